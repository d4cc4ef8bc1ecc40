"""Rerank and score: how well documents answer a query (the shapes of Jina, Cohere and vLLM)."""
