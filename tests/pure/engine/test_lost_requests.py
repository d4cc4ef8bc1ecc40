"""What an engine that has ended hands over of its requests."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from quickstep.cluster.parked import ParkedRequests
from quickstep.cluster.suspects import causes_of
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.streams import LostRequest, RemoteStreams
from quickstep.engine.stream import Stream
from quickstep.types import Delta, FinishReason, Request, Resumed, SamplingParams


class Owner:
    """A stream's owner, which is not asked for anything here."""

    def abort(self, request_id: str) -> None: ...

    def pause(self, request_id: str) -> None: ...

    def resume(self, request_id: str) -> None: ...


def handed_over(request: Request, is_accepted: bool, *deltas: Delta) -> LostRequest:
    """The request, when its engine has ended after these deltas."""

    async def lost() -> LostRequest:
        streams = RemoteStreams(lambda: 0.0, moves=True)
        streams.open(Stream(request, Owner()), request)
        if is_accepted:
            streams.accept(request.request_id, ())
        for delta in deltas:
            streams.deliver(request.request_id, delta)
        (lost,) = streams.take_all("fingerprint")
        assert not streams.request_ids
        return lost

    return asyncio.run(lost())


REQUEST = Request("r", (1, 2, 3), SamplingParams(n=2))


def test_a_request_without_output_says_whether_it_was_accepted() -> None:
    """An accepted one need not pass the limits of a queue again."""
    lost = handed_over(REQUEST, True)
    assert lost.request.resumed == (Resumed(0), Resumed(1))
    assert not lost.has_output
    assert handed_over(REQUEST, False).request == REQUEST


def test_a_request_has_the_tokens_ends_and_scores_that_its_client_has() -> None:
    end = Delta(1, "b", (8,), finish_reason=FinishReason.EOS)
    lost = handed_over(REQUEST, True, Delta(0, prompt_logprobs=(None,)), Delta(1, "a", (7,)), end)
    assert lost.has_output
    assert lost.request.resumed == (
        Resumed(0, num_prompt_logprobs=1),
        Resumed(1, (7, 8), is_finished=True),
    )
    assert list(lost.request.indices) == [0]


def test_a_request_that_waited_did_not_end_its_engine() -> None:
    async def lost(has_started: bool, has_ended: bool, *deltas: Delta) -> LostRequest:
        streams = RemoteStreams(lambda: 0.0, moves=True)
        stream = Stream(REQUEST, Owner())
        before = LostRequest(stream, REQUEST, "fingerprint", num_moves=2, num_deaths=1)
        streams.open(stream, REQUEST, before=before)
        if has_started:
            streams.start([REQUEST.request_id, "unknown"])
        for delta in deltas:
            streams.deliver(REQUEST.request_id, delta)
        (lost,) = streams.take_all("fingerprint", has_ended)
        return lost

    def counts(has_started: bool, has_ended: bool, *deltas: Delta) -> tuple[int, int, bool]:
        found = asyncio.run(lost(has_started, has_ended, *deltas))
        return found.num_moves, found.num_deaths, found.was_computed

    token = Delta(0, "a", (7,))
    assert counts(False, True) == (3, 1, False)
    assert counts(True, True) == (3, 2, True)
    assert counts(True, True, token) == (1, 1, True), "the count begins again with a token"
    assert counts(True, False) == (2, 1, False), "it was taken from an engine that runs"


def test_a_request_that_was_lost_twice_keeps_what_came_before() -> None:
    first = handed_over(REQUEST, True, Delta(0, "a", (7,)))
    again = handed_over(first.request, False, Delta(0, "b", (8,)))
    assert again.request.resumed == (Resumed(0, (7, 8)), Resumed(1))
    assert (first.num_moves, again.num_moves) == (1, 1)


@pytest.mark.parametrize("resumed", [(), (Resumed(0, (7,)), Resumed(1))])
def test_a_request_without_an_engine_ends_when_its_own_time_is_over(
    resumed: tuple[Resumed, ...],
) -> None:
    """Which began when the server received it, and not when its engine ended."""

    async def ends(request: Request) -> list[FinishReason | None]:
        parked = ParkedRequests(StepLog(), None, lambda: 1000.0)
        stream = Stream(request, Owner())
        parked.add(LostRequest(stream, request, "fingerprint"))
        async with asyncio.timeout(60):
            found = [delta.finish_reason async for delta in stream]
        assert not len(parked)
        return found

    request = replace(REQUEST, timeout_s=900.0, received_s=100.0, resumed=resumed)
    assert asyncio.run(ends(request)) == [FinishReason.DEADLINE] * 2


def test_a_continuation_without_an_engine_has_the_time_that_is_left() -> None:
    async def is_parked(request: Request) -> bool:
        parked = ParkedRequests(StepLog(), None, lambda: 1000.0)
        parked.add(LostRequest(Stream(request, Owner()), request, "fingerprint"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        found = request.request_id in parked
        parked.remove(request.request_id)
        return found

    beam = replace(REQUEST, timeout_s=900.0, received_s=0.0, is_continuation=True)
    assert asyncio.run(is_parked(beam))


@pytest.mark.parametrize(
    ("num_deaths", "tried", "causes"),
    [
        ({"a": 1}, None, set()),
        ({"a": 2}, None, {"a"}),
        ({"a": 2, "b": 1}, None, set()),  # either may be it
        ({"a": 2, "b": 2}, None, set()),  # each is tried
        ({"a": 3, "b": 1}, "a", {"a"}),
        ({"a": 2, "waited": 0, "has a token": 1}, None, {"a"}),
        ({"b": 1, "has a token": 2}, None, set()),
    ],
)
def test_the_only_one_that_may_have_ended_an_engine_is_the_cause(
    num_deaths: dict[str, int], tried: str | None, causes: set[str]
) -> None:
    def lost(name: str, num: int) -> LostRequest:
        request = replace(REQUEST, request_id=name)
        return LostRequest(
            Stream(request, Owner()),
            request,
            "fingerprint",
            num_deaths=num,
            was_computed=num > 0,
            got_token=name == "has a token",
        )

    async def found() -> set[str]:
        requests = [lost(name, num) for name, num in num_deaths.items()]
        return causes_of(requests, tried, max_deaths=2)

    assert asyncio.run(found()) == causes
