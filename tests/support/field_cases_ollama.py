"""For every honoured field of Ollama's requests a value, and its visible effect."""

from __future__ import annotations

from typing import Any

import msgspec
from field_effects import (
    ARRAY,
    Case,
    Cases,
    called,
    cases,
    constrained,
    filling,
    read,
    said,
    sampled,
    shown,
    thinking,
    unknown_model,
)

from quickstep.server.ollama import request_types as requests

TOOL = {"type": "function", "function": {"name": "find_it"}}
USER = {"role": "user", "content": "a"}


def messages(*given: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(given)}


def call(**more: Any) -> dict[str, Any]:
    """An assistant's message with a call."""
    function = {"name": "f", "arguments": {}, **more.pop("function", {})}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function, **more}]}


OLLAMA_CASES: dict[type[msgspec.Struct], Cases] = {
    requests.OllamaOptions: {
        **cases(
            num_predict=(2, sampled("max_tokens", 2)),
            temperature=(0.5, sampled("temperature", 0.5)),
            top_k=(5, sampled("top_k", 5)),
            top_p=(0.5, sampled("top_p", 0.5)),
            min_p=(0.5, sampled("min_p", 0.5)),
            typical_p=(0.5, sampled("typical_p", 0.5)),
            seed=(99, sampled("seed", 99)),
            stop=(["x"], sampled("stop", ("x",))),
            repeat_penalty=(1.5, sampled("repetition_penalty", 1.5)),
            presence_penalty=(1.5, sampled("presence_penalty", 1.5)),
            frequency_penalty=(1.5, sampled("frequency_penalty", 1.5)),
        ),
        "repeat_last_n": Case(
            64,
            lambda seen: "options.repeat_last_n is 64" in seen.text,
            whole={"options": {"repeat_penalty": 1.5, "repeat_last_n": 64}},
            status=400,
        ),
    },
    requests.OllamaModelFields: {
        **cases(model=("second", lambda seen: seen.answer["model"] == "second")),
        # of several models: tests/serve/any_api/test_several_models.py
        "keep_alive": Case("soon", lambda seen: "keep_alive" in seen.text, status=400),
    },
    requests.OllamaGenerateFields: {
        **cases(
            options=({"temperature": 0.5}, sampled("temperature", 0.5)),
            stream=(False, lambda seen: seen.text.count("\n") == 0),
            format=(ARRAY, constrained(ARRAY)),
            logprobs=(True, lambda seen: "logprobs" in seen.answer),
            top_logprobs=(2, sampled("logprobs", 2)),
        ),
        "think": Case(False, shown("enable_thinking=False"), engine=thinking),
    },
    requests.OllamaChatRequest: cases(
        messages=([{"role": "user", "content": "yo"}], shown("user: yo")),
        tools=([TOOL], shown('"name": "find_it"')),
    ),
    requests.OllamaGenerateRequest: {
        **cases(
            prompt=("yo", shown("user: yo")),
            system=("yo", shown("system: yo")),
            raw=(True, lambda seen: seen.submitted.prompt == (1, 97)),
        ),
        "suffix": Case("b", lambda seen: 213 in seen.submitted.prompt, engine=filling),
    },
    requests.OllamaMessage: {
        "role": Case("system", shown("system: a")),
        "content": read(),
        "thinking": said("reasoning_content"),
        "tool_calls": Case(
            [{"function": {"name": "f", "arguments": {}}}],
            lambda seen: seen.call["function"].get("name") == "f",
        ),
        "tool_name": said("name"),
        "tool_call_id": said("tool_call_id"),
    },
    requests.OllamaCall: {
        "id": called("id", "yo!"),
        "function": Case(
            {"name": "g", "arguments": {}},
            lambda seen: seen.call["function"]["name"] == "g",
        ),
    },
    requests.OllamaCalledFunction: {
        "name": called("name", "yo!"),
        "arguments": Case(
            {"k": 1}, lambda seen: seen.call["function"].get("arguments") == '{"k":1}'
        ),
    },
    requests.OllamaEmbedRequest: {
        **cases(
            input=("yo", lambda seen: bytes(seen.submitted.prompt[1:]) == b"yo"),
            dimensions=(1, lambda seen: len(seen.answer["embeddings"][0]) == 1),
        ),
        "truncate": Case(
            False,
            lambda seen: "is too long: 5000 tokens" in seen.text,
            {"input": "a" * 5000},
            status=400,
        ),
    },
    requests.OllamaEmbeddingsRequest: {
        "model": unknown_model(),
        "prompt": Case("yo", lambda seen: bytes(seen.submitted.prompt[1:]) == b"yo"),
    },
    requests.OllamaShowRequest: {
        "model": Case("second", lambda seen: "FROM second" in seen.text),
        "name": Case("second", lambda seen: "FROM second" in seen.text, {"model": None}),
    },
}
