"""Quantized values out of 32-bit words, as AWQ, GPTQ and compressed-tensors pack them: lowest bits
first.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from quickstep.errors import ConfigError

__all__ = ["unpack_words"]

assert sys.byteorder == "little", "words are read byte by byte"


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """words [R, W] int32 -> quantized values [R, W * 32 / bits] uint8, for 4 or 8 bits. Raises
    ConfigError.
    """
    if words.dtype != torch.int32:
        raise ConfigError(f"packed codes are stored as {words.dtype}; int32 words are supported")
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)
