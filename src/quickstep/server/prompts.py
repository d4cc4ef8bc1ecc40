"""The forms of a prompt, and how each becomes the tokens that the model reads.

A surface makes prompts, `generation` has them tokenised before it submits them. Prompts of some
length are rendered and tokenised in a thread, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from quickstep.dataclass import dataclass
from quickstep.errors import RequestError
from quickstep.server.engine_face import ServedEngine

__all__ = [
    "ChatPrompt",
    "InfillPrompt",
    "Prompt",
    "TextPrompt",
    "TokenPrompt",
    "prompt_ids",
    "rendered",
]

# Shorter prompts are rendered and tokenised on the event loop: a thread hop costs more.
_INLINE_CHARS = 2048


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenise; special tokens in the text itself are recognised."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as the client gave them."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template. `num_chars` estimates its size.

    `continue_final_message`: the answer goes on from the last message's text.
    """

    messages: tuple[Mapping[str, Any], ...]
    num_chars: int
    add_generation_prompt: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """Text on both sides of what the model is to write; `marker_ids` announce the text before,
    the text behind, and the middle.
    """

    before: str
    behind: str
    marker_ids: tuple[int, int, int]
    add_special_tokens: bool = True


Prompt = TextPrompt | TokenPrompt | ChatPrompt | InfillPrompt


async def prompt_ids(engine: ServedEngine, prompt: Prompt) -> Sequence[int]:
    """The tokens of a prompt. Raises RequestError if the template refuses it."""
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    if _num_chars(prompt) <= _INLINE_CHARS:
        return _encode(engine, prompt)
    return await asyncio.to_thread(_encode, engine, prompt)


def _num_chars(prompt: TextPrompt | ChatPrompt | InfillPrompt) -> int:
    match prompt:
        case TextPrompt(text=text):
            return len(text)
        case ChatPrompt(num_chars=num_chars):
            return num_chars
        case InfillPrompt(before=before, behind=behind):
            return len(before) + len(behind)


def _encode(engine: ServedEngine, prompt: TextPrompt | ChatPrompt | InfillPrompt) -> Sequence[int]:
    encode = engine.tokenizer.encode
    if isinstance(prompt, TextPrompt):
        return encode(prompt.text, prompt.add_special_tokens)
    if isinstance(prompt, InfillPrompt):
        before, behind, middle = prompt.marker_ids
        texts = (encode(prompt.before, False), encode(prompt.behind, False))
        opening = encode("", prompt.add_special_tokens)
        return [*opening, before, *texts[0], behind, *texts[1], middle]
    # the template has written the special tokens already
    return encode(rendered(engine, prompt), False)


def rendered(engine: ServedEngine, prompt: ChatPrompt) -> str:
    """The prompt text of a conversation. Raises RequestError."""
    template = engine.chat_template
    if template is None:
        raise RequestError(
            f"{engine.model_name} has no chat template; use /v1/completions", param="messages"
        )
    return template.render(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        extra=prompt.extra,
        continue_final_message=prompt.continue_final_message,
    )
