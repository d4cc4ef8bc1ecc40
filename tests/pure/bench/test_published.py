"""The fit of engines to published figures: the cases, the steps, and the score."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from benchmarks.published import (
    NAMES,
    PRIORS,
    Case,
    Fit,
    Published,
    Source,
    achieved_of,
    candidate_of,
    constants_of,
    engine_fits,
    factors_of,
    is_inside,
    lengths,
    load_of,
    read_cases,
    scored,
    simulated,
    steps_of,
    summary_lines,
    written,
)
from quickstep.plan.engines import ENGINES
from quickstep.plan.hardware import read_hardware
from quickstep.plan.models import known_models

TABLE = read_hardware()
TRUTH = {name: prior[0] for name, prior in PRIORS.items()} | {
    "memory": 0.68,
    "compute": 0.4,
    "row_overhead_s": 1e-4,
}


def case(
    gpu: str, clients: int, unit: str = "output tokens/s", source: str = "one", **changed
) -> Case:
    fields = {
        "source": source,
        "engine": "vllm",
        "version": "0",
        "gpu": gpu,
        "gpus": 1,
        "model": "llama-3.2-1b",
        "format": "bf16",
        "inputs": 300,
        "outputs": 20,
        "requests": 2 * clients,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "unit": unit,
        "figure": 1.0,
        "clients": clients,
    }
    return Case(**(fields | changed))


def measured(one: Case) -> Case:
    """With the figure of an engine whose constants are TRUTH."""
    steps = steps_of(one, TRUTH, TABLE)
    return Case(
        **{name: getattr(one, name) for name in one.__struct_fields__} | {"figure": steps.value}
    )


def test_cases_have_sources_and_are_as_many_as_the_guide_says() -> None:
    published = read_cases()
    cases = published.cases
    assert len(cases) >= 60
    assert len({item.gpu for item in cases}) >= 4
    assert len({item.engine for item in cases}) >= 3
    assert {item.engine for item in cases} == set(ENGINES)
    assert {item.gpu for item in cases} <= set(TABLE.devices)
    assert {item.model for item in cases} <= set(known_models())
    assert {item.source for item in cases} == set(published.sources)
    for source in published.sources.values():
        assert source.title
        assert source.address
        assert source.date
    assert max(Counter(cases).values()) == 1


@pytest.mark.parametrize("unit", ["output tokens/s", "TPOT ms", "TTFT ms"])
def test_steps_of_a_case_are_those_of_the_cost_model(unit: str) -> None:
    one = case("h100", 4, unit)
    constants = {name: prior[0] for name, prior in PRIORS.items()}
    steps = steps_of(one, constants, TABLE)
    candidate = candidate_of(one, achieved_of(TRUTH), TABLE)
    expected = [
        candidate.costs.seconds(load_of(record)) for record in simulated(one, candidate).records
    ]
    assert steps.times(TRUTH) == pytest.approx(expected)
    assert steps.predicted(constants) == pytest.approx(steps.value)
    assert steps.predicted(TRUTH) == pytest.approx(steps_of(one, TRUTH, TABLE).value, rel=0.02)


def test_the_fit_finds_the_constants_of_an_engine_from_its_figures() -> None:
    loads = [(gpu, clients) for gpu in ("h100", "a100-80", "l4") for clients in (1, 8, 64)]
    cases = [measured(case(gpu, clients, source=gpu)) for gpu, clients in loads]
    constants = {name: prior[0] for name, prior in PRIORS.items()}
    known = Fit([steps_of(item, constants, TABLE) for item in cases])
    before = np.abs(known.errors(known.solve([], known.start, 0), range(len(cases))))
    fitted = known.solve(range(len(cases)), known.start, 6)
    errors = known.errors(fitted, range(len(cases)))
    assert np.median(np.abs(errors)) < 0.3 * np.median(before)
    assert np.median(np.abs(errors)) < 0.05
    sources = {gpu: Source(gpu, gpu, "2026", gpu) for gpu in ("h100", "a100-80", "l4")}
    published = Published(sources, tuple(cases))
    score = scored(known, fitted, published)
    # what a prediction does not know, it predicts worse
    assert np.mean(np.abs(score.alone)) >= np.mean(np.abs(score.fitted))
    # one step of the fit, which leaves pages out, is near the rounds that leave publishers out
    assert score.page == pytest.approx(score.publisher, abs=0.06)
    found = engine_fits(cases, fitted, score)
    assert list(found) == ["vllm"]
    assert found["vllm"].errors.num_cases == 9
    assert "vllm:" in written(found)
    assert len(summary_lines(published, cases, score)) > 10


def test_ranges_have_the_prediction_in_the_middle() -> None:
    errors = [random.Random(seed).gauss(0.1, 0.3) for seed in range(200)]
    factors = factors_of(errors)
    assert factors[2] == 1.0
    assert factors[0] < factors[1] <= 1.0 <= factors[3] < factors[4]
    middle = float(np.median(errors))
    assert sum(is_inside(error - middle, factors) for error in errors) == pytest.approx(160, abs=3)


def test_lengths_have_their_mean_and_no_longer_ones() -> None:
    rng = random.Random(0)
    assert lengths(200, None, 3, rng) == [200] * 3
    found = lengths(200, 1024, 1000, rng)
    assert sum(found) / 1000 == pytest.approx(200, rel=0.01)
    assert max(found) <= 1024
    assert max(found) > 800


def test_constants_have_bounds() -> None:
    constants = constants_of(np.full(len(NAMES), 1.0))
    assert constants["memory"] == 1.0
    assert constants["half_tokens"] == pytest.approx(math.e)
