"""`/tokenize`, `/detokenize` and `/apply-template`, field by field."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest
from client import MESSAGES, client_of
from fake_engine import FakeEngine

from quickstep.server.app import create_app
from quickstep.server.fields.field_classes import field_classes
from quickstep.server.openai.tokenize import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from quickstep.server.options import RequestLimits, ServerOptions

TOOL = {"type": "function", "function": {"name": "find_it"}}
CHAT_IDS = list(b"user: hi\nassistant:")


def post(path: str, body: dict[str, Any], options: ServerOptions | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine(), options)) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


def tokenized(**body: Any) -> dict[str, Any]:
    response = post("/tokenize", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


# field -> (what goes with it, value, the tokens that must come out)
HONOURED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "prompt": ({}, "ab", [1, 97, 98]),
    "messages": ({}, MESSAGES, CHAT_IDS),
    "content": ({}, "ab", [97, 98]),
    "model": ({"content": "a"}, "fake", [97]),
    "add_special_tokens": ({"prompt": "a"}, False, [97]),
    "return_token_strs": ({"prompt": "a"}, True, [1, 97]),
    "add_generation_prompt": ({"messages": MESSAGES}, False, list(b"user: hi")),
    "continue_final_message": (
        {"messages": [{"role": "assistant", "content": "So"}]},
        True,
        list(b"assistant: So"),
    ),
    "chat_template_kwargs": (
        {"messages": MESSAGES},
        {"k": "v"},
        list(b"user: hi\nk=v\nassistant:"),
    ),
    "add_special": ({"content": "a"}, True, [1, 97]),
    "with_pieces": (
        {"content": "aé"},
        True,
        [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}],
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], Any]] = {
    "chat_template": ({"messages": MESSAGES}, "{{ messages }}"),
    "mm_processor_kwargs": ({"prompt": "a"}, {"x": 1}),
    "parse_special": ({"content": "a"}, False),
}


def test_every_field_of_the_schema_is_in_a_table() -> None:
    assert set(TokenizeRequest.__struct_fields__) == set(HONOURED) | set(REFUSED) | {"tools"}
    assert set(field_classes(TokenizeRequest)) == set(REFUSED)


@pytest.mark.parametrize("name", HONOURED)
def test_an_honoured_field_takes_effect(name: str) -> None:
    others, value, tokens = HONOURED[name]
    answer = tokenized(**others, **{name: value})
    assert answer["tokens"] == tokens
    assert answer["count"] == len(tokens)
    assert answer["max_model_len"] == 4096


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_400_with_its_name(name: str) -> None:
    others, value = REFUSED[name]
    error = post("/tokenize", {**others, name: value}).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not supported: ")
    for passing in (None, *field_classes(TokenizeRequest)[name].passes):
        assert post("/tokenize", {**others, name: passing}).status_code == 200


def test_token_strings_come_only_when_requested() -> None:
    assert tokenized(prompt="a", return_token_strs=True)["token_strs"] == ["piece-1", "piece-97"]
    assert tokenized(prompt="a")["token_strs"] is None


@pytest.mark.parametrize("num_chars", [0, 1, 2, 3, 4, 6, 7, 8])
def test_an_answer_that_is_encoded_in_slices_is_the_same(
    monkeypatch: pytest.MonkeyPatch, num_chars: int
) -> None:
    monkeypatch.setattr("quickstep.server.openai.tokenize._SLICE_ENTRIES", 3)
    text = "abcdefgh"[:num_chars]
    ids = [1, *text.encode()]
    for fields, tokens in (
        ({"prompt": text, "return_token_strs": True}, ids),
        (
            {"content": text, "with_pieces": True},
            [{"id": each, "piece": chr(each)} for each in ids[1:]],
        ),
    ):
        answer = msgspec.convert(tokenized(**fields), Tokenized, strict=True)
        assert msgspec.to_builtins(answer.tokens) == tokens
        assert answer.count == len(tokens)
        strings = [f"piece-{each}" for each in ids] if "prompt" in fields else None
        assert answer.token_strs == strings


def test_tools_are_in_the_tokenised_conversation() -> None:
    answer = tokenized(messages=MESSAGES, tools=[TOOL])
    assert b'"name": "find_it"' in bytes(answer["tokens"])


def test_special_tokens_may_be_added_to_a_conversation() -> None:
    assert tokenized(messages=MESSAGES, add_special_tokens=True)["tokens"] == [1, *CHAT_IDS]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "content": "a"}, "content"),
        ({"prompt": "a", "messages": MESSAGES}, "messages"),
        ({"prompt": "a", "with_pieces": True}, "with_pieces"),
        ({"prompt": "a", "tools": [TOOL]}, "tools"),
        ({"content": "a", "return_token_strs": True}, "return_token_strs"),
        ({"messages": MESSAGES, "add_special": True}, "add_special"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "a", "model": "gpt"}, "model"),
    ],
)
def test_what_does_not_go_together_is_refused(body: dict[str, Any], param: str) -> None:
    response = post("/tokenize", body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_detokenizing_answers_in_both_words() -> None:
    response = post("/detokenize", {"tokens": [97, 98, 200], "model": "fake"})
    assert response.json() == {"prompt": "ab\ufffd", "content": "ab\ufffd"}
    assert set(DetokenizeRequest.__struct_fields__) == {"tokens", "model"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tokens"),
        ({"tokens": [256]}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": ["a"]}, "tokens[0]"),
        ({"tokens": [1, 2, 3]}, "tokens"),
        ({"tokens": [1], "model": "gpt"}, "model"),
    ],
)
def test_wrong_token_ids_are_refused(body: dict[str, Any], param: str) -> None:
    options = ServerOptions(limits=RequestLimits(detokenized=2))
    response = post("/detokenize", body, options)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_the_template_can_be_applied_alone() -> None:
    body = {"messages": MESSAGES, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    assert post("/apply-template", body).json() == {"prompt": "user: hi\na=1"}
    assert "find_it" in post("/apply-template", {"messages": MESSAGES, "tools": [TOOL]}).text
    assert post("/apply-template", {"messages": MESSAGES, "model": "x"}).status_code == 404
    assert set(ApplyTemplateRequest.__struct_fields__) == {
        "messages",
        "model",
        "tools",
        "add_generation_prompt",
        "chat_template_kwargs",
    }


def test_long_texts_are_tokenised_in_a_thread() -> None:
    assert tokenized(content="ab" * 5000)["count"] == 10_000
    response = post("/detokenize", {"tokens": [97] * 5000})
    assert response.json()["content"] == "a" * 5000
