"""`python -m benchmarks.tune_gpu`: the fastest tiles of products on this GPU, with the same bits.

For every kind and shape of weight of the models of the goals, and for several numbers of tokens,
each candidate is run, its result is compared bit for bit with that of the default tile for the most
tokens, and those that agree are timed, in CUDA graphs over copies that do not fit into the cache.
It prints rows for `TUNED` in `quickstep/ops/triton/tiles.py`; candidates whose bits differ, and
those that the GPU refuses, are counted. Processes compile the kernels first, into Triton's cache.

`--device cpu` runs two candidates on a tiny shape through the interpreter, to see that it
works; its times mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

    from quickstep.ops.triton.tiles import Tile
    from quickstep.ops.weights import LinearWeight

__all__ = ["every_tile", "random_weight", "tile_product", "weight_shapes"]

_MODELS = ("llama-3.1-8b", "qwen2.5-0.5b", "llama-3.2-1b")
_CPU_SHAPES = (("tiny", (48, 64)),)
_TOKENS = {"cuda": (1, 16, 64, 128, 512, 2048), "cpu": (1, 5)}
_MOST_OUTPUTS = 65_536
_KINDS = ("float", "int8", "int4", "fp8")
# the most tokens, and (block_t, block_n, num_warps, num_stages, block_k)
_CANDIDATES = (
    (16, ((16, 64, 4, 4), (16, 64, 4, 6), (16, 128, 4, 4), (16, 128, 8, 4), (16, 32, 4, 6))),
    (64, ((64, 64, 4, 4), (64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 8, 4), (32, 64, 4, 5))),
    (
        None,
        (
            *((64, 128, 8, 4, 64), (128, 64, 4, 5, 64), (128, 128, 8, 3, 64)),
            *((128, 128, 8, 4, 64), (128, 256, 8, 3, 64), (256, 128, 8, 3, 64)),
        ),
    ),
)


class _Choice(msgspec.Struct, frozen=True):
    """The best tile for at most so many tokens, and what it gains."""

    num_tokens: int
    tile: Tile
    us: float
    default_us: float
    num_same: int
    num_candidates: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print rows for TUNED. Returns 1 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS)
    parser.add_argument("--models", nargs="+", default=_MODELS, help="names of shapes")
    parser.add_argument("--seconds", type=float, default=480.0, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
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
    shapes = _CPU_SHAPES if args.device == "cpu" else tuple(weight_shapes(args.models))
    for kind in args.kinds:
        if args.device == "cuda" and time.monotonic() < end_s:
            # an output projection takes gigabytes to quantize, and has the variants of the others
            small = [shape for _, shape in shapes if shape[0] < _MOST_OUTPUTS]
            _compile_all(kind, small, args.jobs)
        for weight, shape in shapes:
            if time.monotonic() > end_s:
                print(f"# no time left for {kind} {weight}")
                continue
            choices = list(_tune(kind, shape, args.device))
            for choice in choices:
                print(
                    f"# {kind} {weight} {shape}, {choice.num_tokens} tokens: {choice.us:.1f} us, "
                    f"default {choice.default_us:.1f} us, {choice.num_same} of "
                    f"{choice.num_candidates} candidates have the default's bits"
                )
            if choices:
                print(_row(kind, shape, choices), flush=True)
    return 0


def weight_shapes(models: Sequence[str]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and [N, C] of the matrices of a layer, and of the output projection; each shape once."""
    from quickstep.bench.shapes import SHAPES
    from quickstep.model.spec import parse_spec

    found: dict[tuple[int, int], str] = {}
    for name in models:
        spec = parse_spec(SHAPES[name])
        queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        hidden, width = spec.hidden_size, spec.intermediate_size
        found.setdefault((queries + 2 * keys, hidden), f"{name} qkv")
        found.setdefault((hidden, queries), f"{name} o_proj")
        found.setdefault((2 * width, hidden), f"{name} gate_up")
        found.setdefault((hidden, width), f"{name} down_proj")
        found.setdefault((spec.vocab_size, hidden), f"{name} lm_head")
    yield from ((name, shape) for shape, name in found.items())


def random_weight(
    kind: str, shape: tuple[int, int], device: str, generator: torch.Generator
) -> LinearWeight:
    """A packed weight of a kind: `float` (bf16), or a way to quantize."""
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


def _compile_all(kind: str, shapes: Sequence[tuple[int, int]], num_jobs: int) -> None:
    """Run every candidate once in other processes; Triton keeps what they compile."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        jobs = [
            pool.submit(_compile, kind, shape, index / len(shapes))
            for index, shape in enumerate(shapes)
        ]
        for job in as_completed(jobs):
            if (error := job.exception()) is not None:
                print(f"# compiling {kind}: {error}", file=sys.stderr)


def _compile(kind: str, shape: tuple[int, int], start: float) -> None:
    """All candidates for a shape, from another one on than other processes."""
    import torch

    weight = random_weight(kind, shape, "cuda", torch.Generator("cuda").manual_seed(0))
    work = [(tokens, tile) for tokens in _TOKENS["cuda"] for tile in _candidates(tokens, "cuda")]
    first = int(start * len(work))
    for num_tokens, tile in (*work[first:], *work[:first]):
        x = torch.zeros(num_tokens, shape[1], dtype=torch.bfloat16, device="cuda")
        tile_product(x, weight, tile)


def _tune(kind: str, shape: tuple[int, int], device: str) -> Iterator[_Choice]:
    """The choices for each number of tokens."""
    import torch

    from benchmarks.gpu_timing import Call, median_us, num_copies

    generator = torch.Generator(device).manual_seed(0)
    weights = [random_weight(kind, shape, device, generator)]
    for _ in range(num_copies(weights[0].nbytes, device) - 1):
        weights.append(copy.deepcopy(weights[0]))
    most = max(_TOKENS[device])
    every = torch.randn(most, shape[1], generator=generator, device=device).bfloat16()
    expected = tile_product(every, weights[0], None)
    assert expected is not None, "the default tile runs"

    def calls(x: torch.Tensor, tile: Tile | None) -> list[Call]:
        return [lambda weight=weight: tile_product(x, weight, tile) for weight in weights]

    for num_tokens in _TOKENS[device]:
        x = every[:num_tokens]
        candidates = list(_candidates(num_tokens, device))
        same = [
            tile
            for tile in candidates
            if (found := tile_product(x, weights[0], tile)) is not None
            and torch.equal(found, expected[:num_tokens])
        ]
        if not same:
            print(f"# {kind} {shape}, {num_tokens} tokens: no tile has the default's bits")
            return
        times = median_us(device, calls(x, None), *(calls(x, tile) for tile in same))
        us = dict(zip(same, times[1:], strict=True))
        best = min(us, key=lambda tile: us[tile])
        yield _Choice(num_tokens, best, us[best], times[0], len(same), len(candidates))


def every_tile() -> Iterator[Tile]:
    """The candidates for any number of tokens."""
    from quickstep.ops.triton.tiles import Tile

    yield from (Tile(*row) for _, rows in _CANDIDATES for row in rows)


def tile_product(x: torch.Tensor, weight: LinearWeight, tile: Tile | None) -> torch.Tensor | None:
    """The product; None where the GPU refuses the tile."""
    from quickstep.ops.triton.linear import tiled_linear

    try:
        return tiled_linear(x, weight, tile)
    except Exception as error:  # what a GPU refuses is Triton's to say, in classes of its own
        print(f"# {tile}: {type(error).__name__}", file=sys.stderr)
        return None


def _candidates(num_tokens: int, device: str) -> Iterator[Tile]:
    """The default tiles for so many tokens, and others."""
    from quickstep.ops.triton.tiles import DEFAULTS, Tile

    defaults = {tiles.tile(num_tokens): None for tiles in DEFAULTS.values()}
    yield from defaults
    if device == "cpu":
        return
    chosen = next(rows for most, rows in _CANDIDATES if most is None or num_tokens <= most)
    for row in chosen:
        tile = Tile(*row)
        if tile not in defaults:
            yield tile


def _row(kind: str, shape: tuple[int, int], choices: Sequence[_Choice]) -> str:
    """A row of TUNED: neighbouring numbers of tokens with one tile are one."""
    from quickstep.ops.triton.linear import slice_inputs
    from quickstep.ops.triton.tiles import DEFAULTS

    held = "float8" if kind == "fp8" else kind
    if kind == "float" and slice_inputs(*shape) < shape[1]:
        held = "sliced float"
    kept = [
        one
        for one, after in itertools.zip_longest(choices, choices[1:])
        if after is None or after.tile != one.tile
    ]
    tiles = [
        f"({None if choice is kept[-1] else choice.num_tokens}, "
        f"Tile({', '.join(map(str, msgspec.structs.astuple(choice.tile)))}))"
        for choice in kept
    ]
    by_tokens = f"({', '.join(tiles)},)"
    return f"({held!r}, {shape[0]}, {shape[1]}): ShapeTiles({DEFAULTS[held].block_k}, {by_tokens}),"


if __name__ == "__main__":
    sys.exit(main())
