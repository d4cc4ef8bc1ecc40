"""Echo, prompt logprobs, token ids, infill, the best of several and beams, over the script."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, chunks, client_of
from fake_engine import END_ID, WORDS, FakeEngine, FakeTokenizer, Script

from quickstep.errors import RequestError
from quickstep.server.app import create_app
from quickstep.server.generate.generation import ParsedRequest, open_generation
from quickstep.server.generate.prompts import TokenPrompt
from quickstep.server.options import RequestLimits
from quickstep.types import FinishReason, Request, SamplingParams

TEXT = "".join(WORDS)
MARKERS = {"<|fim_prefix|>": 211, "<|fim_suffix|>": 212, "<|fim_middle|>": 213}


@dataclass
class InfillTokenizer(FakeTokenizer):
    """A vocabulary with Qwen's markers."""

    def token_id(self, text: str) -> int | None:
        return MARKERS.get(text) or super().token_id(text)


def post(
    fields: dict[str, Any], engine: FakeEngine | None = None, route: str = COMPLETIONS
) -> httpx.Response:
    body = {"prompt": "ab"} if route == COMPLETIONS else {"messages": MESSAGES}

    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine())) as client:
            return await client.post(route, json={**body, **fields})

    return asyncio.run(run())


def answered(fields: dict[str, Any], engine: FakeEngine | None = None) -> dict[str, Any]:
    response = post(fields, engine)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(fields: dict[str, Any], route: str = COMPLETIONS) -> dict[str, Any]:
    engine = FakeEngine()
    response = post(fields, engine, route)
    assert response.status_code == 400, response.text
    assert not engine.submitted
    error: dict[str, Any] = response.json()["error"]
    return error


def streamed(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Each choice of a stream, put together again."""
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks(post({**fields, "stream": True}).text):
        for word in chunk["choices"]:
            whole = joined.setdefault(word["index"], {"text": "", "logprobs": {}})
            append(whole, word)
    return [joined[index] for index in sorted(joined)]


def append(whole: dict[str, Any], word: dict[str, Any]) -> None:
    whole["text"] += word["text"]
    for name, values in (word["logprobs"] or {}).items():
        whole["logprobs"].setdefault(name, []).extend(values)
    for name in ("token_ids", "prompt_token_ids"):
        if name in word:
            whole.setdefault(name, []).extend(word[name])


def test_echo_puts_the_prompt_before_each_text() -> None:
    answer = answered({"prompt": ["ab", "c"], "n": 2, "echo": True, "max_tokens": 2})
    assert [choice["text"] for choice in answer["choices"]] == ["abHello world"] * 2 + [
        "cHello world"
    ] * 2
    assert answer["usage"]["completion_tokens"] == 8


def test_echo_of_token_ids_is_their_text() -> None:
    assert answered({"prompt": [97, 98], "echo": True})["choices"][0]["text"] == f"ab{TEXT}"


def test_echoed_logprobs_begin_with_null_and_their_offsets_with_the_prompt() -> None:
    fields = {"prompt": [97, 195, 164, 98], "echo": True, "logprobs": 1, "max_tokens": 2}
    logprobs = answered(fields)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b", "Hello", " world"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -1.0, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"b": -1.0, "Hello": -0.5}
    # the two bytes are one character (here decoded as two: the text is that of the ids)
    assert logprobs["text_offset"][:4] == [0, 1, 2, 2]
    text = answered({**fields, "prompt": "ab"})["choices"][0]
    offsets = text["logprobs"]["text_offset"]
    # the special token that opens the prompt has no place in the text, "a" has the first
    assert text["text"] == "abHello world"
    assert text["logprobs"]["tokens"][1:] == ["a", "b", "Hello", " world"]
    assert [text["text"][offset] for offset in offsets[-2:]] == ["H", " "]


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"echo": True, "logprobs": 2, "n": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"echo": True, "max_tokens": 0, "return_token_ids": True},
        {"return_token_ids": True, "n": 2},
    ],
)
def test_a_stream_says_the_same_as_the_whole_answer(fields: dict[str, Any]) -> None:
    fields = {"prompt": ["ab", "xyz"], "max_tokens": 4, **fields}
    names = ("text", "logprobs", "token_ids", "prompt_token_ids")
    whole = [
        {name: choice[name] for name in names if name in choice}
        for choice in answered(fields)["choices"]
    ]
    parts = streamed(fields)
    for part in parts:
        part["logprobs"] = part["logprobs"] or None
    assert parts == whole


def test_no_tokens_with_echo_score_a_prompt_as_evaluation_harnesses_ask() -> None:
    answer = answered({"prompt": [97, 98, 99], "echo": True, "logprobs": 1, "max_tokens": 0})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_objects_by_token_id() -> None:
    asked = {"prompt_logprobs": 1, "max_tokens": 1}
    for choice in answered({**asked, "prompt": [97, 98], "n": 2})["choices"]:
        first, second = choice["prompt_logprobs"]
        assert first is None
        assert second["98"] == {"logprob": -1.0, "rank": 2, "decoded_token": "b"}
        assert second["0"] == {"logprob": -0.5, "rank": 1, "decoded_token": "Hello"}
    chat = post(asked, route=CHAT).json()
    assert chat["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in chat["choices"][0]
    assert "prompt_logprobs" not in post({}, route=CHAT).json()


def test_a_chat_stream_has_token_ids_in_its_chunks() -> None:
    response = post({"return_token_ids": True, "stream": True, "max_tokens": 3}, route=CHAT)
    parts = chunks(response.text)
    assert parts[0]["prompt_token_ids"] == list(b"user: hi\nassistant:")
    assert all("prompt_token_ids" not in part for part in parts[1:])
    ids = [i for part in parts for choice in part["choices"] for i in choice.get("token_ids", ())]
    assert ids == [0, 1, 2]


def test_a_suffix_puts_the_prompt_into_the_order_of_infilling() -> None:
    engine = FakeEngine(tokenizer=InfillTokenizer())
    answer = answered({"prompt": "ab", "suffix": "cd", "max_tokens": 2}, engine)
    assert engine.submitted[0].prompt == (1, 211, 97, 98, 212, 99, 100, 213)
    assert answer["choices"][0]["text"] == "Hello world"
    answered({"prompt": "ab", "suffix": "c", "add_special_tokens": False}, engine)
    assert engine.submitted[1].prompt == (211, 97, 98, 212, 99, 213)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "c", "echo": True}, "echo"),
        ({"suffix": "c", "prompt": [1, 2]}, "suffix"),
        ({"suffix": "c", "prompt": [[1], [2]]}, "suffix"),
    ],
)
def test_what_cannot_go_with_a_suffix_is_400(fields: dict[str, Any], param: str) -> None:
    response = post(fields, FakeEngine(tokenizer=InfillTokenizer()))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_model_without_the_tokens_takes_no_suffix() -> None:
    error = refused({"suffix": "c"})
    assert error["message"] == "suffix is not supported: the model does not fill in the middle"


def test_the_best_of_several_count_all_tokens() -> None:
    engine = FakeEngine()
    answer = answered({"n": 2, "best_of": 5, "max_tokens": 3, "prompt": ["a", "b"]}, engine)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 5 * 3
    assert engine.submitted[0].sampling.logprobs == 0


def test_as_many_best_as_sampled_may_be_streamed() -> None:
    assert len(streamed({"n": 2, "best_of": 2, "max_tokens": 1})) == 2


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"stop": ["x"]}, "stop"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"length_penalty": 100}, "length_penalty"),
        ({"n": 33}, "n"),
    ],
)
def test_what_a_search_would_not_follow_is_400(
    route: str, fields: dict[str, Any], param: str
) -> None:
    assert refused({"use_beam_search": True, **fields}, route)["param"] == param


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_defaults_that_clients_write_out_pass_with_a_search(route: str) -> None:
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "presence_penalty": 0, "stop": []}
    answer = post(
        {"use_beam_search": True, "n": 2, "max_tokens": 2, "logprobs": None, **fields}, route=route
    )
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2


def test_the_ends_say_why() -> None:
    engine = FakeEngine(script=Script(FinishReason.DEADLINE))
    choice = answered({"max_tokens": 50}, engine)["choices"][0]
    assert choice["finish_reason"] == "timeout"
    assert choice["stop_reason"] is None  # a script says nothing of its own
    ending = chunks(post({"stream": True}).text)[-1]["choices"][0]
    assert ending["stop_reason"] is None


def test_a_deadline_reaches_the_engine_with_every_prompt() -> None:
    async def run() -> list[float | None]:
        engine = FakeEngine()
        await engine.start()
        prompts = (TokenPrompt((1,)), TokenPrompt((2,)))
        request = ParsedRequest("fake", prompts, Request(timeout_s=2.5))
        await (await open_generation(engine, request)).aclose()
        return [item.deadline_s for item in engine.submitted]

    assert asyncio.run(run()) == [2.5, 2.5]


@pytest.mark.parametrize(("n", "param"), [(1, "max_tokens"), (3, "n")])
def test_tokens_of_a_request_are_bounded(n: int, param: str) -> None:
    async def run() -> None:
        engine = FakeEngine()
        await engine.start()
        sampling = SamplingParams(max_tokens=None, n=n)
        request = ParsedRequest("fake", (TokenPrompt((1,)),), Request(sampling=sampling))
        limits = RequestLimits(tokens=4095 * n)
        try:
            await open_generation(engine, request, limits)
        finally:
            assert not engine.submitted

    with pytest.raises(RequestError, match="tokens") as refusal:
        asyncio.run(run())
    assert refusal.value.param == param


def test_an_end_token_is_named_but_not_shown() -> None:
    choice = answered({"max_tokens": 50, "return_token_ids": True})["choices"][0]
    assert choice["token_ids"][-1] == END_ID
    assert choice["text"] == TEXT
