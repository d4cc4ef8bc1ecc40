"""The engine over a real (tiny, random) model: the same request gives the same answer anywhere."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.outputs import collect
from quickstep.errors import ConfigError
from quickstep.model.decoder_spec import LongContext
from quickstep.ops.native import backend as native
from quickstep.types import FinishReason, SamplingParams

PROMPTS = [f"{'shared beginning ' * 3}and question {n} {'!' * n}" for n in range(8)]
ASCII = range(94)  # the first tokens of the vocabulary are the printable characters
SAMPLING = SamplingParams(
    max_tokens=20, temperature=0.8, seed=11, logprobs=2, allowed_token_ids=ASCII
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def engine_for(checkpoint, num_blocks=256, max_model_len=None, longer=False, **scheduler):
    return open_engine(
        EngineConfig(
            load=LoadConfig(model=str(checkpoint), num_threads=1),
            cache=CacheConfig(block_size=4, num_blocks=num_blocks),
            scheduler=SchedulerConfig(**scheduler),
            max_model_len=max_model_len,
            allow_long_context=longer,
            seed=0,
        )
    )


def run(engine, test):
    async def whole():
        await engine.start()
        try:
            return await test(engine)
        finally:
            await engine.stop()

    return asyncio.run(whole())


async def complete(engine, prompt, sampling=SAMPLING):
    return await collect(engine.generate(prompt, sampling), prompt, sampling, engine.tokenizer)


def essence(output):
    """What must not depend on the batch: tokens, text, logprob bits and the end."""
    return [(o.token_ids, o.text, o.logprobs, o.ended_by) for o in output.outputs]


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each prompt by itself, cold, one after another."""

    async def test(engine):
        return [essence(await complete(engine, prompt)) for prompt in PROMPTS]

    return run(engine_for(checkpoint, max_num_seqs=1), test)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_depth": 2},
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, "pipeline_depth": 2, "num_blocks": 64},
    ],
    ids=["batched", "overlapped", "chunked", "starved"],
)
def test_concurrent_streams_equal_each_alone(checkpoint, alone, settings):
    async def test(engine):
        together = await asyncio.gather(*(complete(engine, prompt) for prompt in PROMPTS))
        assert engine.stats().scheduler.blocks.num_used == 0
        return [essence(output) for output in together]

    assert run(engine_for(checkpoint, **settings), test) == alone


def test_a_prefix_hit_changes_nothing_but_the_work(checkpoint, alone):
    async def test(engine):
        cold = await complete(engine, PROMPTS[0])
        warm = await complete(engine, PROMPTS[0])
        assert cold.metrics.num_cached_tokens == 0
        assert warm.metrics.num_cached_tokens >= 48
        assert essence(cold) == essence(warm) == alone[0]

    run(engine_for(checkpoint), test)


def test_n_sequences_share_the_prompt_and_the_first_is_the_one_alone(checkpoint, alone):
    async def test(engine):
        output = await complete(engine, PROMPTS[3], replace(SAMPLING, n=3))
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({one.token_ids for one in output.outputs}) == 3
        assert essence(output)[0] == alone[3][0]

    run(engine_for(checkpoint, pipeline_depth=2), test)


def test_leaving_half_of_the_streams_leaves_the_others_and_no_block(checkpoint, alone):
    async def leave_early(engine, prompt):
        async with engine.generate(prompt, SAMPLING) as stream:
            async for _ in stream:
                break

    async def test(engine):
        kept = [complete(engine, prompt) for prompt in PROMPTS[::2]]
        left = [leave_early(engine, prompt) for prompt in PROMPTS[1::2]]
        outputs = (await asyncio.gather(*kept, *left))[: len(kept)]
        assert [essence(output) for output in outputs] == alone[::2]
        assert engine.stats().scheduler.blocks.num_used == 0

    run(engine_for(checkpoint, pipeline_depth=2), test)


def test_a_stop_string_ends_an_answer_with_what_is_before_it(checkpoint, alone):
    _, text, _, _ = alone[0][0]
    assert len(text) == 20
    middle = text[10:12]

    async def test(engine):
        output = await complete(engine, PROMPTS[0], replace(SAMPLING, stop=(middle,)))
        assert output.outputs[0].text == text[: text.index(middle)]
        assert output.outputs[0].ended_by is FinishReason.STOP_STRING
        assert output.outputs[0].stop_reason == middle
        assert engine.stats().num_requests == 0

    run(engine_for(checkpoint), test)


def test_a_deadline_gives_the_beginning_of_the_whole_answer(checkpoint):
    sampling = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)

    async def test(engine):
        whole = await complete(engine, "deadline", sampling)
        stream = engine.generate("deadline", sampling, timeout_s=1e-6)
        partial = await collect(stream, None, sampling, engine.tokenizer)
        assert partial.outputs[0].ended_by is FinishReason.DEADLINE
        num_tokens = len(partial.outputs[0].token_ids)
        assert partial.outputs[0].token_ids == whole.outputs[0].token_ids[:num_tokens]
        assert whole.outputs[0].ended_by is FinishReason.CONTEXT_LIMIT

    run(engine_for(checkpoint, max_model_len=64), test)


def test_an_opened_engine_says_what_it_loaded(checkpoint):
    engine = engine_for(checkpoint, max_model_len=256)
    assert engine.model_name == "tiny-llama"
    assert engine.max_model_len == 256
    assert engine.memory_plan.num_blocks == 256
    assert engine.memory_plan.long_context is None
    assert engine.model.load_s > 0
    assert dict(engine.default_sampling) == {"temperature": 0.6, "top_p": 0.9}
    assert engine.tokenizer.eos_token_ids == {256}
    asyncio.run(engine.stop())


def test_a_context_beyond_the_models_limit_is_refused_with_the_way_out(checkpoint):
    with pytest.raises(ConfigError, match=r"is 257, the model's limit is 256; .*--allow-long"):
        engine_for(checkpoint, max_model_len=257)


def test_a_context_beyond_the_models_limit_is_served_with_scaled_positions(checkpoint, caplog):
    plain = engine_for(checkpoint)
    with caplog.at_level("INFO", "quickstep"):
        engine = engine_for(checkpoint, max_model_len=1024, longer=True)
    assert "positions are scaled (yarn, factor 4)" in caplog.text
    assert engine.max_model_len == 1024
    assert engine.memory_plan.long_context == LongContext("yarn", 4.0, 256)
    assert engine.fingerprint != plain.fingerprint
    asyncio.run(plain.stop())

    async def test(engine):
        output = await complete(engine, list(range(90)) * 8)  # 720 tokens
        assert len(output.outputs[0].token_ids) == 20

    run(engine, test)


def test_fingerprints_are_equal_for_equal_weights_only(checkpoint, tmp_path):
    other = write_checkpoint(tmp_path / "other", seed=1)
    first, again, changed = (engine_for(path) for path in (checkpoint, checkpoint, other))
    assert first.fingerprint == again.fingerprint != changed.fingerprint
    for engine in (first, again, changed):
        asyncio.run(engine.stop())


def test_load_progress_ends_with_all_bytes(checkpoint):
    seen = []
    config = EngineConfig(load=LoadConfig(model=str(checkpoint), num_threads=1))
    engine = open_engine(config, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)
    asyncio.run(engine.stop())


def test_a_checkpoint_without_a_tokenizer_and_a_bad_thread_count_are_refused(tmp_path):
    path = write_checkpoint(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="--threads is 0"):
        open_engine(EngineConfig(load=LoadConfig(model=str(path), num_threads=0)))
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        engine_for(path)


def test_without_the_native_library_the_engine_says_so_and_runs(
    checkpoint, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "absent.so")

    async def test(engine):
        answer = await complete(engine, "no library")
        assert len(answer.outputs[0].token_ids) == SAMPLING.max_tokens

    run(engine_for(checkpoint), test)
    assert "absent.so" in caplog.text
