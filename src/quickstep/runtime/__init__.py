"""Layer 4: step plans become tensors, tensors become tokens."""
