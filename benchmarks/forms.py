"""Values of e2m1 in 6 bits against what held them before: 8 bits (NVFP4), or bfloat16 (MXFP4).

    python -m benchmarks.forms [--isa avx2] [--threads 1] [--rows 1 8 64] [--shapes 4096x4096]

Both hold the same weights, as `benchmarks.stacks` measures two forms: in one process in turns, with
copies above 128 MB. The ratio of a round is the time before over that in 6 bits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.machine import describe_machine
from benchmarks.stacks import activations, copies, measured
from quickstep.model.formats.storage import E2M1_LEVELS, factors
from quickstep.model.formats.stored_values import decode_rows
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import BFLOAT16, UINT8, HostTensor
from quickstep.ops.weights import LinearWeight, QuantizedWeight, StoredMatrix, StoredRows

GROUPS = {"NVFP4": 16, "MXFP4": 32}
SHAPES = ("4864x896", "4096x4096", "5760x2880")  # outputs x inputs; the last: an expert of gpt-oss
_MORE_OF_8_BITS = 128 - 32


def stored_rows(folder: Path, name: str, outputs: int, inputs: int) -> StoredRows:
    """Random half bytes in a file, with the scales of a format."""
    random = np.random.default_rng(0)
    file = folder / f"{name}-{outputs}x{inputs}"
    file.write_bytes(random.integers(0, 256, (outputs, inputs // 2), dtype=np.uint8).tobytes())
    scales = random.random((outputs, inputs // GROUPS[name])) / 100 + 0.001
    if name == "MXFP4":
        scales = np.exp2(np.floor(np.log2(scales)))
    levels = HostTensor(E2M1_LEVELS, UINT8)
    return StoredRows(file, 0, outputs, "LEVELS", scales=factors(scales), levels=levels)


def both_forms(ops: OpTable, rows: StoredRows, num_inputs: int) -> list[list[LinearWeight]]:
    """Copies of the weights in 6 bits, and as they were held before."""
    decoded = decode_rows(rows, num_inputs, torch.device("cpu"))
    load = ops.load_linear
    assert isinstance(decoded, QuantizedWeight) and load is not None
    matrix = StoredMatrix("LEVELS", (rows,), num_inputs)
    if decoded.group_size == GROUPS["NVFP4"]:
        eight = replace(decoded, quants=decoded.quants + _MORE_OF_8_BITS, bits=8)
        return [copies(lambda: load(matrix, None)), copies(lambda: ops.pack_quantized(eight, None))]
    plain = replace(matrix, kind="BF16")
    return [copies(lambda: load(matrix, None)), copies(lambda: load(plain, None))]


def main() -> None:
    parser = argparse.ArgumentParser(description="E2M1 in 6 bits, and as it was held before.")
    parser.add_argument("--isa", nargs="+", default=list(native_status().levels[:-1]))
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--formats", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(describe_machine())
    print(
        "| format | shape | bytes for 32 | level | threads | rows | us before | in 6 bits |", end=""
    )
    print(" ratio | quartiles |\n|---|---|---|---|--:|--:|--:|--:|--:|---|")
    for name in options.formats:
        for shape in options.shapes:
            outputs, inputs = (int(size) for size in shape.split("x"))
            with tempfile.TemporaryDirectory() as folder:
                rows = stored_rows(Path(folder), name, outputs, inputs)
                for isa in options.isa:
                    for threads in options.threads:
                        clock = time.thread_time if threads == 1 else time.perf_counter
                        ops = load_native(threads, isa)
                        assert ops is not None
                        forms = both_forms(ops, rows, inputs)
                        held = [
                            f"{32 * form[0].nbytes / outputs / inputs:.1f}" for form in forms[::-1]
                        ]
                        for num_rows in options.rows:
                            x = activations(num_rows, inputs).to(BFLOAT16)
                            columns = measured(ops, forms, x, options.rounds, clock)
                            head = [name, shape, ", ".join(held), isa, f"{threads}"]
                            print(f"| {' | '.join([*head, *columns])} |", flush=True)


if __name__ == "__main__":
    main()
