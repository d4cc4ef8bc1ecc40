"""Grammars through the engine: mixed, starved and overlapped, the bits are those of a run alone."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from tiny_checkpoint import write_checkpoint

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.outputs import collect
from quickstep.errors import RequestError
from quickstep.types import FinishReason, Grammar, Request, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 30}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.of_json_schema(SCHEMA),
    None,
    Grammar.of_regex("[a-z]{20,40}[0-9]"),
    Grammar.of_choice(["yes", "no", "a longer answer than those"]),
    Grammar.of_json_object(),
    Grammar.of_lark('start: "(" start ")" | "x"'),
]
PROMPTS = [f"question {n} {'!' * n}" for n in range(12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def sampling_of(index):
    return SamplingParams(
        grammar=GRAMMARS[index % len(GRAMMARS)],
        temperature=(0.0, 1.0, 3.0)[index % 3],
        seed=index,
        max_tokens=60,
        logprobs=1,
        frequency_penalty=0.3 * (index % 2),
        n=2 if index == 4 else 1,
    )


def outputs(checkpoint, groups, num_blocks=512, **scheduler):
    """Each group of request indices at once, in one engine; and how often it preempted."""

    async def whole():
        engine = open_engine(
            EngineConfig(
                load=LoadConfig(model=str(checkpoint), num_threads=1),
                cache=CacheConfig(block_size=4, num_blocks=num_blocks),
                scheduler=SchedulerConfig(**scheduler),
                seed=0,
            )
        )
        await engine.start()
        try:
            found = {}
            for group in groups:
                streams = [(i, engine.generate(PROMPTS[i], sampling_of(i))) for i in group]
                for index, stream in streams:
                    whole = await collect(
                        stream, PROMPTS[index], sampling_of(index), engine.tokenizer
                    )
                    found[index] = [
                        (o.token_ids, o.text, o.logprobs, o.ended_by) for o in whole.outputs
                    ]
            return found, engine.stats().scheduler.totals.num_preemptions
        finally:
            await engine.stop()

    return asyncio.run(whole())


@pytest.fixture(scope="module")
def alone(checkpoint):
    found, _ = outputs(checkpoint, [[index] for index in range(len(PROMPTS))], pipeline_depth=1)
    return found


def test_alone_each_output_fits_or_was_cut(alone):
    for index, sequences in alone.items():
        for _, text, _, ended_by in sequences:
            assert ended_by in (FinishReason.EOS, FinishReason.MAX_TOKENS)
            if GRAMMARS[index % len(GRAMMARS)] == GRAMMARS[0] and ended_by is FinishReason.EOS:
                assert set(json.loads(text)) == {"a", "b"}
            if GRAMMARS[index % len(GRAMMARS)] == GRAMMARS[3]:
                assert text in ("yes", "no", "a longer answer than those")


@pytest.mark.parametrize("depth", [1, 2])
def test_a_mixed_batch_gives_the_same_bits(checkpoint, alone, depth):
    found, _ = outputs(
        checkpoint, [range(len(PROMPTS))], pipeline_depth=depth, max_num_batched_tokens=24
    )
    assert found == alone


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_sequences_continue_in_their_grammar(checkpoint, alone, depth):
    found, num_preemptions = outputs(
        checkpoint, [range(len(PROMPTS))], num_blocks=64, pipeline_depth=depth
    )
    assert num_preemptions > 0
    assert found == alone


def test_submit_refuses_what_cannot_be_enforced(checkpoint):
    async def whole():
        engine = open_engine(EngineConfig(load=LoadConfig(model=str(checkpoint), num_threads=1)))
        await engine.start()
        wrong = SamplingParams(grammar=Grammar.of_json_schema({"uniqueItems": True}, strict=True))
        try:
            with pytest.raises(RequestError, match="uniqueItems"):
                engine.generate("a", wrong)
            with pytest.raises(RequestError, match="uniqueItems"):
                await engine.prepare(Request("", (1,), wrong))
            await engine.prepare(Request("", (1,), SamplingParams()))
            assert engine.stats().num_requests == 0
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_a_stream_says_what_is_enforced_less_strictly(checkpoint):
    overlapping = {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 9}]}

    async def whole():
        engine = open_engine(EngineConfig(load=LoadConfig(model=str(checkpoint), num_threads=1)))
        await engine.start()
        try:
            for schema, ignored in ((overlapping, ("oneOf",)), (SCHEMA, ())):
                sampling = SamplingParams(grammar=Grammar.of_json_schema(schema), max_tokens=9)
                async with engine.generate("a", sampling) as stream:
                    await stream.accepted()
                    assert stream.ignored == ignored
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_more_grammars_are_in_flight_than_are_kept(checkpoint):
    async def whole():
        config = EngineConfig(
            load=LoadConfig(model=str(checkpoint), num_threads=1),
            scheduler=SchedulerConfig(max_num_seqs=2),
        )
        engine = open_engine(config)
        await engine.start()
        try:
            streams = {}
            for number in range(80):
                text = f"answer number {number}"
                sampling = SamplingParams(grammar=Grammar.of_choice([text]), max_tokens=40)
                await engine.prepare(Request("", (1,), sampling))
                stream = engine.generate(f"question {number}", sampling)
                engine.pause(stream.request_id)  # so that all are in flight at once
                streams[text] = stream, sampling
            assert engine.model.grammars.num_kept < len(streams)
            for stream, _ in streams.values():
                engine.resume(stream.request_id)
            for text, (stream, sampling) in streams.items():
                answer = await collect(stream, "", sampling, engine.tokenizer)
                assert [output.text for output in answer.outputs] == [text]
        finally:
            await engine.stop()

    asyncio.run(whole())


def test_a_complete_grammar_ends_before_min_tokens(checkpoint):
    async def whole():
        engine = open_engine(EngineConfig(load=LoadConfig(model=str(checkpoint), num_threads=1)))
        await engine.start()
        try:
            grammar = Grammar.of_choice(["abc"])
            sampling = SamplingParams(grammar=grammar, min_tokens=20, max_tokens=30)
            whole = await collect(engine.generate("a", sampling), "a", sampling, engine.tokenizer)
            return whole.outputs[0]
        finally:
            await engine.stop()

    output = asyncio.run(whole())
    assert (output.text, output.ended_by) == ("abc", FinishReason.EOS)


def test_llguidance_is_not_loaded_before_the_first_grammar():
    code = (
        "import sys, quickstep.engine.assembly, quickstep.runtime.runner, quickstep.server.app;"
        "print('llguidance' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
