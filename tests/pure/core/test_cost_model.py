"""The step-time model: it learns, it stays non-negative, and nothing upsets it."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from quickstep.core.cost_model import Coefficients, LinearCostModel, Prediction, StepLoad
from quickstep.sampling_params import Grammar
from quickstep.types import Phase, SamplingParams, StepRow

TRUE = Coefficients(8e-3, token_s=2e-5, row_s=1.5e-4, kv_token_s=2e-8, pair_s=1e-8)
LOADS = st.builds(
    StepLoad,
    st.integers(0, 4096),
    st.integers(0, 256),
    st.integers(0, 2_000_000),
    st.integers(0, 2_000_000),
    st.integers(0, 4096),
    st.integers(0, 256),
    st.integers(0, 256),
    st.integers(0, 256),
    st.integers(0, 256),
)
SECONDS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-9, 10.0)


def true_seconds(load: StepLoad, coefficients: Coefficients = TRUE) -> float:
    return LinearCostModel(coefficients).seconds(load)


def random_load(rng: Random) -> StepLoad:
    """Decode steps of many sizes, and now and then a prefill."""
    rows = rng.randint(1, 64)
    chunk = rng.choice((0, 0, 100, 512, 2000))
    decodes = StepLoad(rows, rows, context := rows * rng.randint(10, 3000), context)
    return decodes + StepLoad.of_span(rng.randint(0, 4000), chunk) if chunk else decodes


def worst_error(model: LinearCostModel, coefficients: Coefficients = TRUE) -> float:
    rng = Random(99)
    loads = [random_load(rng) for _ in range(200)]
    expected = [true_seconds(load, coefficients) for load in loads]
    pairs = zip(loads, expected, strict=True)
    return max(abs(model.seconds(load) / seconds - 1) for load, seconds in pairs)


def test_predictions_are_sane_before_any_step() -> None:
    model = LinearCostModel()
    one, many = model.seconds(StepLoad.of_span(9, 1)), model.seconds(StepLoad.of_span(100, 2048))
    assert 1e-4 < one < many < 10.0


def test_it_learns_a_linear_machine() -> None:
    rng, model = Random(1), LinearCostModel()
    before = worst_error(model)
    for _ in range(1500):
        load = random_load(rng)
        model.observe(load, true_seconds(load) * rng.uniform(0.97, 1.03))
    assert before > 0.5
    assert worst_error(model) < 0.05


def test_it_is_measured_as_costing_nothing() -> None:
    rng, model = Random(6), LinearCostModel(Coefficients(8e-3, 2e-5, 0.0, 0.0, 0.0))
    for _ in range(1500):
        load = random_load(rng)
        model.observe(load, true_seconds(load))
    assert worst_error(model) < 0.05


def test_it_follows_a_machine_that_changes() -> None:
    rng, model = Random(2), LinearCostModel()
    slower = Coefficients(*(3 * value for value in (8e-3, 2e-5, 1.5e-4, 2e-8, 1e-8)))
    for number in range(2000):
        load = random_load(rng)
        model.observe(load, true_seconds(load, TRUE if number < 1000 else slower))
    assert worst_error(model, slower) < 0.05


def test_of_short_steps_only_some_are_learnt_from() -> None:
    rng, model = Random(9), LinearCostModel()
    tiny = Coefficients(*(value / 100 for value in (8e-3, 2e-5, 1.5e-4, 2e-8, 1e-8)))
    loads = [random_load(rng) for _ in range(20_000)]
    seconds = [true_seconds(load, tiny) for load in loads]
    for load, one in zip(loads, seconds, strict=True):
        model.observe(load, one)
    assert 64 < model.num_steps <= 64 + sum(seconds) / 2e-3 < len(loads) / 2
    assert worst_error(model, tiny) < 0.1

    before = model.num_steps
    for load, one in zip(loads[:100], seconds, strict=False):
        model.learn(load, one)
    assert model.num_steps == before + 100


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_machine_of_another_speed_is_known_from_its_first_step(factor: float) -> None:
    model = LinearCostModel(TRUE)
    machine = Coefficients(*(factor * value for value in (8e-3, 2e-5, 1.5e-4, 2e-8, 1e-8)))
    load = StepLoad(100, 4, 1000, 3000)
    model.observe(load, true_seconds(load, machine))
    assert worst_error(model, machine) < 0.01


def test_a_hundredfold_slow_first_step_is_forgiven() -> None:
    rng, model = Random(5), LinearCostModel()
    for number in range(1000):
        load = random_load(rng)
        model.observe(load, true_seconds(load) * (100 if number == 0 else 1))
    assert worst_error(model) < 0.05


def test_a_hiccup_weighs_little() -> None:
    rng, model = Random(3), LinearCostModel()
    for number in range(1500):
        load = random_load(rng)
        model.observe(load, true_seconds(load) * (200 if number % 50 == 0 else 1))
    assert worst_error(model) < 0.1


def test_a_workload_of_one_shape_is_predicted() -> None:
    model, load = LinearCostModel(), StepLoad(8, 8, 800, 800)
    for _ in range(300):
        model.observe(load, 0.02)
    assert model.seconds(load) == pytest.approx(0.02, rel=0.02)


def test_a_machine_that_slows_down_is_believed_within_a_few_steps() -> None:
    rng, model = Random(8), LinearCostModel()
    for number in range(1010):
        load = random_load(rng)
        model.observe(load, true_seconds(load) * (1.4 if number >= 1000 else 1.0))
    slower = Coefficients(*(1.4 * value for value in (8e-3, 2e-5, 1.5e-4, 2e-8, 1e-8)))
    assert worst_error(model, slower) < 0.15


def test_a_chunk_costs_more_behind_a_long_context() -> None:
    rng, model = Random(7), LinearCostModel()
    for _ in range(1500):
        load = random_load(rng)
        model.observe(load, true_seconds(load))
    chunks = [StepLoad.of_span(start, 100) for start in (0, 4000)]
    for chunk in chunks:
        assert model.seconds(chunk) == pytest.approx(true_seconds(chunk), rel=0.05)
    assert model.seconds(chunks[1]) > model.seconds(chunks[0]) + 0.5 * TRUE.pair_s * 400_000


def test_the_load_of_a_row_counts_what_each_token_sees() -> None:
    assert StepLoad.of_span(start=5, num_tokens=3) == StepLoad(3, 1, 8, 6 + 7 + 8)
    assert StepLoad.of_span(0, 2) + StepLoad.of_span(9, 1) == StepLoad(3, 2, 12, 3 + 10)


def test_the_same_observations_give_the_same_predictions() -> None:
    models = [LinearCostModel(), LinearCostModel()]
    for model in models:
        rng = Random(4)
        for _ in range(50):
            model.observe(random_load(rng), rng.random())
    assert models[0].coefficients == models[1].coefficients


def test_it_learns_what_a_scored_position_costs() -> None:
    rng, model = Random(9), LinearCostModel()
    machine = Coefficients(8e-3, 2e-5, 1.5e-4, 2e-8, 1e-8, score_s=3e-4)
    for _ in range(1500):
        load, chunk = random_load(rng), rng.choice((0, 100, 512))
        load += StepLoad.of_span(rng.randint(0, 4000), chunk, num_scored=chunk)
        model.observe(load, true_seconds(load, machine))
    for num_scored in (0, 16, 500):
        chunk = StepLoad.of_span(0, 512, num_scored)
        assert model.seconds(chunk) == pytest.approx(true_seconds(chunk, machine), rel=0.05)


def test_a_scored_position_costs_by_the_vocabulary_before_one_was_seen() -> None:
    chunk = StepLoad.of_span(0, 100, num_scored=100)
    plain = StepLoad.of_span(0, 100)
    small, large = (LinearCostModel(Coefficients.of_vocabulary(n)) for n in (1_000, 200_000))
    assert small.seconds(plain) == large.seconds(plain)
    one = StepLoad.of_span(0, 100, num_scored=1)
    extra = [model.seconds(chunk) - model.seconds(one) for model in (small, large)]
    assert extra[1] == pytest.approx(200 * extra[0])


@pytest.mark.parametrize("unit", ["num_logits_rows", "num_grammar_rows", "num_logprobs_rows"])
def test_it_learns_what_a_row_costs_by_what_it_samples(unit: str) -> None:
    rng, model = Random(11), LinearCostModel()
    machine = Coefficients(8e-3, 2e-5, 1.5e-4, 2e-8, 1e-8, 0.0, 0.0, 0.0, 0.0)
    plain, costly = random_load(rng), StepLoad(8, 8, 800, 800)
    for _ in range(1500):
        load = random_load(rng)
        num_rows = rng.randint(0, load.num_rows)
        seconds = true_seconds(load, machine) + 5e-4 * num_rows
        model.observe(replace(load, **{unit: num_rows}), seconds)
    for num_rows in (0, 8):
        expected = true_seconds(costly, machine) + 5e-4 * num_rows
        load = replace(costly, **{unit: num_rows})
        assert model.seconds(load) == pytest.approx(expected, rel=0.05)
    assert model.seconds(plain) == pytest.approx(true_seconds(plain, machine), rel=0.05)


def test_it_learns_what_a_step_reads_once_and_from_where_on_tokens_cost_more() -> None:
    rng, model = Random(13), LinearCostModel()
    machine = Coefficients(
        8e-3, 2e-5, logits_step_s=4e-3, token_beyond_32_s=2e-4, token_beyond_256_s=1e-4
    )
    for _ in range(1500):
        load = random_load(rng)
        if rng.random() < 0.7:
            load = replace(load, num_logits_rows=rng.randint(1, load.num_rows))
        model.observe(load, true_seconds(load, machine))
    for num_tokens in (1, 32, 60, 300, 1000):
        load = StepLoad.of_span(0, num_tokens)
        for of in (load, replace(load, num_logits_rows=1)):
            assert model.seconds(of) == pytest.approx(true_seconds(of, machine), rel=0.1)


def test_rows_cost_what_grows_with_them_in_their_step() -> None:
    model = LinearCostModel(
        Coefficients(
            8e-3,
            1e-5,
            row_s=2e-5,
            kv_token_s=3e-8,
            logits_step_s=4e-3,
            token_beyond_32_s=2e-4,
            token_beyond_256_s=1e-4,
        )
    )
    few = [StepLoad.of_span(start, 1, num_logits_rows=1) for start in (5, 900)]
    in_short_step = model.unit_prices(sum(few, StepLoad()))
    assert in_short_step.of(few[0]) == pytest.approx(3e-5 + 6 * 3e-8)
    assert in_short_step.of(few[1]) == pytest.approx(3e-5 + 901 * 3e-8)
    many = [*few, StepLoad.of_span(0, 400)]
    in_long_step = model.unit_prices(sum(many, StepLoad()))
    assert in_long_step.of(few[0]) == pytest.approx(33e-5 + 6 * 3e-8)
    assert in_long_step.of(many[2]) == pytest.approx(400 * 31e-5 + 2e-5 + 400 * 3e-8)


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_single_outlier_moves_no_prediction(factor: float) -> None:
    rng, model = Random(12), LinearCostModel()
    for _ in range(1000):
        load = random_load(rng)
        model.observe(load, true_seconds(load))
    before = worst_error(model)
    load = random_load(rng)
    model.observe(load, factor * true_seconds(load))
    assert worst_error(model) < before + 0.1
    for _ in range(20):
        load = random_load(rng)
        model.observe(load, true_seconds(load))
    assert worst_error(model) < 0.05


def test_a_prediction_outside_of_what_was_measured_is_marked() -> None:
    model, small, large = LinearCostModel(), StepLoad(1, 1, 100, 100), StepLoad(8, 8, 800, 800)
    assert model.range is None
    assert model.predict(small).is_extrapolated
    for load in (small, large):
        model.observe(load, true_seconds(load))
    assert model.range == (small, large)
    inside = StepLoad(4, 4, 400, 400)
    assert model.predict(inside) == Prediction(model.seconds(inside), is_extrapolated=False)
    for changes in ({"num_tokens": 9}, {"num_kv_tokens": 50}, {"num_scored": 1}):
        assert model.predict(replace(inside, **changes)).is_extrapolated


def test_the_load_of_a_row_says_what_is_done_with_its_logits() -> None:
    row = StepRow(0, 10, 1, (5,), (), Phase.DECODE, emits=True, output_position=0)
    plain = StepLoad.of_span(10, 1, num_logits_rows=1)
    assert StepLoad.of_row(row) == StepLoad.of_row(row, SamplingParams()) == plain
    lists = StepLoad.of_row(row, SamplingParams(logprobs=4))
    assert lists == replace(plain, num_logprobs_rows=1)
    inner = replace(row, emits=False)
    assert StepLoad.of_row(inner, SamplingParams(logprobs=4)) == StepLoad.of_span(10, 1)
    assert StepLoad.of_row(replace(row, adapter="a")) == replace(plain, num_adapter_rows=1)


def test_a_draft_is_a_token_with_logits_and_a_mask_of_its_own() -> None:
    row = StepRow(0, 10, 4, (5, 6, 7, 8), (), Phase.DECODE, True, 0, num_drafts=3)
    span = StepLoad.of_span(10, 4, num_logits_rows=4)
    assert StepLoad.of_row(row) == span
    grammar = Grammar("regex", "a")
    restricted = StepLoad.of_row(row, SamplingParams(grammar=grammar, logprobs=0))
    assert restricted == replace(span, num_grammar_rows=4, num_logprobs_rows=4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(LOADS, SECONDS), max_size=30), LOADS)
def test_predictions_stay_finite_and_non_negative(
    observations: list[tuple[StepLoad, float]], requested: StepLoad
) -> None:
    model = LinearCostModel()
    for load, seconds in observations:
        model.observe(load, seconds)
    for value in astuple(model.coefficients):
        assert math.isfinite(value)
        assert value >= 0.0
    assert model.seconds(requested) >= 0.0


@pytest.mark.parametrize("num_cold", [1, 2, 5])
def test_cold_first_steps_do_not_scale_the_model(num_cold: int) -> None:
    def seconds(load: StepLoad) -> float:
        return 2e-3 + 5e-5 * load.num_tokens + 1e-4 * load.num_rows

    model = LinearCostModel()
    prompt = StepLoad.of_span(0, 512, num_logits_rows=1)
    decode = StepLoad(8, 8, 8000, 8000, num_logits_rows=8)
    for _ in range(num_cold):
        model.observe(prompt, 1.0)
    for _ in range(5):
        model.observe(decode, seconds(decode))
    assert model.seconds(prompt) < 3.0 * seconds(prompt)
    assert model.seconds(decode) < 1.5 * seconds(decode)
