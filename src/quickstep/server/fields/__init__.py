"""What request fields are: their classes, how bodies are read, and fields of several APIs."""
