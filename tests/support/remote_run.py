"""Runs a test against a `RemoteEngine` over the scripted worker; what its tests share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import scripted_worker
from msgspec.structs import replace

from quickstep.engine.remote import supervisor
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.remote.supervisor import RestartLimits
from quickstep.engine.stats import EngineState
from quickstep.engine.stream import Stream
from quickstep.types import Delta, FinishReason, Request, SamplingParams

DEADLINE_S = 60.0
QUICK = RestartLimits(max_quick_deaths=3, first_delay_s=0.01, max_delay_s=0.01)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
HOLD_STOP_S = 0.3  # a process whose step never ends cannot follow Stop: no need to wait for it


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


def is_alive(process_id: int) -> bool:
    """Whether there is such a process; one that waits to be reaped is dead."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def run(
    path: Path,
    test: Callable[[RemoteEngine], Awaitable[None]],
    mode: str = "serve",
    stall_s: float = 30.0,
    max_undecided: int = 4096,
    **scheduler: int,
) -> None:
    """Run `test` on a started engine in a process, which must be gone at the end."""

    async def whole() -> None:
        config = scripted_worker.config(path, **scheduler)
        engine = RemoteEngine(
            config,
            command=scripted_worker.command(mode),
            restart_limits=QUICK,
            stall_s=stall_s,
            max_undecided=max_undecided,
        )
        await engine.open()
        process_ids = {engine.process_id}
        await engine.start()
        try:
            await asyncio.wait_for(test(engine), DEADLINE_S)
        finally:
            process_ids.add(engine.process_id)
            await engine.stop()
        assert engine.stats().state in (EngineState.STOPPED, EngineState.FAILED)
        assert engine.stats().num_requests == 0
        assert not any(is_alive(process_id) for process_id in process_ids if process_id)

    stop_s = HOLD_STOP_S if mode == "hold" else supervisor._STOP_S
    with patch.object(supervisor, "_STOP_S", stop_s):
        asyncio.run(whole())


def ask(
    engine: RemoteEngine,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    request_id: str = "",
    timeout_s: float | None = None,
) -> Stream:
    """Submit a prompt."""
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return engine.stream(Request(request_id, tuple(ids), sampling, timeout_s=timeout_s))


async def read(stream: Stream) -> list[Delta]:
    """All deltas, without what the clock says."""
    return [replace(delta, timings=None) async for delta in stream]


async def ends(stream: Stream) -> list[tuple[FinishReason | None, str]]:
    return [(d.finish_reason, d.error) for d in await read(stream) if d.finish_reason is not None]
