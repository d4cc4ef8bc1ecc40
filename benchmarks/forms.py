"""Values of 16 levels in 4 bits against the same values in a form without levels: 6 or 8 bits.

    python -m benchmarks.forms [--isa avx2] [--threads 1] [--rows 1 8 64] [--shapes 4096x4096]

Both hold the same weights, as `benchmarks.stacks` measures two forms: in one process in turns, with
copies above 128 MB. The ratio of a round is the time in 6 or 8 bits over that in 4. Without levels
scales are float16 or float32, which of IQ4_XS takes 36 bytes for 32 weights in place of 33.3.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import describe_machine
from benchmarks.stacks import activations, copies, measured, random_rows
from quickstep.model.checkpoint.gguf_file import BLOCKS
from quickstep.model.formats.gguf_blocks import decode_blocks
from quickstep.model.formats.storage import E2M1_LEVELS, factors
from quickstep.model.formats.stored_values import decode_rows
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import BFLOAT16, UINT8, HostTensor
from quickstep.ops.weights import LinearWeight, QuantizedWeight, StoredMatrix, StoredRows

GROUPS = {"NVFP4": 16, "MXFP4": 32}  # of safetensors
FORMATS = ("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "IQ3_XXS", "IQ2_XS")
SHAPES = ("4864x896", "4096x4096", "5760x2880")  # outputs x inputs; the last: an expert of gpt-oss


def of_safetensors(folder: Path, name: str, outputs: int, inputs: int) -> StoredRows:
    """Random half bytes in a file, with the scales of a format."""
    random = np.random.default_rng(0)
    file = folder / f"{name}-{outputs}x{inputs}"
    file.write_bytes(random.integers(0, 256, (outputs, inputs // 2), dtype=np.uint8).tobytes())
    scales = random.random((outputs, inputs // GROUPS[name])) / 100 + 0.001
    if name == "MXFP4":
        scales = np.exp2(np.floor(np.log2(scales)))
    levels = HostTensor(E2M1_LEVELS, UINT8)
    return StoredRows(file, 0, outputs, "LEVELS", scales=factors(scales), levels=levels)


def both_forms(
    ops: OpTable, folder: Path, name: str, outputs: int, inputs: int
) -> list[list[LinearWeight]]:
    """Copies of random weights in 4 bits, and in a form without levels."""
    if name in GROUPS:
        rows = of_safetensors(folder, name, outputs, inputs)
        decoded = decode_rows(rows, inputs, torch.device("cpu"))
    else:
        blocks = random_rows(name, (outputs, inputs))
        rows = StoredRows(folder / f"{name}-{outputs}x{inputs}", 0, outputs, name)
        rows.file.write_bytes(blocks.tobytes())
        decoded = decode_blocks(name, torch.from_numpy(blocks), (outputs, inputs))
    load = ops.load_linear
    assert isinstance(decoded, QuantizedWeight) and load is not None and rows.kind is not None
    matrix = StoredMatrix(rows.kind, (rows,), inputs)
    return [copies(lambda: load(matrix, None)), copies(lambda: ops.pack_quantized(decoded, None))]


def fitting(inputs: int, name: str) -> int:
    """Inputs that the format's blocks divide, about as many."""
    size = GROUPS[name] if name in GROUPS else BLOCKS[name][0]
    return -(-inputs // size) * size


def main() -> None:
    parser = argparse.ArgumentParser(description="16 levels in 4 bits, and without levels.")
    parser.add_argument("--isa", nargs="+", default=list(native_status().levels[:-1]))
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(describe_machine())
    print("| format | shape | bytes for 32 | level | threads | rows | us without levels |", end="")
    print(" in 4 bits | ratio | quartiles |\n|---|---|---|---|--:|--:|--:|--:|--:|---|")
    for name in options.formats:
        for shape in options.shapes:
            outputs, inputs = (int(size) for size in shape.split("x"))
            inputs = fitting(inputs, name)
            with tempfile.TemporaryDirectory() as folder:
                for isa in options.isa:
                    for threads in options.threads:
                        clock = time.thread_time if threads == 1 else time.perf_counter
                        ops = load_native(threads, isa)
                        assert ops is not None
                        forms = both_forms(ops, Path(folder), name, outputs, inputs)
                        held = [
                            f"{32 * form[0].nbytes / outputs / inputs:.1f}" for form in forms[::-1]
                        ]
                        for num_rows in options.rows:
                            x = activations(num_rows, inputs).to(BFLOAT16)
                            columns = measured(ops, forms, x, options.rounds, clock)
                            head = [name, f"{outputs}x{inputs}", ", ".join(held), isa, f"{threads}"]
                            print(f"| {' | '.join([*head, *columns])} |", flush=True)


if __name__ == "__main__":
    main()
