"""Proposers of draft tokens: tokens that the model checks in one step instead of one by one."""
