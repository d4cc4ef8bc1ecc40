"""Grammars of requests: read, tried in a process of their own, compiled."""
