"""`map_in_processes`: work that is independent of each other, in several processes.

For simulations, which one core advances. The order of the results is that of the items, whatever
the number of processes. All processes end with the call, also if it raises or is interrupted.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TypeVar, cast

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Called with the place of an item that is about to be worked on, and how many are done.
Started = Callable[[int, int], None]


def map_in_processes(
    work: Callable[[_Item], _Result],
    items: Sequence[_Item],
    num_processes: int,
    started: Started | None = None,
) -> list[_Result]:
    """`work` of each item, in at most `num_processes` new processes; with one, or a single item, in
    this process. `work`, the items and the results have to be picklable.

    Raises what `work` raises, and RuntimeError if a process ends before its work does.
    """
    num_processes = min(num_processes, len(items))
    results: list[_Result] = []
    if num_processes < 2:
        for place, item in enumerate(items):
            if started is not None:
                started(place, place)
            results.append(work(item))
        return results
    # not forked: a thread of this process, as that of a progress bar, may hold a lock
    context = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    processes = []
    try:
        for _ in range(num_processes):
            end, far_end = context.Pipe()
            process = context.Process(target=_work_on_items, args=(far_end, work), daemon=True)
            process.start()
            far_end.close()  # so that the end of the process closes the pipe
            ends.append(end)
            processes.append(process)
        return _results(items, ends, started)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _results(
    items: Sequence[_Item], ends: Sequence[Connection], started: Started | None
) -> list[_Result]:
    """Give each process an item, and the next one for each result."""
    results: dict[int, _Result] = {}
    place_of_end: dict[Connection, int] = {}
    places = iter(range(len(items)))

    def start(end: Connection) -> None:
        place = next(places, None)
        if place is None:
            return
        if started is not None:
            started(place, len(results))
        place_of_end[end] = place
        end.send(items[place])

    for end in ends:
        start(end)
    while place_of_end:
        for end in cast("list[Connection]", wait(place_of_end)):
            try:
                result, error = end.recv()
            except EOFError as ended:
                raise RuntimeError("a process ended before its work, maybe for memory") from ended
            if error is not None:
                raise error
            results[place_of_end.pop(end)] = result
            start(end)
    return [results[place] for place in range(len(items))]


def _work_on_items(end: Connection, work: Callable[[_Item], _Result]) -> None:
    """Of a process: until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    while True:
        try:
            item = end.recv()
        except EOFError:
            return
        try:
            answer: tuple[_Result | None, Exception | None] = work(item), None
        except Exception as error:
            answer = None, error
        end.send(answer)
