"""llama.cpp's own routes: `/completion`, complete and streamed, and the state of the server."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from client import MESSAGES, client_of, frames
from fake_engine import WORDS, FakeEngine, FakeStream, Script
from msgspec.structs import replace

from quickstep.server.app import create_app
from quickstep.server.llama_cpp.response_types import (
    LlamaChunk,
    LlamaCompletion,
    LlamaProps,
    ServerLoad,
)
from quickstep.types import FinishReason, SequenceTimings

TEXT = "".join(WORDS)


def call(method: str, path: str, engine: FakeEngine | None = None, **sent: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.request(method, path, **sent)

    return asyncio.run(run())


def complete(engine: FakeEngine | None = None, **fields: Any) -> dict[str, Any]:
    response = call("POST", "/completion", engine, json={"prompt": "a", **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    msgspec.convert(answer, type=LlamaCompletion)
    return answer


def streamed(engine: FakeEngine | None = None, **fields: Any) -> list[dict[str, Any]]:
    sent = {"prompt": "a", "stream": True, **fields}
    return [
        json.loads(data) for data in frames(call("POST", "/completion", engine, json=sent).text)
    ]


def test_timings_leave_out_what_a_completion_waited_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timings_of = FakeStream._timings

    def preempted(stream: FakeStream, num_output_tokens: int) -> SequenceTimings:
        waited = {"preempted_s": 2.0, "paused_s": 1.0, "finished_s": 4.0}
        return replace(timings_of(stream, num_output_tokens), **waited)

    monkeypatch.setattr(FakeStream, "_timings", preempted)
    timings = complete(n_predict=4, prompt="abcdef")["timings"]
    assert (timings["prompt_n"], timings["prompt_ms"]) == (4, 250.0)
    assert (timings["predicted_n"], timings["predicted_ms"]) == (4, 750.0)


def test_a_completion_has_llama_cpps_fields() -> None:
    answer = complete(n_predict=50, temperature=0.5)
    assert answer["content"] == TEXT
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (2, 9)
    assert (answer["tokens_cached"], answer["truncated"], answer["tokens"]) == (3, False, [])
    assert (answer["model"], answer["id_slot"], answer["index"]) == ("fake", -1, 0)
    assert answer["generation_settings"]["temperature"] == 0.5
    assert answer["generation_settings"]["n_predict"] == 50
    assert answer["generation_settings"]["seed"] == 1234
    timings = answer["timings"]
    assert (timings["cache_n"], timings["predicted_n"]) == (3, 9)
    assert (timings["prompt_ms"], timings["predicted_ms"]) == (250.0, 750.0)
    assert timings["predicted_per_second"] == 12.0


@pytest.mark.parametrize(
    ("reason", "stop_type"),
    [
        (FinishReason.MAX_TOKENS, "limit"),
        (FinishReason.CONTEXT_LIMIT, "limit"),
        (FinishReason.REPETITION, "limit"),
        (FinishReason.STOP_STRING, "word"),
        (FinishReason.STOP_TOKEN, "eos"),
    ],
)
def test_every_end_has_its_stop_type(reason: FinishReason, stop_type: str) -> None:
    answer = complete(FakeEngine(script=Script(reason)))
    assert answer["stop_type"] == stop_type
    assert answer["truncated"] == (reason is FinishReason.CONTEXT_LIMIT)


def test_the_stop_string_is_named() -> None:
    # the tokens continue where the text was cut
    words = (*WORDS[:2], "")
    engine = FakeEngine(script=Script(FinishReason.STOP_STRING, words=words))
    assert complete(engine, stop=["x", ","])["stopping_word"] == ","


def test_a_stream_has_the_text_and_ends_with_the_completion() -> None:
    *chunks, last = streamed(n_predict=4)
    for chunk in chunks:
        msgspec.convert(chunk, type=LlamaChunk)
    msgspec.convert(last, type=LlamaCompletion)
    assert "".join(chunk["content"] for chunk in chunks) == "".join(WORDS[:4])
    assert [chunk["tokens"] for chunk in chunks] == [[0], [1], [2], [3]]
    assert [chunk["stop"] for chunk in chunks] == [False] * 4
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "limit")
    assert last["tokens_predicted"] == 4
    assert "timings" not in chunks[0]


def test_a_streams_chunks_may_have_timings_and_probabilities() -> None:
    chunks = streamed(n_predict=2, timings_per_token=True, n_probs=1)[:-1]
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2]
    (token,) = chunks[0]["completion_probabilities"]
    assert (token["id"], token["token"], token["logprob"]) == (0, "Hello", -0.25)
    assert token["bytes"] == list(b"Hello")
    assert token["top_logprobs"][0]["logprob"] == -0.5


def test_completions_of_a_stream_differ_by_index() -> None:
    words = streamed(n_predict=2, n_cmpl=2, prompt=["a", "b"])
    for index in range(4):
        mine = [chunk for chunk in words if chunk["index"] == index]
        assert "".join(chunk["content"] for chunk in mine) == "Hello world"
        assert [chunk["stop"] for chunk in mine] == [False, False, True]


def test_fields_of_the_answer_can_be_chosen() -> None:
    fields = ["content", "generation_settings/n_predict", "timings/no", "nothing/at/all"]
    response = call(
        "POST", "/completion", json={"prompt": "a", "n_predict": 1, "response_fields": fields}
    )
    assert response.json() == {"content": "Hello", "generation_settings/n_predict": 1}
    assert streamed(n_predict=1, response_fields=["stop_type"])[-1] == {"stop_type": "limit"}


def test_a_failure_is_the_streams_last_event() -> None:
    engine = FakeEngine(script=Script(FinishReason.ERROR, error="the logits are NaN"))
    assert "NaN" in streamed(engine)[-1]["error"]["message"]


def test_props_have_defaults_and_template_and_no_path() -> None:
    engine = FakeEngine(model_name="some/model", default_sampling={"temperature": 0.6})
    props = call("GET", "/props", engine).json()
    msgspec.convert(props, type=LlamaProps)
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 4096
    assert (settings["params"]["temperature"], settings["params"]["n_predict"]) == (0.6, -1)
    assert (props["total_slots"], props["model_path"]) == (1, "some/model")
    assert props["chat_template"] == "{{ messages }}"
    assert props["build_info"].startswith("quickstep ")
    assert call("GET", "/props", FakeEngine(chat_template=None)).json()["chat_template"] == ""


def test_slots_and_load_report_the_state() -> None:
    load = call("GET", "/load").json()
    msgspec.convert(load, type=ServerLoad)
    assert (load["server_load"], load["num_running"], load["num_free_blocks"]) == (0, 0, 1000)
    assert call("GET", "/slots").json() == [
        {"id": 0, "n_ctx": 4096, "speculative": False, "is_processing": False}
    ]
    assert call("GET", "/slots?fail_on_no_slot=1").status_code == 200
    assert call("GET", "/slots?fail=1").status_code == 400


def test_openais_routes_answer_without_the_version() -> None:
    assert call("POST", "/chat/completions", json={"messages": MESSAGES}).status_code == 200
    assert call("POST", "/completions", json={"prompt": "a"}).json()["object"] == "text_completion"
    assert call("POST", "/responses", json={"input": "a"}).json()["object"] == "response"
    assert call("GET", "/responses/no").json() == call("GET", "/v1/responses/no").json()
    assert call("GET", "/models").json() == call("GET", "/v1/models").json()
    assert call("GET", "/health").json()["status"] == "ok"
