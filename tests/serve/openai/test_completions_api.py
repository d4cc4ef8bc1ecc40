"""`/v1/completions` over the scripted engine: forms of the prompt, choices, logprobs, usage."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from client import COMPLETIONS, chunks, client_of
from fake_engine import WORDS, FakeEngine, Script

from quickstep.server.app import create_app
from quickstep.types import FinishReason

TEXT = "".join(WORDS)


def post(body: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.post(COMPLETIONS, json=body)

    return asyncio.run(run())


def test_a_text_prompt_is_completed_with_usage_and_seed() -> None:
    answer = post({"model": "fake", "prompt": "abc", "max_tokens": 100}).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake"
    assert answer["system_fingerprint"] == "fp_fake"
    assert answer["seed"] == 1234
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": TEXT,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "seed": 1234,
    }
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 9,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_max_tokens_is_16_unless_given() -> None:
    engine = FakeEngine()
    post({"prompt": "abc"}, engine)
    assert engine.submitted[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ("ab", [(1, 97, 98)]),
        (["a", "b"], [(1, 97), (1, 98)]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
    ids=["text", "texts", "ids", "lists-of-ids"],
)
def test_every_form_of_the_prompt_is_taken(prompt: Any, submitted: list[tuple[int, ...]]) -> None:
    engine = FakeEngine()
    answer = post({"prompt": prompt, "n": 2}, engine).json()
    assert [item.prompt for item in engine.submitted] == submitted
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(submitted)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, submitted))


def test_special_tokens_can_be_left_out() -> None:
    engine = FakeEngine()
    post({"prompt": "ab", "add_special_tokens": False}, engine)
    assert engine.submitted[0].prompt == (97, 98)


@pytest.mark.parametrize(
    "prompt", [[], ["a", 1], [[1], "a"], [256], [[-1]], "", [[]], {}, None, [[[1]]]]
)
def test_an_unusable_prompt_is_400_and_nothing_stays_submitted(prompt: Any) -> None:
    engine = FakeEngine()
    response = post({"prompt": prompt, "add_special_tokens": False}, engine)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    assert not engine.open_streams


def test_one_bad_prompt_of_a_list_takes_the_others_back() -> None:
    engine = FakeEngine()
    response = post({"prompt": [[1], []]}, engine)
    assert response.status_code == 400
    assert len(engine.submitted) == 1
    assert not engine.open_streams


def test_logprobs_are_four_parallel_lists() -> None:
    (choice,) = post({"prompt": "a", "max_tokens": 2, "logprobs": 2}).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"Hello": -0.25, " world": -1.5}, {" world": -0.25, "Hello": -0.5}],
        "text_offset": [0, 5],
    }


def test_streamed_choices_add_up_to_the_whole_answer() -> None:
    body = {"prompt": ["a", "b"], "n": 2, "logprobs": 1}
    whole = post(body).json()
    parts = chunks(post({**body, "stream": True}).text)
    assert len({(part["id"], part["created"], part["object"]) for part in parts}) == 1
    for choice in whole["choices"]:
        mine = [
            part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(item["text"] for item in mine) == choice["text"]
        listed = [item["logprobs"] for item in mine if item["logprobs"]]
        for name, values in choice["logprobs"].items():
            assert [value for item in listed for value in item[name]] == values
        reasons = [item["finish_reason"] for item in mine]
        assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]


def test_usage_comes_once_and_last_when_requested() -> None:
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}
    *news, last = chunks(post(body).text)
    assert all(part["usage"] is None and part["choices"] for part in news)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 9


def test_usage_is_not_sent_unasked() -> None:
    assert all("usage" not in part for part in chunks(post({"prompt": "a", "stream": True}).text))


def test_continuous_usage_counts_along() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "stream": True, "stream_options": options, "max_tokens": 3}
    counts = [part["usage"]["completion_tokens"] for part in chunks(post(body).text)]
    assert counts == [1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP_STRING, "stop"),
        (FinishReason.CONTEXT_LIMIT, "length"),
        (FinishReason.DEADLINE, "timeout"),
        (FinishReason.REPETITION, "repetition"),
        (FinishReason.ABORTED, "abort"),
    ],
)
def test_finish_reasons_are_openais(reason: FinishReason, told: str) -> None:
    (choice,) = post({"prompt": "a"}, FakeEngine(Script(reason))).json()["choices"]
    assert choice["finish_reason"] == told


def test_a_failed_sequence_is_an_error_answer() -> None:
    engine = FakeEngine(Script(FinishReason.ERROR, error="the logits are NaN"))
    response = post({"prompt": "a"}, engine)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the logits are NaN"
    assert not engine.open_streams


def test_a_request_that_the_shutdown_cuts_is_503() -> None:
    response = post({"prompt": "a"}, FakeEngine(Script(FinishReason.SHUTDOWN)))
    assert response.status_code == 503
    assert "send the request again" in response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_failure_within_a_stream_is_an_error_event(prompt: Any) -> None:
    engine = FakeEngine(Script(FinishReason.ERROR, error="the logits are NaN"))
    *_, last = chunks(post({"prompt": prompt, "stream": True}, engine).text)
    assert last["error"] == {
        "message": "the logits are NaN",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert not engine.open_streams


def test_an_unexpected_failure_within_a_stream_shows_no_insides() -> None:
    engine = FakeEngine(Script(raises=RuntimeError("secret")))
    response = post({"prompt": "a", "stream": True}, engine)
    assert "secret" not in response.text
    assert chunks(response.text)[-1]["error"]["code"] == "internal_error"
    assert not engine.open_streams


def test_an_unexpected_failure_shows_no_insides() -> None:
    engine = FakeEngine(Script(raises=RuntimeError("secret")))
    response = post({"prompt": "a"}, engine)
    assert response.status_code == 500
    assert "secret" not in response.text
    assert json.loads(response.text)["error"]["code"] == "internal_error"
    assert not engine.open_streams
