"""Ollama's API: its requests, its answers, and the routes below `/api`."""
