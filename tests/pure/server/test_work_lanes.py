"""Work that grows with a client's input: lanes by size, each with its own threads and limit."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import platform
import re
import struct
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from quickstep.server.http.errors import ServerBusy
from quickstep.server.http.work_lanes import WorkLanes, done_in_thread

LARGE = 4 * 1024 * 1024
DEADLINE_S = 30.0


def test_large_work_takes_no_thread_of_small_work() -> None:
    released = threading.Event()

    async def run() -> None:
        lanes = WorkLanes()
        large = [
            asyncio.ensure_future(lanes.run(LARGE, lambda: released.wait(DEADLINE_S)))
            for _ in range(8)
        ]
        for size in (1, 64 * 1024, 1024 * 1024):
            assert await lanes.run(size, lambda: "done") == "done"
        assert not any(task.done() for task in large)
        released.set()
        assert all(await asyncio.gather(*large))

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_beyond_the_limit_nothing_waits() -> None:
    begun, released = threading.Event(), threading.Event()

    def hold() -> bool:
        begun.set()
        return released.wait(DEADLINE_S)

    async def run() -> None:
        lanes = WorkLanes(max_waiting=(1, 1, 1))
        large = [asyncio.ensure_future(lanes.run(LARGE, hold)) for _ in range(2)]
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        with pytest.raises(ServerBusy, match="send the request again later"):
            await lanes.run(LARGE, hold)
        released.set()
        assert all(await asyncio.gather(*large))
        assert await lanes.run(LARGE, lambda: 1) == 1

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_thread_lets_others_run_that_wake_up() -> None:
    def own() -> tuple[int, int, int]:
        """Its time slice, 0 where the kernel has none for ordinary threads; policy and nice."""
        raw = ctypes.create_string_buffer(48)  # struct sched_attr
        number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
        if sys.platform == "linux" and kernel >= (6, 12):
            assert ctypes.CDLL(None).syscall(number, 0, raw, 48, 0) == 0
        slice_ns = struct.unpack("=IIQiIQQQ", raw.raw)[5]
        return slice_ns, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

    kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    slice_ns, policy, nice = asyncio.run(WorkLanes().run(1, own))
    assert nice == os.getpriority(os.PRIO_PROCESS, 0)
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        assert policy == os.SCHED_BATCH
        assert slice_ns == (20_000_000 if kernel >= (6, 12) else 0)
    else:  # the policy that it was started with
        assert policy == os.sched_getscheduler(0)


def test_cancelled_work_does_not_begin_and_frees_its_place() -> None:
    released, ran = threading.Event(), threading.Event()

    async def run() -> None:
        lanes = WorkLanes(max_waiting=(1, 1, 1))
        first = asyncio.ensure_future(lanes.run(LARGE, lambda: released.wait(DEADLINE_S)))
        second = asyncio.ensure_future(lanes.run(LARGE, ran.set))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.ensure_future(lanes.run(LARGE, lambda: "third"))
        await asyncio.sleep(0)
        released.set()
        assert await first
        assert await third == "third"

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert not ran.is_set()


def test_short_json_is_parsed_at_once_and_long_json_in_a_thread() -> None:
    async def run() -> None:
        lanes = WorkLanes()
        here = threading.get_ident()
        assert await lanes.do(1000, threading.get_ident) == here
        assert await lanes.do(100_000, threading.get_ident) != here

    asyncio.run(run())


@asynccontextmanager
async def held_lane(lanes: WorkLanes) -> AsyncIterator[None]:
    """The thread of the lane of large inputs is busy, until the end."""
    begun, released = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        released.wait(DEADLINE_S)

    first = asyncio.ensure_future(lanes.run(LARGE, hold))
    await asyncio.to_thread(begun.wait, DEADLINE_S)
    yield
    await asyncio.sleep(0)  # what was put meanwhile waits
    released.set()
    await first


def test_keys_take_turns_in_a_lane() -> None:
    order: list[str] = []

    async def run() -> None:
        lanes = WorkLanes()
        keys = ["flood"] * 20 + ["ann", "bob", "ann"]
        async with held_lane(lanes):
            others = [
                asyncio.ensure_future(lanes.of(key).run(LARGE, lambda key=key: order.append(key)))
                for key in keys
            ]
        await asyncio.gather(*others)

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    assert order[:6] == ["flood", "ann", "bob", "flood", "ann", "flood"]
    assert order[6:] == ["flood"] * 17


def put_into_held_lane(*keys: str) -> list[object]:
    """What becomes of an input of each key, in a lane of four places whose thread is busy."""

    async def run() -> list[object]:
        lanes = WorkLanes(max_waiting=(4, 4, 4))
        async with asyncio.timeout(DEADLINE_S), held_lane(lanes):
            waiting = [asyncio.ensure_future(lanes.of(key).run(LARGE, int)) for key in keys]
        return await asyncio.gather(*waiting, return_exceptions=True)

    return asyncio.run(run())


def test_in_a_full_lane_the_key_with_most_makes_way() -> None:
    results = put_into_held_lane(*["flood"] * 4, *["ann"] * 3)
    assert [type(result) for result in results[:4]] == [int, int, ServerBusy, ServerBusy]
    assert [type(result) for result in results[4:]] == [int, int, ServerBusy]


def test_one_key_leaves_a_place_in_a_lane_to_the_next() -> None:
    results = put_into_held_lane(*["flood"] * 6, "ann")
    assert [type(result) for result in results] == [int] * 3 + [ServerBusy] * 3 + [int]
    assert "of your API key" in str(results[3])


def test_work_to_be_finished_ends_before_its_cancellation_does() -> None:
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        released.wait(DEADLINE_S)
        ended.set()

    async def run() -> bool:
        async with asyncio.timeout(DEADLINE_S):
            task = asyncio.ensure_future(WorkLanes().finish(LARGE, work))
            await asyncio.to_thread(begun.wait, DEADLINE_S)
            task.cancel()
            asyncio.get_running_loop().call_later(0.01, released.set)
            await asyncio.gather(task, return_exceptions=True)
            return task.cancelled() and ended.is_set()

    assert asyncio.run(run())


def test_work_that_fails_after_its_cancellations_is_reported_and_they_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, released = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        released.wait(DEADLINE_S)
        raise ValueError("a bug")

    async def run() -> bool:
        async with asyncio.timeout(DEADLINE_S):
            task = asyncio.ensure_future(done_in_thread(work))
            await asyncio.to_thread(begun.wait, DEADLINE_S)
            for _ in range(3):  # a client that leaves, and a server that stops
                task.cancel()
                await asyncio.sleep(0)
                assert not task.done(), "its files are still written"
            released.set()
            await asyncio.gather(task, return_exceptions=True)
            return task.cancelled()

    assert asyncio.run(run())
    gc.collect()  # nothing is left that no owner has retrieved
    (record,) = caplog.records
    assert record.exc_info is not None and "a bug" in str(record.exc_info[1])
