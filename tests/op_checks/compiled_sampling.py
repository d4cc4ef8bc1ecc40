"""Compiles the kernels of sampling for an H100, without one, and prints the instructions in fp64
that they have as JSON. A process of its own: Triton does not compile where it interprets.
"""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quickstep.ops.triton.sampling import filters, sample, token_scores

LOGITS = {"logits": "*fp32", "vocab_size": "i32", "logits_stride": "i64"}
SOURCES = {**LOGITS, "changed": "*fp64", "masks": "*i64", "bans": "*i8", "rows": "*i64"}
ROW = {"peaks": "*fp64", "states": "*i64"}
TILES = {"tile_values": "*fp64", "tile_ids": "*i64"}
TILE = {"TILE": sample._TILE}
KERNELS = (
    (
        sample._penalize_kernel,
        {**LOGITS, "rows": "*i64", "counts": "*i32", "changed": "*fp64"},
        TILE,
        4,
    ),
    (sample._peak_kernel, {**SOURCES, "tile_maxima": "*fp64"}, TILE, 4),
    (
        sample._row_kernel,
        {**ROW, "rows": "*i64", "tile_maxima": "*fp64", "num_tiles": "i32"},
        {"BLOCK": 128},
        4,
    ),
    (
        sample._scale_kernel,
        {**SOURCES, **ROW, "scaled": "*fp64", "weights": "*i64"},
        TILE,
        8,
    ),
    (
        sample._noise_kernel,
        {**SOURCES, **ROW, **TILES, "filtered": "*fp64"},
        TILE,
        8,
    ),
    (
        sample._winner_kernel,
        {**TILES, "states": "*i64", "token_ids": "*i64", "num_tiles": "i32"},
        {"BLOCK": 128},
        4,
    ),
    (
        filters._filter_kernel,
        {"scaled": "*fp64", "weights": "*i64", "rows": "*i64", "vocab_size": "i32"},
        {"BLOCK": filters._BLOCK},
        16,
    ),
    (
        token_scores._score_kernel,
        {**LOGITS, "peaks": "*fp32", "token_ids": "*i64", "partial": "*i64"},
        {"TILE": token_scores._TILE},
        4,
    ),
)


def main() -> None:
    """Print {kernel: instructions with fp64 operands, each once}."""
    found = {}
    for kernel, pointers, constants, num_warps in KERNELS:
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            signature={name: pointers.get(name, "constexpr") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
        )
        options = {"num_warps": num_warps, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert compiled.asm["cubin"]
        instructions = re.findall(r"^\s*(\w[\w.]*\.f64)\s", compiled.asm["ptx"], re.MULTILINE)
        found[kernel.__name__] = sorted(set(instructions))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
