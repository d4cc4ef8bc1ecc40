"""Layer 3: specs, architectures, weights."""
