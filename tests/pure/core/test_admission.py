"""Admission: predicted waits by priority, and refusals from the published state of the queue."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
from msgspec import structs
from scheduler_world import Setup, World, ask

from quickstep.core.admission import AdmissionState, WaitEstimate
from quickstep.core.queues import WaitingQueue
from quickstep.core.sequence import Sequence
from quickstep.engine.requests import check_request
from quickstep.errors import FirstTokenTooLate, QueueFull, RequestError
from quickstep.types import FinishReason, Request, RequestClass, Resumed, SamplingParams

BUSY = AdmissionState(
    num_waiting=40,
    num_interactive=10,
    max_waiting=40,
    num_free_slots=0,
    waiting=((0, 10), (1000, 30)),
    running=((0, 4), (1000, 4)),
    interval_s=0.1,
    delay_s=0.05,
)


def limited(deadline_s: float, **fields: object) -> Request:
    return msgspec.structs.replace(Request("r"), ttft_deadline_s=deadline_s, **fields)


def check(request: Request, undecided: dict[int, int] | None = None, waited_s: float = 0.0) -> None:
    BUSY.check(request, 1, undecided or {}, waited_s)


def test_batch_work_neither_fills_the_queue_nor_lengthens_the_wait_of_an_interactive_request() -> (
    None
):
    check(limited(2.0))
    with pytest.raises(QueueFull) as full:
        check(Request("r", request_class=RequestClass.BATCH))
    assert full.value.status == 429
    assert full.value.retry_after_s == pytest.approx(1.5 * 41 * 0.1)


def test_a_request_is_refused_for_those_of_its_own_level_and_before() -> None:
    with pytest.raises(FirstTokenTooLate) as late:
        check(limited(1.5))
    assert late.value.status == 503
    assert "the predicted wait is 1.65 s" in str(late.value)
    check(limited(0.1, priority=-1))  # before all others, and may take the place of a running one


def test_what_the_engine_has_not_decided_yet_counts_by_its_level() -> None:
    check(limited(2.0), {1000: 50})
    with pytest.raises(FirstTokenTooLate):
        check(limited(2.0), {0: 5})


def test_the_time_that_a_request_has_waited_already_counts() -> None:
    with pytest.raises(FirstTokenTooLate, match=r"it has waited for 0\.50 s"):
        check(limited(2.0), waited_s=0.5)


def test_policies_that_do_not_serve_by_level_leave_the_decision_to_the_scheduler() -> None:
    unknown = msgspec.structs.replace(BUSY, waiting=None, running=None)
    unknown.check(limited(0.001), 1, {}, waited_s=0.0)


def test_a_long_delay_is_forgotten_while_no_first_token_measures_another() -> None:
    estimate = WaitEstimate()
    for _ in range(50):
        estimate.count_first_token(4.0, now=10.0)
    assert estimate.delay_s(10.0) > 4.0
    assert estimate.delay_s(20.0) < 0.3
    assert estimate.delay_s(1e9) == pytest.approx(0.0)


def waiting_world(count: int, request_class: RequestClass) -> World:
    """One sequence runs for long, and others wait."""
    world = World(Setup(max_num_seqs=1))
    world.add(ask("runs", max_tokens=40))
    world.plan()
    world.commit()
    for number in range(count):
        request = ask(f"w{number}", max_tokens=40)
        world.add(msgspec.structs.replace(request, request_class=request_class))
    return world


def test_the_scheduler_counts_only_what_is_served_before_a_request() -> None:
    tight = Request("late", (1, 2, 3), SamplingParams(max_tokens=4), ttft_deadline_s=0.3)
    urgent = msgspec.structs.replace(tight, priority=-1)
    world = waiting_world(50, RequestClass.INTERACTIVE)
    with pytest.raises(RequestError, match="the first token cannot come"):
        world.scheduler.add(tight, world.now)
    world.scheduler.add(urgent, world.now)
    world = waiting_world(50, RequestClass.BATCH)
    state = world.scheduler.admission_state(world.now)
    assert (state.waiting, state.num_interactive) == (((1000, 50),), 0)


def test_the_wait_of_a_request_counts_from_when_the_server_received_it() -> None:
    world = World(Setup(max_num_seqs=1))
    request = msgspec.structs.replace(
        ask("a", max_tokens=4), ttft_deadline_s=1.0, received_s=world.now - 0.9999
    )
    with pytest.raises(FirstTokenTooLate, match=r"it has waited for 1\.00 s"):
        world.scheduler.add(request, world.now)
    world.add(msgspec.structs.replace(request, ttft_deadline_s=None))
    timings = world.scheduler.timings("a", world.now)[0]
    assert timings.queue_s == pytest.approx(0.9999)


@pytest.mark.parametrize("resumed", [(), (Resumed(0, (1, 0)),)])
def test_a_deadline_counts_from_when_the_server_received_the_request(
    resumed: tuple[Resumed, ...],
) -> None:
    """Also on the engine that continues it: its time limit does not begin again there."""
    scheduler = World(Setup()).scheduler
    request = ask("a", max_tokens=40, timeout_s=10.0)
    scheduler.add(msgspec.structs.replace(request, received_s=91.0, resumed=resumed), 100.0)
    assert scheduler.wakeup(100.0) == 101.0
    assert scheduler.expire(100.99) == ()
    (output,) = scheduler.expire(101.0)
    assert output.finish_reason is FinishReason.DEADLINE


@pytest.mark.parametrize("max_waiting", [None, 1, 2])
def test_what_continues_an_accepted_request_passes_no_limit_and_keeps_its_place(
    max_waiting: int | None,
) -> None:
    world = World(Setup(max_num_seqs=1, max_waiting=max_waiting))
    world.add(ask("running", max_tokens=3))
    world.plan()
    world.advance(1.0)
    world.add(ask("later", max_tokens=1))
    beams = [
        msgspec.structs.replace(
            ask(f"beam{index}", max_tokens=1), is_continuation=True, received_s=0.5
        )
        for index in range(4)
    ]
    for beam in beams:
        assert world.add(beam)
    assert [one.request.request_id for one in world.scheduler._waiting] == [
        *(beam.request_id for beam in beams),
        "later",
    ]


def test_requests_that_are_shed_at_once_do_not_read_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(Setup(max_num_seqs=1))
    world.add(ask("running", max_tokens=3))
    world.plan()
    for index in range(20):
        request = ask(f"r{index}", max_tokens=1)
        world.scheduler.add(msgspec.structs.replace(request, ttft_deadline_s=1e6), 0.0)
    num_walks = 0
    walk = WaitingQueue.__iter__

    def counted(queue: WaitingQueue) -> Iterator[Sequence]:
        nonlocal num_walks
        num_walks += 1
        return walk(queue)

    monkeypatch.setattr(WaitingQueue, "__iter__", counted)
    assert len(world.scheduler.expire(2e6)) == 20
    assert not num_walks


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("timeout_s", (0.0, -1.0, math.nan, math.inf)),
        ("ttft_deadline_s", (0.0, -1.0, math.nan, math.inf)),
        ("tenant_weight", (0.0, -1.0, math.nan, math.inf)),
        ("received_s", (math.nan, math.inf)),
        ("priority", (10**400, -(10**400), 0.5)),
    ],
)
def test_numbers_that_a_scheduler_cannot_order_by_are_refused(
    name: str, values: tuple[float, ...]
) -> None:
    for value in values:
        request = msgspec.structs.replace(Request("r", (1,)), **{name: value})
        with pytest.raises(RequestError, match=name):
            check_request(request, 10, 10, frozenset({9}))


def num_queued(world: World, account: str, **fields: object) -> int:
    """How many requests of an account are accepted until one is refused."""
    count = 0
    while world.add(
        structs.replace(ask(f"{account}-{count}"), tenant=f"{account}/{count}", **fields)
    ):
        count += 1
    return count


def busy_world(max_waiting: int) -> World:
    world = World(Setup(max_num_seqs=1, max_waiting=max_waiting, num_blocks=64))
    world.add(ask("running", max_tokens=30))
    world.plan()
    return world


@pytest.mark.parametrize("weight", [0.25, 1.0, 10.0, 1000.0])
@pytest.mark.parametrize("max_waiting", [2, 4, 9, 16, 40, 90])
def test_an_account_that_floods_the_queue_leaves_room_for_others(
    max_waiting: int, weight: float
) -> None:
    world = busy_world(max_waiting)
    flood = num_queued(world, "flood", tenant_weight=weight)
    assert flood >= min(2 * weight, 1) / 3 * max_waiting
    others = [num_queued(world, f"account{number}") for number in range(max(1, max_waiting // 9))]
    assert min(others) >= 1
    world.drain()
    world.verify()


@pytest.mark.parametrize("weight", [0.25, 1.0, 10.0])
@pytest.mark.parametrize("max_waiting", [2, 9, 40])
def test_the_published_state_refuses_what_the_share_of_an_account_does(
    max_waiting: int, weight: float
) -> None:
    """Before the body is parsed or tokenized, by the same rule, of accounts with more than four
    sequences: some may have ended since it was published.
    """
    world = busy_world(max_waiting)
    num_early = 0
    names = ("flood", "other", "flood", "third", "flood")
    for number in range(3 * max_waiting):
        tenant = f"{names[number % len(names)]}/{number}"
        request = structs.replace(ask(f"r{number}"), tenant=tenant, tenant_weight=weight)
        try:
            world.scheduler.admission_state(world.now).check(request, 1, {}, 0.0)
            is_refused = False
        except QueueFull:
            is_refused = True
        is_accepted = world.add(request)
        assert not (is_refused and is_accepted)
        num_early += is_refused
    assert num_early or max_waiting < 40
    world.drain()


def test_who_sends_one_request_after_the_other_is_not_refused_by_an_older_state() -> None:
    """The state was published while the one before waited in a queue that is nearly full."""
    world = busy_world(40)
    num_queued(world, "flood")
    assert world.add(structs.replace(ask("quiet"), tenant="quiet"))
    while world.add(
        structs.replace(ask(f"o{world.scheduler.stats().num_waiting}"), tenant="flood")
    ):
        pass
    state = world.scheduler.admission_state(world.now)
    world.abort("quiet")
    again = structs.replace(ask("again"), tenant="quiet")
    state.check(again, 1, {}, 0.0)
    assert world.add(again)
    with pytest.raises(QueueFull):
        state.check(structs.replace(ask("more"), tenant="flood"), 1, {}, 0.0)
    world.drain()


def test_batch_work_of_an_account_takes_nothing_of_its_interactive_share() -> None:
    alone, both = busy_world(40), busy_world(40)
    num_queued(both, "other", request_class=RequestClass.BATCH)
    assert num_queued(both, "ann", request_class=RequestClass.BATCH)
    for world in (alone, both):
        num_queued(world, "eve")
    interactive = {"request_class": RequestClass.INTERACTIVE}
    assert num_queued(both, "bob", **interactive) == num_queued(alone, "bob", **interactive)
    both.drain()


def test_without_accounts_all_of_the_queue_is_for_everybody() -> None:
    world = World(Setup(max_num_seqs=1, max_waiting=9, num_blocks=64))
    world.add(ask("running", max_tokens=30))
    world.plan()
    assert [world.add(ask(f"r{number}")) for number in range(10)] == [True] * 9 + [False]
    world.drain()


@pytest.mark.parametrize("tenant", ["", "ann/1"])
def test_requests_that_belong_together_are_queued_all_or_none(tenant: str) -> None:
    def add(name: str, **fields: object) -> bool:
        return world.add(structs.replace(ask(name), tenant=tenant, **fields))

    world = busy_world(18)
    assert add("own")
    assert not add("first", num_following=17)
    assert add("first", num_following=9)
    while world.add(ask(f"nobody{world.scheduler.stats().num_waiting}")):
        pass
    assert not add("later")
    assert all([add(f"following{number}", has_place=True) for number in range(9)])
    world.drain()
    world.verify()


@pytest.mark.parametrize(("tenant", "num_left"), [("", 5), ("ann/1", 3)])
def test_places_of_those_that_follow_are_kept_until_they_come_or_for_a_second(
    tenant: str, num_left: int
) -> None:
    def add(name: str, **fields: object) -> bool:
        return world.add(structs.replace(ask(name), tenant=tenant, **fields))

    world = busy_world(18)
    assert add("own")
    assert add("first", num_following=9)
    assert not add("second", num_following=9), "before those of the first have come"
    assert all([add(f"following{number}", has_place=True) for number in range(9)])
    assert not add("third", num_following=9)
    assert add("fourth", num_following=1)
    assert not add("fifth", num_following=num_left)
    world.advance(1.5)
    assert add("sixth", num_following=num_left), "that of the fourth did not come"
    world.drain()
    world.verify()


def test_an_empty_queue_takes_more_than_it_has_places() -> None:
    world = busy_world(9)
    assert world.add(structs.replace(ask("first"), tenant="ann/1", num_following=20))
    assert not world.add(structs.replace(ask("second"), tenant="ann/1", num_following=20))
    world.drain()


def test_a_request_that_another_engine_accepted_passes_a_full_queue() -> None:
    """With output or without; the order of service and the deadline of its first token stay."""
    world = World(Setup(max_num_seqs=1, max_waiting=1))
    assert world.add(ask("running"))
    assert world.plan() is not None
    assert world.add(ask("waiting"))
    assert not world.add(ask("refused"))
    for name, resumed in (("begun", Resumed(0, (0, 1))), ("queued", Resumed(0))):
        assert world.add(structs.replace(ask(name), resumed=(resumed,), ttft_deadline_s=0.5))
    world.advance(1.0)
    ends = {output.request_id: output.finish_reason for output in world.scheduler.expire(world.now)}
    assert ends == {"queued": FinishReason.SHED}
