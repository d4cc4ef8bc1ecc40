"""From logits to tokens: grammars, reasoning, penalties, filters, noise, log-probabilities."""
