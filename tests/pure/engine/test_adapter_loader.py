"""What becomes of requests when reading or loading an adapter fails, or never ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from scheduler_world import Setup, open_scheduler

from quickstep.engine.adapter_loader import AdapterLoader
from quickstep.errors import ConfigError, EngineError, RequestError
from quickstep.types import FinishReason, Request, SamplingParams, SequenceOutput


class Panic(BaseException):
    """As a panic in Rust, which is no Exception."""


class FakeAdapters:
    """Adapters whose files do what a test wants; the id of an adapter is its name."""

    def __init__(self, work: dict[str, Callable[[], object]]) -> None:
        self.work = work
        self.packed: dict[str, object] = {}
        self.to_read_again: list[str] = []
        self.loaded: tuple[()] = ()
        self.retired: tuple[()] = ()

    def is_opened(self, name: str) -> bool:
        return False

    def path_of(self, name: str) -> Path | None:
        self.work[name]()
        return None

    def find(self, name: str) -> Any:
        raise RequestError(f"the adapter {name!r} is not loaded", param="model")

    def pack(self, adapter_id: str) -> object:
        return self.work[adapter_id]()

    def put(self, adapter_id: str, packed: object) -> None:
        self.packed[adapter_id] = packed

    def evict(self, adapter_ids: Iterable[str]) -> None:
        for adapter_id in adapter_ids:
            self.packed.pop(adapter_id, None)

    def read_again(self, adapter_id: str) -> None:
        self.to_read_again.append(adapter_id)


def fails(error: BaseException) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


async def run(work: dict[str, Callable[[], object]]) -> tuple[FakeAdapters, dict[str, str]]:
    """Load the adapters one after the other for a request each; returns the errors of the ends."""
    scheduler = open_scheduler(Setup(max_loras=1, num_blocks=64))
    adapters, errors = FakeAdapters(work), dict[str, str]()
    woken = asyncio.Event()

    def deliver(outputs: Iterable[SequenceOutput], now: float) -> None:
        for output in outputs:
            assert output.finish_reason is FinishReason.ERROR
            errors[output.request_id] = output.error

    loader = AdapterLoader(
        adapters,  # type: ignore[arg-type]
        scheduler,
        lambda: 0.0,
        deliver,
        woken.set,
        read_limit_s=0.05,
    )
    for name in work:
        scheduler.register_adapter(name, 1)
        sampling = SamplingParams(max_tokens=4)
        scheduler.add(Request(name, (0, 1), sampling, adapter_id=name), 0.0)
        assert scheduler.plan(0.0) is None
        loader.follow_orders()
        await woken.wait()
        woken.clear()
        plan = scheduler.plan(0.0)
        assert (plan is not None) == (name in adapters.packed)
        scheduler.check()
        if plan is not None:
            scheduler.abort(name, 0.0)
            scheduler.fail(plan, "not computed here", 0.0)
    loader.close()
    return adapters, errors


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ConfigError("its file is not there"), "its file is not there"),
        (OSError("the disk"), "OSError, which the log"),
        (Panic("in Rust"), "Panic, which the log"),
    ],
)
def test_a_failed_load_ends_the_requests_that_wait_for_it_and_nothing_else(
    error: BaseException, part: str
) -> None:
    work = {"bad": fails(error), "worse": fails(error), "good": object}
    adapters, errors = asyncio.run(run(work))
    assert errors.keys() == {"bad", "worse"} and part in errors["bad"]
    assert adapters.packed.keys() == {"good"}
    assert adapters.to_read_again == ["bad", "worse"]


def test_a_system_without_another_thread_ends_the_requests_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, num_left = threading.Thread.start, 2

    def limited(thread: threading.Thread) -> None:
        nonlocal num_left
        num_left -= thread.name == "adapter"
        if thread.name == "adapter" and num_left >= 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    adapters, errors = asyncio.run(run({"bad": object, "worse": object, "good": object}))
    assert errors.keys() == {"bad", "worse"} and "can't start new thread" in errors["bad"]
    assert adapters.packed.keys() == {"good"}


def test_loads_that_never_end_give_their_places_back() -> None:
    never = threading.Event()
    work = {name: never.wait for name in ("one", "two", "three")}
    adapters, errors = asyncio.run(run({**work, "good": object}))
    assert errors.keys() == work.keys() and "longer than 0.05 s" in errors["one"]
    assert adapters.packed.keys() == {"good"}


def test_a_directory_that_does_not_answer_holds_up_its_own_requests_only() -> None:
    never = threading.Event()
    work = {f"gone-{number}": never.wait for number in range(6)}
    adapters = FakeAdapters({**work, "absent": lambda: None})

    async def open_all() -> list[object]:
        scheduler = open_scheduler(Setup(max_loras=1))
        loader = AdapterLoader(
            adapters,  # type: ignore[arg-type]
            scheduler,
            lambda: 0.0,
            lambda outputs, now: None,
            lambda: None,
            read_limit_s=0.02,
        )
        opening = [loader.open(name) for name in (*work, "absent")]
        return await asyncio.gather(*opening, return_exceptions=True)

    *gone, absent = asyncio.run(open_all())
    assert all(isinstance(one, EngineError) for one in gone)
    assert isinstance(absent, RequestError)
