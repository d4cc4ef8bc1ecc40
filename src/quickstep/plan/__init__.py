"""Layer 6: what a model needs on which hardware; imports layers 0, 1, 3's specs and `sim`."""
