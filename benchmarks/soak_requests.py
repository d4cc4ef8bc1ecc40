"""The requests of the soak test: random ones for every API, and malformed ones.

A request depends on the random generator only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["APIS", "SoakRequest", "malformed_request", "random_request"]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_WORDS = [
    "def",
    "add",
    "merge",
    "the",
    "list",
    "of",
    "itertools",
    "chain",
    "and",
    "return",
    "value",
    "if",
    "not",
    "for",
    "while",
]
_SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
    {"enum": ["yes", "no", 3, None]},
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """A request, and its expected statuses."""

    kind: str
    path: str
    body: bytes
    streams: bool = False
    statuses: frozenset[int] = frozenset({200})
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


def _text(rng: random.Random, max_words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(1, max_words)))


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Some of the fields that chat and completions share."""
    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0, 0.7, 1.3]),
        "top_p": lambda: 0.9,
        "top_k": lambda: 20,
        "min_p": lambda: 0.05,
        "presence_penalty": lambda: 0.5,
        "frequency_penalty": lambda: 0.5,
        "repetition_penalty": lambda: 1.1,
        "n": lambda: rng.randint(1, 3),
        "seed": lambda: rng.randrange(1 << 31),
        "stop": lambda: rng.choice(["\n\n", [")", "return x"]]),
        "logit_bias": lambda: {"5": -10},
        "priority": lambda: rng.randint(-2, 2),
        "user": lambda: rng.choice(["ann", "bob"]),
    }
    names = rng.sample(sorted(choices), rng.randint(0, 5))
    return {name: choices[name]() for name in names}


def _streaming(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {}
    options = {"stream_options": {"include_usage": True}} if rng.random() < 0.5 else {}
    return {"stream": True, **options}


def _completion(rng: random.Random) -> dict[str, Any]:
    prompt: Any = _text(rng, 60)
    if rng.random() < 0.2:
        prompt = [prompt, _text(rng, 9)]
    extra: dict[str, Any] = {"logprobs": 2} if rng.random() < 0.2 else {}
    if rng.random() < 0.2:
        extra["structured_outputs"] = {"regex": f"[a-z]{{1,{rng.randint(1, 20)}}}"}
    shared = {**_sampling(rng), **_streaming(rng), **extra}
    return {"prompt": prompt, "max_tokens": rng.randint(1, 48), **shared}


def _chat(rng: random.Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": _text(rng, 40)}]
    if rng.random() < 0.3:
        messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    extra: dict[str, Any] = {}
    form = rng.random()
    if form < 0.15:
        extra = {"tools": [_TOOL], "tool_choice": rng.choice(["auto", "required"])}
    elif form < 0.35:
        spec = {"name": "s", "schema": rng.choice(_SCHEMAS)}
        extra = {"response_format": {"type": "json_schema", "json_schema": spec}}
    elif form < 0.4:
        extra = {"response_format": {"type": "json_object"}}
    shared = {**_sampling(rng), **_streaming(rng), **extra}
    return {"messages": messages, "max_tokens": rng.randint(1, 48), **shared}


def _responses(rng: random.Random) -> dict[str, Any]:
    stream = {"stream": True} if rng.random() < 0.5 else {}
    # few are stored, since stored responses would look like a memory leak
    store = rng.random() < 0.05
    shared = {"max_output_tokens": 32, "store": store, **stream}
    return {"model": "demo", "input": _text(rng, 40), **shared}


def _messages(rng: random.Random) -> dict[str, Any]:
    stream = {"stream": True} if rng.random() < 0.5 else {}
    content = _text(rng, 40)
    turns = [{"role": "user", "content": content}]
    return {"model": "demo", "max_tokens": rng.randint(1, 40), "messages": turns, **stream}


def _embeddings(rng: random.Random) -> dict[str, Any]:
    return {"model": "demo", "input": [_text(rng, 20) for _ in range(rng.randint(1, 3))]}


def _tokenize(rng: random.Random) -> dict[str, Any]:
    return {"model": "demo", "prompt": _text(rng, 99)}


# kind -> (weight, path, body)
APIS: dict[str, tuple[int, str, Callable[[random.Random], dict[str, Any]]]] = {
    "chat": (6, CHAT, _chat),
    "completions": (5, COMPLETIONS, _completion),
    "responses": (2, "/v1/responses", _responses),
    "messages": (2, "/v1/messages", _messages),
    "embeddings": (1, "/v1/embeddings", _embeddings),
    "tokenize": (1, "/tokenize", _tokenize),
}


def random_request(rng: random.Random, kinds: list[str]) -> SoakRequest:
    """A valid request."""
    kind = rng.choices(kinds, [APIS[name][0] for name in kinds])[0]
    _, path, body_of = APIS[kind]
    body = body_of(rng)
    return SoakRequest(kind, path, json.dumps(body).encode(), streams=bool(body.get("stream")))


def _rejected(path: str, body: Any, *statuses: int) -> SoakRequest:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return SoakRequest("malformed", path, content, statuses=frozenset(statuses or (400,)))


def malformed_request(rng: random.Random) -> SoakRequest:
    """A request that the server must reject."""
    turn = [{"role": "user", "content": "a"}]
    deep: Any = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": deep}}
    unsupported = {"type": "string", "pattern": "(?<=a)b", "title": str(rng.randrange(99))}
    known = [
        _rejected(COMPLETIONS, b""),
        _rejected(COMPLETIONS, b'{"prompt": "a"'),
        _rejected(COMPLETIONS, b'{"prompt": "\xff"}'),
        _rejected(COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
        _rejected(COMPLETIONS, {"prompt": "a", "temperature": "hot"}),
        _rejected(COMPLETIONS, {"prompt": "a", "n": 10_000}),
        _rejected(COMPLETIONS, {"prompt": [10**7]}),
        _rejected(COMPLETIONS, {"prompt": "word " * 20_000}),
        _rejected(COMPLETIONS, {"prompt": "a", "mirostat": 2}),
        _rejected(COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(a"}}),
        _rejected(COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": unsupported}}),
        _rejected(COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404),
        _rejected(COMPLETIONS, b"[" * 5000),
        _rejected(COMPLETIONS, b" " * 5_000_000, 413),
        _rejected(CHAT, {"messages": []}),
        _rejected(CHAT, {"messages": turn, "response_format": schema}),
        _rejected(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        _rejected("/v1/nowhere", {}, 404),
        SoakRequest("malformed", CHAT, b"", statuses=frozenset({405}), method="GET"),
        SoakRequest(
            "malformed",
            "/health",
            b"",
            statuses=frozenset({431}),
            method="GET",
            headers=(("x-long", "y" * 40_000),),
        ),
    ]
    return rng.choice(known)
