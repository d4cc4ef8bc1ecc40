"""OpenAI's own client; runs with its major versions 2 and 3."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from conftest import KEY

QUESTION: Any = [{"role": "user", "content": "What does itertools.chain do?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
PERSON: Any = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]
GREEDY: Any = {"model": "gpt-4o-mini", "temperature": 0, "max_tokens": 60}


class GetWeather(pydantic.BaseModel):
    """Get the current weather of a city."""

    city: Literal["Bern", "Basel"]


class Person(pydantic.BaseModel):
    name: str
    age: int


TOOL: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(scripted_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def saying(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}


def test_both_served_names_answer_and_are_listed(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names == ["demo", "gpt-4o-mini"]
    for name in names:
        answer = client.chat.completions.create(**{**GREEDY, "model": name}, messages=QUESTION)
        assert answer.choices[0].message.content


def test_a_stream_repeats_the_complete_answer_and_counts_the_same(client: openai.OpenAI) -> None:
    complete = client.chat.completions.create(**GREEDY, messages=QUESTION)
    with client.chat.completions.stream(
        **GREEDY, messages=QUESTION, stream_options={"include_usage": True}
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.content == complete.choices[0].message.content
    assert streamed.choices[0].finish_reason == complete.choices[0].finish_reason
    assert streamed.usage is not None
    assert complete.usage is not None
    assert streamed.usage.completion_tokens == complete.usage.completion_tokens
    assert streamed.usage.total_tokens == complete.usage.total_tokens


def test_usage_comes_in_a_last_chunk_only_if_it_is_requested(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "messages": QUESTION, "stream": True}
    without = list(client.chat.completions.create(**fields))
    assert all(chunk.usage is None and chunk.choices for chunk in without)
    counted = list(client.chat.completions.create(**fields, stream_options={"include_usage": True}))
    assert [bool(chunk.usage) for chunk in counted] == [False] * (len(counted) - 1) + [True]
    assert counted[-1].choices == []


def test_logprobs_have_an_entry_for_each_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **GREEDY, messages=QUESTION, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode()
    assert text.startswith(answer.choices[0].message.content or "?")
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
        assert token.top_logprobs[0].token == token.token


@pytest.mark.parametrize(
    "choice", ["auto", "required", TOOL | {"function": {"name": "get_weather"}}]
)
def test_a_tool_call_is_parsed_streamed_and_replayed(client: openai.OpenAI, choice: Any) -> None:
    fields: Any = {**GREEDY, "tools": [TOOL], "tool_choice": choice}
    complete = client.chat.completions.parse(**fields, messages=WEATHER).choices[0].message
    with client.chat.completions.stream(**fields, messages=WEATHER) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (complete, streamed):
        assert message.tool_calls is not None
        assert message.tool_calls[0].function.name == "get_weather"
        assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)
    assert complete.tool_calls is not None
    result = {"role": "tool", "tool_call_id": complete.tool_calls[0].id, "content": "20 degrees"}
    answer = client.chat.completions.create(
        **{**fields, "tool_choice": "none"},
        messages=[*WEATHER, complete.model_dump(exclude_none=True), result],
    )
    assert answer.choices[0].message.content


def test_a_pydantic_model_is_filled(client: openai.OpenAI) -> None:
    complete = client.chat.completions.parse(**GREEDY, messages=PERSON, response_format=Person)
    with client.chat.completions.stream(
        **GREEDY, messages=PERSON, response_format=Person
    ) as stream:
        streamed = stream.get_final_completion()
    for completion in (complete, streamed):
        assert isinstance(completion.choices[0].message.parsed, Person)


def test_json_mode_gives_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 200},
        messages=PERSON,
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_completions_with_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["def f(", "import "], n=2, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    streamed = list(
        client.completions.create(model="demo", prompt="def f(", max_tokens=4, stream=True)
    )
    assert streamed[-1].choices[0].finish_reason == "length"


def test_embeddings_as_numbers_and_as_base64(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="demo", input=["a", "b c"], encoding_format="float")
    packed = client.embeddings.create(model="demo", input=["a", "b c"])  # asks for base64 by itself
    assert len(plain.data) == len(packed.data) == 2
    for one, other in zip(plain.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert plain.usage.prompt_tokens > 0


def test_a_response_is_created_streamed_continued_and_deleted(client: openai.OpenAI) -> None:
    # The client's stream knows no final response but a completed one: the answer must fit.
    fields: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 200}
    first = client.responses.create(**fields, input="What does itertools.chain do?")
    assert first.output_text
    assert first.usage is not None
    with client.responses.stream(**fields, input="What does itertools.chain do?") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == first.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    second = client.responses.create(**fields, input="And tee?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model="demo", input=PERSON, text_format=Person, temperature=0, max_output_tokens=60
    )
    assert isinstance(response.output_parsed, Person)


def test_async_requests_run_together(url: str) -> None:
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = [
                client.chat.completions.create(**GREEDY, messages=QUESTION, seed=seed)
                for seed in range(8)
            ]
            return await asyncio.gather(*asked)

    texts = {answer.choices[0].message.content for answer in asyncio.run(run())}
    assert len(texts) == 1  # greedy: the same alone and in a batch


def test_what_has_no_effect_is_reported(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        **GREEDY,
        messages=QUESTION,
        reasoning_effort="low",
        store=True,
        verbosity="low",
        service_tier="flex",
        prompt_cache_key="k",
        extra_body={"colour": "red"},
    )
    ignored = raw.headers["x-quickstep-ignored"].split(", ")
    assert {"reasoning_effort", "store", "verbosity", "service_tier", "colour"} <= set(ignored)
    assert raw.parse().choices[0].message.content


def test_a_long_prompt_is_a_context_overflow(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**saying("word " * 5000, model="demo"))
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"


def test_errors_have_the_clients_types(client: openai.OpenAI, scripted: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.InternalServerError, match="NaN"):
        scripted.chat.completions.create(**saying("fail"))
    with pytest.raises(openai.APIError, match="NaN"):
        list(scripted.chat.completions.create(**saying("fail", stream=True)))
    with pytest.raises(openai.InternalServerError) as gone:
        scripted.chat.completions.create(**saying("no engine"))
    assert gone.value.status_code == 503


def test_a_key_is_needed_where_the_server_has_keys(locked_url: str) -> None:
    for key, allowed in ((KEY, True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{locked_url}/v1", api_key=key, max_retries=0) as client:
            if allowed:
                assert client.chat.completions.create(**saying("hi")).choices
                continue
            with pytest.raises(openai.AuthenticationError) as refused:
                client.chat.completions.create(**saying("hi"))
            assert refused.value.code == "invalid_api_key"


def test_a_client_retries_until_the_server_is_ready(scripted: openai.OpenAI) -> None:
    patient = scripted.with_options(max_retries=2)
    assert patient.chat.completions.create(**saying("busy 1")).choices[0].message.content
    with pytest.raises(openai.InternalServerError):
        scripted.chat.completions.create(**saying("busy 1"))
    assert scripted.chat.completions.create(**saying("hi")).choices


def test_a_client_gives_up_after_its_timeout(scripted: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        scripted.with_options(timeout=0.5).chat.completions.create(**saying("never"))


def test_reasoning_is_beside_the_content(scripted: openai.OpenAI) -> None:
    message: Any = scripted.chat.completions.create(**saying("reason")).choices[0].message
    assert (message.content, message.reasoning_content) == ("Four.", "Two and two.")
    assert message.reasoning == message.reasoning_content
    deltas: list[Any] = [
        chunk.choices[0].delta
        for chunk in scripted.chat.completions.create(**saying("reason", stream=True))
        if chunk.choices
    ]
    told = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert told == "Two and two."
    assert "".join(delta.content or "" for delta in deltas) == "Four."


def test_two_calls_in_one_answer(scripted: openai.OpenAI) -> None:
    fields = saying("call twice", tools=[TOOL])
    complete = scripted.chat.completions.create(**fields).choices[0]
    with scripted.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (complete, streamed):
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls or []
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bern", "Basel"]
        assert len({call.id for call in calls}) == 2


def test_a_call_that_is_cut_is_partial(scripted: openai.OpenAI) -> None:
    fields = saying("cut call", tools=[TOOL])
    complete = scripted.chat.completions.create(**fields).choices[0]
    assert complete.finish_reason == "length"
    assert complete.message.tool_calls
    assert not complete.message.content
    with pytest.raises(openai.LengthFinishReasonError):
        scripted.chat.completions.parse(**fields)


def test_broken_arguments_of_the_history_are_accepted(client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": '}}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "none"}]}
    answer = client.chat.completions.create(
        **GREEDY, messages=[*WEATHER, {"role": "assistant", "tool_calls": [call]}, result]
    )
    assert answer.choices[0].message.content is not None
