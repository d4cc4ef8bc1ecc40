"""Running an engine in the process of a command: open it, collect the text of a stream, stop it.

`generate`, `chat`, `demo` and `batch` use it. `serve` runs its engine in another process instead.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quickstep.cli.screen import loading_bar, print_memory
from quickstep.config import EngineConfig
from quickstep.core.sequence import sequence_seed
from quickstep.errors import EngineError
from quickstep.types import FinishReason, SequenceTimings

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine
    from quickstep.engine.stream import Stream

_Result = TypeVar("_Result")


def with_engine(
    config: EngineConfig,
    work: Callable[[Engine], Awaitable[_Result]],
    show_memory: bool | None = None,
) -> _Result:
    """Load an engine, start it, run `work` in an event loop, stop it. Raises ConfigError.

    The memory table goes to stderr: always, never, or (None) if that is a terminal.
    """
    engine = _load_engine(config, show_memory)

    async def run() -> _Result:
        await engine.start()
        try:
            return await work(engine)
        finally:
            await engine.stop()

    return asyncio.run(run())


def _load_engine(config: EngineConfig, show_memory: bool | None) -> Engine:
    from quickstep.ops.torch_import import defer_parts_of_torch

    # NumPy computes no matrix products here, and its idle threads would take time and memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # imported objects stay alive; scanning them is a sixth of the loading time
    try:
        defer_parts_of_torch()
        from quickstep.engine.assembly import open_engine

        with loading_bar(f"loading {config.load.model}") as progress:
            engine = open_engine(config, progress)
        gc.freeze()
    finally:
        gc.enable()
    show = sys.stderr.isatty() if show_memory is None else show_memory
    if show and engine.memory_plan is not None:
        print_memory(engine.memory_plan)
    return engine


class Answer(msgspec.Struct):
    """One sequence of a request. Sampling with `n=1` and this `seed` gives the same text.

    The times are the engine's own, the same as in its step log.
    """

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    timings: SequenceTimings | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        """Arrival to first token."""
        timings = self.timings
        if timings is None or timings.first_token_s is None:
            return None
        return timings.first_token_s - timings.arrival_s

    @property
    def time_per_output_token_s(self) -> float | None:
        """(end - first token) / (tokens - 1); None below two tokens."""
        timings = self.timings
        if timings is None or timings.first_token_s is None or timings.num_output_tokens < 2:
            return None
        span = timings.finished_s - timings.first_token_s
        return span / (timings.num_output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """The fields that `--json` prints."""
        timings = self.timings
        return {
            "index": self.index,
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason.value if self.finish_reason else None,
            "seed": self.seed,
            "num_cached_tokens": timings.num_cached_tokens if timings else 0,
            "num_blocks": timings.num_blocks if timings else 0,
            "time_to_first_token_s": self.time_to_first_token_s,
            "time_per_output_token_s": self.time_per_output_token_s,
            "queue_s": timings.queue_s if timings else None,
            "device_s": timings.device_s if timings else None,
        }


async def collect(
    stream: Stream, n: int, write: Callable[[str], None] | None = None
) -> list[Answer]:
    """Read a stream to its end; `write` gets each piece of text. Raises EngineError on failure."""
    answers = [Answer(index, sequence_seed(stream.seed, index)) for index in range(n)]
    async with stream:
        async for delta in stream:
            answer = answers[delta.index]
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.finish_reason = delta.finish_reason
            answer.timings = delta.timings or answer.timings
            if write is not None and delta.text:
                write(delta.text)
            if delta.finish_reason is not None and delta.finish_reason.is_failure:
                raise EngineError(delta.error or "the model failed on this request")
    return answers
