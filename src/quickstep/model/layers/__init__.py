"""Layers of a decoder as objects: each with a mixer of tokens, and what that keeps in the cache."""
