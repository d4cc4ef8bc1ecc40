"""Usage over HTTP: a row of the ledger for every API, rate limits and budgets of API keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.errors import ConfigError
from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions, UsageOptions
from quickstep.server.usage.api_keys import ApiKey, ApiKeys, PriorityRange, read_key_file
from quickstep.server.usage.ledger import usage_totals
from quickstep.server.usage.limits import Budget, KeyLimits
from quickstep.server.usage.price_book import PriceBook, PriceEntry

PRICES = PriceBook(
    default=PriceEntry(
        input_per_million=2.0, cached_input_per_million=1.0, output_per_million=10.0
    ),
    models={"fake": PriceEntry(device_per_hour=3.6)},
)
ANN = {"authorization": "Bearer secret-a"}
BOB = {"authorization": "Bearer secret-b"}
Call = tuple[str, str, dict[str, Any] | None, dict[str, str]]
COMPLETION: Call = ("POST", COMPLETIONS, {"prompt": "ab", "max_tokens": 4}, ANN)


def options(path: Path | None = None, **limits: Any) -> ServerOptions:
    keys = ApiKeys([ApiKey("ann", "secret-a", limits=KeyLimits(**limits)), "bob=secret-b"])
    return ServerOptions(api_keys=keys, usage=UsageOptions(PRICES, path))


def answers(
    calls: Sequence[Call], given: ServerOptions, engine: FakeEngine | None = None
) -> list[httpx.Response]:
    """The answers of one app, one after the other."""

    async def run() -> list[httpx.Response]:
        async with client_of(create_app(engine or FakeEngine(), given)) as client:
            return [
                await client.request(method, path, json=body, headers=headers)
                for method, path, body, headers in calls
            ]

    return asyncio.run(run())


EVERY_API: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 4, "user": "someone"}),
    (COMPLETIONS, {"prompt": "ab", "max_tokens": 4, "stream": True}),
    ("/chat/completions", {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
    ("/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 4}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/completion", {"prompt": "a", "n_predict": 4}),
    ("/api/generate", {"model": "fake", "prompt": "a", "options": {"num_predict": 4}}),
    ("/api/embed", {"model": "fake", "input": "a"}),
]


def test_every_api_has_rows_in_the_ledger_with_key_and_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    calls: list[Call] = [("POST", url, body, ANN) for url, body in EVERY_API]
    for answer in answers(calls, options(path)):
        assert answer.status_code == 200, answer.text
    rows = usage_totals(path, ["key", "model", "adapter", "endpoint"])
    assert [row.group for row in rows] == sorted(("ann", "fake", "", url) for url, _ in EVERY_API)
    assert all(row.num_sequences == 1 and row.num_prompt_tokens > 0 for row in rows)
    by_endpoint = {row.group[3]: row for row in rows}
    chat = by_endpoint[CHAT]
    assert (chat.num_cached_tokens, chat.num_output_tokens) == (3, 4)
    # cached input at 1 dollar, other input at 2, output at 10, half a second at 3.6 per hour
    assert chat.cost_by_tokens_nusd == 1000 * (3 + 2 * (chat.num_prompt_tokens - 3) + 10 * 4)
    assert chat.cost_by_device_nusd == 500_000
    assert chat.device_ns == 500_000_000


def test_a_prompt_of_several_choices_is_charged_once(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    body = {"prompt": "ab", "max_tokens": 4, "n": 3}
    (answer,) = answers([("POST", COMPLETIONS, body, ANN)], options(path))
    usage = answer.json()["usage"]
    (total,) = usage_totals(path)
    assert total.num_sequences == 3
    assert total.num_prompt_tokens == usage["prompt_tokens"]
    assert total.num_output_tokens == usage["completion_tokens"] == 12
    assert total.num_cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]


def test_without_keys_rows_have_no_name_of_a_client(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    body = {"prompt": "ab", "max_tokens": 4, "user": "someone"}
    given = ServerOptions(usage=UsageOptions(None, path))
    answers([("POST", COMPLETIONS, body, {})], given)
    (row,) = usage_totals(path, ["key"])
    assert (row.group, row.cost_by_tokens_nusd) == (("",), 0)
    assert b"someone" not in path.read_bytes()


def test_the_ledger_has_no_key(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    answers([COMPLETION], options(path))
    assert b"secret-a" not in path.read_bytes()


def batch_lines(engine: FakeEngine, given: ServerOptions) -> list[dict[str, Any]]:
    """The lines of the output and the error file of a batch of two completions."""
    line = {"method": "POST", "url": COMPLETIONS, "body": {"prompt": "ab", "max_tokens": 4}}
    lines = "".join(json.dumps({**line, "custom_id": name}) + "\n" for name in "ab")

    async def run() -> list[dict[str, Any]]:
        async with client_of(create_app(engine, given)) as client:
            upload = await client.post(
                "/v1/files",
                files={"file": ("in.jsonl", lines)},
                data={"purpose": "batch"},
                headers=ANN,
            )
            request = {
                "input_file_id": upload.json()["id"],
                "endpoint": COMPLETIONS,
                "completion_window": "24h",
            }
            batch = (await client.post("/v1/batches", json=request, headers=ANN)).json()
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.001)  # its task runs in this loop
                batch = (await client.get(f"/v1/batches/{batch['id']}", headers=ANN)).json()
            read = []
            for name in ("output_file_id", "error_file_id"):
                if batch[name] is not None:
                    answer = await client.get(f"/v1/files/{batch[name]}/content", headers=ANN)
                    read += [json.loads(one) for one in answer.text.splitlines()]
            return read

    return asyncio.run(run())


def test_lines_of_batches_are_recorded_and_have_no_rate_limit(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    given = options(path, requests_per_minute=1, tokens_per_minute=1)
    assert [one["response"]["status_code"] for one in batch_lines(FakeEngine(), given)] == [200] * 2
    (row,) = usage_totals(path, ["key", "endpoint"])
    assert (row.group, row.num_sequences) == (("ann", "/v1/batches"), 2)


def test_lines_of_batches_fail_when_the_budget_is_spent(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    given = options(path, budgets=(Budget(tokens=1, per="month"),))
    answers([COMPLETION], given)
    for line in batch_lines(FakeEngine(), given):
        assert line["response"]["status_code"] == 429
        assert line["response"]["body"]["error"]["code"] == "insufficient_quota"


def test_requests_beyond_a_rate_limit_are_429_and_every_answer_reports_the_limit() -> None:
    calls: list[Call] = [
        ("GET", "/v1/models", None, ANN),
        COMPLETION,
        COMPLETION,
        COMPLETION,
        ("GET", "/v1/models", None, BOB),
        ("POST", COMPLETIONS, {"prompt": "ab", "max_tokens": 1}, BOB),
    ]
    models, first, second, third, *others = answers(calls, options(requests_per_minute=2))
    assert [one.status_code for one in (models, first, second, third)] == [200, 200, 200, 429]
    remaining = [one.headers["x-ratelimit-remaining-requests"] for one in (models, first, second)]
    assert remaining == ["2", "1", "0"]
    assert third.headers["x-ratelimit-limit-requests"] == "2"
    assert third.headers["x-ratelimit-reset-requests"] in ("1m0s", "59s")
    assert "x-ratelimit-limit-tokens" not in third.headers
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "the API key ann has a limit of 2 requests per minute" in error["message"]
    assert third.headers["retry-after"] in ("29", "30")
    for answer in others:
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_tokens_are_taken_from_the_limit_when_a_request_has_ended() -> None:
    engine = FakeEngine()
    large: Call = ("POST", COMPLETIONS, {"prompt": "ab", "max_tokens": 2000}, ANN)
    first, refused, small = answers(
        [large, large, COMPLETION], options(tokens_per_minute=1000), engine
    )
    usage = first.json()["usage"]["total_tokens"]
    # while it runs, all 1,000 are reserved; at its end, what it used is taken
    assert refused.status_code == 429
    assert "1000 tokens per minute" in refused.json()["error"]["message"]
    assert small.status_code == 200
    used = usage + small.json()["usage"]["total_tokens"]
    assert 1000 - used <= int(small.headers["x-ratelimit-remaining-tokens"]) <= 1002 - used


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_a_stream_reserves_its_tokens_until_its_end(url: str) -> None:
    body = {"max_tokens": 700, "stream": True}
    prompt: dict[str, Any] = {"messages": MESSAGES} if url == CHAT else {"prompt": "ab"}
    call: Call = ("POST", url, {**body, **prompt}, ANN)
    first, second = answers([call, call], options(tokens_per_minute=1000))
    assert (first.status_code, second.status_code) == (200, 200)
    # its head is sent while it runs
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 300
    assert 200 < int(second.headers["x-ratelimit-remaining-tokens"]) < 300


def test_a_request_that_is_refused_or_fails_reserves_nothing() -> None:
    bad: Call = ("POST", COMPLETIONS, {"prompt": "a" * 5000, "max_tokens": 100}, ANN)
    refused, answer = answers([bad, COMPLETION], options(tokens_per_minute=1500))
    assert refused.status_code == 400
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) > 1400


def test_embeddings_have_the_limits_too() -> None:
    call: Call = ("POST", "/v1/embeddings", {"input": "abc"}, ANN)
    first, second = answers([call, call], options(requests_per_minute=1))
    assert (first.status_code, second.status_code) == (200, 429)


def test_a_refusal_has_the_form_of_the_api() -> None:
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 4}
    call: Call = ("POST", "/v1/messages", body, ANN)
    *_, refused = answers([call, call], options(requests_per_minute=1))
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "2" != refused.headers["retry-after"] >= "5"


def test_a_budget_survives_a_restart_and_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    budget = Budget(usd=0.00007, per="month")
    given = options(path, budgets=(budget,))
    (first,) = answers([COMPLETION], given)
    assert first.status_code == 200
    second, third = answers([COMPLETION, COMPLETION], given)
    assert (second.status_code, third.status_code) == (200, 429)
    error = third.json()["error"]
    assert error["code"] == "insufficient_quota"
    assert "the API key ann has spent its budget of 7e-05 USD per month" in error["message"]
    assert "it resets at 20" in error["message"]
    assert int(third.headers["retry-after"]) >= 1
    (fourth,) = answers([COMPLETION], given)
    assert fourth.status_code == 429
    (other,) = answers([("POST", COMPLETIONS, {"prompt": "ab"}, BOB)], given)
    assert other.status_code == 200


KEYS = """
ann:
  key: secret-a
  priorities: -5..5
  requests_per_minute: 60
  tokens_per_minute: 100000
  budget: {usd: 5, per: day}
bob:
  key: secret-b
  budget:
    - {tokens: 1000000, per: day}
    - {device_s: 3600, per: month}
"""


def test_a_yaml_file_of_keys_has_their_limits(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    entries, is_shared = read_key_file(path)
    keys = ApiKeys([*entries, "carl=secret-c"])
    assert (keys.names, is_shared) == (("ann", "bob", "carl"), False)
    assert keys.owner([b"secret-b"]) == "bob"
    assert keys.priorities_of("ann") == PriorityRange(-5, 5)
    assert keys.limits == {
        "ann": KeyLimits(60, 100_000, (Budget(usd=5, per="day"),)),
        "bob": KeyLimits(
            budgets=(Budget(tokens=1_000_000, per="day"), Budget(device_s=3600, per="month"))
        ),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ann: secret-a", "ann: Expected `object`, got `str`"),
        ("ann: {requests_per_minute: 1}", "ann: Object missing required field `key`"),
        ("ann: {key: s, rpm: 1}", "ann: Object contains unknown field `rpm`"),
        ("a/b: {key: s}", "the name 'a/b' of an API key must be"),
        ("ann: {key: s, priorities: high}", "the priorities of the API key ann are 'high'"),
        ("ann: {key: s, requests_per_minute: 0}", "is 0, it must be at least 1"),
        ("ann: {key: s, budget: {usd: 1, per: week}}", "ann.budget.per: Invalid enum value 'week'"),
        ("ann: {key: s, budget: {per: day}}", "exactly one of usd, tokens and device_s"),
        ("ann: {key: s}\nann: {key: t}", "line 2: the key 'ann' occurs twice"),
    ],
)
def test_a_bad_file_of_keys_is_one_clear_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        ApiKeys(read_key_file(path)[0])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_budget_needs_the_files_that_it_is_counted_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --usage-db"):
        options(budgets=(Budget(tokens=1, per="day"),))
    keys = ApiKeys([ApiKey("ann", "s", limits=KeyLimits(budgets=(Budget(usd=1, per="day"),)))])
    with pytest.raises(ConfigError, match="needs --price-book"):
        ServerOptions(api_keys=keys, usage=UsageOptions(None, tmp_path / "usage.db"))


TIMES = {
    "queue_ms": 0.0,
    "prefill_ms": 250.0,
    "decode_ms": 750.0,
    "preempted_ms": 0.0,
    "paused_ms": 0.0,
    "adapter_ms": 0.0,
    "num_preemptions": 0,
    "device_s": 0.5,
    "rejected_s": 0.0,
    "num_drafts": 0,
    "num_accepted": 0,
    "cached_tokens": 3,
    "cache_miss": "last_block",
    "restore_ms": 0.0,
    "restored_tokens": 0,
}
WANTED = {"x-quickstep-timings": "true", **ANN}
WITH_TIMINGS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES, "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "abcdef", "max_tokens": 4}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
]


@pytest.mark.parametrize(("url", "body"), WITH_TIMINGS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_times_and_costs_that_the_ledger_records(
    url: str, body: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    path = tmp_path / "usage.db"
    body = {**body, "stream": stream}
    by_header, by_field, plain, off = answers(
        [
            ("POST", url, body, WANTED),
            ("POST", url, {**body, "quickstep_timings": True}, ANN),
            ("POST", url, body, ANN),
            ("POST", url, body, {**ANN, "x-quickstep-timings": "false"}),
        ],
        options(path),
    )
    for answer in (plain, off):
        assert "prefill_ms" not in answer.text
    (row,) = usage_totals(path)
    for answer in (by_header, by_field):
        timings = last_object(answer)["quickstep"]
        assert timings["sequences"] == [{"index": 0, **TIMES}]
        assert (timings["cached_tokens"], timings["device_s"]) == (3, 0.5)
        assert timings["cost_by_tokens_usd"] * 4e9 == pytest.approx(row.cost_by_tokens_nusd)
        assert timings["cost_by_device_usd"] * 4e9 == pytest.approx(row.cost_by_device_nusd)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 4}),
        ("/api/generate", {"model": "fake", "prompt": "ab", "options": {"num_predict": 4}}),
        ("/api/chat", {"model": "fake", "messages": MESSAGES, "options": {"num_predict": 4}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_header_gives_other_apis_the_same(url: str, body: dict[str, Any], stream: bool) -> None:
    body = {**body, "stream": stream}
    wanted, plain = answers([("POST", url, body, WANTED), ("POST", url, body, ANN)], options())
    assert wanted.status_code == 200 and "x-quickstep-ignored" not in wanted.headers
    lines = wanted.text.replace("data: ", "").splitlines()
    found = [json.loads(line)["quickstep"] for line in lines if '"quickstep":' in line]
    assert [one["sequences"] for one in found] == [[{"index": 0, **TIMES}]]
    assert found[0]["cost_by_tokens_usd"] > 0
    assert "prefill_ms" not in plain.text


def last_object(answer: httpx.Response) -> dict[str, Any]:
    """The response, or what the last event of a stream has in its place."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        read: dict[str, Any] = answer.json()
        return read
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(events[-1])
    response: dict[str, Any] = last.get("response", last)
    return response


def test_choices_of_one_prompt_have_times_each_and_one_sum() -> None:
    body = {"prompt": ["abcd", "efgh"], "max_tokens": 4, "n": 2, "quickstep_timings": True}
    (answer,) = answers([("POST", COMPLETIONS, body, {})], ServerOptions())
    timings = answer.json()["quickstep"]
    assert [sequence["index"] for sequence in timings["sequences"]] == [0, 1, 2, 3]
    assert (timings["cached_tokens"], timings["device_s"]) == (6, 2.0)
    assert (timings["cost_by_tokens_usd"], timings["cost_by_device_usd"]) == (None, None)
    assert [sequence["cached_tokens"] for sequence in timings["sequences"]] == [3] * 4
    assert [sequence["cache_miss"] for sequence in timings["sequences"]] == ["last_block"] * 4


def test_the_usage_of_a_stream_is_in_the_same_chunk_as_its_timings() -> None:
    body = {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}}
    (answer,) = answers([("POST", COMPLETIONS, body, WANTED)], options())
    last = last_object(answer)
    assert last["choices"] == [] and last["usage"]["total_tokens"] and last["quickstep"]


def test_the_header_is_reported_where_a_response_has_no_place_for_timings() -> None:
    beams = {"prompt": "ab", "max_tokens": 2, "n": 2, "use_beam_search": True}
    calls: list[Call] = [
        ("POST", "/completion", {"prompt": "ab", "n_predict": 4}, WANTED),
        ("POST", COMPLETIONS, beams, WANTED),
    ]
    for answer in answers(calls, options()):
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-quickstep-ignored"] == "x-quickstep-timings"
        assert "paused_ms" not in answer.text


def test_a_header_of_another_value_is_400() -> None:
    call: Call = ("POST", COMPLETIONS, {"prompt": "ab"}, {**ANN, "x-quickstep-timings": "yes"})
    (answer,) = answers([call], options())
    assert answer.status_code == 400
    assert "x-quickstep-timings is 'yes', it must be true or false" in answer.text


def test_a_model_without_a_price_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    prices = PriceBook(models={"other": PriceEntry(output_per_million=1.0)})
    answers([], ServerOptions(usage=UsageOptions(prices)))
    assert "no price for fake: its requests cost nothing" in caplog.text
    caplog.clear()
    answers([], ServerOptions(usage=UsageOptions(PRICES)))
    assert "no price" not in caplog.text


def test_the_engine_reports_what_its_responses_report(tmp_path: Path) -> None:
    """The bundled model: several choices, a beam search, embeddings."""
    engine = open_engine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu"),
            cache=CacheConfig(num_blocks=200),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        )
    )
    path = tmp_path / "usage.db"
    text = {"prompt": "import json, sys, os, re\n" * 4, "max_tokens": 5, "temperature": 0}
    bodies = [{**text, "n": 2, "ignore_eos": True}, {**text, "n": 2, "use_beam_search": True}]

    async def run() -> list[dict[str, Any]]:
        async with client_of(create_app(engine, options(path))) as client:  # type: ignore[arg-type]
            await client.post("/v1/embeddings", json={"input": "a b c"}, headers=BOB)
            return [
                (await client.post(COMPLETIONS, json=body, headers=ANN)).json()["usage"]
                for body in bodies
            ]

    choices, beams = asyncio.run(run())
    ann, bob = usage_totals(path, ["key", "endpoint"])
    assert (ann.group, bob.group) == (("ann", COMPLETIONS), ("bob", "/v1/embeddings"))
    assert ann.num_prompt_tokens == choices["prompt_tokens"] + beams["prompt_tokens"]
    found = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (choices, beams)]
    assert ann.num_cached_tokens == sum(found)
    assert found[1] > found[0] == 0
    # two choices; the prompt's token, then two beams of four more
    assert ann.num_output_tokens == choices["completion_tokens"] + 1 + 2 * 4
    assert (bob.num_output_tokens, bob.num_prompt_tokens > 0) == (0, True)
    totals = engine.stats().scheduler.totals
    busy_ns = (totals.busy_s - totals.rejected_s) * 1e9
    assert ann.device_ns + bob.device_ns == pytest.approx(busy_ns, rel=1e-6)
