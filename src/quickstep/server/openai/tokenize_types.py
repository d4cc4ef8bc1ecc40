"""The JSON bodies and answers of `/tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quickstep.server.openai.request_types import Message
from quickstep.server.schema.field_classes import refused

__all__ = [
    "ApplyTemplateRequest",
    "DetokenizeRequest",
    "Detokenized",
    "RenderedPrompt",
    "TokenPiece",
    "TokenizeRequest",
    "Tokenized",
    "TokenizerInfo",
]


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/tokenize`: `prompt` or `messages` (vLLM), or `content` (llama.cpp)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str | None, refused("the model's own template is used")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: Annotated[dict[str, Any] | None, refused("the model reads text only")] = (
        None
    )
    tools: list[dict[str, Any]] | None = None
    add_special: bool | None = None
    parse_special: Annotated[
        bool | None, refused("special tokens are recognised in every text", passes=(True,))
    ] = None
    with_pieces: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/detokenize`, the same for vLLM and llama.cpp."""

    tokens: list[int]
    model: str | None = None


class ApplyTemplateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of llama.cpp's `/apply-template`."""

    messages: list[Message]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenPiece(msgspec.Struct, frozen=True):
    """A token (llama.cpp's `with_pieces`): its text, or its bytes if they are no whole text."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenize`; `token_strs` are the vocabulary's own spellings."""

    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/detokenize`: the same text by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenizer_info`: what a client needs to write prompts by itself."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    vocab_size: int
    model_max_length: int
    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    eos_token_ids: list[int]


class RenderedPrompt(msgspec.Struct, frozen=True):
    """The answer of `/apply-template`."""

    prompt: str
