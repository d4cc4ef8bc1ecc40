"""Layer 1: sequences, block pool, policies, scheduler, cost model; no tensors, clocks, threads."""
