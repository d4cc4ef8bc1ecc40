"""The worker thread: order, callbacks, failures, closing."""

import gc
import threading
import weakref

import pytest
import torch
from msgspec.structs import replace
from paged_hash_model import PagedHashModel

from quickstep.errors import EngineError, StepOutOfMemory
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.executors.local import LocalExecutor, ShortTicket
from quickstep.runtime.runner import ModelRunner
from quickstep.types import Admission, Phase, SamplingParams, StepPlan, StepRow

PROMPT = (5, 9, 2)
GREEDY = SamplingParams(temperature=0.0)


class GatedModel(PagedHashModel):
    """Waits for `gate` in each step."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()

    def forward(self, batch, kv):
        self.gate.wait()
        return super().forward(batch, kv)


def open_executor(model, short_s=1.0):
    kv = allocate_kv(model.kv_layout, 8, 4, model.device)
    return LocalExecutor(ModelRunner(model, kv, 4, num_slots=2, clock=lambda: 0.0), short_s)


def first_step(step_id=0, slot=0):
    row = StepRow(slot, 0, len(PROMPT), PROMPT, (0, 1), Phase.PREFILL, True, 0)
    return StepPlan(step_id, (row,), (Admission(slot, "r#0", PROMPT, len(PROMPT), GREEDY, 0),))


def decode_step(step_id):
    row = StepRow(0, len(PROMPT) + step_id - 1, 1, (), (), Phase.DECODE, True, step_id)
    return StepPlan(step_id, (row,))


def tokens_of(ticket):
    return ticket.result().outputs[0].token_ids


def test_plans_queued_before_any_result_run_in_order():
    waited = open_executor(PagedHashModel())
    expected = [tokens_of(waited.submit(first_step()))]
    expected += [tokens_of(waited.submit(decode_step(i))) for i in (1, 2, 3)]
    model = GatedModel()
    queued = open_executor(model)
    tickets = [queued.submit(first_step()), *(queued.submit(decode_step(i)) for i in (1, 2, 3))]
    assert not any(ticket.done() for ticket in tickets)
    model.gate.set()
    assert [tokens_of(ticket) for ticket in tickets] == expected
    assert all(ticket.done() for ticket in tickets)
    waited.close()
    queued.close()


def test_a_callback_comes_when_the_result_is_there():
    model = GatedModel()
    executor = open_executor(model)
    ticket = executor.submit(first_step())
    called = threading.Event()
    seen = []
    ticket.add_done_callback(lambda _: (seen.append(ticket.done()), called.set()))
    assert not called.is_set()
    model.gate.set()
    called.wait()
    assert seen == [True]
    late = []
    ticket.add_done_callback(lambda _: late.append(True))
    assert late == [True]
    executor.close()


def test_a_failed_step_fails_the_ones_behind_it_until_reset():
    model = PagedHashModel()
    executor = open_executor(model)
    expected = tokens_of(executor.submit(first_step()))
    model.error = RuntimeError("out of memory")
    failed = executor.submit(decode_step(1))
    with pytest.raises(EngineError, match="step 1 failed: RuntimeError, which the log") as raised:
        failed.result()
    assert raised.value.__cause__ is model.error  # with its text, which clients do not get
    model.error = None
    with pytest.raises(EngineError, match="queued after a step that failed"):
        executor.submit(decode_step(2)).result()
    with pytest.raises(EngineError, match="queued after a step that failed"):
        executor.submit(first_step(3, slot=1)).result()
    executor.reset()
    row = replace(first_step().rows[0], slot=1, new_block_ids=(2, 3))
    again = StepPlan(4, (row,), (replace(first_step().admitted[0], slot=1),), released=(0, 1))
    assert tokens_of(executor.submit(again)) == expected
    executor.close()


def test_a_step_without_enough_memory_fails_alone():
    model = PagedHashModel()
    executor = open_executor(model)
    expected = tokens_of(executor.submit(first_step()))
    model.error = torch.OutOfMemoryError("tried to allocate 16 GiB")
    with pytest.raises(StepOutOfMemory, match="16 GiB; lower --max-num-batched-tokens"):
        executor.submit(decode_step(1)).result()
    model.error = None
    executor.reset()
    assert tokens_of(executor.submit(replace(first_step(2), released=(0,)))) == expected
    executor.close()


class Panic(BaseException):
    """What pyo3 raises for a panic in Rust is no Exception either."""


@pytest.mark.parametrize("short", [False, True], ids=["on the worker thread", "on the caller's"])
def test_a_panic_is_a_failed_step(short):
    model = PagedHashModel()
    executor = open_executor(model, short_s=1.0 if short else -1.0)
    expected = tokens_of(executor.submit(first_step()))
    model.error = Panic("rust")
    failed = executor.submit(decode_step(1))
    assert isinstance(failed, ShortTicket) == short
    with pytest.raises(EngineError, match="step 1 failed: Panic, which the log"):
        failed.result()
    model.error = None
    executor.reset()
    again = replace(first_step(2), released=(0,))
    assert tokens_of(executor.submit(again)) == expected
    executor.close()


def test_close_finishes_what_was_submitted_and_refuses_more():
    model = GatedModel()
    executor = open_executor(model)
    tickets = [executor.submit(first_step()), executor.submit(decode_step(1))]
    model.gate.set()
    executor.close()
    executor.close()
    executor.reset()
    assert all(ticket.done() and tokens_of(ticket) for ticket in tickets)
    with pytest.raises(EngineError, match="closed"):
        executor.submit(decode_step(2))


class ThreadsModel(PagedHashModel):
    """Notes which thread computes each step."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def forward(self, batch, kv):
        self.threads.append(threading.current_thread())
        return super().forward(batch, kv)


def test_a_step_like_a_short_one_runs_on_the_thread_that_asks_for_it():
    model, here = ThreadsModel(), threading.current_thread()
    executor = open_executor(model)
    executor.submit(first_step()).result()
    ticket = executor.submit(decode_step(1))
    assert ticket.done() and len(model.threads) == 1, (
        "it has not run before its result is requested"
    )
    assert tokens_of(ticket) == tokens_of(ticket)
    assert [thread is here for thread in model.threads] == [False, True]
    # one whose result is not requested runs before the next, and a prompt is no short step
    executor.submit(decode_step(2))
    executor.submit(first_step(3, slot=1)).result()
    assert [thread is here for thread in model.threads] == [False, True, True, False]
    executor.close()


def test_after_a_long_step_the_worker_thread_takes_the_next():
    model, here = ThreadsModel(), threading.current_thread()
    ticks = iter((0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0))  # the second step takes a second
    kv = allocate_kv(model.kv_layout, 8, 4, model.device)
    executor = LocalExecutor(ModelRunner(model, kv, 4, num_slots=2, clock=lambda: next(ticks)))
    for plan in (first_step(), decode_step(1), decode_step(2), decode_step(3)):
        executor.submit(plan).result()
    assert [thread is here for thread in model.threads] == [False, True, False, True]
    executor.close()


def test_closing_and_failing_take_a_short_step_along():
    model = PagedHashModel()
    executor = open_executor(model)
    executor.submit(first_step()).result()
    model.error = RuntimeError("out of memory")
    failing = executor.submit(decode_step(1))
    executor.reset()  # after it: the next one runs again
    with pytest.raises(EngineError, match="step 1 failed: RuntimeError, which the log"):
        failing.result()
    model.error = None
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.submit(decode_step(2))


def test_a_closed_executor_keeps_neither_model_nor_cache():
    executor = open_executor(PagedHashModel())
    runner = weakref.ref(executor._runner)
    executor.submit(first_step()).result()
    executor.close()
    executor.close()
    gc.collect()
    assert runner() is None
