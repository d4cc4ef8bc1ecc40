"""With and without speculation, the bundled model gives the same outputs, whatever is requested."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from quickstep import LLM, Grammar, SamplingParams
from quickstep.engine.outputs import RequestOutput
from quickstep.runtime.speculation.medusa import MedusaProposer
from quickstep.runtime.speculation.proposer import Drafts, DraftTask

LIST = "numbers = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,"
CODE = "def first(a):\n    return a\n\ndef second(a):\n    return a\n\ndef third(a):\n"
PARAMS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.7, "seed": 3},
    "several": {"temperature": 0.7, "seed": 4, "n": 3},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "penalties": {"temperature": 0.5, "seed": 5, "repetition_penalty": 1.1, "logprobs": 1},
    "minimum": {"temperature": 0.0, "min_tokens": 20},
    "stop string": {"temperature": 0.0, "stop": ["third", "2, 3, 1"]},
    "stop string at once": {"temperature": 0.0, "stop": [","]},
    "end ignored": {"temperature": 0.0, "ignore_eos": True},
    "pattern": {"temperature": 0.0, "grammar": Grammar("regex", r"( [0-9],){12}")},
}


def sampling(fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, **fields})


def generated(config: dict[str, Any] | list[dict[str, Any]]) -> dict[str, list[RequestOutput]]:
    with LLM("demo", num_threads=1, speculative_config=config) as llm:
        return {
            name: llm.generate([LIST, CODE], sampling(fields), use_tqdm=False)
            for name, fields in PARAMS.items()
        }


@pytest.fixture(scope="module")
def without() -> dict[str, list[RequestOutput]]:
    return generated({"method": "off"})


@pytest.fixture(
    scope="module",
    params=[
        {"method": "suffix"},
        {"method": "ngram"},
        {"model": "demo-eagle", "method": "eagle", "tree_width": 1},
        {"model": "demo-eagle", "method": "eagle", "tree_width": 4, "num_speculative_tokens": 12},
    ],
    ids=["suffix", "ngram", "chains", "trees"],
)
def with_drafts(request: pytest.FixtureRequest) -> dict[str, list[RequestOutput]]:
    return generated(request.param)


@pytest.mark.parametrize("name", PARAMS)
def test_the_outputs_are_equal(
    name: str, without: dict[str, list[RequestOutput]], with_drafts: dict[str, list[RequestOutput]]
) -> None:
    for expected, found in zip(without[name], with_drafts[name], strict=True):
        assert found.outputs == expected.outputs
        counts = [sequence.num_output_tokens for sequence in found.metrics.sequences if sequence]
        assert counts == [
            sequence.num_output_tokens for sequence in expected.metrics.sequences if sequence
        ]


def test_drafts_were_accepted_and_rejected(with_drafts: dict[str, list[RequestOutput]]) -> None:
    timings = [
        sequence
        for outputs in with_drafts.values()
        for output in outputs
        for sequence in output.metrics.sequences
        if sequence
    ]
    assert sum(one.num_accepted for one in timings) > 50
    assert sum(one.num_drafts - one.num_accepted for one in timings) > 5
    assert sum(one.rejected_s for one in timings) > 0.0


def test_the_outputs_are_equal_without_a_model_that_raises(
    without: dict[str, list[RequestOutput]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = itertools.count()

    def propose(self: MedusaProposer, tasks: Sequence[DraftTask]) -> list[Drafts]:
        next(calls)
        raise RuntimeError("no draft today")

    monkeypatch.setattr(MedusaProposer, "propose", propose)
    found = generated([{"model": "demo-medusa"}, {"model": "demo-eagle"}])
    assert next(calls) == 1, "it was called after its failure"
    assert "the proposer medusa failed and is off" in caplog.text
    assert "speculation is off" not in caplog.text
    for name, outputs in found.items():
        assert [output.outputs for output in outputs] == [one.outputs for one in without[name]]
    timings = [sequence for sequence in found["greedy"][0].metrics.sequences if sequence]
    assert sum(one.num_accepted for one in timings) > 5
