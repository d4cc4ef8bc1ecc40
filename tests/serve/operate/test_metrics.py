"""`/metrics`: vLLM's names and types, the prefix, goodput, bounded labels, and the dashboard."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, Script
from live_server import live_server, until
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families

from quickstep.cli.flags.serve import _goodput
from quickstep.core.admission import AdmissionState
from quickstep.errors import ConfigError
from quickstep.server.app import create_app
from quickstep.server.operate.metrics import _Histogram
from quickstep.server.options import MetricsOptions, ServerOptions
from quickstep.types import FinishReason

# As documented by vLLM (docs.vllm.ai, "Production Metrics"): those that both servers have.
VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "iteration_tokens_total": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
}
GOODPUT = MetricsOptions(goodput_ms={"ttft": 60_000.0, "tpot": 60_000.0})


def scraped(
    options: MetricsOptions, bodies: list[dict[str, Any]], engine: FakeEngine | None = None
) -> str:
    async def run() -> str:
        app = create_app(engine or FakeEngine(), ServerOptions(metrics=options))
        async with client_of(app) as client:
            for body in bodies:
                await client.post(COMPLETIONS, json=body)
            return (await client.get("/metrics")).text

    return asyncio.run(run())


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    known = {"model_name": "fake", "engine": "0", **labels}
    return values(text)[name, frozenset(known.items())]


@pytest.mark.parametrize("prefix", ["quickstep", "vllm"])
def test_names_and_types_are_vllms(prefix: str) -> None:
    text = scraped(MetricsOptions(prefix=prefix), [{"prompt": "abc", "max_tokens": 2}])
    types = {one.name: one.type for one in text_string_to_metric_families(text)}
    assert {name: types.get(f"{prefix}:{name}") for name in VLLM} == VLLM
    assert all(name.startswith(f"{prefix}:") for name in types)


def test_labels_and_buckets_are_vllms() -> None:
    text = scraped(MetricsOptions(prefix="vllm"), [{"prompt": "abc", "max_tokens": 2, "n": 2}])
    assert value(text, "vllm:request_params_n_sum") == 2.0
    assert value(text, "vllm:request_params_max_tokens_sum") == 2.0
    assert value(text, "vllm:time_to_first_token_seconds_bucket", le="2560.0") == 2.0
    assert value(text, "vllm:request_prompt_tokens_bucket", le="2000.0") == 1.0
    label_sets = {frozenset(dict(labels)) - {"le"} for name, labels in values(text)}
    expected = [{"model_name", "engine"}, {"model_name", "engine", "finished_reason"}]
    assert {frozenset(one) for one in expected} <= label_sets


def test_histograms_are_those_of_prometheus_client() -> None:
    buckets = (0.5, 1.0, 2.5, 1000.0, 2e7)
    values = [0.0, 0.5, 0.6, 1.0, 1.0, 2.0, 2.5, 999.0, 1e6, 3e7]
    ours, theirs = (
        _Histogram("Text.", buckets),
        Histogram("a", "Text.", buckets=buckets, registry=None),
    )
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    samples = [
        (sample.name, sample.labels.get("le"), sample.value)
        for sample in ours.family("a", ("model", "0")).samples
    ]
    assert samples == [
        (sample.name, sample.labels.get("le"), sample.value)
        for family in theirs.collect()
        for sample in family.samples
        if sample.name != "a_created"
    ]


def test_a_prompt_is_counted_with_its_first_token_and_once() -> None:
    """A long answer would otherwise hide the work on its prompt until it ends."""
    engine = FakeEngine(Script(endless=True))
    body = {"prompt": ["abc", "de"], "n": 2, "stream": True, "max_tokens": 10**6}
    with live_server(engine, ServerOptions(drain_s=0.0)) as server:

        def prompt_tokens() -> float:
            text = httpx.get(f"{server.url}/metrics").text
            return value(text, "quickstep:prompt_tokens_total")

        assert prompt_tokens() == 0.0
        with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json=body) as response:
            lines = response.iter_lines()
            seen: set[int] = set()
            while seen != {0, 2}:  # the first choices of both prompts
                line = next(lines)
                if line.startswith("data: {"):
                    seen |= {json.loads(line[6:])["choices"][0]["index"]}
            assert prompt_tokens() == 7.0
        until(lambda: not engine.open_streams)
        assert prompt_tokens() == 7.0


def test_a_prompt_that_gives_no_token_is_counted_at_the_end() -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    text = scraped(MetricsOptions(), [body])
    assert value(text, "quickstep:generation_tokens_total") == 0.0
    assert value(text, "quickstep:prompt_tokens_total") == 4.0


def test_the_predicted_wait_is_that_of_one_more_request() -> None:
    queue = AdmissionState(num_waiting=3, num_free_slots=0, prompt_s=0.5, slot_s=2.0)
    text = scraped(MetricsOptions(), [], FakeEngine(admission=queue))
    assert value(text, "quickstep:predicted_queue_time_seconds") == 3 * 0.5 + 4 * 2.0
    text = scraped(MetricsOptions(), [])
    assert value(text, "quickstep:predicted_queue_time_seconds") == 0.0


def test_good_requests_keep_every_target() -> None:
    bodies = [{"prompt": "abc", "max_tokens": 3}] * 2
    text = scraped(GOODPUT, bodies)
    assert value(text, "quickstep:goodput_requests_total", good="true") == 2.0
    assert value(text, "quickstep:goodput_missed_total", target="ttft") == 0.0


def test_a_request_that_misses_a_target_is_not_good() -> None:
    text = scraped(MetricsOptions(goodput_ms={"ttft": 1e-6, "e2el": 6e5}), [{"prompt": "abc"}])
    assert value(text, "quickstep:goodput_requests_total", good="true") == 0.0
    assert value(text, "quickstep:goodput_requests_total", good="false") == 1.0
    assert value(text, "quickstep:goodput_missed_total", target="ttft") == 1.0
    assert value(text, "quickstep:goodput_missed_total", target="e2el") == 0.0


def test_a_failed_request_is_not_good() -> None:
    engine = FakeEngine(script=Script(reason=FinishReason.ERROR, error="planted"))
    text = scraped(GOODPUT, [{"prompt": "abc"}], engine)
    assert value(text, "quickstep:goodput_requests_total", good="false") == 1.0


def test_without_targets_there_is_no_goodput() -> None:
    assert "goodput" not in scraped(MetricsOptions(), [])


def test_clients_add_no_series() -> None:
    async def run() -> tuple[int, int]:
        async with client_of(create_app(FakeEngine())) as client:
            before = len(values((await client.get("/metrics")).text))
            for number in range(5):
                body = {"messages": MESSAGES, "model": f"m{number}", "user": f"u{number}"}
                await client.post(CHAT, json=body)
                await client.post(CHAT, json={**body, "model": "fake"})
            return before, len(values((await client.get("/metrics")).text))

    before, after = asyncio.run(run())
    assert before == after


@pytest.mark.parametrize("prefix", ["", "a b", "x:y", "9a", "a" * 40])
def test_a_prefix_that_prometheus_does_not_take_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-prefix"):
        MetricsOptions(prefix=prefix)


def test_goodput_targets_are_parsed_as_vllms_bench_does() -> None:
    assert _goodput(["ttft:500", "tpot:50"]) == {"ttft": 500.0, "tpot": 50.0}
    for text in ("ttft", "ttft:", "ttft:soon"):
        with pytest.raises(ConfigError, match="TARGET:MILLISECONDS"):
            _goodput([text])
    for targets in ({"itl": 5.0}, {"ttft": 0.0}, {"ttft": float("nan")}):
        with pytest.raises(ConfigError, match="--goodput"):
            MetricsOptions(goodput_ms=targets)
