"""Opening an engine for a command: a progress bar, the memory table, start and stop.

`generate`, `chat` and `demo` run in `with_engine`, in this process; `serve` opens its engine in a
process of its own and shows the same (`print_memory`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from quickstep.cli.screen import console_on, loading_bar, plain_table, print_table, size_text
from quickstep.config import EngineConfig

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine
    from quickstep.model.sizing import MemoryPlan

__all__ = ["opened", "print_memory", "with_engine"]

_Result = TypeVar("_Result")


def opened(config: EngineConfig, show_memory: bool | None = None) -> Engine:
    """A loaded engine that is not started. Raises ConfigError.

    The memory table goes to stderr: always, never, or (None) if that is a terminal.
    """
    from quickstep.ops.torch_import import defer_parts_of_torch

    # numpy's threads for matrix products, of which there are none here: they spin and take memory
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # what is imported stays, and looking for garbage in it takes a sixth of the time
    defer_parts_of_torch()
    from quickstep.engine.assembly import open_engine

    with loading_bar(f"loading {config.load.model}") as progress:
        engine = open_engine(config, progress)
    gc.freeze()
    gc.enable()
    shown = sys.stderr.isatty() if show_memory is None else show_memory
    if shown and engine.memory_plan is not None:
        print_memory(engine.memory_plan)
    return engine


def print_memory(plan: MemoryPlan) -> None:
    """The plan's table, and what it had to shrink, on stderr."""
    title, header = "memory", ("part", "size", "of")
    rows = [(row.label, size_text(row.num_bytes), row.detail) for row in plan.rows]
    text = None if sys.stderr.isatty() else plain_table(title, header, rows)
    if text is None:
        print_table(console_on(), title, header, rows)
    else:
        sys.stderr.write(text)
    if logging.getLogger("quickstep").isEnabledFor(logging.INFO):
        return  # the engine has logged its notes
    for note in plan.notes:
        print(note, file=sys.stderr)


def with_engine(
    config: EngineConfig,
    work: Callable[[Engine], Awaitable[_Result]],
    show_memory: bool | None = None,
) -> _Result:
    """Open an engine, run `work` on it in an event loop, stop it whatever happens."""
    engine = opened(config, show_memory)

    async def run() -> _Result:
        await engine.start()
        try:
            return await work(engine)
        finally:
            await engine.stop()

    return asyncio.run(run())
