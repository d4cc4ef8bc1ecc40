"""Packed weights in the cache directory: a later start maps what an earlier one has packed."""
