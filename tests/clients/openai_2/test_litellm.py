"""LiteLLM, as OpenAI's, vLLM's and Anthropic's provider, and as aider calls it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pydantic
import pytest
from conftest import KEY
from litellm.exceptions import ContextWindowExceededError

QUESTION: Any = [{"role": "user", "content": "What does itertools.chain do?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
PERSON: Any = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]
LONG: Any = [{"role": "user", "content": "word " * 5000}]
CITY: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": CITY,
    },
}
PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


class Person(pydantic.BaseModel):
    name: str
    age: int


def at(url: str, provider: str, model: str = "demo") -> dict[str, Any]:
    """How LiteLLM reaches the server through a provider."""
    base = url if provider == "anthropic" else f"{url}/v1"
    return {
        "model": f"{provider}/{model}",
        "api_base": base,
        "api_key": "none",
        "max_tokens": 60,
        "temperature": 0,
        "num_retries": 0,
        "timeout": 60,
    }


def scripted(url: str, provider: str, text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {**at(url, provider, "fake"), "max_tokens": 200, "messages": messages, **fields}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream_repeats_the_complete_answer_and_its_usage(url: str, provider: str) -> None:
    complete: Any = litellm.completion(**at(url, provider), messages=QUESTION)
    chunks = list(
        litellm.completion(
            **at(url, provider),
            messages=QUESTION,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    streamed: Any = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert complete.choices[0].message.content
    assert streamed.choices[0].message.content == complete.choices[0].message.content
    assert streamed.choices[0].finish_reason == complete.choices[0].finish_reason
    assert streamed.usage.completion_tokens == complete.usage.completion_tokens
    assert streamed.usage.prompt_tokens == complete.usage.prompt_tokens > 0


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_call_is_made_streamed_and_replayed(url: str, provider: str, choice: str) -> None:
    fields: Any = {**at(url, provider), "tools": [TOOL], "tool_choice": choice}
    message: Any = litellm.completion(**fields, messages=WEATHER).choices[0].message
    chunks = list(litellm.completion(**fields, messages=WEATHER, stream=True))
    streamed: Any = litellm.stream_chunk_builder(chunks, messages=WEATHER)
    for calls in (message.tool_calls, streamed.choices[0].message.tool_calls):
        assert [call.function.name for call in calls] == ["get_weather"]
        assert set(json.loads(calls[0].function.arguments)) == {"city"}
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20 degrees"}
    answer: Any = litellm.completion(
        **{**fields, "tool_choice": "auto"}, messages=[*WEATHER, message, result]
    )
    assert answer.choices[0].finish_reason in ("stop", "tool_calls")


def test_a_tool_is_forced_by_name(url: str) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    for provider in PROVIDERS:
        answer: Any = litellm.completion(
            **at(url, provider), messages=QUESTION, tools=[TOOL], tool_choice=choice
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_pydantic_model_is_a_response_format(url: str, provider: str) -> None:
    answer: Any = litellm.completion(
        **at(url, provider), messages=PERSON, response_format=Person, drop_params=False
    )
    assert Person.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_logprobs(url: str, provider: str) -> None:
    answer: Any = litellm.completion(
        **at(url, provider), messages=QUESTION, logprobs=True, top_logprobs=2
    )
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) >= answer.usage.completion_tokens - 1
    assert all(len(token.top_logprobs) == 2 for token in tokens)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_reasoning_is_a_field_of_its_own(scripted_url: str, provider: str) -> None:
    fields = scripted(scripted_url, provider, "reason")
    complete: Any = litellm.completion(**fields)
    chunks = list(litellm.completion(**fields, stream=True))
    streamed: Any = litellm.stream_chunk_builder(chunks)
    for answer in (complete, streamed):
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_two_calls_in_one_answer(scripted_url: str, provider: str) -> None:
    fields = scripted(scripted_url, provider, "call twice", tools=[TOOL])
    complete: Any = litellm.completion(**fields)
    chunks = list(litellm.completion(**fields, stream=True))
    streamed: Any = litellm.stream_chunk_builder(chunks)
    for answer in (complete, streamed):
        calls = answer.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bern", "Basel"]
        assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_reasoning_effort_and_other_hints_are_accepted(url: str, provider: str) -> None:
    answer: Any = litellm.completion(
        **at(url, provider),
        messages=QUESTION,
        reasoning_effort="low",
        user="ann",
        parallel_tool_calls=None,
        seed=1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        allowed_openai_params=["reasoning_effort"],
        extra_body={"colour": "red", "top_k": 3},
        metadata={"trace": "1"},
    )
    assert answer.choices[0].message.content


def test_thinking_of_anthropic_is_accepted(url: str, scripted_url: str) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    # LiteLLM knows by a model's name whether it thinks, unless it is told.
    thinks: Any = {"thinking": thinking, "allowed_openai_params": ["thinking"]}
    fields = at(url, "anthropic") | {"temperature": 1, "max_tokens": 1500}
    answer: Any = litellm.completion(**fields, **thinks, messages=QUESTION)
    assert answer.choices[0].message.content
    # The blocks of the answer go back with the tool's result.
    fields = scripted(scripted_url, "anthropic", "reason and call", tools=[TOOL])
    fields |= {"max_tokens": 1500, "temperature": 1}
    answer = litellm.completion(**fields, **thinks)
    message = answer.choices[0].message
    assert message.thinking_blocks[0]["thinking"] == "Weather."
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20 degrees"}
    fields["messages"] = [*fields["messages"], message, result, *fields["messages"]]
    assert litellm.completion(**fields, **thinks).choices


def test_marks_for_the_cache_are_accepted(url: str) -> None:
    mark = {"type": "ephemeral"}
    text = "You are a helpful assistant. " * 20
    messages = [
        {"role": "system", "content": [{"type": "text", "text": text, "cache_control": mark}]},
        *QUESTION,
    ]
    for provider in PROVIDERS:
        litellm.completion(**at(url, provider), messages=messages)
        again: Any = litellm.completion(**at(url, provider), messages=messages)
        assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_text_completion(url: str) -> None:
    fields = {**at(url, "text-completion-openai"), "max_tokens": 5}
    complete: Any = litellm.text_completion(**fields, prompt="import ")
    assert complete.choices[0].finish_reason == "length"
    chunks: Any = list(litellm.text_completion(**fields, prompt="import ", stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == complete.choices[0].text


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_embeddings(url: str, provider: str) -> None:
    answer: Any = litellm.embedding(
        model=f"{provider}/demo", api_base=f"{url}/v1", api_key="none", input=["a", "b c"]
    )
    assert [entry["index"] for entry in answer.data] == [0, 1]
    assert len(answer.data[0]["embedding"]) == len(answer.data[1]["embedding"]) > 0
    assert answer.usage.prompt_tokens > 0


def test_the_responses_api(url: str) -> None:
    fields = at(url, "openai")
    for name in ("max_tokens", "num_retries"):
        del fields[name]
    answer: Any = litellm.responses(**fields, input="What does itertools.chain do?")
    assert answer.status == "completed"
    assert answer.output[0].content[0].text
    events: Any = litellm.responses(**fields, input="What does itertools.chain do?", stream=True)
    assert [event.type for event in events][-1] == "response.completed"


def test_async_requests_run_together(url: str) -> None:
    async def run() -> list[Any]:
        asked = [litellm.acompletion(**at(url, "openai"), messages=QUESTION) for _ in range(6)]
        return await asyncio.gather(*asked)

    assert len({answer.choices[0].message.content for answer in asyncio.run(run())}) == 1


def test_an_async_stream(url: str) -> None:
    async def run() -> str:
        stream: Any = await litellm.acompletion(**at(url, "openai"), messages=QUESTION, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(run())


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_overflows_the_context(url: str, provider: str, stream: bool) -> None:
    with pytest.raises(ContextWindowExceededError):
        litellm.completion(**at(url, provider), messages=LONG, stream=stream)


def test_long_texts_overflow_the_context_in_other_apis(url: str) -> None:
    with pytest.raises(ContextWindowExceededError):
        litellm.text_completion(**at(url, "text-completion-openai"), prompt="word " * 5000)
    with pytest.raises(ContextWindowExceededError):
        litellm.embedding(
            model="openai/demo", api_base=f"{url}/v1", api_key="none", input=["word " * 5000]
        )
    with pytest.raises(ContextWindowExceededError):
        litellm.responses(
            model="openai/demo", api_base=f"{url}/v1", api_key="none", input="word " * 5000
        )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_errors_have_litellms_types(scripted_url: str, locked_url: str, provider: str) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**scripted(locked_url, provider, "hi", api_key="wrong"))
    assert litellm.completion(**scripted(locked_url, provider, "hi", api_key=KEY)).choices
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**scripted(scripted_url, provider, "hi", model=f"{provider}/gpt-9"))
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**scripted(scripted_url, provider, "hi", temperature=-1))
    with pytest.raises(litellm.InternalServerError):
        litellm.completion(**scripted(scripted_url, provider, "fail"))
    with pytest.raises((litellm.ServiceUnavailableError, litellm.InternalServerError)):
        litellm.completion(**scripted(scripted_url, provider, "no engine"))
    with pytest.raises(litellm.Timeout):
        litellm.completion(**scripted(scripted_url, provider, "never", timeout=0.5))


def test_a_busy_server_is_retried(scripted_url: str) -> None:
    answer: Any = litellm.completion(**scripted(scripted_url, "openai", "busy 1", num_retries=2))
    assert answer.choices[0].message.content


def ollama_at(url: str, provider: str, model: str = "demo") -> dict[str, Any]:
    return at(url, provider, model) | {"api_base": url}


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_ollamas_api_answers_and_streams(url: str, provider: str) -> None:
    fields = ollama_at(url, provider)
    complete: Any = litellm.completion(**fields, messages=QUESTION, num_ctx=2048)
    chunks = list(litellm.completion(**fields, messages=QUESTION, stream=True))
    streamed: Any = litellm.stream_chunk_builder(chunks)
    for answer in (complete, streamed):
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason in ("stop", "length")
        assert answer.usage.completion_tokens > 0
    assert streamed.choices[0].message.content == complete.choices[0].message.content


def test_ollamas_api_calls_a_tool_and_fills_a_model(url: str) -> None:
    fields = ollama_at(url, "ollama_chat")
    message: Any = litellm.completion(**fields, messages=WEATHER, tools=[TOOL]).choices[0].message
    assert "city" in json.loads(message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20 degrees"}
    turns = [*WEATHER, message, result]
    assert litellm.completion(**fields, messages=turns, tools=[TOOL]).choices
    answer: Any = litellm.completion(**fields, messages=PERSON, response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content)


def test_ollamas_api_gives_reasoning(scripted_url: str) -> None:
    fields = scripted(scripted_url, "ollama_chat", "reason", api_base=scripted_url)
    message: Any = litellm.completion(**fields, reasoning_effort="low").choices[0].message
    assert (message.reasoning_content, message.content) == ("Two and two.", "Four.")


def test_ollamas_api_embeds(url: str) -> None:
    answer: Any = litellm.embedding(model="ollama/demo", api_base=url, input=["a", "b c"])
    assert len(answer.data) == 2


# What aider sends: its `Model.send_completion` and `Coder.show_send_output_stream`.


def test_aiders_stream(scripted_url: str) -> None:
    chunks = litellm.completion(
        model="openai/fake",
        messages=[
            {"role": "system", "content": "Act as an expert software developer."},
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Ok."},
            {"role": "user", "content": "reason"},
        ],
        stream=True,
        temperature=0,
        timeout=600,
        api_base=f"{scripted_url}/v1",
        api_key="none",
        drop_params=True,
    )
    text = reasoning = ""
    for chunk in chunks:
        delta: Any = chunk.choices[0].delta
        reasoning += getattr(delta, "reasoning_content", None) or ""
        text += delta.content or ""
    assert (text, reasoning) == ("Four.", "Two and two.")


def test_aiders_function_call(url: str) -> None:
    answer: Any = litellm.completion(
        model="openai/demo",
        messages=WEATHER,
        stream=False,
        temperature=0,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        api_base=f"{url}/v1",
        api_key="none",
    )
    call = answer.choices[0].message.tool_calls[0]
    assert "city" in json.loads(call.function.arguments)


def test_aider_continues_an_answer_that_was_cut(url: str) -> None:
    cut: Any = litellm.completion(**{**at(url, "openai"), "max_tokens": 5}, messages=QUESTION)
    assert cut.choices[0].finish_reason == "length"
    begun = {"role": "assistant", "content": cut.choices[0].message.content, "prefix": True}
    answer: Any = litellm.completion(**at(url, "openai"), messages=[*QUESTION, begun])
    assert answer.choices[0].message.content is not None


def test_aiders_marks_for_the_cache_and_extra_params(url: str) -> None:
    mark = {"type": "ephemeral"}
    parts = [{"type": "text", "text": "What does itertools.chain do?", "cache_control": mark}]
    answer: Any = litellm.completion(
        **at(url, "openai"),
        messages=[{"role": "user", "content": parts}],
        extra_headers={"anthropic-beta": "prompt-caching-2024-07-31"},
        extra_body={"num_ctx": 8192},
    )
    assert answer.choices[0].message.content
