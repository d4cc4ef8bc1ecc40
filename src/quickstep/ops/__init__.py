"""Layer 2: the op seam, its PyTorch reference and its other implementations."""
