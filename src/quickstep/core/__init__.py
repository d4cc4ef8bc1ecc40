"""Layer 1, standard library only: sequences, block pool, policies, scheduler, cost model."""
