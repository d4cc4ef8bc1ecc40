"""Every sequence that ends with an error has one line in the log, with the id of its request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest
from scripted_engine import ScriptedEngine, read

from quickstep.engine.engine import Engine
from quickstep.engine.remote.streams import RemoteStreams
from quickstep.engine.stream import Stream
from quickstep.errors import EngineDied, RequestError
from quickstep.types import (
    Delta,
    FinishReason,
    Request,
    RowFailure,
    SamplingParams,
    StepResult,
)

FAILURES = (FinishReason.ERROR, FinishReason.REFUSED)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The lines about ends of sequences so far."""
    with caplog.at_level(logging.INFO, "quickstep.engine.stream"):
        yield lambda: [
            record.getMessage()
            for record in caplog.records
            if record.name == "quickstep.engine.stream"
        ]


class NoOwner:
    def abort(self, request_id: str) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...


def stream_of(request_id: str, n: int = 1) -> Stream:
    request = Request(request_id, (1, 2), SamplingParams(n=n, max_tokens=4))
    return Stream(request, NoOwner())


@pytest.mark.parametrize("reason", FinishReason)
@pytest.mark.parametrize("is_read", [True, False])
def test_an_end_is_logged_if_it_is_a_failure_whether_or_not_it_is_read(
    reason: FinishReason, is_read: bool, lines: Callable[[], list[str]]
) -> None:
    async def whole() -> None:
        stream = stream_of("r7", n=2)
        stream.accept()
        if not is_read:
            await stream.aclose()
        stream.put(Delta(0, text="a", token_ids=(1,)))
        stream.put(Delta(1, finish_reason=reason, error="the cause"))

    asyncio.run(whole())
    assert len(lines()) == (reason in FAILURES)
    assert all("r7[1]" in line and line.endswith(": the cause") for line in lines())


def broken_step(parts: ScriptedEngine) -> None:
    parts.executor.broken = set(range(10**4))


def broken_loop(parts: ScriptedEngine) -> None:
    def plan(now: float) -> None:
        raise ValueError("planted")

    parts.scheduler.plan = plan


def broken_text(parts: ScriptedEngine) -> None:
    class Broken:
        def advance(self, output: object) -> None:
            raise ValueError("planted")

    for live in parts.engine._live._live.values():
        live.texts[1] = Broken()


def failed_rows(is_refused: bool) -> Callable[[ScriptedEngine], None]:
    def plant(parts: ScriptedEngine) -> None:
        run = parts.executor._run

        def failing(plan: object) -> StepResult:
            result = run(plan)
            failures = tuple(
                RowFailure(row, "no token is left", is_refused)
                for row in range(len(result.outputs))
            )
            return StepResult(result.step_id, result.outputs, result.seconds, failures)

        parts.executor._run = failing

    return plant


@pytest.mark.parametrize(
    "plant", [broken_step, broken_loop, broken_text, failed_rows(True), failed_rows(False)]
)
def test_every_fault_of_an_engine_leaves_a_line_per_sequence(
    plant: Callable[[ScriptedEngine], None], lines: Callable[[], list[str]]
) -> None:
    async def whole() -> set[str]:
        parts = ScriptedEngine()
        engine: Engine = parts.engine
        await engine.start()
        parts.executor.gate.clear()
        streams = [engine.generate(text, SamplingParams(max_tokens=9, n=2)) for text in ("ab", "c")]
        await asyncio.sleep(0)
        plant(parts)
        parts.executor.gate.set()
        found = await asyncio.gather(*map(read, streams))
        await engine.stop()
        return {
            f"{stream.request_id}[{index}]"
            for stream, deltas in zip(streams, found, strict=True)
            for index, (_, _, last) in deltas.items()
            if last.finish_reason in FAILURES
        }

    failed = asyncio.run(whole())
    assert failed
    assert len(lines()) == len(failed)
    assert all(any(sequence in line for line in lines()) for sequence in failed)


@pytest.mark.parametrize("is_accepted", [True, False])
@pytest.mark.parametrize("has_died", [True, False])
def test_the_end_of_the_engines_process_is_logged_for_what_it_had_accepted(
    is_accepted: bool, has_died: bool, lines: Callable[[], list[str]]
) -> None:
    """One that was not accepted raises the error where the request is answered."""

    async def whole() -> None:
        streams = RemoteStreams(lambda: 0.0)
        request = Request("r1", (1, 2), SamplingParams(n=2, max_tokens=4))
        stream = Stream(request, NoOwner())
        streams.open(stream, request)
        if is_accepted:
            streams.accept("r1", ())
        if has_died:
            streams.end_all(FinishReason.ERROR, "the engine process ended")
        else:
            streams.refuse("r1", RequestError("it is too long"))
        if not is_accepted:
            with pytest.raises(EngineDied if has_died else RequestError):
                await stream.accepted()

    asyncio.run(whole())
    assert [line.split()[1] for line in lines()] == (["r1[0]", "r1[1]"] if is_accepted else [])
