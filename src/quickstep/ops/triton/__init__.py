"""Triton kernels of the ops, for GPUs. `backend` makes the table; nothing else is public."""
