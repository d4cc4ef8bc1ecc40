"""Layer 6: HTTP APIs."""
