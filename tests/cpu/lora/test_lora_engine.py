"""Adapters through `LLM`: alone as in mixed batches, cached prefixes, replacement, unloading."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from adapter_files import ALL, adapter_config, adapter_tensors, write_adapter, write_files
from quickstep import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quickstep.config import LoRAConfig
from quickstep.engine import adapter_loader
from quickstep.engine.assembly import open_engine
from quickstep.engine.beam_search import BeamSearch
from quickstep.engine.llm import engine_config
from quickstep.errors import ConfigError, RequestError
from quickstep.model.spec import read_spec
from quickstep.types import Request

PROMPT = "a prompt of more than two blocks of sixteen tokens, for the prefix cache"
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=10, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora")
    spec = read_spec(write_checkpoint(path / "base"))
    targets = (ALL, (*ALL, "embed_tokens", "lm_head"), ("lm_head", "q_proj"))
    for seed, rank in enumerate((4, 16, 3)):
        write_adapter(path / f"a{seed}", spec, targets[seed], rank=rank, seed=seed)
    write_adapter(path / "wide", spec, rank=64)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["captured", "eager"])
def llm(folder, request):
    options = {"num_threads": 1, "enforce_eager": request.param}
    with LLM(str(folder / "base"), enable_lora=True, max_lora_rank=16, **options) as llm:
        yield llm


def adapter(folder, index, name=None):
    return LoRARequest(name or f"a{index}", index + 1, str(folder / f"a{index}"))


def answers(llm, prompts, adapters):
    return [one.outputs[0] for one in llm.generate(prompts, SAMPLED, lora_request=adapters)]


def test_a_mixed_batch_answers_as_each_request_alone(llm, folder):
    adapters = [None, *(adapter(folder, index) for index in (0, 1, 2, 0)), None]
    mixed = answers(llm, [PROMPT] * 6, adapters)
    alone = [answers(llm, [PROMPT], [one])[0] for one in adapters]
    assert [one.token_ids for one in mixed] == [one.token_ids for one in alone]
    assert [one.logprobs for one in mixed] == [one.logprobs for one in alone]
    assert len({tuple(one.token_ids) for one in mixed}) == 4, "each adapter has an effect"


def test_prompts_are_scored_with_the_adapter_of_the_output_projection(llm, folder):
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    adapters = [None, *(adapter(folder, index) for index in range(3))]
    mixed = llm.generate([PROMPT] * 4, scored, lora_request=adapters)
    alone = [llm.generate([PROMPT], scored, lora_request=one)[0] for one in adapters]
    assert [one.prompt_logprobs for one in mixed] == [one.prompt_logprobs for one in alone]
    assert len({str(one.prompt_logprobs) for one in mixed}) == 4


def test_adapters_at_scales_are_an_adapter_of_their_own(llm, folder):
    plain = [adapter(folder, index) for index in (0, 1)]
    for one in plain:
        answers(llm, [PROMPT], one)
    mixes = [LoRARequest(name) for name in ("a0*0.5+a1*2", "a1*-1", "a0*1+a1*1")]
    mixed = answers(llm, [PROMPT] * 6, [None, *plain, *mixes])
    for one, expected in zip([None, *plain, *mixes], mixed, strict=True):
        alone = answers(llm, [PROMPT], one)[0]
        assert (alone.token_ids, alone.logprobs) == (expected.token_ids, expected.logprobs)
    assert len({tuple(one.token_ids) for one in mixed}) == 6
    with pytest.raises(RequestError, match="'absent' is not loaded"):
        answers(llm, [PROMPT], LoRARequest("a0*0.5+absent*1"))


def test_a_mix_follows_a_new_version_of_its_adapter(llm, folder):
    answers(llm, [PROMPT], adapter(folder, 0, "changing"))
    before = answers(llm, [PROMPT], LoRARequest("changing*0.5"))[0]
    answers(llm, [PROMPT], adapter(folder, 1, "changing"))
    after = answers(llm, [PROMPT], LoRARequest("changing*0.5"))[0]
    answers(llm, [PROMPT], adapter(folder, 1))
    assert after.token_ids == answers(llm, [PROMPT], LoRARequest("a1*0.5"))[0].token_ids
    assert after.token_ids != before.token_ids


def test_captured_and_eager_steps_agree(folder):
    found = []
    for eager in (False, True):
        options = {"num_threads": 1, "enforce_eager": eager, "enable_lora": True}
        with LLM(str(folder / "base"), **options) as llm:
            found.append(answers(llm, [PROMPT, PROMPT], [adapter(folder, 1), None]))
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
    assert [one.logprobs for one in found[0]] == [one.logprobs for one in found[1]]


def test_without_adapters_an_engine_with_lora_has_the_same_bits(llm, folder):
    with LLM(str(folder / "base"), num_threads=1) as plain:
        [expected] = [one.outputs[0] for one in plain.generate([PROMPT], SAMPLED)]
    [found] = answers(llm, [PROMPT], [None])
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_name_with_another_path_serves_the_new_version(llm, folder):
    [old] = answers(llm, [PROMPT], [adapter(folder, 0, "versioned")])
    [new] = answers(llm, [PROMPT], [adapter(folder, 1, "versioned")])
    [expected] = answers(llm, [PROMPT], [adapter(folder, 1)])
    assert new.token_ids == expected.token_ids != old.token_ids
    [same] = answers(llm, [PROMPT], LoRARequest("versioned"))
    assert same.token_ids == new.token_ids


@pytest.mark.parametrize(
    ("name", "path", "part"),
    [("", "a0", "name"), ("x", "absent", "no directory"), ("x", "wide", "--max-lora-rank")],
)
def test_an_adapter_that_cannot_be_used_is_refused(llm, folder, name, path, part):
    with pytest.raises(RequestError, match=part):
        llm.generate([PROMPT], SAMPLED, lora_request=LoRARequest(name, 1, str(folder / path)))


def test_adapters_need_enable_lora(folder):
    with pytest.raises(ConfigError, match="enable_lora"):
        LLM(str(folder / "base"), max_loras=3)
    with LLM(str(folder / "base"), num_threads=1) as plain, pytest.raises(RequestError) as error:
        plain.generate([PROMPT], SAMPLED, lora_request=adapter(folder, 0))
    assert "--enable-lora" in str(error.value)


def config(folder, *names, base=None, max_loras=2, **options):
    modules = tuple((name, str(folder / name)) for name in names)
    lora = LoRAConfig(modules, max_loras=max_loras, **options)
    engine_options = {"num_threads": 1, "num_blocks": 64}
    return replace(engine_config(str(base or folder / "base"), engine_options), lora=lora)


def test_adapters_of_the_start_are_in_the_memory_plan_and_checked_first(folder):
    engine = open_engine(config(folder, "a0", "a1"))
    assert [(one.name, one.rank) for one in engine.adapters] == [("a0", 4), ("a1", 16)]
    planned = next(row for row in engine.memory_plan.rows if row.label == "adapters")
    assert planned.num_bytes == sum(one.num_bytes for one in engine.adapters)
    with pytest.raises(ConfigError, match="no directory"):
        open_engine(config(folder, "a0", "absent"))
    more = config(folder, "a0", "a1")
    more = replace(more, lora=replace(more.lora, max_cpu_loras=6))
    [with_host] = [row for row in open_engine(more).memory_plan.rows if row.label == "adapters"]
    assert with_host.num_bytes == 3 * planned.num_bytes
    engine = open_engine(config(folder, "a0", "a1", "a2"))
    assert len(engine.adapters) == 3 and len(engine._adapters._adapters.packed) == 2


@pytest.fixture(scope="module")
def complete(folder):
    """An adapter with its own embedding and output projection."""
    spec = read_spec(folder / "base")
    tensors = adapter_tensors(spec, ("q_proj",))
    table = np.random.default_rng(1).normal(size=(spec.vocab_size, spec.hidden_size)) * 0.1
    tensors["base_model.model.lm_head.weight"] = table.astype(np.float32)
    tensors["base_model.model.model.embed_tokens.weight"] = table[::-1].astype(np.float32)
    saved = ["lm_head", "embed_tokens"]
    values = adapter_config(target_modules=["q_proj"], modules_to_save=saved)
    return str(write_files(folder / "complete", values, tensors))


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_complete_matrices_and_int8_weights_are_exact_in_any_batch(
    folder, complete, dtype, enforce_eager
):
    options = {"num_threads": 1, "enforce_eager": enforce_eager, "lora_dtype": dtype}
    with LLM(str(folder / "base"), enable_lora=True, **options) as llm:
        own = LoRARequest("own", 9, complete)
        adapters = [own, None, adapter(folder, 1), own, adapter(folder, 2)]
        mixed = answers(llm, [PROMPT] * 5, adapters)
        alone = [answers(llm, [PROMPT], [one])[0] for one in adapters]
        assert [one.token_ids for one in mixed] == [one.token_ids for one in alone]
        assert [one.logprobs for one in mixed] == [one.logprobs for one in alone]
        assert len({tuple(one.token_ids) for one in mixed}) == 4
        for one in llm._engine.adapters:
            packed = llm._engine._adapters._adapters.packed[one.adapter_id]
            assert packed.nbytes == one.num_bytes, "the memory plan counts what is allocated"
            assert one.adapter_id.endswith("-int8") == (dtype == "int8")
        with pytest.raises(RequestError, match=r"'own' .* has no scale"):
            answers(llm, [PROMPT], LoRARequest("own*0.5"))


def test_an_adapter_is_freed_when_its_last_request_has_ended(folder):
    async def run():
        engine = open_engine(config(folder, "a0", memory_bytes=1_000_000))
        adapters = engine._adapters._adapters
        await engine.start()
        ids = tuple(engine.tokenizer.encode(PROMPT))
        expected = await tokens_of(engine.stream(Request("", ids, SAMPLED, adapter="a0")))
        stream = engine.stream(Request("", ids, SAMPLED, adapter="a0"))
        await engine.load_adapter("a0", str(folder / "a1"))
        with pytest.raises(RequestError, match="not loaded"):
            engine.stream(Request("", ids, SAMPLED, adapter="unknown"))
        new = engine.stream(Request("", ids, SAMPLED, adapter="a0"))
        assert await tokens_of(stream) == expected, "a running request keeps its version"
        assert await tokens_of(new) != expected
        await engine.load_adapter("a2", str(folder / "a2"))
        await engine.unload_adapter("a2")
        with pytest.raises(RequestError, match="not loaded"):
            await engine.unload_adapter("a2")
        for _ in range(20):
            await asyncio.sleep(0)
        assert [one.name for one in engine.adapters] == ["a0"]
        assert len(adapters.packed) == 1
        assert not adapters.retired
        await engine.stop()

    asyncio.run(run())


@pytest.mark.parametrize("change", ["replaced", "unloaded", "freed"])
def test_a_beam_search_stays_with_the_adapter_that_it_began_with(folder, monkeypatch, change):
    monkeypatch.setattr(adapter_loader, "_SEARCH_PAUSE_S", 0.0 if change == "freed" else 0.5)

    async def run():
        engine = open_engine(config(folder, "a0", memory_bytes=1_000_000))
        adapters = engine._adapters._adapters
        await engine.start()
        expected = await search_with(engine, "a0", asyncio.sleep(0))

        async def change_adapter():
            if change == "replaced":
                await engine.load_adapter("a0", str(folder / "a1"))
            else:
                await engine.unload_adapter("a0")
            await asyncio.sleep(0.1)  # the search has no request meanwhile

        searching = search_with(engine, "a0", change_adapter())
        if change == "freed":
            with pytest.raises(
                RequestError, match="'a0' was unloaded or replaced while the request ran"
            ):
                await searching
        else:
            assert await searching == expected
        if change == "replaced":
            assert await search_with(engine, "a0", asyncio.sleep(0)) != expected
        while adapters.retired:
            await asyncio.sleep(0.01)
        assert len(adapters.packed) == (change == "replaced")
        await engine.stop()

    asyncio.run(run())


async def search_with(engine, name, between):
    """The beams of a search that waits for `between` after its second tokens."""
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    between = asyncio.ensure_future(between)

    def submit(request):
        length = len(request.prompt_token_ids) - len(prompt)
        return LateStream(engine.stream(request), between if length == 1 else None)

    search = BeamSearch(
        submit,
        Request("", prompt, adapter=name),
        BeamSearchParams(2, 6),
        frozenset(),
        max_model_len=engine.max_model_len,
        vocab_size=engine.model.vocab_size,
    )
    search.start()
    return [(one.token_ids, one.score) for one in await search.run()]


class LateStream:
    """A stream that is read once `ready` is done."""

    def __init__(self, stream, ready):
        self._stream = stream
        self._ready = ready
        self.accepted, self.aclose = stream.accepted, stream.aclose

    async def __aiter__(self):
        if self._ready is not None:
            await self._ready
        async for delta in self._stream:
            yield delta


async def tokens_of(stream):
    return [token async for delta in stream for token in delta.token_ids]


def pool_of(folder, count=9):
    """A directory with more adapters than fit into memory."""
    directory = folder / "many"
    if not directory.exists():
        spec = read_spec(folder / "base")
        for seed in range(count):
            write_adapter(directory / f"m{seed}", spec, rank=4, seed=20 + seed)
    return directory


def lora_dir_llm(folder, **options):
    directory = str(pool_of(folder))
    return LLM(str(folder / "base"), num_threads=1, lora_dir=directory, **options)


@pytest.mark.parametrize("max_cpu_loras", [None, 5], ids=["from-disk", "from-host-memory"])
def test_more_adapters_than_fit_are_loaded_and_evicted_and_change_nothing(folder, max_cpu_loras):
    names = [f"m{seed}" for seed in range(9)]
    with lora_dir_llm(folder, max_loras=9) as roomy:
        expected = answers(roomy, [PROMPT] * 9, [LoRARequest(name) for name in names])
    assert len({tuple(one.token_ids) for one in expected}) == 9
    with lora_dir_llm(folder, max_loras=2, max_cpu_loras=max_cpu_loras) as llm:
        adapters = llm._engine._adapters._adapters
        order = [4, 0, 8, 4, 2, 6, 1, 3, 7, 5, 4, 0, 2]
        for _ in range(2):
            found = answers(
                llm, [PROMPT] * len(order), [LoRARequest(names[index]) for index in order]
            )
            for index, one in zip(order, found, strict=True):
                assert (one.token_ids, one.logprobs) == (
                    expected[index].token_ids,
                    expected[index].logprobs,
                )
        assert len(adapters.packed) <= 2
        stats = llm._engine.stats().scheduler.adapters
        assert stats.num_evictions >= 7 and stats.num_resident <= 2
        assert stats.num_bytes <= adapters.max_bytes


def test_a_pinned_adapter_stays(folder):
    with lora_dir_llm(folder, max_loras=2, lora_pin=("m0",)) as llm:
        answers(llm, [PROMPT], LoRARequest("m0"))
        pinned = set(llm._engine._adapters._adapters.packed)
        answers(llm, [PROMPT] * 4, [LoRARequest(f"m{seed}") for seed in range(1, 5)])
        assert pinned < set(llm._engine._adapters._adapters.packed)


def test_an_adapter_that_was_changed_on_disk_fails_its_request_only(folder, tmp_path):
    spec = read_spec(folder / "base")
    for seed in range(3):
        write_adapter(tmp_path / f"x{seed}", spec, rank=4, seed=40 + seed)
    options = {"num_threads": 1, "lora_dir": str(tmp_path), "max_loras": 1}
    with LLM(str(folder / "base"), **options) as llm:
        one = [LoRARequest(f"x{seed}") for seed in range(3)]
        [first] = answers(llm, [PROMPT], one[0])
        answers(llm, [PROMPT], one[1])
        write_adapter(tmp_path / "x0", spec, rank=4, seed=49)
        [failed] = llm.generate([PROMPT], SAMPLED, lora_request=one[0])
        assert failed.outputs[0].finish_reason == "error"
        assert "changed on disk" in failed.outputs[0].error
        [new] = answers(llm, [PROMPT], one[0])
        assert new.token_ids and new.token_ids != first.token_ids


def test_an_adapter_that_is_larger_than_all_may_be_is_refused(folder):
    with lora_dir_llm(folder, lora_memory_bytes=1000) as llm, pytest.raises(RequestError) as error:
        answers(llm, [PROMPT], LoRARequest("m0"))
    assert "--lora-memory-bytes" in str(error.value)


@pytest.mark.usefixtures("products_in_order")
def test_triton_kernels_give_the_tokens_of_the_native_ones(folder):
    """Interpreted where there is no GPU. With adapters and without, batched and at batch size 1."""
    adapters = [None, adapter(folder, 0), adapter(folder, 1)]
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = []
    for options in ({"device": "cpu"}, {"device": device, "kernels": "triton"}):
        with LLM(str(folder / "base"), enable_lora=True, num_threads=1, **options) as llm:
            together = llm.generate(["one two"] * 3, greedy, lora_request=adapters)
            alone = [llm.generate(["one two"], greedy, lora_request=one)[0] for one in adapters]
        assert [one.outputs[0].logprobs for one in together] == [
            one.outputs[0].logprobs for one in alone
        ]
        tokens.append([one.outputs[0].token_ids for one in together])
    assert tokens[0] == tokens[1]
    assert len(set(map(tuple, tokens[0]))) == 3


def test_an_adapter_whose_disk_was_away_is_read_again(folder, tmp_path):
    """Also one that only the start names; and another name with the same content serves it."""
    spec = read_spec(folder / "base")
    for seed, name in ((5, "away"), (5, "same"), (6, "other")):
        write_adapter(tmp_path / name, spec, seed=seed)
    weights = tmp_path / "away" / "adapter_model.safetensors"

    async def run():
        engine = open_engine(config(tmp_path, "away", "other", max_loras=1, base=folder / "base"))
        await engine.start()
        expected = await tokens_of(engine.generate(PROMPT, SAMPLED, adapter="away"))
        await tokens_of(engine.generate(PROMPT, SAMPLED, adapter="other"))
        moved = weights.rename(tmp_path / "moved")
        last = [one async for one in engine.generate(PROMPT, SAMPLED, adapter="away")][-1]
        assert "holds no adapter_model.safetensors" in last.error
        with pytest.raises(RequestError, match=r"holds no adapter_model\.safetensors"):
            await engine.open_adapter("away")
        await engine.load_adapter("same", str(tmp_path / "same"))
        assert expected == await tokens_of(engine.generate(PROMPT, SAMPLED, adapter="away"))
        await engine.unload_adapter("same")
        moved.rename(weights)
        await engine.open_adapter("away")
        assert expected == await tokens_of(engine.generate(PROMPT, SAMPLED, adapter="away"))
        await engine.stop()

    asyncio.run(run())


def test_adapters_that_pinned_ones_leave_no_room_for_are_refused(folder):
    sizes = {one.name: one.num_bytes for one in open_engine(config(folder, "a0", "a1")).adapters}
    memory_bytes = sum(sizes.values()) - 1
    with pytest.raises(ConfigError, match=f"the pinned ones leave {sizes['a1'] - 1:,}"):
        open_engine(config(folder, "a1", "a0", memory_bytes=memory_bytes, pinned=("a0",)))


@pytest.mark.parametrize("name", ["a0*1e30", "a0*0.50", "a0*1", "a0*nan", "a0*0"])
def test_a_mix_has_the_checks_of_a_request_by_any_way(llm, folder, name):
    answers(llm, [PROMPT], adapter(folder, 0))
    with pytest.raises(RequestError, match=r"is written|must be from"):
        answers(llm, [PROMPT], LoRARequest(name))
