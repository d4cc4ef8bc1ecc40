"""Prompt logprobs and embeddings over a real (tiny, random) model: the same bits anywhere."""

from __future__ import annotations

import asyncio
import math

import pytest
from tiny_checkpoint import write_checkpoint

from quickstep import LLM, Pooling, SamplingParams
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.outputs import best_of, collect, collect_embedding
from quickstep.errors import RequestError
from quickstep.types import FinishReason, Request

PROMPTS = [f"{'shared beginning ' * 4}and question {n} {'!' * n}" for n in range(8)]
SCORED = SamplingParams(
    max_tokens=14, temperature=0.8, seed=11, logprobs=2, prompt_logprobs=2, ignore_eos=True
)
SETTINGS = {
    "batched": {},
    "overlapped": {"pipeline_depth": 2},
    "chunked": {"max_num_batched_tokens": 24},
    "starved": {"max_num_batched_tokens": 24, "pipeline_depth": 3, "num_blocks": 56},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("prompts") / "tiny")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(str(checkpoint), num_threads=1, block_size=4, seed=3) as llm:
        yield llm


def run(checkpoint, test, num_blocks=256, **scheduler):
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
            return await test(engine)
        finally:
            await engine.stop()

    return asyncio.run(whole())


async def score(engine, prompt, sampling=SCORED):
    stream = engine.generate(prompt, sampling)
    output = await collect(stream, prompt, sampling, engine.tokenizer)
    (one,) = output.outputs
    return output.prompt_logprobs, one.token_ids, one.logprobs, one.ended_by


async def embed(engine, prompt, pooling):
    stream = engine.stream(
        Request("", tuple(engine.tokenizer.encode(prompt)), SamplingParams(), pooling=pooling)
    )
    return (await collect_embedding(stream)).outputs.embedding


async def everything(engine, prompt):
    return [
        await score(engine, prompt),
        await embed(engine, prompt, Pooling.MEAN),
        await embed(engine, prompt, Pooling.LAST),
    ]


@pytest.fixture(scope="module")
def alone(checkpoint):
    async def test(engine):
        return [await everything(engine, prompt) for prompt in PROMPTS]

    return run(checkpoint, test, max_num_seqs=1)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_prompt_outputs_do_not_depend_on_the_batch(checkpoint, alone, settings):
    async def test(engine):
        work = [everything(engine, prompt) for prompt in PROMPTS]
        fillers = [
            collect(
                engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True, seed=1)),
                None,
                SamplingParams(),
                engine.tokenizer,
            )
            for prompt in PROMPTS[:4]
        ]
        got = await asyncio.gather(*work, *fillers)
        if "num_blocks" in settings:
            assert engine.stats().scheduler.totals.num_preemptions > 0
        assert engine.stats().scheduler.blocks.num_used == 0
        return got[: len(PROMPTS)]

    assert run(checkpoint, test, **settings) == alone


def test_a_prompts_tokens_score_as_they_did_when_they_were_sampled(llm):
    drawn = llm.generate(PROMPTS[0], SCORED)[0]
    output = drawn.outputs[0]
    whole = [*drawn.prompt_token_ids, *output.token_ids]
    only = SamplingParams(max_tokens=0, prompt_logprobs=2)
    again = llm.generate(whole, only)[0]
    num_prompt = len(drawn.prompt_token_ids)
    assert again.prompt_logprobs[:num_prompt] == drawn.prompt_logprobs
    assert again.prompt_logprobs[num_prompt:] == output.logprobs
    assert (again.outputs[0].text, again.outputs[0].token_ids) == ("", ())
    assert again.outputs[0].ended_by is FinishReason.MAX_TOKENS
    assert again.prompt_logprobs[0] is None
    for token_id, entry in zip(whole[1:], again.prompt_logprobs[1:], strict=True):
        assert token_id in entry
        assert 2 <= len(entry) <= 3
        ranks = sorted(one.rank for one in entry.values())
        assert ranks[:2] == [1, 2]


def test_a_long_prompt_is_scored_in_slices_as_by_itself(llm):
    """130 positions are three slices; one token at a time is the slow reference."""
    prompt = "".join(chr(33 + n % 90) for n in range(131))
    [whole] = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    ids = whole.prompt_token_ids
    assert len(whole.prompt_logprobs) == 131
    for position in (1, 63, 64, 65, 127, 128, 129, 130):
        allowed = SamplingParams(max_tokens=1, logprobs=0, allowed_token_ids=(ids[position],))
        [step] = llm.generate(list(ids[:position]), allowed)
        assert step.outputs[0].logprobs[0] == whole.prompt_logprobs[position]


@pytest.mark.parametrize("num_bytes", [1, 4000])
def test_slices_are_bounded_in_bytes_and_change_nothing(llm, monkeypatch, num_bytes):
    """One position at a time, and a few: as many as there is memory for."""
    prompt = "".join(chr(33 + n % 90) for n in range(101))
    asked = SamplingParams(max_tokens=0, prompt_logprobs=3)
    [whole] = llm.generate(prompt, asked)
    monkeypatch.setattr("quickstep.runtime.sampling.prompt_scores._BYTES_PER_SLICE", num_bytes)
    [sliced] = llm.generate(prompt, asked)
    assert sliced.prompt_logprobs == whole.prompt_logprobs


def test_a_prompt_hit_by_none_still_fills_the_cache(llm):
    prompt = "a prompt of its own, scored first and then continued"
    [scored] = llm.generate(prompt, SCORED)
    assert scored.metrics.num_cached_tokens == 0
    [after] = llm.generate(prompt, SamplingParams(max_tokens=1))
    assert after.metrics.num_cached_tokens > 32
    assert after.prompt_logprobs is None
    [again] = llm.generate(prompt, SCORED)
    assert again.metrics.num_cached_tokens == 0
    assert again.prompt_logprobs == scored.prompt_logprobs


def test_n_sequences_score_their_prompt_once(llm):
    several = SamplingParams(n=3, max_tokens=2, prompt_logprobs=1, seed=5)
    [output] = llm.generate(PROMPTS[1], several)
    [single] = llm.generate(PROMPTS[1], SamplingParams(max_tokens=2, prompt_logprobs=1))
    assert output.prompt_logprobs == single.prompt_logprobs


def test_embeddings_have_length_one_and_are_in_order(llm):
    for pooling in (Pooling.MEAN, Pooling.LAST, Pooling.CLS):
        outputs = llm.embed(PROMPTS, pooling=pooling)
        for output in outputs:
            vector = output.outputs.embedding
            assert output.outputs.hidden_size == len(vector) == 32
            assert math.isclose(math.fsum(x * x for x in vector), 1.0, rel_tol=1e-6)
        alone = [llm.embed(prompt, pooling=pooling)[0] for prompt in PROMPTS]
        assert [one.outputs for one in outputs] == [one.outputs for one in alone]
    last = llm.embed([[65]], pooling=Pooling.LAST)[0].outputs
    assert llm.embed([[65]], pooling=Pooling.MEAN)[0].outputs == last
    assert llm.embed("abc")[0].outputs == llm.embed("abc", pooling=Pooling.LAST)[0].outputs


def test_the_mean_is_that_of_every_prefixs_last_state(checkpoint, llm):
    """Directions of single states, since embeddings have lost their lengths: a slow reference."""
    ids = llm.engine.tokenizer.encode("mean of five")
    mean = llm.embed([ids], pooling=Pooling.MEAN)[0].outputs.embedding
    lasts = [
        llm.embed([ids[: end + 1]], pooling=Pooling.LAST)[0].outputs.embedding
        for end in range(len(ids))
    ]
    # the tiny model's final norm has weights of one: each state has nearly the same length
    total = [math.fsum(column) for column in zip(*lasts, strict=True)]
    length = math.sqrt(math.fsum(x * x for x in total))
    assert mean == pytest.approx([x / length for x in total], abs=1e-5)


def test_the_card_says_how_to_pool(tmp_path):
    path = write_checkpoint(tmp_path / "card")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(str(path), num_threads=1) as llm:
        assert llm.engine.retrieval.pooling is Pooling.MEAN
        assert llm.embed("x y")[0].outputs == llm.embed("x y", pooling=Pooling.MEAN)[0].outputs


def test_a_prompt_may_fill_the_context_where_nothing_follows(llm):
    ids = [65] * 256
    assert len(llm.embed([ids])[0].prompt_token_ids) == 256
    [scored] = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert len(scored.prompt_logprobs) == 256
    with pytest.raises(RequestError, match="256 tokens"):
        llm.generate(ids, SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="257 tokens"):
        llm.embed([[65] * 257])


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_values_out_of_range_name_their_field(sampling, param):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**sampling)
    assert refused.value.param == param


def test_what_the_engine_cannot_give_is_refused(llm):
    with pytest.raises(RequestError, match="prompt_logprobs is 265"):
        llm.generate("a", SamplingParams(prompt_logprobs=265))
    with pytest.raises(RequestError, match="one embedding"):
        llm.engine.stream(Request("", (5,), SamplingParams(n=2), pooling=Pooling.LAST))


def test_the_best_of_several_have_the_highest_mean_logprob(llm):
    sampling = SamplingParams(n=6, max_tokens=8, logprobs=0, seed=4, temperature=1.5)
    [output] = llm.generate("choose", sampling)
    best = best_of(output, 2)
    means = [one.cumulative_logprob / len(one.token_ids) for one in output.outputs]
    assert [one.index for one in best.outputs] == sorted(range(6), key=lambda i: -means[i])[:2]
    with pytest.raises(RequestError, match="7 of 6"):
        best_of(output, 7)
    with pytest.raises(RequestError, match="logprobs"):
        best_of(llm.generate("choose", SamplingParams(n=2))[0], 1)
