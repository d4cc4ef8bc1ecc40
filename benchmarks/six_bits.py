"""ggml's types of 5 and 6 bits: products in the form of 6 bits against those in 8, in turns.

    python -m benchmarks.six_bits [--kinds Q6_K Q5_K] [--isa avx2] [--threads 1] [--rows 1 8 256]

Both forms are of the same random blocks and in one process. Each has copies above 128 MB, so that
weights are read from memory. The ratio of a round is the time in 8 bits over that in 6; the median
of the rounds is printed, and their quartiles. One thread's time is its processor time, so that
other processes matter less. That both forms give the same bits is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from msgspec.structs import replace

from benchmarks.machine import describe_machine
from quickstep.model.checkpoint.gguf_file import BLOCKS
from quickstep.ops.native import packed
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import FLOAT32, HostTensor
from quickstep.ops.weights import LinearWeight, StoredMatrix, StoredRows

SHAPES = ((896, 4864), (4096, 4096), (4096, 14336))  # outputs, inputs
ROTATED_BYTES = 128 << 20  # above the caches of a core
LEAST_SECONDS = 0.01  # of a form in a round


def random_rows(kind: str, shape: tuple[int, int]) -> bytes:
    """Blocks of random bytes whose scales are finite."""
    inputs, size = BLOCKS[kind]
    blocks = np.random.default_rng(0).integers(
        0, 256, (shape[0] * shape[1] // inputs, size), dtype=np.uint8
    )
    scale = np.array([0.01], np.float16).view(np.uint8)
    for at in {"Q6_K": (208,), "Q5_0": (0,)}.get(kind, (0, 2)):
        blocks[:, at : at + 2] = scale
    return blocks.tobytes()


def loaded(ops: OpTable, stored: StoredMatrix, bits: int) -> LinearWeight:
    """A matrix of 6 bits in the form of 6 or 8."""
    assert ops.load_linear is not None
    own = packed._form_of
    with mock.patch.object(packed, "_form_of", lambda stored: replace(own(stored), bits=bits)):
        return ops.load_linear(stored, None)


def measured(
    ops: OpTable,
    forms: list[list[LinearWeight]],
    rows: int,
    rounds: int,
    clock: Callable[[], float],
) -> list[str]:
    """Columns of a table: the least microseconds of both forms, and the ratios of the rounds."""
    values = np.random.default_rng(1).standard_normal((rows, forms[0][0].num_inputs))
    x = HostTensor(values.astype(np.float32), FLOAT32)
    results = [ops.linear(x, copies[0]).numpy() for copies in forms]
    assert (results[0] == results[1]).all()
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
    ratios = [eight / six for six, eight in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    least = [f"{min(times) * 1e6:.0f}" for times in reversed(seconds)]
    return [f"{rows}", *least, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="The form of 6 bits against that of 8.")
    parser.add_argument("--kinds", nargs="+", default=["Q6_K"])
    parser.add_argument("--isa", nargs="+", default=list(native_status().levels[:-1]))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first ones")
    options = parser.parse_args()
    print(describe_machine())
    print("| type | shape | level | threads | rows | us of 8 | of 6 | ratio | quartiles |")
    print("|---|---|---|--:|--:|--:|--:|--:|---|")
    for kind in options.kinds:
        for shape in SHAPES[: options.shapes]:
            with tempfile.NamedTemporaryFile() as file:
                file.write(random_rows(kind, shape))
                file.flush()
                part = StoredRows(Path(file.name), 0, shape[0], kind)
                stored = StoredMatrix(kind, (part,), shape[1])
                for isa in options.isa:
                    for threads in options.threads:
                        clock = time.thread_time if threads == 1 else time.perf_counter
                        ops = load_native(threads, isa)
                        assert ops is not None
                        forms = []
                        for bits in (6, 8):
                            first = loaded(ops, stored, bits)
                            count = max(1, ROTATED_BYTES // first.nbytes)
                            forms.append(
                                [first, *(loaded(ops, stored, bits) for _ in range(count))]
                            )
                        for rows in options.rows:
                            columns = measured(ops, forms, rows, options.rounds, clock)
                            head = [kind, f"{shape[0]} x {shape[1]}", isa, f"{threads}"]
                            print(f"| {' | '.join([*head, *columns])} |", flush=True)


if __name__ == "__main__":
    main()
