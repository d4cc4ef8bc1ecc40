"""KV blocks from the engine that computes prompts to the engine that continues them."""
