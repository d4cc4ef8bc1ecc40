"""Layer 5: the live loop, streams, `LLM`, and the packages that serve them."""
