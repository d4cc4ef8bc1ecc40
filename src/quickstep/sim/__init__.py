"""Layer 6: the scheduler on a virtual clock; imports layers 0 and 1 only."""
