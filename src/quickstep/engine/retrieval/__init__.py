"""Embeddings and scores: what a checkpoint says about them, and the prompts of pairs."""
