"""Sampling and scores of tokens on the device; `sample` is the entry."""
