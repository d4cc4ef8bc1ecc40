"""Every field of the request schemas, field by field: honoured with its effect, or refused by name.

The tables are complete: a field of OpenAI's own client, or of our schema, that stands in none of
them fails the first tests.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, Submitted
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from quickstep.server.app import create_app
from quickstep.server.refused import CHAT_REFUSED, COMPLETION_REFUSED
from quickstep.server.schemas import ChatRequest, CompletionRequest
from quickstep.types import Grammar

Seen = tuple[Submitted, dict[str, Any]]
JSON_FORMAT = {"response_format": {"type": "json_object"}}
ROUTES = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "a"}}


def sampled(name: str, value: Any) -> Callable[[Seen], bool]:
    return lambda seen: getattr(seen[0].sampling, name) == value


# field -> (value, what has to be true of what the engine got and of the answer)
SHARED: dict[str, tuple[Any, Callable[[Seen], bool]]] = {
    "model": ("fake", lambda seen: seen[1]["model"] == "fake"),
    "n": (2, lambda seen: len(seen[1]["choices"]) == 2),
    "temperature": (0.5, sampled("temperature", 0.5)),
    "top_p": (0.5, sampled("top_p", 0.5)),
    "top_k": (5, sampled("top_k", 5)),
    "min_p": (0.5, sampled("min_p", 0.5)),
    "presence_penalty": (1.5, sampled("presence_penalty", 1.5)),
    "frequency_penalty": (-1.5, sampled("frequency_penalty", -1.5)),
    "repetition_penalty": (1.5, sampled("repetition_penalty", 1.5)),
    "logit_bias": ({"5": -100}, sampled("logit_bias", {5: -100.0})),
    "allowed_token_ids": ([1, 2], sampled("allowed_token_ids", (1, 2))),
    "seed": (99, lambda seen: seen[0].sampling.seed == 99 and seen[1]["seed"] == 99),
    "max_tokens": (2, lambda seen: seen[1]["usage"]["completion_tokens"] == 2),
    "min_tokens": (3, sampled("min_tokens", 3)),
    "stop": ("x", sampled("stop", ("x",))),
    "stop_token_ids": ([9], sampled("stop_token_ids", (9,))),
    "include_stop_str_in_output": (True, sampled("include_stop_str_in_output", True)),
    "ignore_eos": (True, sampled("ignore_eos", True)),
    "skip_special_tokens": (False, sampled("skip_special_tokens", False)),
    "response_format": (
        {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "array"}}},
        sampled("grammar", Grammar.of_json_schema({"type": "array"})),
    ),
    "structured_outputs": ({"regex": "a+"}, sampled("grammar", Grammar.of_regex("a+"))),
    "user": ("ann", lambda seen: seen[0].tenant == "ann"),
    "priority": (-3, lambda seen: seen[0].priority == -3),
    "cache_salt": ("x", lambda seen: seen[0].cache_salt == "x"),
    "prompt_logprobs": (2, sampled("prompt_logprobs", 2)),
}
OF_COMPLETIONS: dict[str, tuple[Any, Callable[[Seen], bool]]] = {
    "prompt": ([7], lambda seen: seen[0].prompt == (7,)),
    "logprobs": (2, sampled("logprobs", 2)),
    "add_special_tokens": (False, lambda seen: seen[0].prompt == (97,)),
    "best_of": (4, lambda seen: seen[0].sampling.n == 4 and len(seen[1]["choices"]) == 1),
    "echo": (True, lambda seen: seen[1]["choices"][0]["text"].startswith("aHello")),
    "return_token_ids": (
        True,
        lambda seen: (
            seen[1]["choices"][0]["prompt_token_ids"] == [1, 97]
            and seen[1]["choices"][0]["token_ids"][:2] == [0, 1]
        ),
    ),
}
OF_CHAT: dict[str, tuple[Any, Callable[[Seen], bool]]] = {
    "messages": (
        [{"role": "user", "content": "yo"}],
        lambda seen: bytes(seen[0].prompt).startswith(b"user: yo"),
    ),
    "max_completion_tokens": (2, lambda seen: seen[1]["usage"]["completion_tokens"] == 2),
    "logprobs": (True, sampled("logprobs", 0)),
    "add_generation_prompt": (False, lambda seen: bytes(seen[0].prompt) == b"user: hi"),
    "chat_template_kwargs": ({"k": "v"}, lambda seen: b"k=v" in bytes(seen[0].prompt)),
    "metadata": ({"a": "b"}, lambda seen: seen[1]["metadata"] == {"a": "b"}),
    "tools": (
        [{"type": "function", "function": {"name": "find_it"}}],
        lambda seen: b'"name": "find_it"' in bytes(seen[0].prompt),
    ),
    "return_token_ids": (
        True,
        lambda seen: (
            seen[1]["prompt_token_ids"] == list(seen[0].prompt)
            and seen[1]["choices"][0]["token_ids"][:2] == [0, 1]
        ),
    ),
    "safety_identifier": ("ann", lambda seen: seen[0].tenant == "ann"),
    # a hint that one engine has no use for: it is not to separate what the cache may share
    "prompt_cache_key": ("k", lambda seen: seen[0].cache_salt == ""),
}
HONOURED = [(CHAT, *row) for row in (SHARED | OF_CHAT).items()] + [
    (COMPLETIONS, *row) for row in (SHARED | OF_COMPLETIONS).items()
]
# what needs a second field, or a stream, has tests of its own
# (`tool_choice` and `parallel_tool_calls`: test_chat_tools.py)
# (`suffix`, beams: test_choice_fields.py)
ELSEWHERE = {
    "stream",
    "stream_options",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "suffix",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
}

REFUSED: dict[str, Any] = {
    "audio": {"voice": "alloy", "format": "wav"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "high",
    "service_tier": "flex",
    "store": True,
    "verbosity": "low",
    "web_search_options": {},
}
REFUSING = [(CHAT, name) for name in CHAT_REFUSED] + [
    (COMPLETIONS, name) for name in COMPLETION_REFUSED
]
SCHEMAS: dict[str, type[msgspec.Struct]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
OPENAI: dict[str, Any] = {
    CHAT: chat_create_params.CompletionCreateParamsBase,
    COMPLETIONS: completion_create_params.CompletionCreateParamsBase,
}


def post(route: str, fields: dict[str, Any], engine: FakeEngine | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.post(route, json={**ROUTES[route], **fields})

    return asyncio.run(run())


def declared(route: str) -> set[str]:
    return set(SCHEMAS[route].__struct_fields__)


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_the_schema_is_in_a_table(route: str) -> None:
    honoured = {name for path, name, _ in HONOURED if path == route}
    refused = {name for path, name in REFUSING if path == route}
    assert honoured & refused == set()
    assert declared(route) - honoured - refused - ELSEWHERE == set()


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_openais_client_is_in_the_schema(route: str) -> None:
    assert set(OPENAI[route].__annotations__) - declared(route) == set()


@pytest.mark.parametrize(("route", "name", "row"), HONOURED)
def test_an_honoured_field_takes_effect(
    route: str, name: str, row: tuple[Any, Callable[[Seen], bool]]
) -> None:
    value, holds = row
    engine = FakeEngine()
    response = post(route, {name: value}, engine)
    assert response.status_code == 200, response.text
    assert holds((engine.submitted[0], response.json()))


@pytest.mark.parametrize(("route", "name"), REFUSING)
def test_a_refused_field_is_400_with_its_name(route: str, name: str) -> None:
    engine = FakeEngine()
    response = post(route, {name: REFUSED[name]}, engine)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{name} is not supported: ")
    assert not engine.submitted


@pytest.mark.parametrize(("route", "name"), REFUSING)
def test_a_refused_field_passes_where_it_asks_for_nothing(route: str, name: str) -> None:
    table = CHAT_REFUSED if route == CHAT else COMPLETION_REFUSED
    for value in (None, *table[name].passes):
        assert post(route, {name: value}).status_code == 200


@pytest.mark.parametrize(("route", "name"), [(r, n) for r in ROUTES for n in declared(r)])
def test_null_means_not_given(route: str, name: str) -> None:
    expected = 400 if name in ("messages", "prompt") else 200
    assert post(route, {name: None}).status_code == expected


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", ["temprature", "best_off", "", "x" * 1000, "ä", "a`b"])
def test_an_unknown_field_is_400_with_its_name(route: str, name: str) -> None:
    response = post(route, {name: 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "unknown" in error["message"]
    assert error["param"] == name


def test_an_unknown_field_names_the_nearest() -> None:
    error = post(CHAT, {"max_token": 1}).json()["error"]
    assert error["message"] == "max_token is unknown; did you mean max_tokens?"


WRONG: list[tuple[str, Any, str]] = [
    ("temperature", "hot", "temperature"),
    ("temperature", -0.1, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("min_p", 2, "min_p"),
    ("top_k", -2, "top_k"),
    ("top_k", 1.5, "top_k"),
    ("presence_penalty", 2.1, "presence_penalty"),
    ("frequency_penalty", -2.1, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("logit_bias", {"x": 1}, "logit_bias"),
    ("logit_bias", {"256": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"5": "x"}, "logit_bias[...]"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
    ("allowed_token_ids", [256], "allowed_token_ids"),
    ("stop_token_ids", [-1], "stop_token_ids"),
    ("stop_token_ids", ["x"], "stop_token_ids[0]"),
    ("seed", 2**64, "seed"),
    ("seed", "x", "seed"),
    ("n", 0, "n"),
    ("n", 33, "n"),
    ("n", True, "n"),
    ("max_tokens", 0, "max_tokens"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("prompt_logprobs", True, "prompt_logprobs"),
    ("length_penalty", 1.0, "length_penalty"),
    ("early_stopping", True, "early_stopping"),
    ("min_tokens", 10**6, "min_tokens"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", ["x" * 257], "stop"),
    ("stop", [""], "stop"),
    ("stop", [1], "stop[0]"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "s"}},
        "response_format.json_schema.schema",
    ),
    ("response_format", {"type": "json_object", "x": 1}, "response_format.x"),
    ("structured_outputs", {}, "structured_outputs"),
    ("structured_outputs", {"json_object": False}, "structured_outputs"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "structured_outputs"),
    ("structured_outputs", {"structural_tag": "a"}, "structured_outputs.structural_tag"),
    ("user", 5, "user"),
    ("user", "x" * 513, "user"),
    ("cache_salt", "x" * 513, "cache_salt"),
    ("model", 5, "model"),
    ("priority", 1.5, "priority"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("name", "value", "param"), WRONG)
def test_a_wrong_value_is_400_with_its_path(route: str, name: str, value: Any, param: str) -> None:
    engine = FakeEngine()
    response = post(route, {"max_tokens": 5, name: value}, engine)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": 2}, "logprobs"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (CHAT, {"metadata": {"a": "b" * 513}}, "metadata"),
        (CHAT, {"metadata": {"a": 1}}, "metadata[...]"),
        (CHAT, {**JSON_FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {**JSON_FORMAT, "ignore_eos": True}, "ignore_eos"),
        (CHAT, {**JSON_FORMAT, "allowed_token_ids": [1]}, "allowed_token_ids"),
        (CHAT, {"safety_identifier": "x" * 513}, "safety_identifier"),
        (CHAT, {"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"n": 3, "best_of": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 33}, "best_of"),
        (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"prompt": ["a"] * 17, "n": 32}, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 17, "best_of": 32}, "best_of"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": ["a"] * 257}, "prompt"),
        (
            COMPLETIONS,
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ],
)
def test_fields_that_contradict_or_exceed_are_400(
    route: str, fields: dict[str, Any], param: str
) -> None:
    response = post(route, fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_both_names_of_max_tokens_may_stand_if_they_agree() -> None:
    engine = FakeEngine()
    post(CHAT, {"max_tokens": 4, "max_completion_tokens": 4}, engine)
    assert engine.submitted[0].sampling.max_tokens == 4


def test_the_checkpoints_defaults_hold_where_a_request_is_silent() -> None:
    engine = FakeEngine(default_sampling={"temperature": 0.6, "top_k": 20, "max_tokens": 7})
    post(CHAT, {"top_k": 5}, engine)
    sampling = engine.submitted[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 5, 7)
    post(COMPLETIONS, {}, engine)
    assert engine.submitted[1].sampling.max_tokens == 16  # OpenAI's own default goes first
