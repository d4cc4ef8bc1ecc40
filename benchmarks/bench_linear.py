"""One linear layer: the native kernels beside torch's, interleaved in one run.

    python -m benchmarks.bench_linear [--threads 2] [--repeats 9] [--isa avx2]

Caveats: one layer in a loop, weights rotated so that they come from memory, not from cache; the
machine should be quiet (the spread says whether it was); memory bandwidth drifts on shared
machines, so only figures of one run compare. GB/s counts the weight's bytes once per call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.machine import describe_machine
from quickstep.ops.native import default_num_threads, load_native, native_status

# (outputs, inputs): qkv, attention output, gate_up, down of Qwen2.5-0.5B and Llama-3.2-1B
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864), (16384, 2048), (2048, 8192))
ROTATED_BYTES = 512 << 20  # well above any cache


def interleaved(calls: dict[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taking turns; each call gets the number of its round."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def show(label: str, seconds: list[float], nbytes: float, flops: float) -> str:
    middle = statistics.median(seconds)
    spread = (max(seconds) - min(seconds)) / middle * 100
    rates = f"{nbytes / middle / 1e9:6.1f} GB/s {flops / middle / 1e9:7.0f} GFLOP/s"
    return f"{label} {middle * 1e6:8.0f} us +-{spread:3.0f} % {rates}"


def bench_shape(shape: tuple[int, int], dtype: torch.dtype, options: argparse.Namespace) -> None:
    outputs, inputs = shape
    ops = load_native(options.threads, options.isa)
    assert ops is not None, native_status().reason
    nbytes = outputs * inputs * dtype.itemsize
    copies = max(2, min(64, ROTATED_BYTES // nbytes))
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(copies)]
    packed = [ops.pack_linear(weight, None) for weight in weights]
    for rows in options.rows:
        x = torch.randn(rows, inputs).to(dtype)
        calls: dict[str, Callable[[int], object]] = {
            "native": lambda i, x=x: [  # type: ignore[misc]
                ops.linear(x, packed[(i + j) % copies]) for j in range(copies)
            ],
            "torch": lambda i, x=x: [  # type: ignore[misc]
                torch.nn.functional.linear(x, weights[(i + j) % copies]) for j in range(copies)
            ],
        }
        seconds = interleaved(calls, options.repeats)
        flops = 2.0 * outputs * inputs * rows
        parts = [
            show(name, [value / copies for value in values], nbytes, flops)
            for name, values in seconds.items()
        ]
        name = str(dtype).removeprefix("torch.")
        print(f"{name} {outputs:6d} x {inputs:5d} M={rows:4d} | " + " | ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Native linear layers beside torch's.")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(describe_machine())
    level = options.isa or native_status().isa
    print(f"kernels {level}, load average {os.getloadavg()[0]:.1f}, {options.repeats} rounds")
    for dtype in options.dtypes:
        for shape in SHAPES[: options.shapes]:
            bench_shape(shape, getattr(torch, dtype), options)


if __name__ == "__main__":
    main()
