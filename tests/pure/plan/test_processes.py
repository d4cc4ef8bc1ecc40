"""Independent work in several processes: the order of results, errors, and the end of all."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial

import pytest

from quickstep.plan.processes import map_in_processes


def squared_in(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def failing_at(worst: int, number: int) -> int:
    if number == worst:
        raise ValueError(f"{number} is not a good number")
    return number


def interrupted(place: int, num_done: int) -> None:
    if num_done == 2:
        raise KeyboardInterrupt


def exits(number: int) -> int:
    os._exit(3)


def test_results_are_in_the_order_of_the_items_and_of_other_processes() -> None:
    found = map_in_processes(squared_in, range(7), 2)
    assert [square for square, _ in found] == [number * number for number in range(7)]
    workers = {worker for _, worker in found}
    assert 1 <= len(workers) <= 2
    assert os.getpid() not in workers


@pytest.mark.parametrize(("num_items", "num_processes"), [(1, 8), (3, 1), (0, 4)])
def test_little_work_starts_no_process(num_items: int, num_processes: int) -> None:
    started: list[tuple[int, int]] = []
    found = map_in_processes(
        squared_in, range(num_items), num_processes, lambda *call: started.append(call)
    )
    assert found == [(number * number, os.getpid()) for number in range(num_items)]
    assert started == [(place, place) for place in range(num_items)]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_an_error_of_the_work_is_raised_here(num_processes: int) -> None:
    with pytest.raises(ValueError, match="3 is not a good number"):
        map_in_processes(partial(failing_at, 3), range(6), num_processes)
    assert not multiprocessing.active_children()


def test_an_interrupt_ends_all_processes() -> None:
    with pytest.raises(KeyboardInterrupt):
        map_in_processes(squared_in, range(6), 2, interrupted)
    assert not multiprocessing.active_children()


def test_a_process_that_ends_is_an_error_and_no_wait() -> None:
    with pytest.raises(RuntimeError, match="a process ended before its work"):
        map_in_processes(exits, range(3), 2)
    assert not multiprocessing.active_children()
