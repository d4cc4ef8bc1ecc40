"""Linear layers of every weight format: microseconds, fraction of peak and of read bandwidth.

    python -m benchmarks.bench_linear [--formats bfloat16 int8 int4] [--rows 1 8 512] [--torch]

Formats take turns in each round, so that changes of the machine's clock or bandwidth affect all of
them. Peak and bandwidth are measured by the kernels' probes before and after a shape. Each layer
runs in a loop over copies of its weights, so that they are read from memory, not from cache. The
spread is small on a quiet machine. The bandwidth counts the bytes of the weights once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.machine import describe_machine
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.native.backend import (
    NativeProbe,
    default_num_threads,
    load_native,
    load_probe,
    native_status,
)
from quickstep.ops.table import OpTable

# (outputs, inputs): qkv, attention output, gate_up, down of Qwen2.5-0.5B and Llama-3.2-1B
SHAPES = (
    *((1152, 896), (896, 896), (9728, 896), (896, 4864)),  # Qwen2.5-0.5B
    *((16384, 2048), (2048, 8192)),  # Llama-3.2-1B
    *((37888, 3584), (3584, 18944)),  # Qwen2.5-7B
)
ROTATED_BYTES = 128 << 20  # above any cache
PROBE_BYTES = 512 << 20
PROBE_ROUNDS = 500_000
PROBE_PASSES = 4
# quantized formats; other names are torch dtypes
QUANTIZED = {
    "int8": MatrixFormat(8, 128),
    "int8-g64": MatrixFormat(8, 64),
    "int8-row": MatrixFormat(8),
    "int4": MatrixFormat(4, 128, has_sub_scales=True),
    "int4-g32": MatrixFormat(4, 32),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """Copies of one packed weight, and the activations' dtype."""

    run: Callable[[torch.Tensor, int], object]
    copies: int
    nbytes: int
    dtype: torch.dtype
    multiplied: torch.dtype  # what the probe multiplies


def quantized_layer(ops: OpTable, weight: torch.Tensor, form: MatrixFormat) -> Layer:
    quantized = ops.quantize(weight, form.bits, form.group_size, False, form.has_sub_scales)
    nbytes = form.num_bytes(tuple(weight.shape))
    copies = max(2, min(64, ROTATED_BYTES // nbytes))
    packed = [ops.pack_quantized(quantized, None) for _ in range(copies)]
    return Layer(lambda x, i: ops.linear(x, packed[i]), copies, nbytes, torch.bfloat16, torch.int8)


def plain_layer(ops: OpTable, weight: torch.Tensor, *, native: bool) -> Layer:
    nbytes = weight.numel() * weight.element_size()
    copies = max(2, min(64, ROTATED_BYTES // nbytes))
    if native:
        packed = [ops.pack_linear(weight, None) for _ in range(copies)]
        return Layer(
            lambda x, i: ops.linear(x, packed[i]), copies, nbytes, weight.dtype, weight.dtype
        )
    clones = [weight.clone() for _ in range(copies)]
    linear = torch.nn.functional.linear
    return Layer(lambda x, i: linear(x, clones[i]), copies, nbytes, weight.dtype, weight.dtype)


def make_layers(
    ops: OpTable, shape: tuple[int, int], options: argparse.Namespace
) -> dict[str, Layer]:
    weight = torch.randn(*shape)
    layers = {}
    for name in options.formats:
        if name in QUANTIZED:
            layers[name] = quantized_layer(ops, weight, QUANTIZED[name])
            continue
        dtype = getattr(torch, name)
        layers[name] = plain_layer(ops, weight.to(dtype), native=True)
        if options.torch:
            layers[f"{name} by torch"] = plain_layer(ops, weight.to(dtype), native=False)
    return layers


def interleaved(calls: dict[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taking turns; each call gets the number of its round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def best_rate(work: Callable[[], int]) -> float:
    """The most that `work` did of what it counts, per second."""
    rates = []
    for _ in range(PROBE_PASSES):
        start = time.perf_counter()
        done = work()
        rates.append(done / (time.perf_counter() - start))
    return max(rates)


def read_rate(probe: NativeProbe) -> float:
    def work() -> int:
        probe.read()
        return probe.num_bytes

    return best_rate(work)


def multiply_rates(probe: NativeProbe, layers: dict[str, Layer]) -> dict[torch.dtype, float]:
    def rate(dtype: torch.dtype) -> float:
        return best_rate(lambda: probe.multiply(dtype, PROBE_ROUNDS))

    return {dtype: rate(dtype) for dtype in {layer.multiplied for layer in layers.values()}}


def bench_rows(
    layers: dict[str, Layer], shape: tuple[int, int], rows: int, probe: NativeProbe, repeats: int
) -> None:
    calls: dict[str, Callable[[int], object]] = {}
    counts = {name: max(2, min(layer.copies, 256 // rows)) for name, layer in layers.items()}
    for name, layer in layers.items():
        x = torch.randn(rows, shape[1]).to(layer.dtype)
        calls[name] = lambda turn, x=x, layer=layer, count=counts[name]: [  # type: ignore[misc]
            layer.run(x, (turn * count + i) % layer.copies) for i in range(count)
        ]
    peaks, read = multiply_rates(probe, layers), read_rate(probe)
    timed = interleaved(calls, repeats)
    after = multiply_rates(probe, layers)
    read = max(read, read_rate(probe))
    for name, values in timed.items():
        layer = layers[name]
        middle = statistics.median(values)
        seconds = middle / counts[name]
        spread = (max(values) - min(values)) / middle * 100
        peak = max(peaks[layer.multiplied], after[layer.multiplied])
        flops = 2.0 * shape[0] * shape[1] * rows
        print(
            f"{name:18s} {shape[0]:6d} x {shape[1]:5d} M={rows:4d} {seconds * 1e6:9.1f} us "
            f"+-{spread:3.0f} %  peak {flops / seconds / peak:5.2f} of {peak / 1e12:.2f} T/s  "
            f"read {layer.nbytes / seconds / read:5.2f} of {read / 1e9:.1f} GB/s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Native linear layers of every weight format.")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 512])
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "int8", "int4"])
    parser.add_argument(
        "--torch", action="store_true", help="measure torch's linear for unquantized formats too"
    )
    parser.add_argument("--shapes", type=int, default=4, help="number of shapes, the first ones")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ops = load_native(options.threads, options.isa)
    probe = load_probe(PROBE_BYTES, options.threads, options.isa)
    assert ops is not None, native_status().reason
    assert probe is not None, native_status().reason
    print(describe_machine())
    print(f"kernels {probe.isa}, load average {os.getloadavg()[0]:.1f}, {options.repeats} rounds")
    for shape in SHAPES[: options.shapes]:
        layers = make_layers(ops, shape, options)
        for rows in options.rows:
            bench_rows(layers, shape, rows, probe, options.repeats)


if __name__ == "__main__":
    main()
