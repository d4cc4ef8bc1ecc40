"""The queue's order, and deadlines that outlive nothing."""

from __future__ import annotations

from random import Random

from quickstep.core.queues import DeadlineQueue, Due, WaitingQueue
from quickstep.core.sequence import Sequence
from quickstep.core.service_order import PriorityOrder
from quickstep.types import Request


def arrive(
    arrival: int, priority: int = 0, timeout_s: float | None = None, now: float = 0.0
) -> Sequence:
    request = Request(f"r{arrival}", (1,), priority=priority, timeout_s=timeout_s)
    return Sequence(request, 0, arrival, now, PriorityOrder(10.0).rank(request, now, 0.0))


def test_the_queue_orders_by_priority_then_arrival_and_puts_paused_ones_last() -> None:
    queue = WaitingQueue(PriorityOrder(10.0))
    paused = arrive(4, priority=-9)
    for sequence in (arrive(3, priority=1), arrive(2), arrive(1), paused, arrive(5, priority=-1)):
        queue.push(sequence, 0.0)
    queue.set_paused(paused, True, 0.0)
    assert [sequence.arrival for sequence in queue] == [5, 1, 2, 3, 4]
    queue.remove(paused)
    assert [sequence.arrival for sequence in queue] == [5, 1, 2, 3]
    assert queue.head is not None
    assert queue.head.arrival == 5


def test_a_sequence_gains_a_level_of_priority_for_every_aging_time_that_it_waits() -> None:
    queue = WaitingQueue(PriorityOrder(10.0))
    for number, priority, now in (
        (1, 2, 0.0),
        (2, 0, 19.0),
        (3, 0, 21.0),
        (4, 1, 9.0),
        (5, 1, 11.0),
    ):
        queue.push(arrive(number, priority=priority, now=now), now)
    assert [sequence.arrival for sequence in queue] == [2, 4, 1, 3, 5]


def test_deadlines_come_in_their_order_whatever_was_dropped_between() -> None:
    rng, deadlines, live = Random(0), DeadlineQueue(), []
    for arrival in range(1000):
        sequence = arrive(arrival, timeout_s=rng.random())
        deadlines.push(sequence)
        if rng.random() < 0.5:
            sequence.finish(0.0)
        else:
            live.append(sequence)
    live.sort(key=lambda sequence: sequence.deadline_s or 0.0)
    first = [sequence for sequence in live if (sequence.deadline_s or 0.0) <= 0.3]
    assert list(deadlines.pop_due(0.3)) == [(sequence, Due.EXPIRE) for sequence in first]
    rest = [(sequence, Due.EXPIRE) for sequence in live[len(first) :]]
    assert list(deadlines.pop_due(1.0)) == rest
    assert deadlines.next_s() is None


def test_finished_sequences_are_forgotten_before_their_deadline() -> None:
    deadlines = DeadlineQueue()
    for arrival in range(1000):
        sequence = arrive(arrival, timeout_s=1e9)
        deadlines.push(sequence)
        sequence.finish(0.0)
    assert len(deadlines.heap) < 100


def test_a_request_without_a_deadline_is_not_watched() -> None:
    deadlines = DeadlineQueue()
    deadlines.push(arrive(0))
    assert deadlines.next_s() is None
