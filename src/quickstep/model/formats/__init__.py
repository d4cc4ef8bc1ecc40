"""Quantized checkpoints of other tools, read into our formats."""
