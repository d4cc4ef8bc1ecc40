"""Stacks of matrices of different ggml types: each in a form of its own against all in one form.

    python -m benchmarks.stacks [--cases 2] [--isa avx2] [--threads 1] [--rows 1 8 64]

Both are of the same random blocks and in one process. Each has copies above 128 MB, so that
weights are read from memory. The ratio of a round is the time in one form over that in several; the
median of the rounds is printed, and their quartiles. One thread's time is its processor time, so
that other processes matter less. One form is what torch's ops make of a stack
(`formats.quantized_reader.stack_matrices`), packed for the native kernels.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe_machine
from quickstep.model.checkpoint.gguf_file import BLOCKS
from quickstep.model.formats.gguf_blocks import decode_blocks
from quickstep.model.formats.quantized_reader import stack_matrices
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import FLOAT32, HostTensor
from quickstep.ops.weights import LinearWeight, QuantizedWeight, StoredMatrix, StoredRows

# inputs, and the outputs of each matrix with their type, as files called Q4_K_M have them
CASES = {
    "qkv of Qwen2.5 0.5B": (896, ((1024, "Q5_0"), (128, "Q8_0"))),
    "qkv of Qwen3 4B": (2560, ((5120, "Q4_K"), (1024, "Q6_K"))),
    "qkv of Llama 3 8B": (4096, ((5120, "Q4_K"), (1024, "Q6_K"))),
    "gates and ups, 1024": (1024, ((3072, "Q4_K"), (3072, "Q5_K"))),
}
ROTATED_BYTES = 128 << 20  # above the caches of a core
LEAST_SECONDS = 0.01  # of a form in a round
_SCALES_AT = {"Q6_K": (208,)}  # of K types and types with minimums at 0 and 2
_SCALES_AT |= dict.fromkeys(("Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ2_XS", "IQ3_XXS"), (0,))


def random_rows(kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Blocks of random bytes whose scales are finite: [blocks, bytes]."""
    inputs, size = BLOCKS[kind]
    blocks = np.random.default_rng(0).integers(
        0, 256, (shape[0] * shape[1] // inputs, size), dtype=np.uint8
    )
    scale = np.array([0.01], np.float16).view(np.uint8)
    for at in _SCALES_AT.get(kind, (0, 2)):
        blocks[:, at : at + 2] = scale
    return blocks


def copies(make: Callable[[], LinearWeight]) -> list[LinearWeight]:
    """A weight, as often as it takes to be read from memory."""
    first = make()
    return [first, *(make() for _ in range(max(1, ROTATED_BYTES // first.nbytes)))]


def activations(rows: int, num_inputs: int) -> HostTensor:
    """[rows, num_inputs] in float32."""
    values = np.random.default_rng(1).standard_normal((rows, num_inputs))
    return HostTensor(values.astype(np.float32), FLOAT32)


def both_forms(
    ops: OpTable, folder: Path, num_inputs: int, matrices: tuple[tuple[int, str], ...]
) -> list[list[LinearWeight]]:
    """Copies of a stack in forms of their own, and in one form."""
    parts, decoded = [], []
    for outputs, kind in matrices:
        blocks = random_rows(kind, (outputs, num_inputs))
        file = folder / f"{outputs}-{kind}"
        file.write_bytes(blocks.tobytes())
        parts.append(StoredRows(file, 0, outputs, kind))
        decoded.append(decode_blocks(kind, torch.from_numpy(blocks), (outputs, num_inputs)))
    stored = StoredMatrix(matrices[0][1], tuple(parts), num_inputs)
    stacked = stack_matrices(decoded, torch.float32)
    assert isinstance(stacked, QuantizedWeight) and ops.load_linear is not None
    load = ops.load_linear

    return [copies(lambda: load(stored, None)), copies(lambda: ops.pack_quantized(stacked, None))]


def measured(
    ops: OpTable,
    forms: list[list[LinearWeight]],
    x: HostTensor,
    rounds: int,
    clock: Callable[[], float],
) -> list[str]:
    """Columns of a table: rows of `x`, the least microseconds of the second form and of the first,
    and the ratios of the rounds.
    """
    for copies in forms:
        ops.linear(x, copies[0])
    start = clock()
    ops.linear(x, forms[1][1 % len(forms[1])])
    count = max(1, int(LEAST_SECONDS / (clock() - start)))
    seconds: tuple[list[float], list[float]] = ([], [])
    number = 0
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 else (1, 0):
            copies = forms[which]
            start = clock()
            for i in range(number, number + count):
                ops.linear(x, copies[i % len(copies)])
            seconds[which].append((clock() - start) / count)
        number += count
    ratios = [one / several for several, one in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    least = [f"{min(times) * 1e6:.0f}" for times in reversed(seconds)]
    return [f"{x.shape[0]}", *least, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Stacks in forms of their own, and in one form.")
    parser.add_argument("--isa", nargs="+", default=list(native_status().levels[:-1]))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first ones")
    options = parser.parse_args()
    print(describe_machine())
    print("| stack | bytes for 32 | level | threads | rows | us in one form | in several |", end="")
    print(" ratio | quartiles |\n|---|---|---|--:|--:|--:|--:|--:|---|")
    for name, (num_inputs, matrices) in [*CASES.items()][: options.cases]:
        num_weights = num_inputs * sum(outputs for outputs, _ in matrices)
        with tempfile.TemporaryDirectory() as folder:
            for isa in options.isa:
                for threads in options.threads:
                    clock = time.thread_time if threads == 1 else time.perf_counter
                    ops = load_native(threads, isa)
                    assert ops is not None
                    forms = both_forms(ops, Path(folder), num_inputs, matrices)
                    held = [f"{32 * form[0].nbytes / num_weights:.1f}" for form in reversed(forms)]
                    for rows in options.rows:
                        columns = measured(
                            ops, forms, activations(rows, num_inputs), options.rounds, clock
                        )
                        head = [name, ", ".join(held), isa, f"{threads}"]
                        print(f"| {' | '.join([*head, *columns])} |", flush=True)


if __name__ == "__main__":
    main()
