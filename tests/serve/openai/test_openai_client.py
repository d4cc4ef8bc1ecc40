"""The real `openai` client against a server on a socket, with the scripted engine behind it."""

from collections.abc import Iterator

import openai
import pytest
from fake_engine import WORDS, FakeEngine, Script
from live_server import live_server

from quickstep.types import FinishReason

TEXT = "".join(WORDS)


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


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=50
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
        )
    )
    words = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(word.delta.content or "" for word in words) == TEXT
    assert [word.finish_reason for word in words if word.finish_reason] == ["stop"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [9]
    assert words[1].logprobs is not None
    assert words[1].logprobs.content is not None
    assert len(words[1].logprobs.content[0].top_logprobs) == 2


def test_the_streaming_helper_assembles_the_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="fake", messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == TEXT


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 4
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_completions_stream(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="fake", prompt=[1, 2], max_tokens=99, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT


def test_fields_beyond_openais_go_through_extra_body(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    client.completions.create(model="fake", prompt="a", extra_body={"min_p": 0.25, "top_k": 3})
    assert engine.submitted[-1].sampling.min_p == 0.25
    assert engine.submitted[-1].sampling.top_k == 3


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "quickstep"


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fake", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"


def test_an_unknown_field_is_reported_to_the_client(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="fake", prompt="a", extra_body={"colour": 1}
    )
    assert raw.headers["x-quickstep-ignored"] == "colour"


def test_an_error_event_raises_in_the_clients_stream(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = Script(FinishReason.ERROR, error="the logits are NaN")
    try:
        stream = client.completions.create(model="fake", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="NaN"):
            list(stream)
    finally:
        engine.script = Script()


def test_a_large_body_is_413_over_a_socket(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="fake", prompt="a" * (5 * 1024 * 1024))
    assert refused.value.status_code == 413
