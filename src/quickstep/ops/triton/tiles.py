"""Which tile of a product a program computes, by GPU, kind and shape of the weight, and tokens.

Data, and how it is looked up. Nothing is measured while serving: `python -m benchmarks.tune_gpu`
measures on a GPU, checks that bits stay those of the default, and prints rows for `TUNED`.

What must not change with the number of tokens:

- `float` and `float8`: sums in fp32 run over blocks of `block_k` inputs, so it belongs to the
  shape. Another block of tokens or outputs leaves the order of a sum as it is only if the GPU keeps
  the matrix instruction (below 64 tokens, an H100 takes another one), so a shape has one tile for
  all numbers of tokens unless its row in `TUNED` was checked.
- `int8` and `int4`: sums of a group are integers, and groups are added one by one: every tile has
  the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import torch

__all__ = ["DEFAULTS", "TUNED", "ShapeTiles", "Tile", "tile_of", "tiles_of"]


class Tile(msgspec.Struct, frozen=True):
    """Tokens and outputs of a program, and how Triton compiles it."""

    block_t: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3


class ShapeTiles(msgspec.Struct, frozen=True):
    """The tiles of a weight shape.

    Attributes:
        block_k: Inputs of a block, for every number of tokens; of `int8` and `int4`, at most so
            many of a group.
        by_tokens: The most tokens of a step, ascending, and their tile; None for all others.
    """

    block_k: int
    by_tokens: tuple[tuple[int | None, Tile], ...]

    def tile(self, num_tokens: int) -> Tile:
        """For a step's number of tokens."""
        return next(tile for most, tile in self.by_tokens if most is None or num_tokens <= most)


_DEFAULT = Tile(64, 64)
_INTEGERS = ShapeTiles(128, ((16, Tile(16, 64)), (None, _DEFAULT)))

DEFAULTS: Mapping[str, ShapeTiles] = MappingProxyType(
    {
        "float": ShapeTiles(64, ((None, _DEFAULT),)),
        "float8": ShapeTiles(64, ((None, _DEFAULT),)),
        "int8": _INTEGERS,
        "int4": _INTEGERS,
    }
)

# By GPU, a part of its name, the longer first where one is in another; then kind, outputs, inputs.
# Empty until somebody has measured there: what is missing is in DEFAULTS.
TUNED: Mapping[str, Mapping[tuple[str, int, int], ShapeTiles]] = MappingProxyType(
    {"H200": {}, "H100": {}, "A100": {}, "L40": {}, "L4": {}, "RTX 4090": {}}
)


@functools.cache
def _gpu(index: int) -> str:
    """The key of TUNED, "" for another GPU."""
    name = torch.cuda.get_device_name(index)
    return next((key for key in TUNED if key in name), "")


def tiles_of(gpu: str, kind: str, num_outputs: int, num_inputs: int) -> ShapeTiles:
    """Those of a weight [N, C] on a GPU of TUNED, or the default."""
    return TUNED.get(gpu, {}).get((kind, num_outputs, num_inputs), DEFAULTS[kind])


def tile_of(x: torch.Tensor, kind: str, num_outputs: int) -> tuple[Tile, int]:
    """The tile of a product with x [T, C], and its `block_k`."""
    gpu = _gpu(x.device.index or 0) if x.device.type == "cuda" else ""
    tiles = tiles_of(gpu, kind, num_outputs, x.shape[1])
    return tiles.tile(x.shape[0]), tiles.block_k
