"""For every honoured field of chat and completions a value, and its visible effect.

`test_request_fields` demands a case for each honoured row of `field_reference`, and runs it on
every route that the field stands on.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fake_engine import FakeEngine
from field_effects import (
    ANY_OBJECT,
    ARRAY,
    LORA_CASE,
    Case,
    Cases,
    Holds,
    Seen,
    called,
    calling_twice,
    cases,
    constrained,
    ending_early,
    filling,
    is_forced,
    levelled,
    read,
    said,
    sampled,
    shown,
    thinking,
)

from quickstep.errors import EngineError
from quickstep.sampling_params import RepetitionDetectionParams
from quickstep.server.fields import sampling_fields, shared_fields
from quickstep.server.openai import request_types as schemas
from quickstep.types import Grammar, RequestClass

SEARCH = {"name": "find_it", "description": "Finds it.", "parameters": ANY_OBJECT}
TOOL = {"type": "function", "function": SEARCH}
CALL = {"id": "call_9", "function": {"name": "find_it", "arguments": '{"a": 1}'}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": ARRAY}}
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 4}


def streamed(name: str, holds: Holds) -> Case:
    return Case(True, holds, {"stream": True})


def structured(expected: Grammar, **outputs: Any) -> Case:
    holds = sampled("grammar", expected)
    return Case(None, holds, whole={"structured_outputs": outputs})


def repeating(name: str, value: int) -> Case:
    def holds(seen: Seen) -> bool:
        detection = seen.submitted.sampling.repetition_detection
        return detection is not None and getattr(detection, name) == value

    fields = {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 2, name: value}
    return Case(value, holds, whole={"repetition_detection": fields})


def shows_token_ids(seen: Seen) -> bool:
    choice = seen.answer["choices"][0]
    prompt = seen.answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return prompt == list(seen.submitted.prompt) and choice["token_ids"][:2] == [0, 1]


def text_of(seen: Seen) -> str:
    choice = seen.answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def num_calls(seen: Seen) -> int:
    return len(seen.answer["choices"][0]["message"]["tool_calls"])


FIRST = (1, ord("s"))  # token of a completion's prompt, and of a chat's

CHOICES: Cases = {
    **cases(
        prompt_logprobs=(2, sampled("prompt_logprobs", 2)),
        return_token_ids=(True, shows_token_ids),
        truncate_prompt_tokens=(1, lambda seen: len(seen.submitted.prompt) == 1),
    ),
    "truncation_side": Case(
        "right", lambda seen: seen.submitted.prompt[0] in FIRST, {"truncate_prompt_tokens": 1}
    ),
    "return_progress": Case(
        True,
        lambda seen: any("prompt_progress" in chunk for chunk in seen.chunks),
        {"stream": True},
    ),
    # a search asks the engine for one token of each beam at a time
    "use_beam_search": Case(
        True, lambda seen: len(seen.engine.submitted) > 1, {"n": 2, "max_tokens": 3}
    ),
    # without the penalty, the longest text has the highest score
    "length_penalty": Case(-3, lambda seen: text_of(seen) == "", BEAMS, engine=ending_early),
    # the prompt, then two beams, of which one ends; the other ended before
    "early_stopping": Case(
        True, lambda seen: len(seen.engine.submitted) == 3, BEAMS, engine=ending_early
    ),
}
SAMPLING: Cases = {
    **cases(
        model=("second", lambda seen: seen.answer["model"] == "second"),
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
        ttft_deadline_ms=(500, lambda seen: seen.submitted.ttft_deadline_s == 0.5),
        speculation=(False, lambda seen: seen.submitted.speculation is False),
        request_class=("batch", lambda seen: seen.submitted.request_class is RequestClass.BATCH),
        presence_penalty=(1.5, sampled("presence_penalty", 1.5)),
        frequency_penalty=(-1.5, sampled("frequency_penalty", -1.5)),
        repetition_penalty=(1.5, sampled("repetition_penalty", 1.5)),
        logit_bias=({"5": -100}, sampled("logit_bias", {5: -100.0})),
        allowed_token_ids=([1, 2], sampled("allowed_token_ids", (1, 2))),
        seed=(99, lambda seen: seen.submitted.sampling.seed == 99 == seen.answer["seed"]),
        max_tokens=(2, lambda seen: seen.answer["usage"]["completion_tokens"] == 2),
        min_tokens=(3, sampled("min_tokens", 3)),
        repetition_detection=(
            {"max_pattern_size": 8, "min_count": 3},
            sampled("repetition_detection", RepetitionDetectionParams(8, 0, 3)),
        ),
        stop=("x", sampled("stop", ("x",))),
        stop_token_ids=([9], sampled("stop_token_ids", (9,))),
        include_stop_str_in_output=(True, sampled("include_stop_str_in_output", True)),
        ignore_eos=(True, sampled("ignore_eos", True)),
        skip_special_tokens=(False, sampled("skip_special_tokens", False)),
        response_format=(SCHEMA_FORMAT, constrained(ARRAY)),
        structured_outputs=({"regex": "a+"}, sampled("grammar", Grammar.of_regex("a+"))),
        grammar=('root ::= "a"', sampled("grammar", Grammar.of_gbnf('root ::= "a"'))),
        json_schema=(ARRAY, constrained(ARRAY)),
        stream=(True, lambda seen: len(seen.chunks) > 2),
        user=("ann", lambda seen: seen.submitted.tenant == "ann"),
        priority=(-3, lambda seen: seen.submitted.priority == -3),
        cache_salt=("x", lambda seen: seen.submitted.cache_salt == "x"),
        retain_s=(60, lambda seen: seen.submitted.retain_s == 60.0),
        quickstep_timings=(True, lambda seen: "device_s" in seen.answer.get("quickstep", {})),
    ),
    "lora": LORA_CASE,
    # the chain of `second` would repeat it without drafts
    "fallback": Case(
        "none",
        lambda seen: not seen.engine.submitted,
        {"model": "second"},
        engine=lambda: FakeEngine(refusals=[EngineError("busy")]),
        status=503,
    ),
    **{
        name: Case(7, sampled("thinking_budget", 7), engine=thinking)
        for name in ("thinking_budget", *sampling_fields.BUDGET_NAMES)
    },
    "reasoning_budget_message": Case(
        "Enough.",
        sampled("reasoning_budget_message", "Enough."),
        {"thinking_budget": 7},
        engine=thinking,
    ),
    "stream_options": Case(
        {"include_usage": True}, lambda seen: seen.chunks[-1]["choices"] == [], {"stream": True}
    ),
}
NAMED = {"logprobs": True}
COMPLETION: Cases = {
    "logprob_token_ids": Case([5, 9], sampled("logprob_token_ids", (5, 9)), {"logprobs": 1}),
    "return_tokens_as_token_ids": Case(
        True,
        lambda seen: seen.answer["choices"][0]["logprobs"]["tokens"][:1] == ["token_id:0"],
        {"logprobs": 1},
    ),
    **cases(
        prompt=([7], lambda seen: seen.submitted.prompt == (7,)),
        logprobs=(2, sampled("logprobs", 2)),
        add_special_tokens=(False, lambda seen: seen.submitted.prompt == (97,)),
        echo=(True, lambda seen: text_of(seen).startswith("aHello")),
        best_of=(
            4,
            lambda seen: seen.submitted.sampling.n == 4 and len(seen.answer["choices"]) == 1,
        ),
    ),
    "suffix": Case(
        "b", lambda seen: seen.submitted.prompt == (1, 211, 97, 212, 98, 213), engine=filling
    ),
}
CHAT: Cases = {
    "logprob_token_ids": Case([5, 9], sampled("logprob_token_ids", (5, 9)), NAMED),
    "return_tokens_as_token_ids": Case(
        True,
        lambda seen: seen.answer["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:0",
        NAMED,
    ),
    "echo": Case(
        True,
        lambda seen: text_of(seen).startswith("SoHello"),
        {
            "messages": [{"role": "assistant", "content": "So"}],
            "continue_final_message": True,
        },
    ),
    "continue_final_message": Case(
        True,
        lambda seen: seen.prompt.endswith("assistant: So"),
        {"messages": [{"role": "assistant", "content": "So"}]},
    ),
    **cases(
        messages=([{"role": "user", "content": "yo"}], shown("user: yo")),
        max_completion_tokens=(2, lambda seen: seen.answer["usage"]["completion_tokens"] == 2),
        logprobs=(True, sampled("logprobs", 0)),
        top_logprobs=(3, sampled("logprobs", 3)),
        add_generation_prompt=(False, lambda seen: "assistant:" not in seen.prompt),
        chat_template_kwargs=({"k": "v"}, shown("k=v")),
        metadata=({"a": "b"}, lambda seen: seen.answer.get("metadata") == {"a": "b"}),
        tools=([TOOL], shown('"name": "find_it"')),
        safety_identifier=("ann", lambda seen: seen.submitted.tenant == "ann"),
    ),
    "reasoning_effort": Case(
        "none", lambda seen: "enable_thinking=False" in seen.prompt, engine=thinking
    ),
    "verbosity": Case("low", shown("verbosity=low"), engine=levelled),
    "tool_choice": Case("required", is_forced, {"tools": [TOOL]}),
    "parallel_tool_calls": Case(
        False, lambda seen: num_calls(seen) == 1, {"tools": [TOOL]}, engine=calling_twice
    ),
}

OPENAI_CASES: dict[type[msgspec.Struct], Cases] = {
    sampling_fields.SamplingFields: SAMPLING,
    schemas.ChoiceFields: CHOICES,
    schemas.CompletionRequest: COMPLETION,
    schemas.ChatRequest: CHAT,
    sampling_fields.StreamOptions: {
        "include_usage": streamed(
            "include_usage", lambda seen: (seen.chunks[-1].get("usage") or {}) != {}
        ),
        "continuous_usage_stats": streamed(
            "continuous_usage_stats",
            lambda seen: seen.chunks[1].get("usage", {}).get("completion_tokens", 0) > 0,
        ),
    },
    sampling_fields.JsonObjectFormat: {"schema": Case(ARRAY, constrained(ARRAY))},
    sampling_fields.JsonSchemaFormat: {
        "json_schema": Case({"name": "s", "schema": ANY_OBJECT}, constrained(ANY_OBJECT)),
        "schema": Case(ARRAY, constrained(ARRAY)),
    },
    sampling_fields.JsonSchema: {
        "schema": Case(ANY_OBJECT, constrained(ANY_OBJECT)),
        "strict": Case(True, lambda seen: seen.submitted.sampling.grammar.strict),
    },
    sampling_fields.StructuredOutputs: {
        "json": structured(Grammar.of_json_schema(ANY_OBJECT), json=ANY_OBJECT),
        "json_object": structured(Grammar.of_json_object(), json_object=True),
        "regex": structured(Grammar.of_regex("a+"), regex="a+"),
        "choice": structured(Grammar.of_choice(["a", "b"]), choice=["a", "b"]),
        "grammar": structured(Grammar.of_lark('start: "a"'), grammar='start: "a"'),
    },
    sampling_fields.RepetitionDetection: {
        "max_pattern_size": repeating("max_pattern_size", 9),
        "min_pattern_size": repeating("min_pattern_size", 4),
        "min_count": repeating("min_count", 3),
    },
    schemas.TextPart: {"text": read()},
    schemas.RefusalPart: {"refusal": read()},
    schemas.SystemMessage: {"content": said("content"), "name": said("name")},
    schemas.DeveloperMessage: {"content": said("content"), "name": said("name")},
    schemas.UserMessage: {"content": said("content"), "name": said("name")},
    schemas.AssistantMessage: {
        "content": said("content"),
        "name": said("name"),
        "tool_calls": Case([CALL], lambda seen: seen.call["id"] == "call_9"),
        "reasoning_content": said("reasoning_content"),
        "reasoning": Case("hm", said("reasoning_content", "hm").holds),
    },
    schemas.ToolMessage: {
        "content": said("content"),
        "tool_call_id": said("tool_call_id"),
        "name": said("name"),
    },
    schemas.ToolCall: {
        "id": called("id", "call_9"),
        "function": Case(CALL["function"], lambda seen: seen.call["function"] == CALL["function"]),
    },
    schemas.CalledFunction: {
        "name": called("name", "find_it"),
        "arguments": called("arguments", '{"a": 1}'),
    },
    shared_fields.FunctionTool: {"function": Case(SEARCH, shown("Finds it."))},
    shared_fields.FunctionSpec: {
        "name": Case("find_it", shown('"name": "find_it"')),
        "description": Case("Finds it.", shown("Finds it.")),
        "parameters": Case(
            {"type": "object", "title": "yo!"}, shown('"parameters": {"type": "object", "title"')
        ),
        "strict": Case(True, is_forced),
    },
}
