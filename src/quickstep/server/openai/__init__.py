"""OpenAI's completions, chat and embeddings."""
