"""The JSON answers of llama.cpp's own routes, as types."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

__all__ = [
    "LlamaChunk",
    "LlamaCompletion",
    "LlamaProps",
    "LlamaTimings",
    "LlamaToken",
    "LlamaTopToken",
    "ServerLoad",
    "Slot",
]


class LlamaTopToken(msgspec.Struct, frozen=True):
    """A token that might have been, with its log probability from the raw logits."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaToken(msgspec.Struct, frozen=True):
    """A generated token, and the most likely ones in its place."""

    id: int
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[LlamaTopToken]


class LlamaTimings(msgspec.Struct, frozen=True):
    """Tokens and milliseconds of one completion."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class LlamaChunk(msgspec.Struct, frozen=True, kw_only=True):
    """News in a stream."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: LlamaTimings | UnsetType = UNSET
    completion_probabilities: list[LlamaToken] | UnsetType = UNSET


class LlamaCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, or the last word of a stream. Several prompts give a list of them;
    `response_fields` leaves the named ones only.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: LlamaTimings
    completion_probabilities: list[LlamaToken] | UnsetType = UNSET


class DefaultSettings(msgspec.Struct, frozen=True):
    """What a request to `/completion` gets where it is silent."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    params: dict[str, Any]


class Modalities(msgspec.Struct, frozen=True):
    """What a prompt may hold beside text."""

    vision: bool = False
    audio: bool = False


class LlamaProps(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/props`. `model_path` is the model's name, for paths are nobody's business."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    build_info: str
    is_sleeping: bool = False


class Slot(msgspec.Struct, frozen=True):
    """A place in the batch."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/load`: vLLM's `server_load`, and what it is made of."""

    server_load: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
