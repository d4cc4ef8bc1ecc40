"""Encoders: models whose tokens see all others of a text, for embeddings and classes."""
