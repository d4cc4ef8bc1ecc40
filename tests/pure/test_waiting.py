"""The queue's order, and deadlines that outlive nothing."""

from __future__ import annotations

from random import Random

from quickstep.core.sequence import Residency, Sequence
from quickstep.core.waiting import Deadlines, WaitingQueue
from quickstep.types import Request


def arrive(arrival: int, priority: int = 0, deadline_s: float | None = None) -> Sequence:
    request = Request(f"r{arrival}", (1,), priority=priority, deadline_s=deadline_s)
    return Sequence(request, 0, arrival, 0.0)


def test_the_queue_orders_by_tier_then_preemption_then_arrival() -> None:
    queue = WaitingQueue()
    late = arrive(4)
    late.admit(Residency(slot=0, blocks=[0], prefill_end=1, planned=0), 0.0)
    late.preempt(0.0)
    for sequence in (arrive(3, priority=1), arrive(2), arrive(1), late, arrive(5, priority=-1)):
        queue.push(sequence)
    assert [sequence.arrival for sequence in queue] == [5, 4, 1, 2, 3]
    queue.remove(late)
    assert [sequence.arrival for sequence in queue] == [5, 1, 2, 3]
    assert queue.head is not None
    assert queue.head.arrival == 5


def test_deadlines_come_in_their_order_whatever_was_dropped_between() -> None:
    rng, deadlines, live = Random(0), Deadlines(), []
    for arrival in range(1000):
        sequence = arrive(arrival, deadline_s=rng.random())
        deadlines.push(sequence)
        if rng.random() < 0.5:
            sequence.finish(0.0)
        else:
            live.append(sequence)
    live.sort(key=lambda sequence: sequence.request.deadline_s or 0.0)
    first = [sequence for sequence in live if (sequence.request.deadline_s or 0.0) <= 0.3]
    assert deadlines.pop_due(0.3) == first
    assert deadlines.pop_due(1.0) == live[len(first) :]
    assert deadlines.next_s() is None


def test_finished_sequences_are_forgotten_before_their_deadline() -> None:
    deadlines = Deadlines()
    for arrival in range(1000):
        sequence = arrive(arrival, deadline_s=1e9)
        deadlines.push(sequence)
        sequence.finish(0.0)
    assert len(deadlines._heap) < 100


def test_a_request_without_a_deadline_is_not_watched() -> None:
    deadlines = Deadlines()
    deadlines.push(arrive(0))
    assert deadlines.next_s() is None
