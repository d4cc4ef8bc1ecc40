"""The JSON answers of `/tokenize`, `/detokenize` and `/apply-template`."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Detokenized", "RenderedPrompt", "TokenPiece", "Tokenized", "TokenizerInfo"]


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
