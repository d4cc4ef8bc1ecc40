"""Prices: the file, which entry a price comes from, and both costs of a usage."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.server.usage.price_book import (
    Cost,
    Price,
    PriceBook,
    PriceEntry,
    SequenceUsage,
    cost,
    read_price_book,
    sequence_usage,
)
from quickstep.types import FinishReason, SequenceTimings

BOOK = """
default: {input_per_million: 0.15, output_per_million: 0.60, device_per_hour: 3.6}
models:
  small: {input_per_million: 0.10, cached_input_per_million: 0.05}
adapters:
  sql: {output_per_million: 0.90}
"""
TIMINGS = SequenceTimings(
    arrival_s=0.0,
    first_scheduled_s=0.5,
    first_token_s=1.0,
    finished_s=2.0,
    queue_s=0.5,
    prefill_s=0.5,
    decode_s=1.0,
    preempted_s=0.0,
    device_s=0.25,
    num_preemptions=0,
    num_prompt_tokens=100,
    num_cached_tokens=40,
    num_output_tokens=7,
    num_blocks=1,
)


def book(tmp_path: Path, text: str) -> PriceBook:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    return read_price_book(path)


def test_each_price_comes_from_the_most_specific_entry_that_has_it(tmp_path: Path) -> None:
    prices = book(tmp_path, BOOK)
    assert prices.price("other") == Price(0.15, 0.15, 0.60, 3.6)
    assert prices.price("small") == Price(0.10, 0.05, 0.60, 3.6)
    assert prices.price("small", "sql") == Price(0.10, 0.05, 0.90, 3.6)
    assert prices.price("other", "unknown") == prices.price("other")


def test_cached_input_never_costs_more_than_the_input_of_its_entry_by_inheritance() -> None:
    prices = PriceBook(
        default=PriceEntry(input_per_million=2.0, cached_input_per_million=1.0),
        models={"cheap": PriceEntry(input_per_million=0.5)},
    )
    assert prices.price("cheap").cached_input_per_million == 0.5


def test_a_usage_has_a_cost_by_tokens_and_one_by_device_seconds() -> None:
    usage = SequenceUsage(1000, 400, 50, device_s=2.0)
    both = cost(usage, Price(0.15, 0.075, 0.60, 3.6))
    # 600 * 150 + 400 * 75 + 50 * 600 billionths; 2 s of 0.001 dollars
    assert both == Cost(150_000, 2_000_000)
    assert (both.by_tokens_usd, both.by_device_usd) == (0.00015, 0.002)


@given(
    *[st.integers(0, 10**6)] * 3,
    st.floats(0.0, 1e3),
    *[st.sampled_from((0.0, 0.0375, 0.15, 0.6, 1.1, 7.0))] * 4,
)
def test_costs_are_rounded_to_the_nearest_unit(
    new: int,
    cached: int,
    num_outputs: int,
    device_s: float,
    input_: float,
    cached_input: float,
    output: float,
    per_hour: float,
) -> None:
    """Neither up nor down: over many requests the roundings even out."""
    usage = SequenceUsage(new + cached, cached, num_outputs, device_s)
    both = cost(usage, Price(input_, cached_input, output, per_hour))
    thousandths = new * Fraction(input_) + cached * Fraction(cached_input)
    exact = 1000 * (thousandths + num_outputs * Fraction(output))
    assert abs(both.by_tokens_nusd - exact) <= Fraction(1, 2) + exact / 10**12
    exact = 10**9 * Fraction(device_s) * Fraction(per_hour) / 3600
    assert abs(both.by_device_nusd - exact) <= Fraction(1, 2) + exact / 10**12


@given(
    st.lists(st.tuples(*[st.integers(0, 10**6)] * 3), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_a_total_does_not_depend_on_the_order(usages: list[tuple[int, ...]], order) -> None:
    price = Price(0.15, 0.0375, 0.60, 1.1)
    costs = [
        cost(SequenceUsage(cached + new, cached, output, output / 7), price)
        for cached, new, output in usages
    ]
    shuffled = costs[:]
    order.shuffle(shuffled)
    assert Cost.total(costs) == Cost.total(shuffled)


def test_a_prompt_counts_once_for_its_sequences_and_only_if_it_was_computed() -> None:
    first = sequence_usage(FinishReason.EOS, TIMINGS, pays_prompt=True)
    assert first == SequenceUsage(100, 40, 7, 0.25)
    second = sequence_usage(FinishReason.EOS, TIMINGS, pays_prompt=False)
    assert second == SequenceUsage(0, 0, 7, 0.25)
    queued = replace(TIMINGS, first_scheduled_s=None, num_output_tokens=0, device_s=0.0)
    assert sequence_usage(FinishReason.ABORTED, queued, pays_prompt=True) == SequenceUsage()


FREE = (FinishReason.ERROR, FinishReason.SHUTDOWN)


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason not in FREE])
def test_however_else_a_sequence_ends_its_tokens_are_paid(reason: FinishReason) -> None:
    """Also if its client ends it, or its time is over: it has the text so far."""
    usage = sequence_usage(reason, TIMINGS, pays_prompt=True)
    assert usage == SequenceUsage(100, 40, 7, 0.25)


@pytest.mark.parametrize("reason", FREE)
def test_what_the_server_failed_to_finish_costs_device_time_only(reason: FinishReason) -> None:
    assert sequence_usage(reason, TIMINGS, pays_prompt=True) == SequenceUsage(device_s=0.25)


BAD = [
    ("", "has no price"),
    ("default: {}", "has no price"),
    ("- 1", "Expected `object`, got `array`"),
    ("default: {input: 1}", "default: Object contains unknown field `input`"),
    ("models: {m: {}, n: {input: 1}}", "models.n: Object contains unknown field `input`"),
    ("models: {m: 1}", "models.m: Expected `object`, got `int`"),
    ("models: []", "models: Expected `object`, got `array`"),
    ("models: {1: {}}", "a key in models: Expected `str`, got `int`"),
    ("prices: {}", "unknown field `prices`"),
    ("default: {input_per_million: cheap}", "default.input_per_million: Expected `float | null`"),
    ("default: {input_per_million: -1}", "default.input_per_million is -1"),
    ("models: {m: {output_per_million: .nan}}", "models.m.output_per_million is nan"),
    ("adapters: {a: {device_per_hour: .inf}}", "adapters.a.device_per_hour is inf"),
    ("models: {m: {output_per_million: 1}, m: {}}", "line 1: the key 'm' occurs twice"),
    ("default: {input_per_million: 1", "is not YAML: line 1"),
    ("\x00", "is not YAML"),
    ("default: !!python/object/apply:os.system [true]", "is not YAML"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_bad_file_is_one_clear_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        book(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"--price-book {tmp_path}/prices.yaml")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--price-book .*none cannot be read: No such file"):
        read_price_book(tmp_path / "none")
