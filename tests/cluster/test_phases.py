"""`quickstep serve --prefill --decode`: prompts on one engine, the rest on another one."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_process import serving

PROMPTS = ["\n".join(f"def f{i}_{j}(a, b):" for j in range(60)) for i in range(12)]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "seed": 1, "logprobs": 2},
    {"temperature": 0.9, "seed": 2, "n": 3, "repetition_penalty": 1.2},
    {"temperature": 0.0, "seed": 4, "stop": ["return"]},
    {"temperature": 1.0, "seed": 3, "structured_outputs": {"json": SCHEMA}},
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    flags = ("--prefill", "1", "--decode", "1", "--threads", "1", "--num-blocks", "600")
    with serving("demo", *flags) as (process, where):
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield where


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """The answers of one engine."""
    with serving("demo", "--threads", "1") as (process, where):
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        return all_answers(where)


def completed(address: str, number: int) -> dict[str, Any]:
    body = {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": 80,
        **KINDS[number % len(KINDS)],
    }
    response = httpx.post(f"{address}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    answer["usage"].pop("prompt_tokens_details", None)
    return {name: answer[name] for name in ("choices", "usage", "system_fingerprint")}


def health(address: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{address}/health", timeout=30).json()
    return found


def all_answers(address: str) -> list[dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda number: completed(address, number), range(16)))


def test_answers_are_those_of_one_engine(address: str, expected: list[dict[str, Any]]) -> None:
    assert all_answers(address) == expected
    found = health(address)
    assert [replica["role"] for replica in found["replicas"]] == ["prefill", "decode"]
    assert found["num_handovers"] > 0
    deadline_s = time.monotonic() + 10  # the last transfers may still be open
    while health(address)["num_used_blocks"] and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert health(address)["num_used_blocks"] == 0
    metrics = httpx.get(f"{address}/metrics", timeout=30).text
    assert "quickstep:handovers_total" in metrics


def test_the_seconds_and_the_cached_tokens_of_divided_requests_add_up(address: str) -> None:
    """A request has what both engines spent, and its prompt is not cached by the transfer."""

    def cached(number: int) -> int:
        prompt = f"# {number}\n{PROMPTS[number]}"
        body = {"prompt": prompt, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=120).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    num_before = health(address)["num_handovers"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert max(pool.map(cached, range(8))) < 64
    assert health(address)["num_handovers"] > num_before
    lines = httpx.get(f"{address}/debug/steps?last_s=600", timeout=30).text.splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if record["kind"] == "step"]
    ended = [record["timings"] for record in records if record["kind"] == "sequence"]
    charged_s = sum(step["decode_s"] + step["prefill_s"] for step in steps)
    parts = ("device_s", "recomputed_s", "rejected_s")
    assert {step["replica"] for step in steps} == {0, 1}
    assert sum(timings[part] for timings in ended for part in parts) == pytest.approx(charged_s)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_either_engine_may_end(address: str, expected: list[dict[str, Any]], role: str) -> None:
    (process,) = [
        replica["process_id"] for replica in health(address)["replicas"] if replica["role"] == role
    ]
    killer = threading.Timer(0.15, os.kill, (process, signal.SIGKILL))
    killer.start()
    try:
        assert all_answers(address) == expected
    finally:
        killer.join()
