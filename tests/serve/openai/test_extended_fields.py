"""What vLLM's clients send beyond OpenAI's fields, the operator's flags for answers, and the routes
that go with them. Each field alone is tried in `test_request_fields`.
"""

import asyncio
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, chunks, client_of
from fake_engine import FakeEngine, FakeTokenizer
from msgspec.structs import replace

from quickstep.server.app import create_app
from quickstep.server.options import AnswerOptions, RequestLimits, ServerOptions

EMBEDDINGS = "/v1/embeddings"
INVOCATIONS = "/invocations"
VOCAB = FakeTokenizer.vocab_size
WHOLE = ServerOptions(limits=replace(RequestLimits(), logprobs=-1))
METRICS = ServerOptions(answers=AnswerOptions(request_metrics=True))
USAGE = ServerOptions(answers=AnswerOptions(always_usage=True))
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, COMPLETIONS: {"prompt": "ab"}}


def ask(
    path: str,
    body: dict[str, Any] | None = None,
    options: ServerOptions | None = None,
    engine: FakeEngine | None = None,
    headers: dict[str, str] | None = None,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            if body is None:
                return await client.get(path, headers=headers)
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(run())


WHOLE_VOCABULARY: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (CHAT, {"prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
]


@pytest.mark.parametrize("limit", [-1, VOCAB, VOCAB + 1])
@pytest.mark.parametrize(("path", "fields", "name"), WHOLE_VOCABULARY)
def test_minus_one_is_the_complete_vocabulary_where_the_limit_allows_so_many(
    path: str, fields: dict[str, Any], name: str, limit: int
) -> None:
    engine = FakeEngine()
    options = ServerOptions(limits=replace(RequestLimits(), logprobs=limit))
    body = {**BODIES[path], **fields, "max_tokens": 1}
    response = ask(path, body, options, engine)
    assert response.status_code == 200, response.text
    sampling = engine.submitted[0].sampling
    assert VOCAB in (sampling.logprobs, sampling.prompt_logprobs)
    beyond = ask(path, {**body, name: -2}, options)
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("limit", [20, VOCAB - 1])
@pytest.mark.parametrize(("path", "fields", "name"), WHOLE_VOCABULARY)
def test_minus_one_above_the_limit_is_an_error_with_both_numbers(
    path: str, fields: dict[str, Any], name: str, limit: int
) -> None:
    options = ServerOptions(limits=replace(RequestLimits(), logprobs=limit))
    response = ask(path, {**BODIES[path], **fields}, options)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert f"vocabulary of {VOCAB} tokens, and the limit is {limit};" in error["message"]
    assert "--max-logprobs -1" in error["message"]


def test_no_request_gets_more_alternatives_than_there_are_tokens() -> None:
    response = ask(COMPLETIONS, {"prompt": "a", "logprobs": VOCAB + 1}, WHOLE)
    assert response.json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"logprob_token_ids": [1]}),
        (COMPLETIONS, {"logprob_token_ids": [1]}),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [VOCAB]}),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [-1]}),
        (COMPLETIONS, {"logprobs": 1, "logprob_token_ids": [1] * 129}),
        (CHAT, {"logprobs": True, "logprob_token_ids": [1], "use_beam_search": True}),
    ],
)
def test_token_ids_without_logprobs_or_beyond_the_vocabulary_are_400(
    path: str, fields: dict[str, Any]
) -> None:
    response = ask(path, {**BODIES[path], **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprob_token_ids"


@pytest.mark.parametrize(("asked", "kept"), [(2, b"bc"), (-1, b"abc"), (4096, b"abc")])
def test_a_prompt_keeps_its_last_tokens(asked: int, kept: bytes) -> None:
    engine = FakeEngine()
    body = {"prompt": "abc", "truncate_prompt_tokens": asked, "add_special_tokens": False}
    assert ask(COMPLETIONS, body, engine=engine).status_code == 200
    assert bytes(engine.submitted[0].prompt) == kept


@pytest.mark.parametrize(("side", "kept"), [("left", b"bc"), ("right", b"ab"), (None, b"bc")])
def test_a_prompt_is_truncated_on_one_side(side: str | None, kept: bytes) -> None:
    engine = FakeEngine()
    body = {"prompt": "abc", "truncate_prompt_tokens": 2, "add_special_tokens": False}
    assert ask(COMPLETIONS, {**body, "truncation_side": side}, engine=engine).status_code == 200
    assert bytes(engine.submitted[0].prompt) == kept


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{"truncation_side": "left"}, {"truncation_side": "top"}])
def test_a_side_without_a_truncation_or_of_another_name_is_400(
    path: str, fields: dict[str, Any]
) -> None:
    response = ask(path, {**BODIES[path], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "truncation_side")


def test_minus_one_leaves_room_for_the_answer() -> None:
    engine = FakeEngine()
    body = {"prompt": "a" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 96}
    assert ask(COMPLETIONS, body, engine=engine).status_code == 200
    assert len(engine.submitted[0].prompt) == 4000


@pytest.mark.parametrize("asked", [0, -2, 4097])
def test_a_truncation_to_nothing_or_beyond_the_context_is_400(asked: int) -> None:
    response = ask(CHAT, {**BODIES[CHAT], "truncate_prompt_tokens": asked})
    assert (response.status_code, response.json()["error"]["param"]) == (
        400,
        "truncate_prompt_tokens",
    )


BEGUN = {"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True}


def test_an_echo_comes_before_the_answer_streamed_or_not() -> None:
    whole = ask(CHAT, {**BEGUN, "echo": True}).json()["choices"][0]["message"]["content"]
    streamed = chunks(ask(CHAT, {**BEGUN, "echo": True, "stream": True}).text)
    texts = [one["choices"][0]["delta"].get("content") or "" for one in streamed]
    assert whole == "".join(texts)
    assert whole.startswith("SoHello")


def test_an_echo_of_the_users_message_has_no_effect_and_is_reported() -> None:
    response = ask(CHAT, {**BODIES[CHAT], "echo": True})
    assert response.headers["x-quickstep-ignored"] == "echo"
    assert response.json()["choices"][0]["message"]["content"].startswith("Hello")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_operator_can_have_usage_in_every_chunk_and_at_the_end(path: str) -> None:
    for fields in ({}, {"stream_options": {"include_usage": False}}):
        body = {**BODIES[path], **fields, "stream": True}
        found = chunks(ask(path, body, USAGE).text)
        assert (found[-1]["choices"], found[-1]["usage"]["completion_tokens"]) == ([], 9)
        counts = [chunk["usage"]["completion_tokens"] for chunk in found]
        assert counts == sorted(counts) and len(set(counts)) > 2
    assert chunks(ask(path, {**BODIES[path], "stream": True}).text)[-1]["choices"] != []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_chunk_with_the_finish_reason_has_what_vllms_has(path: str) -> None:
    body = {**BODIES[path], "stream": True, "return_token_ids": True}
    found = [chunk["choices"][0] for chunk in chunks(ask(path, body).text)]
    assert [choice["finish_reason"] is None for choice in found] == [True] * (len(found) - 1) + [
        False
    ]
    last = found[-1]
    assert (last["finish_reason"], last["stop_reason"], last["token_ids"]) == ("stop", None, [])
    ids = [token_id for choice in found for token_id in choice.get("token_ids", ())]
    complete = ask(path, {**body, "stream": False}).json()["choices"][0]["token_ids"]
    assert ids == complete
    body = {**BODIES[path], "stream": True}
    bare = [chunk["choices"][0] for chunk in chunks(ask(path, body).text)]
    assert not [choice for choice in bare if "token_ids" in choice]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_continuous_usage_needs_no_usage_at_the_end(path: str) -> None:
    body = {**BODIES[path], "stream": True, "stream_options": {"continuous_usage_stats": True}}
    found = chunks(ask(path, body).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in found][-1] == 9
    assert found[-1]["choices"] != []


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_responses_report_how_long_they_took_where_the_operator_wants_it(path: str) -> None:
    body = BODIES[path]
    expected = {
        "time_to_first_token_ms": 250.0,
        "generation_time_ms": 750.0,
        "queue_time_ms": 0.0,
        "mean_itl_ms": 93.75,
        "tokens_per_second": 12.0,
    }
    assert ask(path, body, METRICS).json()["metrics"] == expected
    assert "metrics" not in ask(path, body).json()
    assert "metrics" not in ask(path, {**body, "n": 2}, METRICS).json()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = chunks(ask(path, {**body, **usage}, METRICS).text)
    assert [one.get("metrics") for one in streamed[-2:]] == [None, expected]


def test_the_tokenizers_special_tokens_and_template_can_be_read() -> None:
    assert ask("/tokenizer_info").json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": VOCAB,
        "model_max_length": 4096,
        "chat_template": "{{ messages }}",
        "bos_token": None,
        "eos_token": "<end>",
        "pad_token": None,
        "unk_token": None,
        "eos_token_ids": [255],
    }


@pytest.mark.parametrize(
    ("path", "body", "object_name"),
    [
        (CHAT, {"messages": MESSAGES, "seed": 1}, "chat.completion"),
        (COMPLETIONS, {"prompt": "a", "seed": 1, "messages": None}, "text_completion"),
        (EMBEDDINGS, {"input": "a"}, "list"),
    ],
)
def test_one_route_answers_every_kind_of_body(
    path: str, body: dict[str, Any], object_name: str
) -> None:
    asked, direct = FakeEngine(), FakeEngine()
    response = ask(INVOCATIONS, body, engine=asked)
    assert response.status_code == 200, response.text
    assert response.json()["object"] == object_name
    ask(path, body, engine=direct)
    assert asked.submitted == direct.submitted


def test_a_stream_of_the_one_route_is_that_of_its_kind() -> None:
    streamed = chunks(ask(INVOCATIONS, {"prompt": "a", "stream": True}).text)
    assert {one["object"] for one in streamed} == {"text_completion"}


@pytest.mark.parametrize("body", [{}, {"text": "a"}, {"messages": None}, [], 5])
def test_a_body_of_no_kind_is_400(body: Any) -> None:
    response = ask(INVOCATIONS, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


ANY: list[tuple[str, dict[str, Any] | None, int]] = [
    (COMPLETIONS, {"prompt": "a"}, 200),
    (COMPLETIONS, {"prompt": "a", "stream": True}, 200),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400),
    (CHAT, {"messages": MESSAGES, "model": "other"}, 404),
    ("/v1/messages", {}, 400),
    ("/nowhere", None, 404),
    (COMPLETIONS, None, 405),
    ("/health", None, 200),
    ("/v1/models", None, 200),
    ("/" + "a" * 9000, None, 414),
]


@pytest.mark.parametrize(("path", "body", "status"), ANY)
def test_every_answer_has_the_requests_id(
    path: str, body: dict[str, Any] | None, status: int
) -> None:
    answer = ask(path, body, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["mine"])
    made = [ask(path, body).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2


def test_a_wrong_key_gets_the_requests_id_as_well() -> None:
    from quickstep.server.usage.api_keys import ApiKeys

    options = ServerOptions(api_keys=ApiKeys(("secret",)))
    answer = ask(COMPLETIONS, {"prompt": "a"}, options, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")


def test_a_request_id_is_cut_and_holds_nothing_that_a_header_may_not() -> None:
    answer = ask("/health", headers={"x-request-id": "a\tb" + "c" * 200})
    assert answer.headers["x-request-id"] == "ab" + "c" * 125
