"""Architectures that only transformers has, with our attention and linear layers."""
