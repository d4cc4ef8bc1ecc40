"""Layer 6: HTTP surfaces."""
