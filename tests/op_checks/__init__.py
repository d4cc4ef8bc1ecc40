"""Cases, float64 oracles and batch-invariance checks of the ops, for every implementation."""
