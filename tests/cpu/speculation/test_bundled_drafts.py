"""What is bundled to draft for the demo model: it changes no bit, and much of it is accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import Any

import pytest

from quickstep import LLM
from quickstep.config import (
    EngineConfig,
    LoadConfig,
    ProposerConfig,
    SchedulerConfig,
    SpeculationConfig,
    SpeculationMethod,
)
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.engine.assembly import load_weights
from quickstep.engine.llm import engine_config
from quickstep.engine.speculation import open_model_proposers
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import bundled_drafts, find_checkpoint
from quickstep.model.interface import Model
from quickstep.model.sizing import MemoryPlan
from quickstep.ops.table import KVCache
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.speculation.combined import CombinedProposer
from quickstep.runtime.speculation.methods import open_lookup_proposers
from quickstep.runtime.speculation.proposer import Drafts, DraftTask, Proposer
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Request, SamplingParams
from quickstep.verify import checker
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions
from quickstep.verify.requests import RandomRequest
from quickstep.verify.run import Event, RunCounts, Trace, run_requests

NAMES = bundled_drafts("demo")
ALL = [{"model": name} for name in NAMES]
Propose = Callable[[Sequence[DraftTask]], Sequence[Drafts]]
DEMO = find_checkpoint(LoadConfig("demo")).path
NUM_BLOCKS, BLOCK_SIZE = 64, 16
PROMPTS = (
    "import os\n\ndef read(path):\n    ",
    "class Reader:\n    def __init__(self, ",
    "    for name in names:\n        ",
    "    if not isinstance(",
)


def load(threads: int) -> Model:
    sizes = {"num_threads": threads, "num_blocks": NUM_BLOCKS, "max_model_len": 256}
    return load_weights(engine_config("demo", sizes), None).model


def opened(model: Model, plan: MemoryPlan, *names: str) -> Mapping[str, Proposer]:
    proposers = tuple(ProposerConfig(model=name) for name in names)
    config = EngineConfig(load=LoadConfig("demo"), speculation=SpeculationConfig(proposers))
    return {one.name: one for one in open_model_proposers(config, model, plan, DEMO)}


def together(models: Iterable[Proposer], calls: Counter[str]) -> CombinedProposer:
    """With all that need no model; each has its turns by random seconds, and is counted."""
    methods = (SpeculationMethod.NGRAM, SpeculationMethod.SUFFIX)
    config = SpeculationConfig(tuple(ProposerConfig(method) for method in methods))
    free, models = open_lookup_proposers(config), list(models)
    for one in (*free, *models):
        propose = one.propose

        def counted(
            tasks: Sequence[DraftTask], name: str = one.name, propose: Propose = propose
        ) -> Sequence[Drafts]:
            calls[name] += 1
            return propose(tasks)

        one.propose = counted  # type: ignore[method-assign]
    return CombinedProposer(free, models, accumulate(iter(Random(0).random, None)).__next__)


def generated(
    names: Sequence[str], temperature: float, calls: Counter[str] | None = None
) -> tuple[dict[tuple[str, int], Trace], RunCounts]:
    """All prompts together, with three drafts in every step; with `calls` from all proposers."""
    model, tokenizer = load(1), Tokenizer.open(DEMO)
    plan = MemoryPlan(NUM_BLOCKS, 256, len(PROMPTS), 256, (), ())
    models = opened(model, plan, *names).values()
    proposer = next(iter(models), None) if calls is None else together(models, calls)
    config = SchedulerConfig(len(PROMPTS), 256, 256, num_speculative_tokens=3 if names else 0)
    kv = allocate_kv(model.kv_layout, NUM_BLOCKS, BLOCK_SIZE, model.device)
    sampling = SamplingParams(temperature=temperature, max_tokens=96, ignore_eos=True, logprobs=1)
    events = [
        Event(
            0,
            f"r{index}",
            RandomRequest(
                Request(f"r{index}", tuple(tokenizer.encode(text)), sampling, seed=index)
            ),
        )
        for index, text in enumerate(PROMPTS)
    ]
    pool = KVBlockPool(NUM_BLOCKS, BLOCK_SIZE)
    return run_requests(model, kv, config, pool, events, None, None, proposer, {})


def test_there_is_one_of_each_kind() -> None:
    assert NAMES == ("demo-draft", "demo-eagle", "demo-medusa")
    assert bundled_drafts("another") == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_logprobs_are_those_without_and_much_is_accepted(temperature: float) -> None:
    expected, _ = generated((), temperature)
    for name, least in zip(NAMES, (0.3, 0.3, 0.05), strict=True):
        traces, counts = generated((name,), temperature)
        assert traces == expected
        assert counts.drafts > 20
        assert counts.accepted_drafts > least * counts.drafts, name


def test_all_together_change_no_bit_and_each_drafts() -> None:
    expected, _ = generated((), 0.8)
    calls: Counter[str] = Counter()
    traces, counts = generated(NAMES, 0.8, calls)
    assert traces == expected
    assert counts.accepted_drafts > 20
    assert set(calls) == {"ngram", "suffix", "draft", "eagle", "medusa"}


@pytest.mark.parametrize("kwargs", [{}, {"max_num_batched_tokens": 64, "enforce_eager": True}])
def test_an_engine_with_all_of_them_generates_what_it_does_without(kwargs: dict[str, Any]) -> None:
    """Among them prompts in chunks next to rows that decode, as the last one is longer."""
    prompts = [*PROMPTS, "".join(PROMPTS) * 4]
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=1)
    found = []
    for config in (ALL, {"method": "off"}):
        sizes = {"num_blocks": NUM_BLOCKS, "max_model_len": 256, "num_threads": 1}
        with LLM("demo", speculative_config=config, **sizes, **kwargs) as llm:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            found.append(
                [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
            )
            assert bool(llm.engine.stats().scheduler.totals.num_drafts) == isinstance(config, list)
    assert found[0] == found[1]


def test_the_memory_plan_has_what_is_allocated_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config("demo", {"max_model_len": 256, "speculative_config": ALL})
    loaded = load_weights(config, None)
    rows = {row.label: row.num_bytes for row in loaded.plan.rows}
    caches = []

    def allocate(*arguments: Any) -> KVCache:
        caches.append(allocate_kv(*arguments))
        return caches[-1]

    monkeypatch.setattr("quickstep.runtime.cache.kv_cache.allocate_kv", allocate)
    names = [one.name for one in open_model_proposers(config, loaded.model, loaded.plan, DEMO)]
    assert names == ["draft", "eagle", "medusa"]
    tensors = [one for cache in caches for one in (*cache.keys, *cache.values)]
    assert rows["draft KV cache"] == sum(tensor.nbytes for tensor in tensors)
    each = [
        load_weights(engine_config("demo", {"speculative_config": one}), None).plan for one in ALL
    ]
    weights = [row.num_bytes for plan in each for row in plan.rows if row.label == "draft weights"]
    assert len(weights) == 3 and rows["draft weights"] == sum(weights)


def test_two_checkpoints_of_a_kind_are_refused() -> None:
    again = str(find_checkpoint(LoadConfig("demo-eagle")).path)
    config = [{"model": "demo-eagle"}, {"model": again}]
    with pytest.raises(ConfigError, match="are both of the method eagle; keep one of them"):
        load_weights(engine_config("demo", {"speculative_config": config}), None)


def test_verify_runs_requests_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "SCENARIOS", ())
    options = VerifyOptions(num_requests=60, seed=5, threads=(1,))
    report = verify(load, options, open_proposers=lambda *sizes: opened(*sizes, *NAMES))
    assert report.mismatches == 0 and report.comparisons > 100
    drafted = {name for name, counts in report.scenarios.items() if counts.runs.drafts}
    assert {name.partition(",")[0] for name in drafted} == {"draft", "eagle", "medusa", "auto"}
