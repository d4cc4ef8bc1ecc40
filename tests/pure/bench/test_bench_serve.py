"""What `bench serve` draws and how it judges, without a server."""

from __future__ import annotations

import random

import pytest

from quickstep.bench.lengths import random_arrivals
from quickstep.bench.serve import Objectives, RequestResult, find_target, percentile, serve_figures
from quickstep.errors import ConfigError


def test_arrivals_follow_the_seed_and_every_tenth_prompt_is_long() -> None:
    first, again = (random_arrivals(random.Random(5), 400, rate=2.0) for _ in range(2))
    assert first == again
    assert [place for place, one in enumerate(first) if one.lengths.num_inputs == 2000] == [
        *range(9, 400, 10)
    ]
    assert 150 < first[-1].at_s < 250


def test_figures_count_from_the_time_a_request_was_due() -> None:
    quick = RequestResult(due_s=10.0, chunks_s=[10.1, 10.2, 10.3], num_tokens=3)
    stalled = RequestResult(due_s=11.0, chunks_s=[12.0, 13.0], num_tokens=2)
    found = serve_figures([quick, stalled], Objectives(ttft_ms=1500, itl_ms=200))
    assert found["ttft_p50_ms"] == pytest.approx(1000)
    assert found["tpot_max_ms"] == pytest.approx(1000)
    assert found["itl_p50_ms"] == pytest.approx(100)
    assert found["wall_s"] == pytest.approx(3)
    assert found["goodput_share"] == 0.5
    assert found["output_tokens_per_s"] == pytest.approx(5 / 3)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([], 0.99) == 0.0


def test_a_url_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="it must be like http"):
        find_target("localhost:8000")
