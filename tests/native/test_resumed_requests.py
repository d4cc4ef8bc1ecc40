"""A request that another engine began continues with the same bits, wherever it was cut.

Each request runs once without interruption. Then, for every number of deltas that its client may
have when the engine is lost, it is resumed: in the same engine, which has its prefix cached, and in
one that knows nothing. What the client has then is compared with the uncut run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, LoRAConfig, SpeculationConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.errors import RequestError
from quickstep.sampling_params import RepetitionDetectionParams
from quickstep.types import Delta, FinishReason, Grammar, Request, Resumed, SamplingParams

CODE = "def add(first, second):\n    return"
ADAPTER = "demo-docstrings"
SCHEMA = Grammar.of_json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "s": {"type": "string", "maxLength": 8}},
        "required": ["a", "s"],
        "additionalProperties": False,
    }
)
CALL = Grammar.of_lark(
    'start: "<tool_call>" call "</tool_call>"\n'
    'call: %json {"type": "object", "properties": {"name": {"const": "add"},'
    ' "arguments": {"type": "object", "properties": {"x": {"type": "integer"}},'
    ' "required": ["x"], "additionalProperties": false}},'
    ' "required": ["name", "arguments"], "additionalProperties": false}'
)
THOUGHTS = SamplingParams(
    reasoning_tags=("<think>", "</think>"),
    thinking_budget=5,
    reasoning_budget_message="\nEnough.\n",
    max_tokens=60,
    temperature=1.0,
    seed=5,
)
# name -> (parameters, adapter)
CASES: dict[str, tuple[SamplingParams, str]] = {
    "greedy": (SamplingParams(temperature=0.0, max_tokens=14), ""),
    "sampled, logprobs": (
        SamplingParams(temperature=0.9, seed=3, max_tokens=14, logprobs=2, prompt_logprobs=1),
        "",
    ),
    "filters": (
        SamplingParams(
            temperature=1.1, seed=4, max_tokens=14, top_p=0.9, min_p=0.01, xtc_probability=0.5
        ),
        "",
    ),
    "penalties": (
        SamplingParams(
            temperature=0.8,
            seed=5,
            max_tokens=16,
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=0.2,
            dry_multiplier=0.8,
            bad_words=("self",),
        ),
        "",
    ),
    "schema": (SamplingParams(grammar=SCHEMA, temperature=1.0, seed=2, max_tokens=50), ""),
    "schema, close to the limit": (
        SamplingParams(grammar=SCHEMA, temperature=2.0, seed=8, max_tokens=22, logprobs=1),
        "",
    ),
    "tool call": (SamplingParams(grammar=CALL, temperature=1.0, seed=6, max_tokens=60), ""),
    "stop strings": (
        SamplingParams(
            temperature=1.0, seed=7, max_tokens=40, stop=("self.", "\n\n", "r(annot at")
        ),
        "",
    ),
    "min_tokens": (
        SamplingParams(temperature=0.9, seed=9, max_tokens=20, min_tokens=8, stop=("(",)),
        "",
    ),
    "characters of several tokens": (
        SamplingParams(
            grammar=Grammar.of_choice(["é€😀 ü"]), temperature=1.0, seed=1, max_tokens=30
        ),
        "",
    ),
    "n": (SamplingParams(temperature=1.0, seed=11, max_tokens=9, n=3, logprobs=1, stop=("(",)), ""),
    "repetition": (
        SamplingParams(
            temperature=0.0,
            max_tokens=40,
            logit_bias={65: 100.0},
            repetition_detection=RepetitionDetectionParams(
                min_pattern_size=1, max_pattern_size=4, min_count=6
            ),
        ),
        "",
    ),
    "thinking budget": (replace(THOUGHTS, inside_reasoning=True), ""),
    "grammar after thinking": (replace(THOUGHTS, inside_reasoning=True, grammar=SCHEMA), ""),
    "stop after thinking": (
        replace(
            THOUGHTS,
            inside_reasoning=True,
            stop=("e",),
            stop_after_reasoning=("<think>", "</think>"),
        ),
        "",
    ),
    "adapter": (SamplingParams(temperature=0.7, seed=12, max_tokens=12), ADAPTER),
}


@asynccontextmanager
async def running(has_drafts: bool = False) -> AsyncIterator[Engine]:
    engine = open_engine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu", num_threads=1),
            cache=CacheConfig(num_blocks=96, block_size=16),
            speculation=SpeculationConfig() if has_drafts else SpeculationConfig(proposers=()),
            lora=LoRAConfig(modules=((ADAPTER, ADAPTER),)),
            seed=0,
        )
    )
    await engine.start()
    try:
        yield engine
        assert engine.stats().scheduler.blocks.num_used == 0
    finally:
        await engine.stop()


async def deltas_of(engine: Engine, request: Request) -> list[Delta]:
    """All deltas of a request, in the order in which they came."""
    await engine.prepare(request)
    return [delta async for delta in engine.stream(request)]


def resumed_after(request: Request, deltas: list[Delta]) -> Request:
    """The request for another engine, when the client has these deltas."""
    tokens = {index: () for index in range(request.sampling.n)}
    ended, num_scores = set(), 0
    for delta in deltas:
        tokens[delta.index] += delta.token_ids
        num_scores += len(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            ended.add(delta.index)
    parts = tuple(
        Resumed(index, ids, index in ended, 0 if index else num_scores)
        for index, ids in tokens.items()
    )
    return replace(request, resumed=parts)


def received(deltas: list[Delta]) -> list[list[Delta]]:
    """What matters of the deltas of each sequence, one by one: not how they were generated."""
    found: dict[int, list[Delta]] = {}
    for delta in deltas:
        output = replace(delta, timings=None, is_draft=False)
        found.setdefault(delta.index, []).append(output)
    return [found[index] for index in sorted(found)]


def num_tokens(deltas: list[Delta]) -> dict[int, int]:
    """How many output tokens each sequence is charged at its end."""
    return {
        delta.index: delta.timings.num_output_tokens
        for delta in deltas
        if delta.timings is not None
    }


@pytest.mark.parametrize("name", CASES)
def test_a_request_continues_from_every_position_with_the_same_bits(name: str) -> None:
    async def check() -> None:
        sampling, adapter = CASES[name]
        async with running() as first, running() as second:
            prompt = tuple(first.tokenizer.encode(CODE))
            request = Request("", prompt, sampling, adapter=adapter)
            if sampling.seed is None:
                request = replace(request, sampling=replace(sampling, seed=1))
            uncut = await deltas_of(first, request)
            assert len(uncut) > 3
            for num_received in range(len(uncut)):
                had = uncut[:num_received]
                again = resumed_after(request, had)
                await second.reset_prefix_cache()
                for engine in (first, second):
                    rest = await deltas_of(engine, again)
                    assert received(had + rest) == received(uncut), (num_received, engine is first)
                    assert num_tokens(had + rest) == num_tokens(uncut)

    asyncio.run(check())


@pytest.mark.parametrize("grammar", [None, SCHEMA])
def test_drafts_change_nothing_of_a_resumed_request(grammar: Grammar | None) -> None:
    async def check() -> None:
        sampling = SamplingParams(
            temperature=0.8, seed=4, max_tokens=40, logprobs=1, grammar=grammar
        )
        async with running() as plain, running(has_drafts=True) as drafting:
            prompt = tuple(plain.tokenizer.encode(CODE))
            request = Request("", prompt, sampling)
            uncut = await deltas_of(plain, request)
            for num_received in range(len(uncut)):
                had = uncut[:num_received]
                rest = await deltas_of(drafting, resumed_after(request, had))
                assert received(had + rest) == received(uncut), num_received

    asyncio.run(check())


def test_what_cannot_be_resumed_is_refused_in_a_sentence() -> None:
    async def check() -> None:
        async with running() as engine:
            prompt = tuple(engine.tokenizer.encode(CODE))
            plain = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
            request = Request("", prompt, plain)
            uncut = await deltas_of(engine, replace(request, sampling=replace(plain, stop=("(",))))
            outputs = tuple(token for delta in uncut for token in delta.token_ids)
            vocab_size = engine.model.vocab_size
            stopped = replace(plain, max_tokens=20, stop=("x",))
            scored = replace(plain, max_tokens=0, prompt_logprobs=0)
            text = tuple(engine.tokenizer.encode("axb", add_special_tokens=False))
            cases = (
                (plain, (Resumed(0, (vocab_size,)),), "ids go from 0"),
                (plain, (Resumed(0, outputs[:1] * 5),), r"ended with token 5 \(max_tokens\)"),
                (plain, (Resumed(0, outputs[:1] * 9),), r"9 tokens .* token 5 \(max_tokens\)"),
                (plain, (Resumed(1),), "names the sequences"),
                (plain, (Resumed(0), Resumed(0)), "twice"),
                (plain, (Resumed(0, is_finished=True),), "all 1 sequences have ended"),
                (plain, (Resumed(0, num_prompt_logprobs=-1),), "below 0"),
                (stopped, (Resumed(0, text),), r"ended with token \d \(stop 'x'\)"),
                (scored, (Resumed(0, (1,)),), "generates none"),
            )
            for sampling, resumed, message in cases:
                with pytest.raises(RequestError, match=message) as refused:
                    engine.stream(replace(request, sampling=sampling, resumed=resumed))
                assert "\n" not in str(refused.value)
                assert not engine.request_ids
            search = replace(request, is_in_search=True, resumed=(Resumed(0, outputs[:1]),))
            with pytest.raises(RequestError, match="beam search"):
                engine.stream(search)

    asyncio.run(check())


def test_tokens_that_its_grammar_does_not_take_end_a_request() -> None:
    async def check() -> None:
        async with running() as engine:
            prompt = tuple(engine.tokenizer.encode(CODE))
            other = tuple(engine.tokenizer.encode("no object", add_special_tokens=False))
            sampling = SamplingParams(grammar=SCHEMA, max_tokens=40)
            request = Request("", prompt, sampling, resumed=(Resumed(0, other),))
            (delta,) = await deltas_of(engine, request)
            assert delta.finish_reason is FinishReason.REFUSED
            assert "grammar cannot be followed" in delta.error

    asyncio.run(check())
