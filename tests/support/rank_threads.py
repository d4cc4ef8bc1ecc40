"""The ranks of a model as threads of one process: each with kernels and weights of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.decoder import Decoder
from quickstep.model.loader import load_model
from quickstep.model.sharding import Shard
from quickstep.model.spec import read_spec
from quickstep.ops.collective import open_ranks
from quickstep.ops.native.backend import load_native
from quickstep.ops.native.ranks import RankMemory
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import CPU

_Result = TypeVar("_Result")
STAGE_BYTES = 4096  # so that larger results are gathered in parts


def run_ranks(
    path: Path,
    load: LoadConfig,
    size: int,
    run: Callable[[Decoder, int], _Result],
    on_host: bool = False,
    store: Path | None = None,
    make_ops: Callable[[], OpTable | None] = lambda: load_native(1),
) -> list[_Result]:
    """What `run(model, rank)` returns in each of `size` threads, all at the same time. With
    `store`, they exchange through gloo, and meet in this file. `make_ops`: a table for each.
    """
    memory = RankMemory.create(STAGE_BYTES, 1 << 20, size)
    results: dict[int, _Result] = {}
    failures: list[BaseException] = []

    def follow(rank: int) -> None:
        native, ops = load_native(1), make_ops()
        assert native is not None and native.steps is not None and ops is not None
        ranks = native.steps.ranks(memory, rank)
        try:
            if size > 1 and store is None:
                ops = replace(ops, ranks=ranks)
            elif size > 1:
                ops = replace(ops, ranks=open_ranks(str(store), ranks, CPU))
            checkpoint, spec, shard = Checkpoint(path, "m"), read_spec(path), Shard(rank, size)
            model = load_model(checkpoint, spec, ops, load, on_host=on_host, shard=shard)
            assert isinstance(model, Decoder)
            results[rank] = run(model, rank)
        except BaseException as error:
            ranks.break_()
            failures.append(error)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]
