"""What is bundled to draft for the demo model: it changes no bit, and much of it is accepted."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from quickstep.config import EngineConfig, LoadConfig, SchedulerConfig, SpeculationConfig
from quickstep.core.block_pool import KVBlockPool
from quickstep.engine.assembly import load_weights
from quickstep.engine.llm import engine_config
from quickstep.engine.speculation import open_model_proposer
from quickstep.engine.text.tokenizer import Tokenizer
from quickstep.model.checkpoint.source import bundled_drafts, find_checkpoint
from quickstep.model.interface import Model
from quickstep.model.sizing import MemoryPlan
from quickstep.runtime.kv_cache import allocate_kv
from quickstep.runtime.speculation.proposer import Proposer
from quickstep.types import Request, SamplingParams
from quickstep.verify import checker
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions
from quickstep.verify.requests import RandomRequest
from quickstep.verify.run import Event, RunCounts, Trace, run_requests

NAMES = bundled_drafts("demo")
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
    proposers = (
        open_model_proposer(
            EngineConfig(load=LoadConfig("demo"), speculation=SpeculationConfig(model=name)),
            model,
            plan,
            DEMO,
        )
        for name in names
    )
    return {one.name: one for one in proposers}


def generated(
    name: str | None, temperature: float
) -> tuple[dict[tuple[str, int], Trace], RunCounts]:
    """All prompts together, with three drafts from a model in every step."""
    model, tokenizer = load(1), Tokenizer.open(DEMO)
    plan = MemoryPlan(NUM_BLOCKS, 256, len(PROMPTS), 256, (), ())
    proposer = None if name is None else next(iter(opened(model, plan, name).values()))
    config = SchedulerConfig(len(PROMPTS), 256, 256, num_speculative_tokens=3 if name else 0)
    kv = allocate_kv(model.kv_shape, NUM_BLOCKS, BLOCK_SIZE, model.device)
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
    expected, _ = generated(None, temperature)
    for name, least in zip(NAMES, (0.3, 0.3, 0.05), strict=True):
        traces, counts = generated(name, temperature)
        assert traces == expected
        assert counts.drafts > 20
        assert counts.accepted_drafts > least * counts.drafts, name


def test_verify_runs_requests_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "SCENARIOS", ())
    options = VerifyOptions(num_requests=60, seed=5, threads=(1,))
    report = verify(load, options, open_proposers=lambda *sizes: opened(*sizes, *NAMES))
    assert report.mismatches == 0 and report.comparisons > 100
    drafted = {name for name, counts in report.scenarios.items() if counts.runs.drafts}
    assert {name.partition(",")[0] for name in drafted} == {"draft", "eagle", "medusa"}
