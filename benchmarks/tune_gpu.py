"""`python -m benchmarks.tune_gpu`: the fastest tiles of products on this GPU, with the same bits.

For every kind of weight and shape, and for several numbers of tokens, each candidate is run, its
result is compared bit for bit with the default tile's, and those that agree are timed in turn. It
prints rows for `TUNED` in `quickstep/ops/triton/tiles.py`; candidates whose bits differ, and those
that the GPU refuses, are counted. Bits must also agree between the numbers of tokens, so each
candidate is compared on the most tokens, and on the first of them by itself.

`--device cpu` runs two candidates on a tiny shape through the interpreter, to see that it
works; its times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

    from quickstep.ops.table import LinearWeight
    from quickstep.ops.triton.tiles import Tile

# (N, C) of qkv, o_proj, gate_up, down_proj of 0.5B, 1B and 7B models
_SHAPES = {
    "cuda": (
        *((1152, 896), (896, 896), (9728, 896), (896, 4864)),
        *((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
        *((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    ),
    "cpu": ((48, 64),),
}
_TOKENS = {"cuda": (1, 8, 16, 64, 256, 2048), "cpu": (1, 5)}
_KINDS = ("float", "int8", "int4", "fp8")
_ROUNDS = {"cuda": 30, "cpu": 1}


class _Choice(msgspec.Struct, frozen=True):
    """The best tile for at most so many tokens, and what it gains."""

    num_tokens: int
    tile: Tile
    seconds: float
    default_seconds: float
    num_same: int
    num_candidates: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print rows for TUNED. Returns 1 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--seconds", type=float, default=480.0, help="stop after so long")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --device cpu tries the command", file=sys.stderr)
        return 1
    end_s = time.monotonic() + args.seconds
    name = torch.cuda.get_device_name() if args.device == "cuda" else "interpreted"
    print(f"# {name}, torch {torch.__version__}")
    for kind, shape in itertools.product(args.kinds, _SHAPES[args.device]):
        if time.monotonic() > end_s:
            print(f"# no time left for {kind} {shape}")
            continue
        choices = list(_tune(kind, shape, args.device))
        for one in choices:
            print(
                f"# {kind} {shape}, {one.num_tokens} tokens: {1e6 * one.seconds:.1f} us, default "
                f"{1e6 * one.default_seconds:.1f} us, {one.num_same} of {one.num_candidates} "
                "candidates have the default's bits"
            )
        print(_row(kind, shape, choices))
    return 0


def _tune(kind: str, shape: tuple[int, int], device: str) -> Iterator[_Choice]:
    """The choices for each number of tokens."""
    import torch

    from quickstep.ops.triton.linear import tiled_linear

    generator = torch.Generator(device).manual_seed(0)
    weight = _weight(kind, shape, device, generator)
    most = max(_TOKENS[device])
    every = torch.randn(most, shape[1], generator=generator, device=device).bfloat16()
    expected = tiled_linear(every, weight)
    same = [one for one in _candidates(device) if _agrees(one, every, weight, expected)]
    num_candidates = len(list(_candidates(device)))
    for num_tokens in _TOKENS[device]:
        x = every[:num_tokens]
        calls = {tile: _call(x, weight, tile) for tile in same}
        times = _times_s(device, [_call(x, weight, None), *calls.values()])
        found = dict(zip(calls, times[1:], strict=True))
        best = min(found, key=lambda tile: found[tile])
        yield _Choice(num_tokens, best, found[best], times[0], len(same), num_candidates)


def _call(x: torch.Tensor, weight: LinearWeight, tile: Tile | None) -> Callable[[], object]:
    from quickstep.ops.triton.linear import tiled_linear

    return lambda: tiled_linear(x, weight, tile)


def _agrees(tile: Tile, x: torch.Tensor, weight: LinearWeight, expected: torch.Tensor) -> bool:
    """Whether all tokens, and the first of them by itself, have the default tile's bits."""
    import torch

    from quickstep.ops.triton.linear import tiled_linear

    try:
        return all(
            torch.equal(tiled_linear(x[:count], weight, tile), expected[:count])
            for count in (len(x), 1)
        )
    except Exception as error:  # what a GPU refuses is Triton's to say, in classes of its own
        print(f"# {tile}: {type(error).__name__}", file=sys.stderr)
        return False


def _candidates(device: str) -> Iterator[Tile]:
    from quickstep.ops.triton.tiles import DEFAULTS, Tile

    defaults = {tile: None for tiles in DEFAULTS.values() for _, tile in tiles.by_tokens}
    yield from defaults
    if device == "cpu":
        return
    for block_t, block_n in itertools.product((16, 32, 64, 128), (32, 64, 128, 256)):
        for num_warps, num_stages in itertools.product((4, 8), (2, 3, 4, 5)):
            tile = Tile(block_t, block_n, num_warps, num_stages)
            if tile not in defaults:
                yield tile


def _weight(
    kind: str, shape: tuple[int, int], device: str, generator: torch.Generator
) -> LinearWeight:
    import torch

    from quickstep.model.quantization import SCHEMES
    from quickstep.model.quantize import quantize_matrix
    from quickstep.ops.reference import reference_ops
    from quickstep.ops.triton.linear import pack_linear
    from quickstep.ops.triton.quantized_linear import pack_quantized

    values = torch.randn(shape, generator=generator, device=device) * shape[1] ** -0.5
    if kind == "float":
        return pack_linear(values.bfloat16(), None)
    form = SCHEMES[kind].format_of(shape[1], outer=False)
    return pack_quantized(quantize_matrix(reference_ops(), values, form), None)


def _times_s(device: str, calls: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each call, taking turns."""
    import torch

    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS[device]):
        for call, spent in zip(calls, times, strict=True):
            started_s = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - started_s)
    return [statistics.median(spent) for spent in times]


def _row(kind: str, shape: tuple[int, int], choices: Sequence[_Choice]) -> str:
    """A row of TUNED: neighbouring numbers of tokens with one tile are one."""
    from quickstep.ops.triton.tiles import DEFAULTS

    held = "float8" if kind == "fp8" else kind
    kept = [
        one
        for one, after in itertools.zip_longest(choices, choices[1:])
        if after is None or after.tile != one.tile
    ]
    tiles = [
        f"({None if one is kept[-1] else one.num_tokens}, Tile({one.tile.block_t}, "
        f"{one.tile.block_n}, {one.tile.num_warps}, {one.tile.num_stages}))"
        for one in kept
    ]
    by_tokens = f"({', '.join(tiles)},)"
    return f"({held!r}, {shape[0]}, {shape[1]}): ShapeTiles({DEFAULTS[held].block_k}, {by_tokens}),"


if __name__ == "__main__":
    sys.exit(main())
