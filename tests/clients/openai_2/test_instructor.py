"""Instructor: pydantic models out of answers, in each of its modes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import instructor
import openai
import pytest
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, field_validator

PERSON: Any = [{"role": "user", "content": "Reply in JSON. Ann is 41 years old."}]
MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
]
GREEDY: Any = {"model": "demo", "temperature": 0, "max_tokens": 200}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class Refused(BaseModel):
    """A value that no answer has."""

    name: Literal["Ann", "Bob"]

    @field_validator("name")
    @classmethod
    def never(cls, name: str) -> str:
        raise ValueError(f"{name} is not allowed")


@pytest.fixture(scope="module")
def plain(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_filled(plain: openai.OpenAI, mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain, mode=mode)
    person = client.chat.completions.create(**GREEDY, messages=PERSON, response_model=Person)
    assert isinstance(person, Person)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_a_model_is_filled_while_it_streams(plain: openai.OpenAI, mode: instructor.Mode) -> None:
    client = instructor.from_openai(plain, mode=mode)
    partial = list(
        client.chat.completions.create_partial(**GREEDY, messages=PERSON, response_model=Person)
    )
    assert len(partial) > 1
    assert Person.model_validate(partial[-1].model_dump())


def test_a_list_of_models_streams(plain: openai.OpenAI) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    people = client.chat.completions.create_iterable(
        **GREEDY | {"max_tokens": 60}, messages=PERSON, response_model=Person
    )
    assert all(isinstance(person, Person) for person in people)


def test_the_raw_completion_comes_along(plain: openai.OpenAI) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    person, completion = client.chat.completions.create_with_completion(
        **GREEDY, messages=PERSON, response_model=Person
    )
    assert isinstance(person, Person)
    assert completion.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_answer_goes_back_with_the_error(
    plain: openai.OpenAI, mode: instructor.Mode
) -> None:
    # Every retry replays the failed call or text and the validator's words.
    client = instructor.from_openai(plain, mode=mode)
    with pytest.raises(InstructorRetryException) as refused:
        client.chat.completions.create(
            **GREEDY, messages=PERSON, response_model=Refused, max_retries=2
        )
    assert "validation error for Refused" in str(refused.value)
    assert refused.value.n_attempts >= 2


def test_async_requests(url: str) -> None:
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as plain:
            client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
            asked = [
                client.chat.completions.create(**GREEDY, messages=PERSON, response_model=Person)
                for _ in range(4)
            ]
            return await asyncio.gather(*asked)

    assert all(isinstance(person, Person) for person in asyncio.run(run()))


def test_the_responses_api(plain: openai.OpenAI) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    person = client.chat.completions.create(
        model="demo", messages=PERSON, response_model=Person, temperature=0, max_output_tokens=200
    )
    assert isinstance(person, Person)
