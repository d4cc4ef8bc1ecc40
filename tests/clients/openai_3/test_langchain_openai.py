"""`ChatOpenAI` and `OpenAIEmbeddings` of LangChain."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from conftest import KEY
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION = "What does itertools.chain do?"
WEATHER = "What is the weather in Bern?"
PERSON = "Reply in JSON. Ann is 41 years old."


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return json.dumps({"city": city, "temperature_c": 20, "condition": "sunny"})


def chat(url: str, **fields: Any) -> ChatOpenAI:
    fields = {"model": "demo", "temperature": 0, "max_tokens": 100, "api_key": "none", **fields}
    return ChatOpenAI(base_url=f"{url}/v1", max_retries=0, **fields)


def streamed(model: Any, asked: Any) -> AIMessageChunk:
    """The sum of a stream's chunks."""
    chunks = list(model.stream(asked))
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert isinstance(total, AIMessageChunk)
    return total


@pytest.mark.parametrize("responses", [False, True])
def test_a_stream_repeats_the_complete_answer_and_its_usage(url: str, responses: bool) -> None:
    model = chat(url, use_responses_api=responses, stream_usage=True)
    messages = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    complete = model.invoke(messages)
    total = streamed(model, messages)
    assert complete.text
    assert total.text == complete.text
    assert complete.usage_metadata
    assert total.usage_metadata
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[name] == complete.usage_metadata[name] > 0


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("choice", [None, "any", "get_weather"])
def test_a_tool_goes_around(url: str, responses: bool, choice: str | None) -> None:
    model = chat(url, use_responses_api=responses)
    bound = model.bind_tools([get_weather], tool_choice=choice)
    complete = bound.invoke(WEATHER)
    total = streamed(bound, WEATHER)
    for message in (complete, total):
        (call,) = message.tool_calls
        assert call["name"] == "get_weather"
        assert set(call["args"]) == {"city"}
        assert not message.invalid_tool_calls
    result = get_weather.invoke(complete.tool_calls[0])
    assert isinstance(result, ToolMessage)
    auto = model.bind_tools([get_weather])
    answer = auto.invoke([HumanMessage(WEATHER), complete, result])
    assert answer.text or answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("responses", [False, True])
def test_structured_output(url: str, method: Any, responses: bool) -> None:
    model = chat(url, use_responses_api=responses)
    strict = None if method == "json_mode" else True
    model_of = model.with_structured_output(Person, method=method, strict=strict, include_raw=True)
    found: Any = model_of.invoke(PERSON)
    assert found["parsing_error"] is None
    assert isinstance(found["parsed"], Person)


def test_structured_output_streams(url: str) -> None:
    parts = list(chat(url).with_structured_output(Person, method="json_schema").stream(PERSON))
    assert isinstance(parts[-1], Person)


def test_tools_and_a_response_format_together(url: str) -> None:
    bound = chat(url).bind_tools([get_weather], response_format=Person, strict=True)
    message = bound.invoke(PERSON)
    assert message.tool_calls or message.additional_kwargs["parsed"]


def test_logprobs(url: str) -> None:
    message = chat(url, logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = message.response_metadata["logprobs"]["content"]
    assert all(len(token["top_logprobs"]) == 2 for token in tokens)


def test_what_a_client_sets_beyond_the_basics_is_accepted(url: str) -> None:
    model = chat(
        url,
        n=2,
        seed=1,
        stop=["###"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        top_p=0.9,
        reasoning_effort="low",
        verbosity="low",
        service_tier="default",
        store=False,
        logit_bias={"5": 1},
        extra_body={"top_k": 3},
        metadata={"run": "1"},
        include_response_headers=True,
    )
    result = model.generate([[HumanMessage(QUESTION)]])
    assert len(result.generations[0]) == 2
    message: Any = result.generations[0][0]
    headers = message.message.response_metadata["headers"]
    assert {"reasoning_effort", "verbosity"} <= set(headers["x-quickstep-ignored"].split(", "))


def test_batches_and_async(url: str) -> None:
    model = chat(url)
    texts = {message.text for message in model.batch([QUESTION] * 4)}

    async def run() -> set[str]:
        answers = await model.abatch([QUESTION] * 4)
        text = "".join([chunk.text async for chunk in model.astream(QUESTION)])
        return {text, *(answer.text for answer in answers)}

    assert asyncio.run(run()) == texts
    assert len(texts) == 1


def test_a_conversation_continues_by_the_id_of_a_response(url: str) -> None:
    model = chat(url, use_responses_api=True, use_previous_response_id=True)
    first = model.invoke(QUESTION)
    second = model.invoke([HumanMessage(QUESTION), first, HumanMessage("And tee?")])
    assert second.response_metadata["id"] != first.response_metadata["id"]
    assert second.usage_metadata
    assert first.usage_metadata
    assert second.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


def test_the_reasoning_of_a_response(scripted_url: str) -> None:
    model = chat(scripted_url, model="fake", use_responses_api=True, output_version="v1")
    complete = model.invoke("reason")
    total = streamed(model, "reason")
    for message in (complete, total):
        kinds = [block["type"] for block in message.content_blocks]
        assert kinds == ["reasoning", "text"]
        assert message.text == "Four."
    # The reasoning goes back as an item of the input.
    assert model.invoke([HumanMessage("reason"), complete, HumanMessage("hi")]).text


def test_completions(url: str) -> None:
    model = OpenAI(base_url=f"{url}/v1", api_key="none", model="demo", temperature=0, max_tokens=8)
    complete = model.invoke("import ")
    assert "".join(model.stream("import ")) == complete
    result = model.generate(["import ", "def f("])
    assert [len(generations) for generations in result.generations] == [1, 1]


def test_embeddings(url: str) -> None:
    # LangChain counts tokens with OpenAI's tokenizer and sends ids unless it is told not to.
    model = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key="none", model="demo", check_embedding_ctx_length=False
    )
    first, second = model.embed_documents(["a", "b c"])
    assert len(first) == len(second) > 0
    assert model.embed_query("a") == pytest.approx(first, abs=1e-5)


@pytest.mark.parametrize("responses", [False, True])
def test_a_long_prompt_overflows_the_context(url: str, responses: bool) -> None:
    model = chat(url, use_responses_api=responses)
    with pytest.raises(ContextOverflowError):
        model.invoke("word " * 5000)
    with pytest.raises(ContextOverflowError):
        list(model.stream("word " * 5000))


def test_errors(scripted_url: str, locked_url: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        chat(locked_url, model="fake", api_key="wrong").invoke("hi")
    assert chat(locked_url, model="fake", api_key=KEY).invoke("hi").text
    with pytest.raises(openai.NotFoundError):
        chat(scripted_url, model="gpt-9").invoke("hi")
    with pytest.raises(openai.APITimeoutError):
        chat(scripted_url, model="fake", timeout=0.5).invoke("never")
    with pytest.raises(openai.InternalServerError):
        chat(scripted_url, model="fake").invoke("fail")
    patient = ChatOpenAI(base_url=f"{scripted_url}/v1", api_key="none", model="fake", max_retries=2)
    assert patient.invoke("busy 1").text


def test_a_call_with_broken_arguments_is_an_invalid_call(scripted_url: str) -> None:
    bound = chat(scripted_url, model="fake").bind_tools([get_weather])
    message = bound.invoke("cut call")
    assert message.response_metadata["finish_reason"] == "length"
    assert message.tool_calls or message.invalid_tool_calls
    # Sent back as it came, with a result.
    call = (message.invalid_tool_calls or message.tool_calls)[0]
    result = ToolMessage("the call was cut", tool_call_id=call["id"])
    assert bound.invoke([HumanMessage("cut call"), message, result, HumanMessage("hi")]).text
