"""LoRA adapters: PEFT checkpoints, and where they apply in a decoder."""
