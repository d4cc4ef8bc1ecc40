"""What a sequence holds while it runs: a slot, KV blocks, the place of its adapter."""
