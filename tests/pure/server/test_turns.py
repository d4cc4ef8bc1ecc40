"""Requests that came together begin in turns of their clients."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from quickstep.server.http.turns import Places, Turns
from quickstep.server.http.work_lanes import WorkLanes

DEADLINE_S = 30.0


def order_of(clients: list[str], cancelled: tuple[int, ...] = ()) -> list[str]:
    """The order in which requests begin that come in the same run of the loop."""
    begun: list[str] = []

    async def request(turns: Turns, client: str) -> None:
        turn = await turns.take(client)
        begun.append(client)
        turn.leave()

    async def run() -> None:
        turns = Turns()
        (await turns.take("before")).leave()  # so that there is a second client
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            tasks = [asyncio.create_task(request(turns, client)) for client in clients]
            await asyncio.sleep(0)
            for number in cancelled:
                tasks[number].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)
            await request(turns, "after")

    asyncio.run(run())
    assert begun.pop() == "after"
    return begun


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        (["a"] * 4 + ["b"], ["a", "b", "a", "a", "a"]),
        (["a", "b", "a", "b", "c"], ["a", "b", "c", "a", "b"]),
        (["a"] * 5, ["a"] * 5),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_clients_take_turns(clients: list[str], expected: list[str]) -> None:
    assert order_of(clients) == expected


def test_a_request_that_is_cancelled_takes_no_turn() -> None:
    assert order_of(["a", "a", "a", "b"], cancelled=(1, 2)) == ["a", "b"]


def test_what_others_have_sent_is_read_before_a_client_has_its_next_turn() -> None:
    """A request comes while one of a flood is at work: its bytes are read and its task begins in
    the two runs of the loop after it.
    """
    begun: list[str] = []

    async def request(turns: Turns, name: str, sent: list[asyncio.Task[None]]) -> None:
        turn = await turns.take(name[0])
        begun.append(name)
        if name == "a1":
            loop = asyncio.get_running_loop()
            loop.call_soon(
                lambda: sent.append(loop.create_task(request(turns, "b0", [])))  # is read
            )
        turn.leave()

    async def run() -> None:
        turns = Turns()
        (await turns.take("b")).leave()
        sent: list[asyncio.Task[None]] = []
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*[request(turns, f"a{place}", sent) for place in range(4)])
            await asyncio.gather(*sent)

    asyncio.run(run())
    assert begun == ["a0", "a1", "b0", "a2", "a3"]


def test_a_client_alone_waits_for_nothing() -> None:
    """None of its requests is put off to another run of the loop."""

    async def run() -> list[bool]:
        turns = Turns()
        takes = [asyncio.ensure_future(turns.take("a")) for _ in range(5)]
        await asyncio.sleep(0)
        return [take.done() for take in takes]

    done = asyncio.run(run())
    assert all(done), done


def test_a_request_that_was_not_held_back_begins_in_the_next_run_also_after_the_last_turn() -> None:
    """Each run of the loop may wait for a thread of a lane that has the interpreter."""

    async def run() -> bool:
        turns = Turns()
        for client in "baa":
            (await turns.take(client)).leave()
        again = asyncio.ensure_future(turns.take("a"))
        for _ in range(2):  # its task runs, then what waits for its turn
            await asyncio.sleep(0)
        return again.done()

    assert asyncio.run(run())


class InHand:
    """Requests that stay in hand until they are told to leave; `begun` are those that began."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.begun: list[str] = []
        self._left: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """Requests of the clients that the first letters name."""
        for name in names:
            self._left[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(name))
        await self.settled()

    async def leave(self, name: str) -> None:
        self._left[name].set()
        await self.settled()

    async def settled(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def _run(self, name: str) -> None:
        turn = await self.turns.take(name[0])
        self.begun.append(name)
        try:
            await self._left[name].wait()
        finally:
            turn.leave()
            turn.leave()  # again, nothing

    async def end(self) -> None:
        for name in self.tasks:
            self._left[name].set()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quickstep.server.http.turns._IN_HAND_S", DEADLINE_S)


@pytest.mark.usefixtures("_patient")
def test_a_client_has_one_request_in_hand_and_delays_no_other_client() -> None:
    async def run() -> None:
        requests = InHand()
        await requests.come("b0", "a0", "a1", "a2")
        assert requests.begun == ["b0", "a0"]
        await requests.leave("b0")
        await requests.come("b1")
        assert requests.begun == ["b0", "a0", "b1"]
        requests.tasks["a1"].cancel()
        await requests.leave("a0")
        assert requests.begun[3:] == ["a2"]
        await requests.come("a3", "a4")
        requests.tasks["a2"].cancel()
        requests.tasks["a3"].cancel()
        await requests.settled()
        assert requests.begun[4:] == ["a4"]
        await requests.end()

    asyncio.run(run())


@pytest.mark.usefixtures("_patient")
def test_who_came_while_a_request_was_in_hand_is_before_its_clients_next_one() -> None:
    async def run() -> None:
        turns, begun = Turns(), list[str]()

        async def request(client: str) -> None:
            turn = await turns.take(client)
            begun.append(client)
            turn.leave()

        for client in "baa":
            (await turns.take(client)).leave()
        first = await turns.take("a")
        second = asyncio.create_task(request("a"))
        await asyncio.sleep(0)
        first.leave()
        third = asyncio.create_task(request("b"))  # as by what the loop reads then
        await asyncio.gather(second, third)
        assert begun == ["b", "a"]

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_a_request_that_waits_for_its_client_holds_nothing_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quickstep.server.http.turns._IN_HAND_S", 0.001)

    async def run() -> None:
        requests = InHand()
        await requests.come("b0", "a0", "a1", "a2")
        async with asyncio.timeout(DEADLINE_S):
            while "a2" not in requests.begun:
                await asyncio.sleep(0.001)
        await requests.end()

    asyncio.run(run())


def test_after_a_refusal_a_client_waits_for_its_next_turn_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quickstep.server.http.turns._REFUSED_S", 0.05)

    async def run() -> None:
        turns, begun = Turns(), list[str]()

        async def request(client: str) -> None:
            turn = await turns.take(client)
            begun.append(client)
            turn.refused()
            turn.leave()  # as at its end

        loop = asyncio.get_running_loop()
        await request("b")
        await request("a")
        since_s = loop.time()
        again = asyncio.create_task(request("a"))
        await request("c")
        await again
        assert begun == ["b", "a", "c", "a"]
        assert loop.time() - since_s >= 0.04

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_after_work_in_a_lane_the_next_held_back_request_waits_and_others_do_not() -> None:
    work_s = 0.02  # less than a request may be in hand

    async def run() -> None:
        turns, lanes, begun = Turns(), WorkLanes(), list[str]()
        loop = asyncio.get_running_loop()
        ended_s: list[float] = []

        async def long_request(name: str) -> None:
            turn = await turns.take(name[0])
            begun.append(name)
            await lanes.run(1, lambda: time.sleep(work_s))
            turn.leave()
            ended_s.append(loop.time())

        async def short_request(name: str) -> None:
            (await turns.take(name[0])).leave()
            begun.append(name)

        await short_request("b0")
        first = asyncio.create_task(long_request("a0"))
        await asyncio.sleep(0)
        following = asyncio.create_task(short_request("a1"))
        await first
        await short_request("c0")
        await following
        assert begun == ["b0", "a0", "c0", "a1"]
        assert loop.time() - ended_s[0] >= work_s
        await long_request("a2")
        await short_request("a3")  # was not held back
        await short_request("b1")
        assert begun[4:] == ["a2", "a3", "b1"]

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_work_in_a_lane_that_is_longer_than_a_request_is_in_hand_delays_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_hand_s = 0.02
    monkeypatch.setattr("quickstep.server.http.turns._IN_HAND_S", in_hand_s)

    async def run() -> None:
        turns, lanes, ends = Turns(), WorkLanes(), threading.Event()

        async def long_request() -> None:
            turn = await turns.take("a")
            await lanes.run(1, lambda: ends.wait(DEADLINE_S))
            turn.leave()

        (await turns.take("b")).leave()
        since_s = asyncio.get_running_loop().time()
        first = asyncio.create_task(long_request())
        await asyncio.sleep(0)
        (await turns.take("a")).leave()
        assert asyncio.get_running_loop().time() - since_s >= 2.5 * in_hand_s
        assert not first.done()
        ends.set()
        await first

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_clients_take_turns_at_a_place_and_who_leaves_gives_it_on() -> None:
    order: list[str] = []

    async def use(places: Places, client: str) -> None:
        async with places.place(client):
            order.append(client)
            await asyncio.sleep(0)

    async def run() -> None:
        places = Places()
        async with asyncio.timeout(DEADLINE_S):
            tasks = [asyncio.create_task(use(places, client)) for client in "aaaab"]
            await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await use(places, "c")

    asyncio.run(run())
    assert "".join(order) == "abaac"


def test_a_place_that_comes_as_its_client_leaves_is_given_on() -> None:
    async def run() -> None:
        places, order = Places(), list[str]()
        first, second = places.place("a"), places.place("b")
        await first.__aenter__()
        waiting = asyncio.ensure_future(second.__aenter__())
        await asyncio.sleep(0)
        await first.__aexit__(None, None, None)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(DEADLINE_S), places.place("c"):
            order.append("c")
        assert order == ["c"]

    asyncio.run(run())
