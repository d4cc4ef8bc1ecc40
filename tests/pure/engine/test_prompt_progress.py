"""How much of a prompt is computed: reported after each step of it, if a request wants to know."""

from __future__ import annotations

import asyncio

import pytest
from scripted_engine import ScriptedEngine, run

from quickstep.engine.engine import Engine
from quickstep.types import Delta, FinishReason, PromptProgress, Request, SamplingParams

PROMPT = tuple(range(65, 89))  # 24 tokens


def request_of(prompt: tuple[int, ...] = PROMPT, **options: object) -> Request:
    fields = {"reports_progress": True, "sampling": SamplingParams(max_tokens=3), **options}
    return Request(prompt_token_ids=prompt, **fields)


async def deltas_of(engine: Engine, request: Request) -> list[Delta]:
    return [delta async for delta in engine.stream(request)]


def processed(deltas: list[Delta]) -> list[int]:
    return [delta.progress.num_processed for delta in deltas if delta.progress is not None]


def test_every_step_of_a_prompt_reports_how_far_it_is() -> None:
    async def test(parts: ScriptedEngine, engine: Engine) -> None:
        cold = await deltas_of(engine, request_of())
        assert processed(cold) == [8, 16, 24]
        assert [delta.token_ids for delta in cold[:2]] == [(), ()]
        assert cold[2].token_ids == (65,)
        assert not [delta for delta in cold[3:] if delta.progress is not None]
        seconds = [delta.progress.seconds for delta in cold[:3] if delta.progress]
        assert seconds == sorted(seconds) and seconds[0] >= 0.0
        assert {delta.progress.num_cached for delta in cold[:3] if delta.progress} == {0}
        warm = await deltas_of(engine, request_of((*PROMPT[:20], 1, 2, 3, 4, 5, 6)))
        assert processed(warm) == [26]
        assert isinstance(warm[0].progress, PromptProgress)
        assert warm[0].progress.num_cached == 20

    run(test, max_num_batched_tokens=8)


def test_the_output_is_the_same_and_without_the_wish_nothing_is_reported() -> None:
    async def test(parts: ScriptedEngine, engine: Engine) -> None:
        silent = await deltas_of(engine, request_of(reports_progress=False))
        assert processed(silent) == []
        told = await deltas_of(engine, request_of())
        assert [delta for delta in silent if delta.token_ids][1:-1] == [
            delta for delta in told if delta.token_ids
        ][1:-1]

    run(test, max_num_batched_tokens=8)


def test_of_several_sequences_the_first_one_reports() -> None:
    async def test(parts: ScriptedEngine, engine: Engine) -> None:
        sampling = SamplingParams(max_tokens=3, n=3)
        deltas = await deltas_of(engine, request_of(sampling=sampling))
        assert processed(deltas) == [8, 16, 24]
        assert {delta.index for delta in deltas if delta.progress is not None} == {0}

    run(test, max_num_batched_tokens=8)


@pytest.mark.parametrize("max_tokens", [40, 60])
def test_what_is_computed_again_after_a_preemption_is_not_reported(max_tokens: int) -> None:
    async def test(parts: ScriptedEngine, engine: Engine) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        prompts = [tuple(range(first, first + 24)) for first in (65, 100)]
        both = await asyncio.gather(
            *(deltas_of(engine, request_of(prompt, sampling=sampling)) for prompt in prompts)
        )
        preempted = 0
        for deltas in both:
            counts = processed(deltas)
            assert counts == sorted(counts) and counts[-1] == 24
            places = [place for place, delta in enumerate(deltas) if delta.token_ids]
            assert not [delta for delta in deltas[places[0] + 1 :] if delta.progress is not None]
            timings = deltas[-1].timings
            assert timings is not None and deltas[-1].finish_reason is FinishReason.MAX_TOKENS
            preempted += timings.num_preemptions
        assert preempted

    run(test, max_num_batched_tokens=8, num_blocks=24, max_num_seqs=2)
