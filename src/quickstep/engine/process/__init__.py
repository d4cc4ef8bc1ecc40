"""The engine in a process of its own: the messages, the worker, and the client that serves it."""
