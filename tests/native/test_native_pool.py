"""The thread pool seen from Python: forked and spawned children, concurrent callers, freeing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import threading
import weakref
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quickstep.errors import EngineError
from quickstep.ops.native.backend import default_num_threads, load_native
from quickstep.ops.table import OpTable
from quickstep.ops.thread_placement import ThreadPlaces
from quickstep.ops.weights import LinearWeight

CHILD_TIMEOUT_S = 60


def native(num_threads: int) -> OpTable:
    ops = load_native(num_threads)
    assert ops is not None
    return ops


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(600, 300, generator=generator).bfloat16()
    return torch.randn(40, 300, generator=generator).bfloat16(), weight


def bits(out: Tensor) -> bytes:
    return out.view(torch.int16).numpy().tobytes()


def send_product(
    pipe: Connection, x: Tensor, weight: Tensor, parents: tuple[OpTable, LinearWeight] | None
) -> None:
    """What a child does: the product on the parent's table, or on one of its own.

    Nothing here may use torch's threads, which hang in a forked child.
    """
    ops = parents[0] if parents else native(2)
    packed = parents[1] if parents else ops.pack_linear(weight, None)
    pipe.send_bytes(bits(ops.linear(x, packed)))


def product_in_child(method: str, parents: tuple[OpTable, LinearWeight] | None) -> bytes:
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=send_product, args=(send, *inputs(), parents))
    child.start()
    try:
        assert receive.poll(CHILD_TIMEOUT_S), "the child hangs"
        return receive.recv_bytes()
    finally:
        child.kill()
        child.join()


def expected() -> bytes:
    x, weight = inputs()
    ops = native(1)
    return bits(ops.linear(x, ops.pack_linear(weight, None)))


def test_a_forked_child_continues_with_the_parents_table() -> None:
    ops = native(3)
    packed = ops.pack_linear(inputs()[1], None)
    ops.linear(inputs()[0], packed)
    assert product_in_child("fork", (ops, packed)) == expected()


def test_a_forked_child_may_load_threads_of_its_own() -> None:
    native(2)
    assert product_in_child("fork", None) == expected()


def test_the_parents_pool_works_after_a_fork() -> None:
    ops = native(3)
    packed = ops.pack_linear(inputs()[1], None)
    product_in_child("fork", (ops, packed))
    assert bits(ops.linear(inputs()[0], packed)) == expected()


def test_a_spawned_child_computes_the_same_bits() -> None:
    assert product_in_child("spawn", None) == expected()


def test_calls_from_several_threads_do_not_mix() -> None:
    ops = native(3)
    x, weight = inputs()
    packed = ops.pack_linear(weight, None)
    want = ops.linear(x, packed)
    wrong: list[int] = []

    def repeat() -> None:
        for rows in range(1, 40):
            if not torch.equal(ops.linear(x[:rows], packed), want[:rows]):
                wrong.append(rows)

    callers = [threading.Thread(target=repeat) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_weights_and_threads_are_freed_with_their_owners() -> None:
    threads_before = thread_ids()
    ops = native(4)
    packed = ops.pack_linear(inputs()[1], None)
    started = thread_ids() - threads_before
    assert len(started) == 3
    freed = weakref.ref(packed.data)  # type: ignore[type-var]
    del packed
    gc.collect()
    assert freed() is None
    del ops
    gc.collect()
    assert started.isdisjoint(thread_ids())


def thread_ids() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def test_pinned_workers_stay_on_their_cpus_and_the_calling_thread_is_free() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cpus = (allowed[0], *(allowed[i % len(allowed)] for i in (1, 2)))
    before = thread_ids()
    ops = load_native(3, places=lambda _: ThreadPlaces(cpus))
    assert ops is not None
    workers = sorted(thread_ids() - before)
    assert [os.sched_getaffinity(tid) for tid in workers] == [{cpu} for cpu in cpus[1:]]
    assert os.sched_getaffinity(0) == set(allowed)
    x, weight = inputs()
    assert bits(ops.linear(x, ops.pack_linear(weight, None))) == expected()


def test_a_caller_sleeps_while_a_worker_without_a_processor_finishes() -> None:
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    threads_before = thread_ids()
    ops = load_native(2, places=lambda _: ThreadPlaces((cpu, cpu)))
    assert ops is not None
    (worker,) = thread_ids() - threads_before
    os.setpriority(os.PRIO_PROCESS, worker, 19)  # it loses the processor in the middle of an item
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 1024, generator=generator).bfloat16()
    # a loop outlasts a turn on the processor on fast CPUs too
    x = torch.randn(4096, 1024, generator=generator).bfloat16()
    packed = ops.pack_linear(weight, None)
    before = num_sleeps()
    os.sched_setaffinity(0, {cpu})  # both threads take turns on this processor
    try:
        for _ in range(400):  # it happens in one of about 20 loops, often in the first
            ops.linear(x, packed)
            if num_sleeps() >= before + 2:
                break
    finally:
        os.sched_setaffinity(0, allowed)
    assert num_sleeps() >= before + 2


def num_sleeps() -> int:
    """How often this thread gave its processor up to wait; `sched_yield` does not count."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_weights_spread_over_nodes_that_are_not_there_are_weights_all_the_same() -> None:
    ops = load_native(2, places=lambda _: ThreadPlaces(nodes=(0, 40)))
    assert ops is not None
    x, weight = inputs()
    assert bits(ops.linear(x, ops.pack_linear(weight, None))) == expected()


def test_a_cpu_that_the_process_may_not_use_is_refused() -> None:
    with pytest.raises(EngineError, match="pinning threads to the CPUs 0, 100000"):
        load_native(2, places=lambda _: ThreadPlaces((0, 100000)))


def test_the_default_thread_count_follows_torch() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert default_num_threads() == 1
    finally:
        torch.set_num_threads(before)
