"""Native paged attention of one layer: microseconds of prefill and decode steps, at every level.

    python -m benchmarks.bench_attention [--levels avx512_amx avx512 avx2] [--kv-dtype int8]

The levels take turns in each round, so that changes of the machine affect all of them. The KV of a
step lies in blocks of 16 positions in random order; the layer has the heads of Qwen2.5-0.5B.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from benchmarks.machine import describe_machine
from quickstep.ops.native.backend import default_num_threads, load_native, native_status
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout
from quickstep.ops.tensors import store_heads

# (rows, cached positions of each, queried positions of each)
STEPS = ((1, 0, 512), (1, 1536, 512), (1, 0, 2048), (1, 512, 1), (32, 512, 1), (1, 8192, 1))
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 14, 2, 64
BLOCK_SIZE = 16
KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int4": torch.uint8,
    "float16": torch.float16,
}


class Step:
    """The arguments of one step's attention."""

    def __init__(self, num_rows: int, num_cached: int, num_queried: int, kv_dtype: torch.dtype):
        length = num_cached + num_queried
        per_row = -(-length // BLOCK_SIZE)
        blocks = torch.randperm(num_rows * per_row).view(num_rows, per_row)
        shape = (num_rows * per_row, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        self.keys, self.values = (store_heads(torch.randn(shape), kv_dtype) for _ in range(2))
        self.queries = torch.randn(num_rows * num_queried, NUM_HEADS, HEAD_SIZE).bfloat16()
        positions = torch.arange(num_cached, length)
        slots = blocks[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.layout = PagedLayout(
            positions=positions.repeat(num_rows),
            slot_mapping=slots.flatten(),
            row_offsets=tuple(range(0, num_rows * num_queried + 1, num_queried)),
            context_lens=(length,) * num_rows,
            block_tables=blocks.to(torch.int32),
            block_size=BLOCK_SIZE,
        )
        self.params = AttentionParams(scale=HEAD_SIZE**-0.5)

    def run(self, ops: OpTable) -> None:
        """Run the attention once."""
        ops.paged_attention(self.queries, self.keys, self.values, self.layout, self.params, None)


def seconds(step: Step, ops: OpTable, repeats: int) -> float:
    """Mean seconds of `repeats` runs."""
    start = time.perf_counter()
    for _ in range(repeats):
        step.run(ops)
    return (time.perf_counter() - start) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    status = native_status()
    assert status.available, status.reason
    parser.add_argument("--levels", nargs="+", default=list(status.levels))
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    tables = {}
    for level in options.levels:
        table = load_native(options.threads, level)
        assert table is not None, level
        tables[level] = table
    print(describe_machine())
    print(
        f"KV {options.kv_dtype}, load average {os.getloadavg()[0]:.1f}, medians of "
        f"{options.rounds} rounds in us (least - most)"
    )
    for shape in STEPS:
        step = Step(*shape, KV_DTYPES[options.kv_dtype])
        first = next(iter(tables.values()))
        repeats = max(1, round(0.02 / max(seconds(step, first, 2), 1e-6)))
        times: dict[str, list[float]] = {level: [] for level in tables}
        for _ in range(options.rounds):
            for level, table in tables.items():
                times[level].append(seconds(step, table, repeats) * 1e6)
        num_rows, num_cached, num_queried = shape
        print(f"{num_rows} x {num_queried} queries after {num_cached} positions")
        for level, measured in times.items():
            middle = statistics.median(measured)
            print(
                f"  {level:12s} {middle:9.0f} ({min(measured):.0f} - {max(measured):.0f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
