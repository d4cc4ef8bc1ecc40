"""Requests that the scheduler accepts, and how a sequence ends: one behaviour per test."""

from __future__ import annotations

import pytest
from scheduler_world import PROMPT, Setup, World, ask, finish, run_alone
from shadow_executor import EOS, STOP

from quickstep.errors import RequestError
from quickstep.types import FinishReason, Request, SamplingParams

# -- requests that are refused -------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt has no tokens") as caught:
        World(Setup()).scheduler.add(ask(prompt=()), 0.0)
    assert caught.value.param == "prompt"


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths() -> None:
    with pytest.raises(RequestError, match=r"40 tokens > 39 maximum.*is 40 tokens"):
        World(Setup(max_model_len=40)).scheduler.add(ask(prompt=(0,) * 40), 0.0)


def test_a_prompt_beyond_the_whole_pool_is_refused_with_both_lengths() -> None:
    setup = Setup(num_blocks=3, block_size=4)
    with pytest.raises(RequestError, match=r"12 tokens.*KV cache holds 12; raise --num-blocks"):
        World(setup).scheduler.add(ask(prompt=(0,) * 12), 0.0)


def test_more_sequences_than_slots_in_one_request_are_refused() -> None:
    with pytest.raises(RequestError, match="n is 5, at most 4") as caught:
        World(Setup(max_num_seqs=4)).scheduler.add(ask(n=5), 0.0)
    assert caught.value.param == "n"


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    world = World(Setup())
    world.add(ask("a"))
    with pytest.raises(RequestError, match="'a' is in use"):
        world.scheduler.add(ask("a"), 0.0)
    finish(world)
    world.scheduler.add(ask("a"), world.now)


def test_a_full_queue_refuses_with_429() -> None:
    world = World(Setup(max_waiting=1))
    world.add(ask("a"))
    with pytest.raises(RequestError, match="the limit is 1") as caught:
        world.scheduler.add(ask("b"), 0.0)
    assert caught.value.status == 429
    world.plan()
    world.scheduler.add(ask("c"), 0.0)


def test_every_sequence_of_a_request_counts_in_the_queue() -> None:
    world = World(Setup(max_waiting=3))
    world.add(ask("a", n=2))
    with pytest.raises(RequestError, match="2 sequences wait and the request adds 2") as caught:
        world.scheduler.add(ask("b", n=2), 0.0)
    assert caught.value.status == 429
    world.scheduler.add(ask("c", n=1), 0.0)


def test_an_empty_queue_takes_a_request_that_is_larger_than_it() -> None:
    world = World(Setup(max_waiting=1))
    world.add(ask("a", n=4))
    finish(world)


# -- how a sequence ends --------------------------------------------------------------------------


def seeds_that_end_by(token_id: int) -> Request:
    """A request whose output, run by itself, contains `token_id` after at least two tokens."""
    for seed in range(200):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        request = Request("a", PROMPT, sampling, seed=seed)
        tokens = run_alone(request, Setup())[0].token_ids
        if token_id in tokens[2:8] and token_id not in tokens[:2]:
            return request
    raise AssertionError("no seed gives the token")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("token_id", "reason"),
    [(EOS, FinishReason.EOS), (STOP, FinishReason.STOP_TOKEN)],
)
def test_an_end_token_ends_and_nothing_follows_it(
    depth: int, token_id: int, reason: FinishReason
) -> None:
    free = seeds_that_end_by(token_id)
    by_eos = token_id == EOS
    sampling = SamplingParams(max_tokens=12, stop_token_ids=() if by_eos else (STOP,))
    eos_token_ids = frozenset({EOS} if by_eos else ())
    world = World(Setup(pipeline_depth=depth))
    world.add(Request("a", PROMPT, sampling, free.seed, eos_token_ids))
    finish(world)
    one = world.received["a#0"]
    assert one.reason is reason
    assert one.token_ids[-1] == token_id
    assert token_id not in one.token_ids[:-1]


def test_no_end_token_ends_before_min_tokens() -> None:
    free = seeds_that_end_by(EOS)
    sampling = SamplingParams(max_tokens=12, min_tokens=12)
    world = World(Setup())
    world.add(Request("a", PROMPT, sampling, free.seed, eos_token_ids=frozenset({EOS})))
    finish(world)
    assert len(world.received["a#0"].token_ids) == 12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_max_tokens_is_never_planned_past(depth: int) -> None:
    world = World(Setup(pipeline_depth=depth))
    world.add(ask(max_tokens=3))
    finish(world)
    assert world.received["a#0"].reason is FinishReason.MAX_TOKENS
    assert sum(row.emits for plan in world.plans for row in plan.rows) == 3


def test_timings_count_the_blocks_that_a_sequence_grew_to() -> None:
    world = World(Setup(block_size=4))
    world.add(ask(max_tokens=6))  # 8 prompt tokens; the last of 14 is never computed
    finish(world)
    timings = world.received["a#0"].timings
    assert timings is not None
    assert timings.num_blocks == 4


def test_the_context_ends_a_sequence_without_max_tokens() -> None:
    world = World(Setup(max_model_len=20))
    world.add(ask(max_tokens=None))
    finish(world)
    one = world.received["a#0"]
    assert one.reason is FinishReason.CONTEXT_LIMIT
    assert len(PROMPT) + len(one.token_ids) == 20


def test_a_pool_smaller_than_the_context_is_the_context() -> None:
    world = World(Setup(num_blocks=3, block_size=4, max_model_len=40))
    world.add(ask(max_tokens=None))
    finish(world)
    assert world.received["a#0"].reason is FinishReason.CONTEXT_LIMIT
    assert len(world.received["a#0"].token_ids) == 4


def test_the_first_token_comes_out_of_the_prefill() -> None:
    world = World(Setup())
    world.add(ask())
    world.plan()
    world.commit()
    assert len(world.received["a#0"].token_ids) == 1


def test_a_deadline_returns_the_partial_output() -> None:
    world = World(Setup())
    world.add(ask(max_tokens=20, timeout_s=1.0))
    assert world.scheduler.wakeup(0.0) == 1.0
    world.plan()
    world.commit()
    world.advance(1.0)
    world.expire()
    one = world.received["a#0"]
    assert (one.reason, len(one.token_ids)) == (FinishReason.DEADLINE, 1)
    finish(world)


def test_the_reason_of_an_abort_is_the_callers() -> None:
    world = World(Setup())
    world.add(ask(n=2))
    world.plan()
    (output,) = world.scheduler.abort("a", 0.0, FinishReason.STOP_STRING, index=1)
    assert (output.index, output.finish_reason) == (1, FinishReason.STOP_STRING)
    assert world.scheduler.abort("a", 0.0, FinishReason.SHUTDOWN)[0].index == 0
    assert world.scheduler.abort("a", 0.0) == ()
    assert world.scheduler.abort("unknown", 0.0) == ()


def test_abort_releases_blocks_while_a_step_is_in_flight() -> None:
    world = World(Setup(pipeline_depth=2))
    world.add(ask())
    world.plan()
    world.plan()
    world.abort("a")
    assert world.scheduler.stats().blocks.num_used == 0
    finish(world)
