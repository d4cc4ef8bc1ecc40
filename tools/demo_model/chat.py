"""Conversations and their text form: the chat template, rendered the way clients will render it.

Owns the message types and the template file. Called by the dialogue builders, the tokenizer's
training and the quality script.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")

Message = dict[str, Any]
Render = Callable[["Conversation"], str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the OpenAI shape, with the tools offered (JSON schemas)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = False


def chat_renderer(template: str = CHAT_TEMPLATE) -> Render:
    """A function from a conversation to text, with the conventions of transformers' renderer."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(template)

    def render(conversation: Conversation) -> str:
        return compiled.render(
            messages=conversation.messages,
            tools=conversation.tools or None,
            add_generation_prompt=conversation.add_generation_prompt,
        )

    return render


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """The assistant's answer."""
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def tool_call(name: str, arguments: dict[str, Any]) -> Message:
    """The assistant calling one tool."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool_result(result: dict[str, Any]) -> Message:
    """What the tool answered."""
    return {"role": "tool", "content": json.dumps(result, ensure_ascii=False)}


def ask(question: str, system_text: str | None = None) -> Conversation:
    """One question, ready for the model's answer."""
    opening: Sequence[Message] = [system(system_text)] if system_text else []
    return Conversation((*opening, user(question)), add_generation_prompt=True)
