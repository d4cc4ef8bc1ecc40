"""`repetition_detection`: an output that repeats itself ends, at the token that the rule names."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_world import Setup, World, finish, run_alone

from quickstep import RepetitionDetectionParams, SamplingParams
from quickstep.core.repetition import RepetitionDetector
from quickstep.errors import RequestError
from quickstep.types import FinishReason, Request

PROMPT = (5, 6, 5, 6, 5, 6, 5, 6)


def repeats(outputs: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether the output ends with a pattern that occurs often enough: the definition."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        tail = outputs[-size * params.min_count :]
        if len(tail) == size * params.min_count and tail == tail[:size] * params.min_count:
            return True
    return False


def first_end(outputs: list[int], params: RepetitionDetectionParams) -> int | None:
    ends = (num for num in range(1, len(outputs) + 1) if repeats(outputs[:num], params))
    return next(ends, None)


@given(
    outputs=st.lists(st.integers(0, 2), max_size=40),
    smallest=st.integers(0, 4),
    more=st.integers(0, 4),
    count=st.integers(2, 4),
)
def test_a_repetition_is_found_at_the_first_token_that_completes_it(
    outputs: list[int], smallest: int, more: int, count: int
) -> None:
    params = RepetitionDetectionParams(max(1, smallest + more), smallest, count)
    detector = RepetitionDetector(params)
    found = [num for num, token in enumerate(outputs, 1) if detector.record(token)]
    assert (found or [None])[0] == first_end(outputs, params)


def outputs_of(sampling: SamplingParams, seed: int, setup: Setup) -> tuple[list[int], FinishReason]:
    world = World(setup)
    world.add(Request("a", PROMPT, sampling, seed))
    finish(world)
    received = world.received["a#0"]
    assert received.reason is not None
    return received.token_ids, received.reason


@pytest.mark.parametrize("min_tokens", [0, 9])
@pytest.mark.parametrize(
    "setup", [Setup(), Setup(pipeline_depth=3), Setup(max_drafts=3), Setup(num_blocks=6)]
)
def test_a_sequence_ends_with_the_repetition_in_every_mode(setup: Setup, min_tokens: int) -> None:
    params = RepetitionDetectionParams(2, 1, 2)
    num_ended = 0
    for seed in range(40):
        free = SamplingParams(max_tokens=16, ignore_eos=True)
        outputs = list(run_alone(Request("a", PROMPT, free, seed), Setup())[0].token_ids)
        ends = (num for num in range(1, 17) if repeats(outputs[:num], params))
        end = next((num for num in ends if num >= min_tokens), None)
        sampling = msgspec.structs.replace(free, repetition_detection=params, min_tokens=min_tokens)
        got, reason = outputs_of(sampling, seed, setup)
        if end is None or end == 16:
            assert (got, reason) == (outputs, FinishReason.MAX_TOKENS)
        else:
            num_ended += 1
            assert (got, reason) == (outputs[:end], FinishReason.REPETITION)
    assert num_ended > 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_pattern_size": -1, "min_count": 2}, "max_pattern_size is -1, it must be between 0"),
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size is 1025, it must be betw"),
        ({"max_pattern_size": 2.0, "min_count": 2}, "max_pattern_size is 2.0, it must be an int"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count is 1, it must be at least 2"),
        ({"max_pattern_size": 2}, "min_count is 0, it must be at least 2"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "is 3, above max_pattern"),
    ],
)
def test_what_names_no_repetition_is_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refused:
        RepetitionDetectionParams(**values)
    assert (refused.value.param or "").startswith("repetition_detection.")


def test_a_largest_pattern_of_zero_ends_nothing() -> None:
    off = SamplingParams(max_tokens=16, repetition_detection=RepetitionDetectionParams())
    assert all(outputs_of(off, seed, Setup())[1] is FinishReason.MAX_TOKENS for seed in range(20))


def test_another_type_is_refused() -> None:
    with pytest.raises(RequestError, match="is a dict, it must be RepetitionDetectionParams"):
        SamplingParams(repetition_detection={"max_pattern_size": 2})  # type: ignore[arg-type]
