"""The KV cache of a runner: its memory, and what a narrower format changes."""
