"""Seeded tensors for the cases of the ops: the case's name is the seed."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

__all__ = ["CaseInputs", "label"]


class CaseInputs:
    """Random inputs of one case; the name is the seed."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal with standard deviation `scale`, in the case's dtype."""
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to below `high`, int64."""
        return torch.randint(low, high, shape, generator=self.generator)

    def permutation(self, n: int) -> Tensor:
        """0 ... n - 1 in a random order, int64."""
        return torch.randperm(n, generator=self.generator)


def label(op: str, dtype: torch.dtype, *parts: object) -> str:
    """The name of a case."""
    return "-".join([op, *(str(part).removeprefix("torch.") for part in (dtype, *parts))])
