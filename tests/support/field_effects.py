"""What a case of a field is made of: a value, what has to be true then, and what it needs around.

`test_request_fields` sends every case twice, with the field and without it: only with it may the
predicate hold. So no case passes where the field is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from fake_engine import FakeEngine, FakeTemplate, FakeTokenizer, Script, Submitted

from quickstep.text.tool_calls.formats import formats_of
from quickstep.types import Grammar

ANY_OBJECT = {"type": "object"}
ARRAY = {"type": "array"}
WITH_CALLS = "{{ tools }}<tool_call>{{ message.tool_calls }}"
MARKERS = {"<|fim_prefix|>": 211, "<|fim_suffix|>": 212, "<|fim_middle|>": 213}
CALL_TEXT = '<tool_call>{"name": "find_it", "arguments": {}}</tool_call>'


@dataclass(frozen=True)
class Seen:
    """What the engine got, what its chat template saw, and what the client got."""

    engine: FakeEngine
    text: str
    later: Any = None  # what a request behind it was answered with

    @property
    def submitted(self) -> Submitted:
        """The first request to the engine."""
        return self.engine.submitted[0]

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """What the template saw."""
        assert self.engine.chat_template is not None
        return self.engine.chat_template.rendered

    @property
    def call(self) -> Mapping[str, Any]:
        """The first earlier call that the template saw; empty if there was none."""
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        return calls[0] if calls else {"id": None, "function": {}}

    @property
    def answer(self) -> Any:
        """The JSON answer."""
        return json.loads(self.text)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The data of a stream's events."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n")]
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def prompt(self) -> str:
        """The prompt's text: of the engine, else of the template; "" if neither got one."""
        if self.engine.submitted:
            return bytes(self.submitted.prompt).decode(errors="replace")
        assert self.engine.chat_template is not None
        texts = self.engine.chat_template.texts
        return texts[-1] if texts else ""


Holds = Callable[[Seen], bool]
Before = Callable[[httpx.AsyncClient], Awaitable[Mapping[str, Any]]]
After = Callable[[httpx.AsyncClient, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Case:
    """A value, and what it leads to.

    Attributes:
        beside: Further top-level fields, in both requests.
        whole: The top-level fields in place of the value, where it does not go with the small body.
        status: Of the answer, where the effect is an error.
        before: Requests before it, in both; what they give are top-level fields.
        after: A request behind it.
    """

    value: Any
    holds: Holds
    beside: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] | None = None
    engine: Callable[[], FakeEngine] = FakeEngine
    status: int = 200
    before: Before | None = None
    after: After | None = None


Cases = Mapping[str, Case]


def cases(**rows: tuple[Any, Holds]) -> dict[str, Case]:
    """One field each: its value, and what it leads to."""
    return {name: Case(value, holds) for name, (value, holds) in rows.items()}


def sampled(name: str, value: Any) -> Holds:
    return lambda seen: getattr(seen.submitted.sampling, name) == value


def constrained(schema: Mapping[str, Any]) -> Holds:
    return sampled("grammar", Grammar.of_json_schema(dict(schema)))


def shown(text: str) -> Holds:
    """The model reads it."""
    return lambda seen: text in seen.prompt


def said(name: str, value: Any = "yo!") -> Case:
    """A field of a message, which the chat template sees."""
    return Case(value, lambda seen: any(message.get(name) == value for message in seen.messages))


def read(value: Any = "yo!", text: str = "yo!") -> Case:
    """Text, which the model reads."""
    return Case(value, shown(text))


def called(name: str, value: str) -> Case:
    """A part of an earlier call, which the chat template sees."""
    if name == "id":
        return Case(value, lambda seen: seen.call["id"] == value)
    return Case(value, lambda seen: seen.call["function"].get(name) == value)


def unknown_model() -> Case:
    """Where the answer does not tell the model."""
    return Case("nobody", lambda seen: "'nobody' does not exist" in seen.text, status=404)


def is_forced(seen: Seen) -> bool:
    grammar = seen.submitted.sampling.grammar
    return grammar is not None and grammar.kind == "lark"


@dataclass
class InfillTokenizer(FakeTokenizer):
    """A vocabulary with Qwen's markers."""

    def token_id(self, text: str) -> int | None:
        return MARKERS.get(text) or super().token_id(text)


@dataclass
class EarlyEndTokenizer(FakeTokenizer):
    """The second likeliest token of every step of the script ends the text."""

    eos_token_ids = frozenset({1})


def filling() -> FakeEngine:
    return FakeEngine(tokenizer=InfillTokenizer())


def ending_early() -> FakeEngine:
    return FakeEngine(tokenizer=EarlyEndTokenizer())


def thinking() -> FakeEngine:
    """A model whose reasoning stands in tags."""
    return FakeEngine(chat_template=FakeTemplate(formats_of(f"{WITH_CALLS}</think>")))


def levelled() -> FakeEngine:
    """A model whose template reads levels of reasoning and of length."""
    template = FakeTemplate(formats_of(f"{WITH_CALLS}</think>"))
    template.source = "{{ reasoning_effort }}{{ verbosity }}"
    return FakeEngine(chat_template=template)


def calling_twice() -> FakeEngine:
    """A model that makes two calls."""
    text = 2 * CALL_TEXT
    return FakeEngine(
        script=Script(words=tuple(text[at : at + 5] for at in range(0, len(text), 5)))
    )


async def loaded_poet(client: httpx.AsyncClient) -> Mapping[str, Any]:
    """Load an adapter that a request may replace."""
    body = {"lora_name": "poet", "lora_path": "old"}
    assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
    return {}


def applies(adapter: str) -> Any:
    return lambda seen: seen.submitted.adapter == adapter


LORA_CASE = Case([{"id": 0, "scale": 0.5}], applies("poet*0.5"), before=loaded_poet)
