"""`python -m benchmarks.gpu_kernels WHAT`: kernels by themselves, for `benchmarks.gpu`.

    limits     copy bandwidth and matrix product of random values; what a launch costs
    bits       whether a token's product has the same bits with any number of other tokens
    tile-bits  which tiles have the bits of the default one
    products   the matrices of the goals' models, next to torch's (cuBLAS)
    attention  paged attention, next to torch's (FlashAttention, cuDNN) on contiguous keys
    once       each kernel of a step a few times, to be run under a profiler

Each prints a JSON object a line, as soon as it is known. With `--device cpu`, Triton's kernels need
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu_timing import Call, gpu_us, median_us, num_copies
from quickstep.bench.limits import TorchLimits, gpu_limits
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout, RowLengths

Row = dict[str, object]

_MODELS = {
    "cuda": ("llama-3.1-8b", "qwen2.5-0.5b", "llama-3.2-1b"),
    "cpu": ("tiny2",),
}
_TOKENS = {"cuda": (1, 64, 2048, 16, 128), "cpu": (1, 8)}
_COUNTS = {
    "cuda": (1, 2, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1024),
    "cpu": (1, 5),
}
_MOST_TOKENS = {"cuda": 2048, "cpu": 9}
_TILED_TOKENS = {"cuda": (16, 64, 256, 2048), "cpu": (16,)}
_KINDS = ("float", "fp8", "int8", "int4")
# query heads, KV heads, head size; sequences, context, new tokens of each
_ATTENTION = {
    "cuda": (
        (32, 8, 128, 1, 1024, 1),
        (32, 8, 128, 1, 8192, 1),
        (32, 8, 128, 64, 1024, 1),
        (32, 8, 128, 1, 2048, 2048),
        (32, 8, 128, 64, 8192, 1),
        (32, 8, 128, 8, 8192, 1),
        (32, 8, 128, 1, 32768, 1),
        (32, 8, 128, 1, 8192, 512),
        (32, 8, 128, 1, 8192, 8192),
        (14, 2, 64, 1, 1024, 1),
        (14, 2, 64, 64, 1024, 1),
        (32, 8, 64, 64, 1024, 1),
    ),
    "cpu": ((4, 2, 32, 2, 128, 1), (4, 2, 32, 1, 128, 16)),
}
_BLOCK_SIZE = 16


def main() -> int:
    """Print the rows of one kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kernels")
    parser.add_argument("what", choices=sorted(_KINDS_OF_ROWS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", default="triton")
    args = parser.parse_args()
    with torch.inference_mode():
        for row in _KINDS_OF_ROWS[args.what](args.device, args.kernels):
            print(json.dumps(row), flush=True)
    return 0


def _limits(device: str, _: str) -> Iterator[Row]:
    if device == "cpu":
        found = TorchLimits(torch.device("cpu"), torch.float32, 64 * 2**20, time.perf_counter)
        yield {"what": found.read_how, "value": found.read_bytes_per_s() / 1e9, "unit": "GB/s"}
        return
    known = gpu_limits(torch.device("cuda"), "auto")
    yield {"what": known.read_how, "value": known.bytes_per_s / 1e9, "unit": "GB/s"}
    yield {"what": known.multiply_how, "value": known.products_per_s / 1e12, "unit": "TFLOP/s"}
    small = torch.rand(256, device=device)
    step_us = median_us(device, [lambda: small.add_(1.0)] * 1000)[0]
    yield {"what": "small kernel after another one in a graph", "value": step_us, "unit": "us"}
    for name, call in _launches(small):
        call()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(300):
            call()
        seconds = time.perf_counter() - started_s
        torch.cuda.synchronize()
        yield {"what": f"{name}, on the host", "value": 1e6 * seconds / 300, "unit": "us"}


def _launches(small: torch.Tensor) -> Iterator[tuple[str, Call]]:
    from quickstep.ops.triton.linear import pack_linear, tiled_linear

    x, packed = small.bfloat16()[None], pack_linear(small.bfloat16().expand(64, 256), None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        small.add_(1.0)
    yield "launch of an op of torch", lambda: small.add_(1.0)
    yield "launch of a Triton product", lambda: tiled_linear(x, packed)
    yield "launch of a graph", graph.replay


def _bits(device: str, _: str) -> Iterator[Row]:
    from benchmarks.tune_gpu import random_weight, weight_shapes
    from quickstep.ops.triton.linear import tiled_linear

    most = _MOST_TOKENS[device]
    for kind in _KINDS:
        for name, shape in weight_shapes(_MODELS[device]):
            generator = torch.Generator(device).manual_seed(sum(shape))
            weight = random_weight(kind, shape, device, generator)
            x = torch.randn(most, shape[1], generator=generator, device=device).bfloat16()
            x[:, 7] *= 40.0  # one channel far above the others, as in language models
            every = tiled_linear(x, weight)
            different = [
                count
                for count in _COUNTS[device]
                if not torch.equal(tiled_linear(x[:count], weight), every[:count])
            ]
            yield {
                "weight": name,
                "shape": f"{shape[0]} x {shape[1]}",
                "kind": kind,
                "same_bits": not different,
                "different_at": " ".join(map(str, different)),
            }


def _tile_bits(device: str, _: str) -> Iterator[Row]:
    """For bf16; the numbers of tokens are multiples of 16, so that each tile is compiled once."""
    from benchmarks.tune_gpu import every_tile, random_weight, tile_product, weight_shapes

    named = dict(weight_shapes(_MODELS[device]))
    for name in (f"{_MODELS[device][0]} o_proj", f"{_MODELS[device][-1]} down_proj"):
        shape = named[name]
        generator = torch.Generator(device).manual_seed(sum(shape))
        weight = random_weight("float", shape, device, generator)
        x = torch.randn(_TILED_TOKENS[device][-1], shape[1], generator=generator, device=device)
        x = x.bfloat16()
        default = tile_product(x, weight, None)
        assert default is not None, "the default tile runs"
        for tile in every_tile():
            results = [
                (count, tile_product(x[:count], weight, tile)) for count in _TILED_TOKENS[device]
            ]
            yield {
                "weight": name,
                "tile": ", ".join(map(str, msgspec.structs.astuple(tile))),
                "bits_of_the_default": " ".join(
                    str(count)
                    for count, one in results
                    if one is not None and torch.equal(one, default[:count])
                ),
                "refused": any(one is None for _, one in results),
            }


def _products(device: str, kernels: str) -> Iterator[Row]:
    from benchmarks.tune_gpu import weight_shapes

    ops = resolve_ops(torch.device(device), kernels)
    generator = torch.Generator(device).manual_seed(0)
    for name, (outputs, inputs) in weight_shapes(_MODELS[device]):
        matrices = [
            (torch.randn(outputs, inputs, generator=generator, device=device) * inputs**-0.5).to(
                torch.bfloat16
            )
            for _ in range(num_copies(2 * outputs * inputs, device))
        ]
        packed = [ops.pack_linear(matrix, None) for matrix in matrices]
        for num_tokens in _TOKENS[device]:
            x = torch.randn(num_tokens, inputs, generator=generator, device=device).bfloat16()
            ours = [lambda weight=weight, x=x: ops.linear(x, weight) for weight in packed]
            theirs = [lambda matrix=matrix, x=x: x @ matrix.T for matrix in matrices]
            ours_us, theirs_us = median_us(device, ours, theirs)
            yield {
                "weight": name,
                "shape": f"{outputs} x {inputs}",
                "tokens": num_tokens,
                "ours_us": ours_us,
                "torch_us": theirs_us,
                "ours_gb_per_s": 2e-3 * outputs * inputs / ours_us,
                "ours_tflops": 2e-6 * outputs * inputs * num_tokens / ours_us,
            }


def _attention(device: str, kernels: str) -> Iterator[Row]:
    ops = resolve_ops(torch.device(device), kernels)
    for sizes in _ATTENTION[device]:
        heads, kv_heads, size, num_rows, context, new = sizes
        ours, theirs = _attention_calls(ops, device, *sizes)
        row: Row = {
            "heads": f"{heads}/{kv_heads} of {size}",
            "sequences": num_rows,
            "context": context,
            "new": new,
        }
        times = dict(zip(("ours", *theirs), median_us(device, ours, *theirs.values()), strict=True))
        others = {f"{name}_us": us for name, us in times.items() if name != "ours"}
        kv_bytes = 4 * num_rows * context * kv_heads * size
        yield row | {
            "ours_us": times["ours"],
            "torch_us": min(others.values()),
            "ours_gb_per_s": 1e-3 * kv_bytes / times["ours"],
            **{name: others.get(name) for name in ("flash_us", "cudnn_us")},
        }


def _attention_calls(
    ops: OpTable,
    device: str,
    heads: int,
    kv_heads: int,
    size: int,
    num_rows: int,
    context: int,
    new: int,
) -> tuple[list[Call], dict[str, list[Call]]]:
    """Ours, and torch's by the backend that accepts it, on the same values, layer by layer."""
    generator = torch.Generator(device).manual_seed(0)

    def random_values(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.to(torch.bfloat16)

    num_blocks = num_rows * context // _BLOCK_SIZE
    num_layers = num_copies(4 * num_rows * context * kv_heads * size, device)
    q = random_values(num_rows * new, heads, size)
    shape = (num_blocks, _BLOCK_SIZE, kv_heads, size)
    layers = [(random_values(*shape), random_values(*shape)) for _ in range(num_layers)]
    offsets = tuple(range(0, num_rows * new + 1, new))
    firsts = torch.arange(num_rows, device=device)[:, None] * context
    positions = torch.arange(context - new, context, device=device).repeat(num_rows)
    is_recorded = device == "cuda" and new == 1
    layout = PagedLayout(
        positions=positions,
        slot_mapping=(firsts + positions.view(num_rows, new)).flatten(),
        row_offsets=() if is_recorded else offsets,
        context_lens=() if is_recorded else (context,) * num_rows,
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device).view(num_rows, -1),
        block_size=_BLOCK_SIZE,
        lengths=RowLengths(torch.tensor(offsets, dtype=torch.int32, device=device)),
    )
    params = AttentionParams(size**-0.5)
    # as this, and not as booleans, torch's FlashAttention accepts it
    mask = causal_lower_right(new, context) if 1 < new < context else None
    rows = q.view(num_rows, new, heads, size).transpose(1, 2)

    def paged(keys: torch.Tensor, values: torch.Tensor) -> object:
        return ops.paged_attention(q, keys, values, layout, params, None)

    def contiguous(keys: torch.Tensor, values: torch.Tensor) -> object:
        k, v = (
            cache.view(num_rows, context, kv_heads, size).transpose(1, 2)
            for cache in (keys, values)
        )
        return torch.nn.functional.scaled_dot_product_attention(
            rows, k, v, attn_mask=mask, is_causal=new == context, enable_gqa=True
        )

    ours = [lambda layer=layer: paged(*layer) for layer in layers]
    if device == "cpu":
        return ours, {"torch": [lambda layer=layer: contiguous(*layer) for layer in layers]}
    theirs: dict[str, list[Call]] = {}
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
    ):

        def call(one: Any, backend: SDPBackend = backend) -> object:
            with sdpa_kernel(backend):
                return contiguous(*one)

        try:
            call(layers[0])
        except RuntimeError as error:
            print(f"{name} refused {tuple(rows.shape)}: {error}", file=sys.stderr)
            continue
        theirs[name] = [lambda layer=layer, call=call: call(layer) for layer in layers]
    return ours, theirs


def _once(device: str, kernels: str) -> Iterator[Row]:
    """Products and attention of the first model; what is measured is the profiler's."""
    from benchmarks.tune_gpu import weight_shapes

    ops = resolve_ops(torch.device(device), kernels)
    for sizes in _ATTENTION[device][:3]:
        calls, _ = _attention_calls(ops, device, *sizes)
        calls[0]()
    for name, (outputs, inputs) in weight_shapes(_MODELS[device][:1]):
        matrix = torch.randn(outputs, inputs, device=device).bfloat16()
        packed = ops.pack_linear(matrix, None)
        for num_tokens in (1, 64, 2048):
            x = torch.randn(num_tokens, inputs, device=device).bfloat16()
            us = gpu_us(lambda x=x, packed=packed: ops.linear(x, packed))
            yield {"weight": name, "tokens": num_tokens, "us_with_the_profiler": us}


_KINDS_OF_ROWS: dict[str, Callable[[str, str], Iterator[Row]]] = {
    "limits": _limits,
    "bits": _bits,
    "tile-bits": _tile_bits,
    "products": _products,
    "attention": _attention,
    "once": _once,
}


if __name__ == "__main__":
    sys.exit(main())
