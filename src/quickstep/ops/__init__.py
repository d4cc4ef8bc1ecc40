"""Layer 2: the op table, its PyTorch reference and its other implementations."""
