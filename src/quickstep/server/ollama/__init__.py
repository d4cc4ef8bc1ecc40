"""Ollama's API: its request types, its response types, and the routes below `/api`."""
