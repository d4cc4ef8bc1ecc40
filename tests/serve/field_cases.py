"""For every honoured field a request that uses it and what must be true then: its visible effect.

`test_request_fields` demands a case for each honoured row of `field_reference`, and runs it. The
rows of a struct that several routes share run on each of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fake_engine import Submitted

from quickstep.server import schemas
from quickstep.types import Grammar

ANY_OBJECT = {"type": "object"}
SEARCH = {"name": "find_it", "description": "Finds it.", "parameters": ANY_OBJECT}
TOOL = {"type": "function", "function": SEARCH}
CALL = {
    "id": "call_9",
    "type": "function",
    "index": 0,
    "function": {"name": "find_it", "arguments": '{"a": 1}'},
}
SCHEMA_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "array"}, "strict": False, "description": "d"},
}


@dataclass(frozen=True)
class Seen:
    """What the engine got, what its chat template saw, and what the client got."""

    submitted: Submitted
    messages: list[Mapping[str, Any]]
    text: str

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON answer."""
        answer: dict[str, Any] = json.loads(self.text)
        return answer

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n")]
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def prompt(self) -> bytes:
        """The prompt's bytes."""
        return bytes(self.submitted.prompt)


Holds = Callable[[Seen], bool]


@dataclass(frozen=True)
class Case:
    """Fields beside the required ones, and what they lead to."""

    fields: dict[str, Any]
    holds: Holds


Cases = dict[str, Case]


def cases(**rows: tuple[Any, Holds]) -> Cases:
    """One field each: its value, and what it leads to."""
    return {name: Case({name: value}, holds) for name, (value, holds) in rows.items()}


def sampled(name: str, value: Any) -> Holds:
    return lambda seen: getattr(seen.submitted.sampling, name) == value


def message(field: str, value: Any, **fields: Any) -> Case:
    """A message with a field, which the chat template sees."""
    body = {"messages": [{**fields, field: value}]}
    return Case(body, lambda seen: seen.messages[0][field] == value)


def part(kind: str, text: str) -> Case:
    body = {"messages": [{"role": "assistant", "content": [{"type": kind, kind: text}]}]}
    return Case(body, lambda seen: seen.messages[0]["content"] == text)


def called(holds: Callable[[Mapping[str, Any]], bool]) -> Case:
    """An earlier call, as the chat template sees it."""
    body = {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    return Case(body, lambda seen: holds(seen.messages[0]["tool_calls"][0]))


def shown(text: bytes) -> Case:
    """A tool, of which the prompt shows something."""
    return Case({"tools": [TOOL]}, lambda seen: text in seen.prompt)


def streamed(options: dict[str, Any], holds: Holds) -> Case:
    return Case({"stream": True, "stream_options": options}, holds)


def structured(expected: Grammar, **outputs: Any) -> Case:
    return Case({"structured_outputs": outputs}, sampled("grammar", expected))


def formatted(holds: Holds) -> Case:
    return Case({"response_format": SCHEMA_FORMAT}, holds)


ARRAY = sampled("grammar", Grammar.of_json_schema({"type": "array"}))
FORCED = {"tools": [TOOL], "tool_choice": "required"}


def is_forced(seen: Seen) -> bool:
    grammar = seen.submitted.sampling.grammar
    return grammar is not None and grammar.kind == "lark"


# What a scripted engine cannot show is tried with a model of its own (`test_choice_fields`,
# `test_sampling_fields`).
UNTRIED = Case({}, lambda seen: True)


def shows_token_ids(seen: Seen) -> bool:
    choice = seen.answer["choices"][0]
    prompt = seen.answer.get("prompt_token_ids") or choice["prompt_token_ids"]
    return tuple(prompt) == seen.submitted.prompt and choice["token_ids"][:2] == [0, 1]


CHOICES: Cases = {
    **cases(
        prompt_logprobs=(2, sampled("prompt_logprobs", 2)),
        return_token_ids=(True, shows_token_ids),
    ),
    **dict.fromkeys(("use_beam_search", "length_penalty", "early_stopping"), UNTRIED),
}
SAMPLING: Cases = {
    **cases(
        model=("fake", lambda seen: seen.answer["model"] == "fake"),
        n=(2, lambda seen: len(seen.answer["choices"]) == 2),
        temperature=(0.5, sampled("temperature", 0.5)),
        top_p=(0.5, sampled("top_p", 0.5)),
        top_k=(5, sampled("top_k", 5)),
        min_p=(0.5, sampled("min_p", 0.5)),
        preset=("chat", sampled("temperature", 0.7)),
        typical_p=(0.5, sampled("typical_p", 0.5)),
        xtc_probability=(0.5, sampled("xtc_probability", 0.5)),
        xtc_threshold=(0.2, sampled("xtc_threshold", 0.2)),
        dry_multiplier=(0.8, sampled("dry_multiplier", 0.8)),
        dry_base=(1.5, sampled("dry_base", 1.5)),
        dry_allowed_length=(3, sampled("dry_allowed_length", 3)),
        dry_range=(100, sampled("dry_range", 100)),
        dry_sequence_breakers=(["."], sampled("dry_sequence_breakers", (".",))),
        bad_words=(["x", "a b"], sampled("bad_words", ("x", "a b"))),
        timeout_s=(2.5, lambda seen: seen.submitted.deadline_s == 2.5),
        presence_penalty=(1.5, sampled("presence_penalty", 1.5)),
        frequency_penalty=(-1.5, sampled("frequency_penalty", -1.5)),
        repetition_penalty=(1.5, sampled("repetition_penalty", 1.5)),
        logit_bias=({"5": -100}, sampled("logit_bias", {5: -100.0})),
        allowed_token_ids=([1, 2], sampled("allowed_token_ids", (1, 2))),
        seed=(99, lambda seen: seen.submitted.sampling.seed == 99 == seen.answer["seed"]),
        max_tokens=(2, lambda seen: seen.answer["usage"]["completion_tokens"] == 2),
        min_tokens=(3, sampled("min_tokens", 3)),
        stop=("x", sampled("stop", ("x",))),
        stop_token_ids=([9], sampled("stop_token_ids", (9,))),
        include_stop_str_in_output=(True, sampled("include_stop_str_in_output", True)),
        ignore_eos=(True, sampled("ignore_eos", True)),
        skip_special_tokens=(False, sampled("skip_special_tokens", False)),
        response_format=(SCHEMA_FORMAT, ARRAY),
        structured_outputs=({"regex": "a+"}, sampled("grammar", Grammar.of_regex("a+"))),
        stream=(True, lambda seen: len(seen.chunks) > 2),
        user=("ann", lambda seen: seen.submitted.tenant == "ann"),
        priority=(-3, lambda seen: seen.submitted.priority == -3),
        cache_salt=("x", lambda seen: seen.submitted.cache_salt == "x"),
    ),
    "thinking_budget": UNTRIED,
    "stream_options": streamed(
        {"include_usage": True}, lambda seen: seen.chunks[-1]["choices"] == []
    ),
}
COMPLETION = cases(
    prompt=([7], lambda seen: seen.submitted.prompt == (7,)),
    logprobs=(2, sampled("logprobs", 2)),
    add_special_tokens=(False, lambda seen: seen.submitted.prompt == (97,)),
    echo=(True, lambda seen: seen.answer["choices"][0]["text"].startswith("aHello")),
    best_of=(
        4,
        lambda seen: seen.submitted.sampling.n == 4 and len(seen.answer["choices"]) == 1,
    ),
)
COMPLETION["suffix"] = UNTRIED
CHAT: Cases = {
    "continue_final_message": Case(
        {
            "messages": [{"role": "assistant", "content": "So"}],
            "continue_final_message": True,
        },
        lambda seen: seen.prompt == b"assistant: So",
    ),
    **cases(
        messages=(
            [{"role": "user", "content": "yo"}],
            lambda seen: seen.prompt.startswith(b"user: yo"),
        ),
        max_completion_tokens=(2, lambda seen: seen.answer["usage"]["completion_tokens"] == 2),
        logprobs=(True, sampled("logprobs", 0)),
        add_generation_prompt=(False, lambda seen: seen.prompt == b"user: hi"),
        chat_template_kwargs=({"k": "v"}, lambda seen: b"k=v" in seen.prompt),
        metadata=({"a": "b"}, lambda seen: seen.answer["metadata"] == {"a": "b"}),
        tools=([TOOL], lambda seen: b'"name": "find_it"' in seen.prompt),
        safety_identifier=("ann", lambda seen: seen.submitted.tenant == "ann"),
        # a hint that one engine has no use for: it is not to separate what the cache may share
        prompt_cache_key=("k", lambda seen: seen.submitted.cache_salt == ""),
    ),
    "top_logprobs": Case({"logprobs": True, "top_logprobs": 3}, sampled("logprobs", 3)),
    "tool_choice": Case(FORCED, is_forced),
    "parallel_tool_calls": Case(
        {**FORCED, "parallel_tool_calls": False},
        lambda seen: is_forced(seen) and len(seen.answer["choices"]) == 1,
    ),
}

OPENAI_CASES: dict[type[msgspec.Struct], Cases] = {
    schemas.SamplingFields: SAMPLING,
    schemas.ChoiceFields: CHOICES,
    schemas.CompletionRequest: COMPLETION,
    schemas.ChatRequest: CHAT,
    schemas.StreamOptions: {
        "include_usage": streamed(
            {"include_usage": True}, lambda seen: seen.chunks[-1]["usage"]["total_tokens"] > 0
        ),
        "continuous_usage_stats": streamed(
            {"continuous_usage_stats": True},
            lambda seen: all(chunk["usage"] for chunk in seen.chunks),
        ),
    },
    schemas.JsonSchemaFormat: {"json_schema": formatted(ARRAY)},
    schemas.JsonSchema: dict.fromkeys(
        ("name", "description", "schema", "strict"), formatted(ARRAY)
    ),
    schemas.StructuredOutputs: {
        "json": structured(Grammar.of_json_schema(ANY_OBJECT), json=ANY_OBJECT),
        "json_object": structured(Grammar.of_json_object(), json_object=True),
        "regex": structured(Grammar.of_regex("a+"), regex="a+"),
        "choice": structured(Grammar.of_choice(["a", "b"]), choice=["a", "b"]),
        "grammar": structured(Grammar.of_lark('start: "a"'), grammar='start: "a"'),
    },
    schemas.TextPart: {"text": part("text", "yo")},
    schemas.RefusalPart: {"refusal": part("refusal", "no")},
    schemas.SystemMessage: {
        "content": message("content", "yo", role="system"),
        "name": message("name", "ann", role="system", content="yo"),
    },
    schemas.DeveloperMessage: {
        "content": message("content", "yo", role="developer"),
        "name": message("name", "ann", role="developer", content="yo"),
    },
    schemas.UserMessage: {
        "content": message("content", "yo", role="user"),
        "name": message("name", "ann", role="user", content="yo"),
    },
    schemas.AssistantMessage: {
        "content": message("content", "yo", role="assistant"),
        "name": message("name", "ann", role="assistant", content="yo"),
        "tool_calls": called(lambda call: call["id"] == "call_9"),
        "reasoning_content": message("reasoning_content", "h", role="assistant", content="yo"),
    },
    schemas.ToolMessage: {
        "content": message("content", "yo", role="tool", tool_call_id="1"),
        "tool_call_id": message("tool_call_id", "1", role="tool", content="yo"),
        "name": message("name", "ann", role="tool", content="yo", tool_call_id="1"),
    },
    schemas.ToolCall: {
        "id": called(lambda call: call["id"] == "call_9"),
        "function": called(lambda call: call["function"]["name"] == "find_it"),
        "type": called(lambda call: call["type"] == "function"),
        "index": called(lambda call: "index" not in call),
    },
    schemas.CalledFunction: {
        "name": called(lambda call: call["function"]["name"] == "find_it"),
        "arguments": called(lambda call: call["function"]["arguments"] == '{"a": 1}'),
    },
    schemas.FunctionTool: {"function": shown(b"find_it")},
    schemas.FunctionSpec: {
        "name": shown(b'"name": "find_it"'),
        "description": shown(b"Finds it."),
        "parameters": shown(b'"parameters": {"type": "object"}'),
        "strict": Case(
            {"tools": [{"type": "function", "function": {**SEARCH, "strict": True}}]}, is_forced
        ),
    },
}
