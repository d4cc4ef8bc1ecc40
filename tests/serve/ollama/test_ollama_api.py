"""Ollama's API: its answers and streams, and what becomes of messages, tools and options.

Each field by itself is tried in `test_request_fields`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from client import client_of
from fake_engine import WORDS, FakeEngine, FakeTemplate, Script
from field_effects import filling
from route_calls import saying

from quickstep.server.app import create_app
from quickstep.server.ollama.keep_alive import keep_alive_s
from quickstep.server.ollama.response_types import (
    OllamaChatResponse,
    OllamaGenerateResponse,
    OllamaModels,
    OllamaRunningModels,
    OllamaShowResponse,
)
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import FinishReason, Grammar

TEXT = "".join(WORDS)
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "find_it", "parameters": {"type": "object"}}}]
CALLS = (
    '<tool_call>{"name": "find_it", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "find_it", "arguments": {"a": [2]}}</tool_call>'
)
TAGGED = "{{ tools }}<tool_call>{{ message.tool_calls }}</think>"
FIGURES = {
    "total_duration": 1_000_000_000,
    "load_duration": 0,
    "prompt_eval_duration": 250_000_000,
    "eval_duration": 750_000_000,
}


def call(
    method: str,
    path: str,
    engine: FakeEngine | None = None,
    options: ServerOptions | None = None,
    **sent: Any,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            return await client.request(method, path, **sent)

    return asyncio.run(run())


def chat(engine: FakeEngine | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [USER], "stream": False, **fields}
    response = call("POST", "/api/chat", engine, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    msgspec.convert(answer, OllamaChatResponse)
    return answer


def lines(path: str, engine: FakeEngine | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Of a stream, which is the default."""
    response = call("POST", path, engine, json={"model": "fake", **fields})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def refused(path: str, engine: FakeEngine | None = None, **fields: Any) -> str:
    """The message of a 400, which is all of an error."""
    engine = engine or FakeEngine()
    response = call("POST", path, engine, json={"model": "fake", **fields})
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert not engine.submitted
    message: str = response.json()["error"]
    return message


def thinking_engine(text: str) -> FakeEngine:
    return FakeEngine(saying(text), chat_template=FakeTemplate(formats_of(TAGGED)))


def test_a_chat_is_one_object_with_the_figures() -> None:
    answer = chat(model="fake:latest")
    assert answer["model"] == "fake:latest"
    assert answer["created_at"].endswith("Z")
    assert answer["message"] == {"role": "assistant", "content": TEXT}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert {name: answer[name] for name in FIGURES} == FIGURES
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (
        len("1user: hi\nassistant:") - 1,
        9,
    )


def test_a_chats_stream_ends_with_the_figures() -> None:
    *parts, last = lines("/api/chat", messages=[USER])
    assert "".join(part["message"]["content"] for part in parts) == TEXT
    assert not any(part["done"] for part in parts)
    assert all("eval_count" not in part for part in parts)
    assert last["done"] and last["message"] == {"role": "assistant", "content": ""}
    assert {name: last[name] for name in FIGURES} == FIGURES
    for line in (*parts, last):
        msgspec.convert(line, OllamaChatResponse)


def test_a_generated_answer_goes_through_the_template_and_a_raw_one_does_not() -> None:
    engine = FakeEngine()
    *parts, last = lines("/api/generate", engine, prompt="hi", system="be kind")
    assert "".join(part["response"] for part in parts) == TEXT
    assert last["done"] and last["response"] == "" and last["eval_count"] == 9
    for line in (*parts, last):
        msgspec.convert(line, OllamaGenerateResponse)
    assert bytes(engine.submitted[0].prompt).endswith(b"system: be kind\nuser: hi\nassistant:")
    raw = FakeEngine()
    lines("/api/generate", raw, prompt="hi", raw=True)
    assert raw.submitted[0].prompt == (1, *b"hi")
    without_template = FakeEngine(chat_template=None)
    lines("/api/generate", without_template, prompt="hi", system="be kind")
    assert without_template.submitted[0].prompt == (1, *b"be kind\n\nhi")


@pytest.mark.parametrize(
    ("reason", "done_reason"),
    [
        (FinishReason.MAX_TOKENS, "length"),
        (FinishReason.CONTEXT_LIMIT, "length"),
        (FinishReason.REPETITION, "length"),
        (FinishReason.STOP_STRING, "stop"),
        (FinishReason.STOP_TOKEN, "stop"),
    ],
)
def test_every_end_has_its_reason(reason: FinishReason, done_reason: str) -> None:
    assert chat(FakeEngine(script=Script(reason)))["done_reason"] == done_reason


@pytest.mark.parametrize("keep_alive", [None, 0, "5m"])
def test_without_anything_to_answer_the_model_is_loaded(keep_alive: Any) -> None:
    done_reason = "unload" if keep_alive == 0 else "load"
    for path, field in (("/api/chat", "message"), ("/api/generate", "response")):
        engine = FakeEngine()
        body = {"model": "fake", "keep_alive": keep_alive}
        response = call("POST", path, engine, json=body)
        answer = response.json()
        assert (answer["done"], answer["done_reason"]) == (True, done_reason)
        assert answer[field] in ("", {"role": "assistant", "content": ""})
        assert ("x-quickstep-ignored" in response.headers) == (keep_alive is not None)
        assert not engine.submitted
        assert call("POST", path, json={"model": "other"}).status_code == 404


def test_calls_are_complete_and_their_arguments_are_objects() -> None:
    message = chat(FakeEngine(saying("Let me see." + CALLS)), tools=TOOLS)["message"]
    assert message["content"] == "Let me see."
    made = [tool_call["function"] for tool_call in message["tool_calls"]]
    assert [one["index"] for one in made] == [0, 1]
    assert [one["arguments"] for one in made] == [{"a": 1}, {"a": [2]}]
    parts = lines(
        "/api/chat", FakeEngine(saying("Let me see." + CALLS)), messages=[USER], tools=TOOLS
    )
    streamed = [one for part in parts for one in part["message"].get("tool_calls", ())]
    assert [one["function"] for one in streamed] == made
    assert "".join(part["message"]["content"] for part in parts) == "Let me see."


def test_a_call_that_the_limit_cuts_has_the_arguments_that_are_there() -> None:
    text = '<tool_call>{"name": "find_it", "arguments": {"a": 1, "b": "x'
    script = saying(text, reason=FinishReason.MAX_TOKENS)
    answer = chat(FakeEngine(script), tools=TOOLS)
    (made,) = answer["message"]["tool_calls"]
    assert made["function"]["arguments"]["a"] == 1
    assert answer["done_reason"] == "length"


def test_reasoning_is_thinking_whole_and_streamed() -> None:
    text = "<think>hm, well</think>Yes."
    message = chat(thinking_engine(text))["message"]
    assert (message["thinking"], message["content"]) == ("hm, well", "Yes.")
    parts = lines("/api/generate", thinking_engine(text), prompt="hi")
    assert "".join(part.get("thinking", "") for part in parts) == "hm, well"
    assert "".join(part["response"] for part in parts) == "Yes."


def test_results_find_their_calls_by_name_in_order_or_by_id() -> None:
    engine = FakeEngine()
    function = {"name": "f", "arguments": {"b": 1, "a": None}}
    chat(
        engine,
        messages=[
            USER,
            {"role": "assistant", "tool_calls": [{"function": function}, {"function": function}]},
            {"role": "tool", "tool_name": "f", "content": "one"},
            {"role": "tool", "content": "two"},
            {"role": "assistant", "tool_calls": [{"id": "x", "function": function}]},
            {"role": "tool", "tool_call_id": "x", "content": "three"},
        ],
    )
    assert engine.chat_template is not None
    rendered = engine.chat_template.rendered
    ids = [one["id"] for message in rendered for one in message.get("tool_calls", ())]
    assert [len(call_id) for call_id in ids] == [9, 9, 1]
    assert len(set(ids)) == 3
    answered = [one["tool_call_id"] for one in rendered if one["role"] == "tool"]
    assert answered == ids
    assert rendered[1]["tool_calls"][0]["function"]["arguments"] == '{"b":1,"a":null}'


def test_an_assistants_text_at_the_end_is_continued() -> None:
    engine = FakeEngine()
    chat(engine, messages=[USER, {"role": "assistant", "content": "So"}])
    assert bytes(engine.submitted[0].prompt).endswith(b"assistant: So")


def test_options_sample_and_what_is_not_given_is_the_checkpoints() -> None:
    engine = FakeEngine(default_sampling={"temperature": 0.6, "top_k": 20})
    chat(engine, options={"top_k": 3, "seed": -1, "num_predict": -2, "stop": ["x"]})
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.6, 3, None)
    assert (sampling.max_tokens, sampling.stop) == (None, ("x",))


def test_repeat_last_n_switches_penalties_off() -> None:
    engine = FakeEngine()
    chat(engine, options={"repeat_penalty": 1.5, "presence_penalty": 1.0, "repeat_last_n": 0})
    sampling = engine.submitted[0].sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.0, 0.0)


def test_format_is_json_or_a_schema() -> None:
    engine = FakeEngine()
    chat(engine, format="json")
    chat(engine, format={"type": "array"})
    chat(engine, format="")
    lines("/api/generate", engine, prompt="a", raw=True, format="json")
    grammars = [item.sampling.grammar for item in engine.submitted]
    of_array = Grammar.of_json_schema({"type": "array"})
    assert grammars == [Grammar.of_json_object(), of_array, None, Grammar.of_json_object()]


def test_logprobs_name_their_tokens() -> None:
    first = lines("/api/chat", messages=[USER], logprobs=True, top_logprobs=1)[0]
    assert first["logprobs"] == [
        {
            "token": "Hello",
            "logprob": -0.25,
            "bytes": list(b"Hello"),
            "top_logprobs": [{"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}],
        }
    ]
    assert len(chat(logprobs=True)["logprobs"]) == 9
    assert "top_logprobs" not in chat(logprobs=True)["logprobs"][0]


@pytest.mark.parametrize(
    ("path", "fields", "begins"),
    [
        ("/api/chat", {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ("/api/chat", {"messages": [USER], "options": {"top_p": 0}}, "options.top_p is"),
        ("/api/chat", {"messages": [USER], "options": {"num_predict": -3}}, "options.num_predict"),
        ("/api/chat", {"messages": [USER], "options": {"mirostat": 1}}, "options.mirostat is not"),
        ("/api/chat", {"messages": [{**USER, "images": ["AA=="]}]}, "messages[0].images is not"),
        ("/api/chat", {"messages": [USER], "think": "very"}, "think is 'very'"),
        ("/api/chat", {"messages": [USER], "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system cannot go"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "context is not supported"),
        ("/api/generate", {"prompt": "a", "template": "x"}, "template is not supported"),
        ("/api/embed", {"input": ["a"] * 257}, "input has 257 entries"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    path: str, fields: dict[str, Any], begins: str
) -> None:
    assert refused(path, **fields).startswith(begins)


def test_a_suffix_does_not_go_with_instructions() -> None:
    message = refused("/api/generate", filling(), prompt="a", suffix="b", system="c")
    assert message.startswith("system cannot go with suffix")


def test_a_stream_that_fails_ends_with_the_error() -> None:
    engine = FakeEngine(script=Script(FinishReason.ERROR, error="the model broke"))
    assert lines("/api/chat", engine, messages=[USER])[-1] == {"error": "the model broke"}


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
def test_a_long_input_is_embedded_from_its_beginning(path: str) -> None:
    engine = FakeEngine()
    field = "input" if path == "/api/embed" else "prompt"
    response = call("POST", path, engine, json={"model": "fake", field: "ä" * 5000})
    assert response.status_code == 200, response.text
    # as many complete characters as fit 4,096 tokens, of two each after the first
    assert engine.submitted[0].prompt == (1, *("ä" * 2047).encode())


def test_vectors_come_in_the_order_of_the_inputs() -> None:
    both = call("POST", "/api/embed", json={"model": "fake", "input": ["a", "bb"]}).json()
    alone = call("POST", "/api/embeddings", json={"model": "fake", "prompt": "bb"}).json()
    assert len(both["embeddings"]) == 2
    assert both["embeddings"][1] == alone["embedding"]
    assert both["prompt_eval_count"] == 5
    none = call("POST", "/api/embed", json={"model": "fake", "input": []}).json()
    assert none["embeddings"] == []


def test_every_served_name_is_listed_with_its_tag() -> None:
    options = ServerOptions(served_model_names=("fake", "org/other:8b"))
    tags = call("GET", "/api/tags", options=options).json()
    assert [model["name"] for model in tags["models"]] == ["fake:latest", "org/other:8b"]
    msgspec.convert(tags, OllamaModels)
    running = call("GET", "/api/ps", options=options).json()
    assert [model["context_length"] for model in running["models"]] == [4096, 4096]
    msgspec.convert(running, OllamaRunningModels)
    for model in tags["models"]:
        details = call("POST", "/api/show", options=options, json={"model": model["name"]})
        assert details.status_code == 200


def test_show_prints_context_template_parameters_and_capabilities() -> None:
    engine = filling()
    engine.default_sampling = {"temperature": 0.6, "repetition_penalty": 1.1}
    engine.chat_template = FakeTemplate(formats_of(TAGGED))
    details = call("POST", "/api/show", engine, json={"name": "fake"}).json()
    answer = msgspec.convert(details, OllamaShowResponse)
    assert answer.model_info["quickstep.context_length"] == 4096
    assert answer.template == engine.chat_template.source
    assert answer.parameters == "temperature 0.6\nrepeat_penalty 1.1"
    assert answer.capabilities == ["completion", "embedding", "tools", "thinking", "insert"]
    assert refused("/api/show", model=None) == "model is missing"


def test_clients_find_a_server_and_its_version() -> None:
    assert call("GET", "/").text == "Ollama is running"
    assert call("HEAD", "/").status_code == 200
    version = call("GET", "/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12, 11)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/pull"),
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
    ],
)
def test_models_are_the_operators(method: str, path: str) -> None:
    response = call(method, path, json={"model": "llama3.2"})
    assert response.status_code == 400
    assert "this server has fake" in response.json()["error"]


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_a_body_needs_no_type_unless_a_page_sends_it(headers: dict[str, str]) -> None:
    body = json.dumps({"model": "fake", "messages": [USER]})
    assert call("POST", "/api/chat", content=body, headers=headers).status_code == 200
    own = {**headers, "origin": "http://localhost"}
    of_page = call("POST", "/api/chat", content=body, headers=own)
    assert of_page.status_code == 415
    assert "application/json" in of_page.json()["error"]


def test_errors_have_ollamas_shape_whatever_is_wrong() -> None:
    keyed = ServerOptions(api_keys=ApiKeys(["ann=AAAA"]))
    for status, answer in (
        (401, call("GET", "/api/tags", options=keyed)),
        (403, call("GET", "/api/tags", headers={"origin": "https://evil.example"})),
        (404, call("POST", "/api/show", json={"model": "other"})),
        (405, call("GET", "/api/chat")),
        (400, call("POST", "/api/chat", content=b"{")),
    ):
        assert answer.status_code == status
        assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        (-1, None),
        ("-1", None),
        ("-5m", None),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        (1e300, None),
        ("9" * 60, None),
    ],
)
def test_durations_are_read_as_ollama_reads_them(value: Any, seconds: float | None) -> None:
    assert keep_alive_s(value) == seconds


@pytest.mark.parametrize("value", ["", "soon", "5 m", "m5", "5mm", "nan", "5" * 100 + "s"])
def test_what_is_no_duration_is_400(value: str) -> None:
    for path in ("/api/chat", "/api/embed"):
        refused = call("POST", path, json={"model": "fake", "input": "a", "keep_alive": value})
        assert refused.status_code == 400, value
        assert "keep_alive" in refused.json()["error"]
