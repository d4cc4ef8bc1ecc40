"""Codes out of 32-bit words, as AWQ, GPTQ and compressed-tensors pack them: lowest bits first."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

__all__ = ["unpack_words"]

assert sys.byteorder == "little", "words are read byte by byte"


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """words [R, W] int32 -> codes [R, W * 32 / bits] uint8, for 4 or 8 bits."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
