"""Layer 5: the live loop, streams, tokenizer, chat template, step log."""
