"""Which tile of a product a program computes, by GPU, kind and shape of the weight, and tokens.

Data, and how it is looked up. Nothing is measured while serving: `python -m benchmarks.tune_gpu`
measures on a GPU, checks that bits stay those of the default, and prints rows for `TUNED`.

What must not change with the number of tokens is the order of a sum:

- `float` and `float8`: a tile's inputs are added in ascending order, 16 at a time, by one matrix
  instruction after another, however many inputs are loaded at once (`block_k`) and whatever the
  tile. On an H200 all tiles that were tried have the same bits (docs/design/0046); a GPU on which
  they differ fails `quickstep doctor --gpu-check`.
- `int8` and `int4`: sums of a group are integers, and groups are added one by one: every tile has
  the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import torch


class Tile(msgspec.Struct, frozen=True):
    """Tokens and outputs of a program, how Triton compiles it, and the inputs of a block: None for
    those of the shape.
    """

    block_t: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    block_k: int | None = None


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


_INT8 = ShapeTiles(128, ((16, Tile(16, 64, 4, 5)), (None, Tile(64, 64, 4, 4))))
_INT4 = ShapeTiles(64, ((16, Tile(16, 64, 4, 6)), (None, Tile(64, 64, 4, 4))))
_FLOAT8 = ShapeTiles(128, ((16, Tile(16, 64, 4, 5)), (None, Tile(64, 64, 4, 4, 64))))
# Few tokens wait for memory: many bytes of weights under way. Many multiply: large tiles.
_FLOAT = ShapeTiles(
    128,
    (
        (16, Tile(16, 64, 4, 6)),
        (32, Tile(32, 64, 4, 5)),
        (64, Tile(64, 64, 4, 4)),
        (256, Tile(128, 64, 4, 5, 64)),
        (1024, Tile(128, 128, 8, 3, 64)),
        (None, Tile(256, 128, 8, 3, 64)),
    ),
)
# A program that has all slices of an output has two sums, which take twice the registers.
_SLICED_FLOAT = ShapeTiles(
    128,
    (*_FLOAT.by_tokens[:4], (None, Tile(128, 128, 8, 3, 64))),
)
# Without matrix units, in registers.
_FP32 = ShapeTiles(64, ((None, Tile(64, 64)),))
# Many outputs fill a GPU with larger tiles too.
_MANY_OUTPUTS = ShapeTiles(
    128,
    (
        (16, Tile(16, 64, 4, 4)),
        (64, Tile(64, 128, 8, 4)),
        (1024, Tile(128, 128, 8, 3, 64)),
        (None, Tile(256, 128, 8, 3, 64)),
    ),
)
_WIDE_OUTPUTS = 8192

DEFAULTS: Mapping[str, ShapeTiles] = MappingProxyType(
    {
        "float": _FLOAT,
        "sliced float": _SLICED_FLOAT,
        "float in fp32": _FP32,
        "float8": _FLOAT8,
        "float8 in fp32": ShapeTiles(64, ((None, Tile(16, 64)),)),
        "int8": _INT8,
        "int4": _INT4,
    }
)

# By GPU, a part of its name, the longer first where one is in another; then kind, outputs, inputs.
# What is missing is in DEFAULTS.
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
    is_wide = kind == "float" and num_outputs >= _WIDE_OUTPUTS
    default = _MANY_OUTPUTS if is_wide else DEFAULTS[kind]
    return TUNED.get(gpu, {}).get((kind, num_outputs, num_inputs), default)


def tile_of(x: torch.Tensor, kind: str, num_outputs: int) -> tuple[Tile, int]:
    """The tile of a product with x [T, C], and its `block_k`."""
    gpu = _gpu(x.device.index or 0) if x.device.type == "cuda" else ""
    tiles = tiles_of(gpu, kind, num_outputs, x.shape[1])
    tile = tiles.tile(x.shape[0])
    return tile, tile.block_k or tiles.block_k
