"""Tools and reasoning in chats: what is accepted, what the model sees, what comes back."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from chat_calls import THINKING, engine_saying, pieces, post
from client import MESSAGES, chunks
from fake_engine import SPECIAL_IDS, FakeEngine, Script
from live_server import live_server

from quickstep.server.options import ServerOptions
from quickstep.text.tool_calls.formats import TOOL_CALL_FORMATS, ToolCallFormat
from quickstep.types import FinishReason

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = '{"city": "São Paulo }", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        live_server(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def message_of(text: str, template: str | None = None, **body: Any) -> dict[str, Any]:
    response = post(body, engine_saying(text, template))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return {**choice["message"], "finish_reason": choice["finish_reason"]}


SAID = [
    (CALL, None, ["get_weather"]),
    (f"Let me see.\n{CALL}\n{CALL}", "Let me see.", ["get_weather"] * 2),
    ("It is < 20 degrees, <tool_call>{no}.", "It is < 20 degrees, <tool_call>{no}.", []),
]


@pytest.mark.parametrize(("text", "content", "names"), SAID)
def test_openais_client_gets_the_calls_streamed_as_whole(
    client: openai.OpenAI, engine: FakeEngine, text: str, content: str | None, names: list[str]
) -> None:
    engine.script = Script(words=pieces(text))
    fields: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "tools": [TOOL]}
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (whole, streamed):
        calls = choice.message.tool_calls or []
        assert (choice.message.content or None) == content
        assert [call.function.name for call in calls] == names
        assert [call.function.arguments for call in calls] == [ARGUMENTS] * len(names)
        assert len({call.id for call in calls}) == len(names)
        assert {call.type for call in calls} <= {"function"}
        assert choice.finish_reason == ("tool_calls" if names else "stop")
    assert whole.message.content == content


def test_a_conversation_with_a_tools_answer_continues(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = Script(words=pieces(CALL))
    messages: list[Any] = [*MESSAGES]
    fields: dict[str, Any] = {"model": "fake", "tools": [TOOL]}
    message = client.chat.completions.create(messages=messages, **fields).choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20 degrees"}
    engine.script = Script(words=("20", " degrees."))
    messages += [message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(messages=messages, **fields).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("20 degrees.", "stop")
    prompt = bytes(engine.submitted[-1].prompt).decode()
    assert "tool: 20 degrees" in prompt
    assert f"'arguments': {ARGUMENTS!r}" in prompt


def test_calls_in_a_stream_have_openais_shape() -> None:
    body = {"tools": [TOOL], "stream": True}
    parts = chunks(post(body, engine_saying(CALL)).text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
    first, *later = pieces
    assert first.pop("id").startswith("call_")
    assert first == {
        "index": 0,
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(later) > 10
    assert [one.keys() for one in later] == [{"index", "function"}] * len(later)
    assert "".join(one["function"]["arguments"] for one in later) == ARGUMENTS
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_in_one_delta_is_streamed_as_its_name_and_then_its_arguments() -> None:
    engine = FakeEngine(script=Script(words=(f"Well.\n{CALL}",)))
    parts = chunks(post({"tools": [TOOL], "stream": True}, engine).text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    said = [delta for delta in deltas if delta and "role" not in delta]
    assert said[0] == {"content": "Well."}
    assert [len(delta["tool_calls"]) for delta in said[1:]] == [1, 1]
    names = [delta["tool_calls"][0]["function"].get("name") for delta in said[1:]]
    assert names == ["get_weather", None]


def test_tools_are_shown_to_the_model_unless_the_choice_is_none() -> None:
    prompts = {}
    for choice in ("auto", "none"):
        engine = engine_saying(CALL)
        answer = post({"tools": [TOOL], "tool_choice": choice}, engine).json()
        prompts[choice] = bytes(engine.submitted[0].prompt).decode()
        assert ("tool_calls" in answer["choices"][0]["message"]) == (choice == "auto")
    assert f"tool={json.dumps(TOOL)}" in prompts["auto"]
    assert "tool=" not in prompts["none"]


def test_without_tools_a_call_is_content() -> None:
    assert message_of(CALL)["content"] == CALL


def test_parallel_tool_calls_false_keeps_the_first_call() -> None:
    for value, number in ((True, 2), (False, 1)):
        said = message_of(f"a\n{CALL}\n{CALL}\nb", tools=[TOOL], parallel_tool_calls=value)
        assert len(said["tool_calls"]) == number
        assert said["content"] == "a\n\n\nb"


@pytest.mark.parametrize("end", [40, 60])
def test_a_call_that_the_limit_cut_has_partial_arguments(end: int) -> None:
    cut = CALL[:end]
    said = message_of(cut, tools=[TOOL], max_tokens=len(pieces(cut)))
    assert said["finish_reason"] == "length"
    assert said["content"] is None
    (call,) = said["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert call["function"]["arguments"] == cut.partition('"arguments": ')[2]


def test_the_markup_of_a_call_whose_name_was_cut_is_no_content() -> None:
    said = message_of(CALL[:25], tools=[TOOL], max_tokens=len(pieces(CALL[:25])))
    assert (said["finish_reason"], said["content"]) == ("length", "")


def test_broken_arguments_of_an_earlier_call_are_accepted_as_their_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "cu'}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    engine = FakeEngine()
    assert post({"messages": messages, "tools": [TOOL]}, engine).status_code == 200
    assert '{"a": "cu' in bytes(engine.submitted[-1].prompt).decode()


def test_complete_calls_do_not_hide_that_the_limit_was_reached() -> None:
    said = message_of(CALL, tools=[TOOL], max_tokens=len(pieces(CALL)))
    assert said["finish_reason"] == "length"
    assert len(said["tool_calls"]) == 1


@pytest.mark.parametrize("n", [1, 3])
def test_logprobs_of_held_text_come_with_its_tokens(n: int) -> None:
    body = {"tools": [TOOL], "logprobs": True, "n": n}
    whole = post(body, engine_saying(CALL)).json()
    parts = chunks(post({**body, "stream": True}, engine_saying(CALL)).text)
    for choice in whole["choices"]:
        mine = [i for p in parts for i in p["choices"] if i["index"] == choice["index"]]
        listed = [entry for i in mine if i["logprobs"] for entry in i["logprobs"]["content"]]
        assert listed == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "tool_calls"


def test_an_error_in_the_stream_is_still_one() -> None:
    engine = engine_saying(CALL[:20], reason=FinishReason.ERROR, error="the logits are NaN")
    text = post({"tools": [TOOL], "stream": True}, engine).text
    assert "NaN" in text


def test_reasoning_is_a_field_of_its_own_streamed_as_whole() -> None:
    text = f"<think>\nSão Paulo?\n</think>\n\nYes.\n{CALL}"
    said = message_of(text, THINKING, tools=[TOOL])
    assert said["reasoning_content"] == said["reasoning"] == "São Paulo?"
    assert said["content"] == "Yes."
    parts = chunks(post({"tools": [TOOL], "stream": True}, engine_saying(text, THINKING)).text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    for name in ("reasoning_content", "reasoning", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == said[name]


def test_a_prompt_that_opens_the_reasoning_makes_the_output_start_inside() -> None:
    asked = {"role": "assistant", "content": "<think>\n"}
    body = {"messages": [*MESSAGES, asked], "add_generation_prompt": False}
    said = message_of("hm\n</think>yes", THINKING, **body)
    assert (said["reasoning_content"], said["content"]) == ("hm", "yes")
    assert message_of("hm\n</think>yes", THINKING)["content"] == "hm\n</think>yes"


def test_markers_that_are_special_tokens_stay_in_the_text() -> None:
    for template, marker in ((None, "<tool_call>"), ("{{ tools }}[TOOL_CALLS]", "[TOOL_CALLS]")):
        engine = engine_saying("x", template)
        post({"tools": [TOOL]}, engine)
        post({}, engine)
        shown = [item.sampling.shown_special_token_ids for item in engine.submitted]
        assert shown == [(SPECIAL_IDS[marker],), ()]
        assert engine.submitted[0].sampling.skip_special_tokens


def test_mistrals_call_ids_are_nine_letters_and_digits() -> None:
    said = message_of("[TOOL_CALLS]f[ARGS]{}", "{{ tools }}[TOOL_CALLS]", tools=[TOOL])
    (call,) = said["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def test_the_operator_may_name_the_formats() -> None:
    python = "[get_weather(city='x')]"
    options = ServerOptions(tool_call_parser="pythonic", reasoning_parser="none")
    text = f"{python}<think>"
    message = post({"tools": [TOOL]}, engine_saying(text, THINKING), options).json()["choices"][0]
    assert message["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "x"}'
    assert message["message"]["content"] == "<think>"


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("other")}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {**named("get_weather"), "x": 1}}, "tool_choice"),
        (
            {"tools": [TOOL], "structured_outputs": {"grammar": 'start: "a"'}},
            "structured_outputs.grammar",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": allowed("some", named("get_weather"))},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tools": [TOOL], "tool_choice": allowed("auto")},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tools": [TOOL], "tool_choice": allowed("auto", named("other"))},
            "tool_choice",
        ),
        (
            {"tools": [TOOL], "tool_choice": allowed("required", {"type": "function"})},
            "tool_choice.allowed_tools.tools[0]",
        ),
        ({"tools": [TOOL], "tool_choice": allowed("required", named("other"))}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 1}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": function(name="")}, "tools[0].function.name"),
        ({"tools": function(name="a b")}, "tools[0].function.name"),
        ({"tools": function(name="x" * 65)}, "tools[0].function.name"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters"),
        ({"tools": function(parameters={"type": "array"})}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}, "type": 5}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
    ],
)
def test_what_cannot_be_honoured_is_400_with_its_path(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    response = post(fields, engine)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.submitted


@pytest.mark.parametrize(
    ("choice", "one_call"), [("required", False), (named("get_weather"), True)]
)
def test_a_forced_call_is_a_grammar_around_the_functions_schema(
    choice: Any, one_call: bool
) -> None:
    engine = engine_saying(CALL)
    body = {"tools": [TOOL, *function(name="f", strict=True)], "tool_choice": choice}
    assert post(body, engine).json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    start, call, *rules = grammar.text.splitlines()
    assert start == ("start: call" if one_call else 'start: call ("\\n" call)*')
    assert len(rules) == 2 * len(call.split("|")) == (2 if one_call else 4)
    # the marker is a special token here, which is no text to the grammar
    assert rules[0].startswith(f"function_0: <[{SPECIAL_IDS['<tool_call>']}]> ")
    assert '"city"' in rules[1]
    one = post({**body, "tool_choice": "required", "parallel_tool_calls": False}, engine)
    assert one.status_code == 200
    assert engine.submitted[1].sampling.grammar.text.startswith("start: call\n")


@pytest.mark.parametrize("known", TOOL_CALL_FORMATS.values(), ids=lambda known: known.name)
def test_calls_can_be_forced_in_every_format(known: ToolCallFormat) -> None:
    engine = FakeEngine()
    options = ServerOptions(tool_call_parser=known.name)
    response = post({"tools": [TOOL], "tool_choice": "required"}, engine, options)
    assert response.status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    assert "get_weather" in grammar.text


def test_a_function_that_the_format_cannot_spell_is_refused_by_name() -> None:
    options = ServerOptions(tool_call_parser="pythonic")
    body = {"tools": function(name="1st"), "tool_choice": "required"}
    response = post(body, FakeEngine(), options)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
GRAMMARS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a"}},
    {"tools": [STRICT]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("fields", GRAMMARS)
@pytest.mark.parametrize("begun", [None, "<think>\n", "<think>\nIt is"])
def test_a_grammar_begins_behind_the_reasoning(fields: dict[str, Any], begun: str | None) -> None:
    engine = engine_saying("x", THINKING)
    messages = MESSAGES if begun is None else [*MESSAGES, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": begun is not None, **fields}
    assert post({**body, "thinking_budget": 20}, engine).status_code == 200
    sampling = engine.submitted[0].sampling
    assert sampling.grammar is not None
    assert sampling.reasoning_tags == ("<think>", "</think>")
    assert sampling.inside_reasoning is (begun is not None)
    assert "think" not in sampling.grammar.text


def test_a_model_without_reasoning_begins_with_the_grammar() -> None:
    engine = FakeEngine()
    assert post(GRAMMARS[0], engine).status_code == 200
    assert engine.submitted[0].sampling.reasoning_tags is None


def test_tools_beside_a_response_format_are_calls_or_an_answer_under_the_schema() -> None:
    engine = engine_saying(CALL)
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert post({"tools": [TOOL], "response_format": form}, engine).status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    assert grammar.text.startswith('start: call ("\\n" call)* | answer\nanswer: %json {')
    forced = {"tools": [TOOL], "response_format": form, "tool_choice": "required"}
    assert post(forced, engine).status_code == 200
    grammar = engine.submitted[1].sampling.grammar
    assert grammar is not None
    assert "answer" not in grammar.text


def test_a_grammar_for_messages_in_channels_is_of_the_final_one() -> None:
    engine = engine_saying("x", "{{ tools }}<|channel|>analysis")
    response = post({"response_format": {"type": "json_object"}}, engine)
    assert response.status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    assert grammar.text.splitlines()[0].endswith('final<|message|>" answer)')
    rules = {"structured_outputs": {"grammar": 'start: "a"'}}
    response = post(rules, engine)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs.grammar"


@pytest.mark.parametrize(
    ("template", "parser", "words"),
    [
        ("{{ messages }}<tool_call>", None, "does not show tools"),
        ("{{ tools }}", None, "--tool-call-parser"),
        (THINKING, "none", "--tool-call-parser"),
    ],
)
def test_a_model_that_knows_no_tools_says_so(template: str, parser: str | None, words: str) -> None:
    options = ServerOptions(tool_call_parser=parser)
    response = post({"tools": [TOOL]}, engine_saying("x", template), options)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools"
    assert words in error["message"]
    assert post({"tools": []}, engine_saying("x", template), options).status_code == 200


def test_earlier_calls_that_a_template_does_not_show_are_refused() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    response = post({"messages": messages}, engine_saying("x", "{{ messages }}"))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls"


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_choice_without_tools_asks_for_nothing(choice: str) -> None:
    body = {"tool_choice": choice, "parallel_tool_calls": False}
    assert post(body).status_code == 200


def test_a_forced_call_is_kept_to_the_allowed_tools() -> None:
    engine = FakeEngine()
    tools = [*function(name="find_it"), *function(name="keep_it"), *function(name="drop_it")]
    choice = allowed("required", named("find_it"), named("keep_it"))
    assert post({"tools": tools, "tool_choice": choice}, engine).status_code == 200
    grammar = engine.submitted[0].sampling.grammar
    assert grammar is not None
    assert [name for name in ("find_it", "keep_it", "drop_it") if name in grammar.text] == [
        "find_it",
        "keep_it",
    ]


def test_calls_are_kept_to_the_allowed_tools_where_the_model_may_choose() -> None:
    tools = [*function(name="find_it"), *function(name="keep_it"), *function(name="drop_it")]
    choices = (None, allowed("auto", named("find_it"), named("keep_it")))
    engines = [FakeEngine(), FakeEngine()]
    for engine, choice in zip(engines, choices, strict=True):
        assert post({"tools": tools, "tool_choice": choice}, engine).status_code == 200
    free, kept = (engine.submitted[0] for engine in engines)
    assert kept.prompt == free.prompt, "the prefix is cached for each choice"
    assert free.sampling.grammar is None
    assert kept.sampling.grammar is not None
    text = kept.sampling.grammar.text
    assert [name for name in ("find_it", "keep_it", "drop_it") if name in text] == [
        "find_it",
        "keep_it",
    ]


def test_one_allowed_tool_may_be_called_again_unless_the_call_is_forced() -> None:
    for mode, num_calls in (("auto", 2), ("required", 1)):
        choice = allowed(mode, named("get_weather"))
        message = message_of(f"{CALL}\n{CALL}", tools=[TOOL], tool_choice=choice)
        assert len(message["tool_calls"]) == num_calls
