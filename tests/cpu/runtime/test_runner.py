"""The runner against a model that really reads its KV cache."""

import itertools

import pytest
import torch
from msgspec.structs import replace
from paged_hash_model import PagedHashModel

from quickstep.errors import EngineError
from quickstep.runtime.cache.kv_cache import allocate_kv, kv_bytes
from quickstep.runtime.runner import ModelRunner
from quickstep.types import (
    Admission,
    FinishReason,
    Grammar,
    Phase,
    RowOutput,
    SamplingParams,
    StepPlan,
    StepRow,
)

BLOCK = 4
PROMPT = (5, 9, 2, 7, 7, 1, 30, 12, 40)
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
WARM = SamplingParams(temperature=0.8, logprobs=0, frequency_penalty=0.5, min_tokens=3)


def runner_of(model=None, num_blocks=32, num_slots=4, new_matcher=None):
    model = model or PagedHashModel()
    kv = allocate_kv(model.kv_layout, num_blocks, BLOCK, model.device)
    ticks = itertools.count()
    clock = lambda: next(ticks) * 0.5  # noqa: E731
    return ModelRunner(model, kv, BLOCK, num_slots, clock, new_matcher)


def admission(slot, prompt=PROMPT, outputs=(), sampling=GREEDY, seed=3):
    return Admission(slot, f"r{slot}#0", (*prompt, *outputs), len(prompt), sampling, seed)


def prefill(slot, token_ids, start=0, blocks=(), emits=True, output=0):
    tokens = tuple(token_ids)
    return StepRow(slot, start, len(tokens), tokens, tuple(blocks), Phase.PREFILL, emits, output)


def decode(slot, start, output, token_ids=(), blocks=()):
    return StepRow(slot, start, 1, token_ids, tuple(blocks), Phase.DECODE, True, output)


def plan(step_id, *rows, admitted=(), released=()):
    return StepPlan(step_id, rows, tuple(admitted), tuple(released))


def outputs_alone(sampling, count=6, prompt=PROMPT, seed=3):
    """The first `count` outputs, one request in a fresh runner, whole prompt at once."""
    runner = runner_of()
    blocks = range((len(prompt) + count) // BLOCK + 1)
    row = prefill(0, prompt, blocks=blocks)
    result = runner.run(plan(0, row, admitted=[admission(0, prompt, (), sampling, seed)]))
    outputs = [result.outputs[0]]
    for i in range(1, count):
        result = runner.run(plan(i, decode(0, len(prompt) + i - 1, i)))
        outputs.append(result.outputs[0])
    return outputs


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_chunked_prompt_among_neighbours_gives_the_same_outputs(sampling):
    alone = outputs_alone(sampling)
    runner = runner_of()
    other = (8, 8, 3)
    first = plan(
        0,
        prefill(2, other, blocks=[9]),
        prefill(1, PROMPT[:3], blocks=[20], emits=False),
        admitted=[admission(1, PROMPT, (), sampling), admission(2, other, (), WARM, seed=1)],
    )
    second = plan(1, decode(2, 3, 1), prefill(1, PROMPT[3:], start=3, blocks=[4, 11]))
    assert runner.run(first).outputs[1].token_ids == ()
    got = [runner.run(second).outputs[1]]
    for i in range(1, 6):
        new = [2] if len(PROMPT) + i - 1 == 12 else []
        rows = [decode(1, len(PROMPT) + i - 1, i, blocks=new)]
        got.append(runner.run(plan(i + 1, *rows)).outputs[0])
    assert got == alone


@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_a_preempted_sequence_continues_as_if_it_had_stayed(sampling):
    alone = outputs_alone(sampling)
    known = tuple(output.token_ids[0] for output in alone[:3])
    runner = runner_of()
    runner.run(plan(0, prefill(0, (1, 1), blocks=[3]), admitted=[admission(0, (1, 1))]))
    again = admission(0, PROMPT, known, sampling)
    row = prefill(0, (*PROMPT, *known), blocks=[8, 7, 6, 5], output=3)
    got = [runner.run(plan(1, row, admitted=[again], released=[0])).outputs[0]]
    for i in (4, 5):
        got.append(runner.run(plan(i, decode(0, len(PROMPT) + i - 1, i))).outputs[0])
    assert got == alone[3:]


def test_a_prefix_hit_reads_what_another_slot_wrote():
    alone = outputs_alone(GREEDY)
    runner = runner_of()
    runner.run(plan(0, prefill(0, PROMPT, blocks=[5, 6, 7]), admitted=[admission(0)]))
    row = prefill(1, PROMPT[8:], start=8, blocks=[5, 6, 9])
    assert runner.run(plan(1, row, admitted=[admission(1)])).outputs[0] == alone[0]


def test_a_row_may_share_a_block_that_another_row_of_the_step_fills():
    alone = outputs_alone(GREEDY)
    runner = runner_of()
    rows = [prefill(0, PROMPT, blocks=[5, 6, 7]), prefill(1, PROMPT[8:], start=8, blocks=[5, 6, 9])]
    result = runner.run(plan(0, *rows, admitted=[admission(0), admission(1)]))
    assert result.outputs == (alone[0], alone[0])


def test_a_nan_row_fails_alone_and_its_queued_successor_fails_too():
    alone = outputs_alone(GREEDY)
    model = PagedHashModel()
    model.poison_token = 63
    runner = runner_of(model)
    rows = [prefill(0, (1, 63), blocks=[0]), prefill(1, PROMPT, blocks=[5, 6, 7])]
    result = runner.run(plan(0, *rows, admitted=[admission(0, (1, 63)), admission(1)]))
    assert [failure.row for failure in result.failures] == [0]
    assert "NaN" in result.failures[0].reason
    assert result.outputs[0].token_ids == ()
    assert result.outputs[1] == alone[0]
    result = runner.run(plan(1, decode(0, 2, 1), decode(1, len(PROMPT), 1)))
    assert [failure.row for failure in result.failures] == [0]
    assert result.outputs[1] == alone[1]


BAD_REQUESTS = {
    "logit_bias": admission(0, sampling=SamplingParams(temperature=0.0, logit_bias={64: 1.0})),
    "allowed_token_ids": admission(0, sampling=SamplingParams(allowed_token_ids=(-1,))),
    "prompt": admission(0, (5, 64, 1, 1)),
}


@pytest.mark.parametrize("said", BAD_REQUESTS)
def test_a_token_that_the_model_lacks_fails_its_row_only(said):
    alone = outputs_alone(GREEDY)
    bad = BAD_REQUESTS[said]
    rows = [
        prefill(0, bad.token_ids[:4], blocks=[0, 1, 2], emits=False),
        prefill(1, PROMPT, blocks=[5, 6, 7]),
    ]
    result = runner_of().run(plan(0, *rows, admitted=[bad, admission(1)]))
    assert [failure.row for failure in result.failures] == [0]
    assert said in result.failures[0].reason
    assert (result.failures[0].finish_reason is FinishReason.REFUSED) == (said != "prompt")
    assert result.outputs[1] == alone[0]


class Panic(BaseException):
    """What pyo3 raises for a panic in Rust is no Exception either."""


RAISED = {
    "ours": EngineError("planted"),
    "anything": RuntimeError("planted"),
    "panic": Panic("planted"),
}


@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
def test_whatever_is_raised_while_a_slot_is_set_up_fails_its_sequence_only(raised):
    def broken(grammar):
        raise raised

    alone = outputs_alone(GREEDY)
    runner = runner_of(new_matcher=broken)
    bad = admission(0, sampling=replace(GREEDY, grammar=Grammar.of_json_object()))
    rows = [prefill(0, PROMPT, blocks=[0, 1, 2]), prefill(1, PROMPT, blocks=[5, 6, 7])]
    result = runner.run(plan(0, *rows, admitted=[bad, admission(1)]))
    assert [failure.row for failure in result.failures] == [0]
    assert "planted" in result.failures[0].reason
    assert result.failures[0].finish_reason is FinishReason.ERROR
    assert result.outputs[1] == alone[0]
    after = plan(
        1,
        prefill(0, PROMPT, blocks=[8, 9, 10]),
        decode(1, len(PROMPT), 1),
        admitted=[admission(0)],
        released=[0],
    )
    assert runner.run(after).outputs == (alone[0], alone[1])


class BrokenMatcher:
    """A grammar's matcher that allows everything and raises in one of its methods."""

    def __init__(self, broken, error):
        self.broken, self.error = broken, error

    def deep_copy(self):
        return self

    def is_stopped(self):
        return False

    def is_error(self):
        return False

    def _call(self, name, result):
        if name == self.broken:
            raise self.error
        return result

    def compute_bitmask(self):
        return self._call("compute_bitmask", b"\xff" * 8)

    def consume_token(self, token_id):
        return self._call("consume_token", True)


@pytest.mark.parametrize("broken", ["compute_bitmask", "consume_token"])
@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
def test_whatever_is_raised_while_a_row_is_sampled_fails_its_sequence_only(raised, broken):
    alone = outputs_alone(GREEDY)
    runner = runner_of(new_matcher=lambda grammar: (BrokenMatcher(broken, raised), None))
    grammar = Grammar.of_json_object()
    bad = admission(0, sampling=replace(GREEDY, grammar=grammar, max_tokens=None))
    rows = [prefill(0, PROMPT, blocks=[0, 1, 2]), prefill(1, PROMPT, blocks=[5, 6, 7])]
    result = runner.run(plan(0, *rows, admitted=[bad, admission(1)]))
    assert [failure.row for failure in result.failures] == [0]
    assert "planted" in result.failures[0].reason
    assert result.outputs == (RowOutput(), alone[0])


@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
def test_whatever_is_raised_while_a_prompt_is_scored_fails_its_sequence_only(raised, monkeypatch):
    def broken(*args):
        raise raised

    alone = outputs_alone(GREEDY)
    runner = runner_of()
    monkeypatch.setattr("quickstep.runtime.sampling.prompt_scores.PromptScorer.score", broken)
    bad = admission(0, sampling=replace(GREEDY, prompt_logprobs=1))
    scored = replace(prefill(0, PROMPT, blocks=[0, 1, 2]), num_scored=len(PROMPT) - 1)
    rows = [scored, prefill(1, PROMPT, blocks=[5, 6, 7])]
    result = runner.run(plan(0, *rows, admitted=[bad, admission(1)]))
    assert [failure.row for failure in result.failures] == [0]
    assert "the prompt could not be read: planted" in result.failures[0].reason
    assert result.outputs == (RowOutput(), alone[0])


def test_releasing_a_slot_that_holds_nothing_is_fine():
    runner = runner_of()
    row = prefill(1, PROMPT, blocks=[0, 1, 2])
    result = runner.run(plan(0, row, admitted=[admission(1)], released=[1, 2]))
    assert result.outputs[0] == outputs_alone(GREEDY)[0]


def test_seconds_come_from_the_clock():
    result = runner_of().run(plan(4, prefill(0, PROMPT, blocks=[0, 1, 2]), admitted=[admission(0)]))
    assert (result.step_id, result.seconds) == (4, 0.5)


def test_a_plan_without_rows_only_moves_slots():
    runner = runner_of()
    runner.run(plan(0, prefill(0, PROMPT, blocks=[0, 1, 2]), admitted=[admission(0)]))
    assert runner.run(plan(1, released=[0])).outputs == ()
    with pytest.raises(EngineError, match="slot 0"):
        runner.run(plan(2, decode(0, len(PROMPT), 1)))


BAD_PLANS = {
    "slot out of range": plan(1, prefill(4, (1,), blocks=[9]), admitted=[admission(4)]),
    "negative slot": plan(1, prefill(-1, (1,), blocks=[9])),
    "slot without a sequence": plan(1, decode(1, 1, 1)),
    "slot taken": plan(1, admitted=[admission(0)]),
    "block out of range": plan(1, prefill(1, (1,), blocks=[32]), admitted=[admission(1)]),
    "token out of range": plan(1, prefill(1, (64,), blocks=[9]), admitted=[admission(1)]),
    "more tokens than it says": plan(1, replace(decode(0, len(PROMPT), 1), token_ids=(1, 2))),
    "output out of step": plan(1, decode(0, len(PROMPT), 2)),
    "too few blocks": plan(1, prefill(1, PROMPT, blocks=[9]), admitted=[admission(1)]),
}


@pytest.mark.parametrize("bad", BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_does_not_fit_is_an_engine_error(bad):
    runner = runner_of()
    runner.run(plan(0, prefill(0, PROMPT, blocks=[0, 1, 2]), admitted=[admission(0)]))
    with pytest.raises(EngineError):
        runner.run(bad)


def test_slots_follow_a_failed_plan_and_rows_outside_of_it_continue():
    alone = outputs_alone(GREEDY)
    model = PagedHashModel()
    runner = runner_of(model)
    setup = [prefill(i, PROMPT, blocks=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(3)]
    runner.run(plan(0, *setup, admitted=[admission(i) for i in range(3)]))
    model.error = RuntimeError("out of memory")
    entering = prefill(3, PROMPT, blocks=[9, 10, 11])
    with pytest.raises(RuntimeError):
        runner.run(
            plan(1, decode(0, 9, 1), entering, admitted=[admission(3)], released=[2]),
        )
    model.error = None
    runner.skip(plan(2, decode(0, 10, 2), prefill(2, (1,)), admitted=[admission(2)]))
    result = runner.run(plan(3, decode(0, 9, 1), decode(1, 9, 1), decode(3, 9, 1)))
    assert [failure.row for failure in result.failures] == [0, 2]
    assert result.outputs[1] == alone[1]
    again = [prefill(i, PROMPT, blocks=[12 + i, 16 + i, 20 + i]) for i in (0, 2, 3)]
    admissions = [admission(i) for i in (0, 2, 3)]
    result = runner.run(plan(4, *again, admitted=admissions, released=[0, 2, 3]))
    assert result.outputs == (alone[0],) * 3


def test_kv_is_zeroed_and_as_large_as_announced():
    shape = PagedHashModel().kv_layout
    kv = allocate_kv(shape, 6, BLOCK, torch.device("cpu"))
    assert kv.keys[0].shape == (6, BLOCK, 1, 8)
    assert not any(tensor.any() for tensor in kv.tensors)
    total = sum(tensor.nbytes for tensor in kv.tensors)
    assert total == kv_bytes(shape, 6, BLOCK)
