"""The JSON responses of llama.cpp's own routes, as types.

`endpoint` encodes them as they are; `/openapi.json` is generated from them.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.openai.response_types import PromptProgressReport


class LlamaAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter; `path` is its name, `scale` applies to requests without `lora`."""

    id: int
    path: str
    scale: float


class LlamaTopToken(msgspec.Struct, frozen=True):
    """One of the most likely tokens, with its log probability from the raw logits."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaToken(msgspec.Struct, frozen=True):
    """A generated token, and the most likely ones at its position."""

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


class LogitBias(msgspec.Struct, frozen=True):
    """What is added to a token's logit."""

    token: int
    bias: float


class GenerationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling parameters of a completion; the defaults are of what Quickstep does not have.
    `stream` and `n_ctx` are in completions only, not in `/props`.
    """

    n_predict: int
    max_tokens: int
    seed: int
    temperature: float
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    repeat_last_n: int = -1
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: tuple[str, ...]
    mirostat: int = 0
    stop: tuple[str, ...]
    n_keep: int = -1
    n_discard: int = 0
    ignore_eos: bool
    logit_bias: list[LogitBias]
    n_probs: int
    min_keep: int = 0
    grammar: str
    samplers: tuple[str, ...]
    lora: tuple[()] = ()
    stream: bool | UnsetType = UNSET
    n_ctx: int | UnsetType = UNSET


class LlamaChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a stream: new text and tokens of one completion."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: LlamaTimings | UnsetType = UNSET
    completion_probabilities: list[LlamaToken] | UnsetType = UNSET
    prompt_progress: PromptProgressReport | UnsetType = UNSET


class LlamaCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A complete completion, or the last chunk of a stream. Several prompts give a list of them;
    with `response_fields`, only the named fields are sent.
    """

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: GenerationSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: LlamaTimings
    completion_probabilities: list[LlamaToken] | UnsetType = UNSET


class DefaultSettings(msgspec.Struct, frozen=True):
    """The parameters of a request to `/completion` that sets none."""

    id: int
    id_task: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    params: GenerationSettings


class Modalities(msgspec.Struct, frozen=True):
    """What a prompt may contain in addition to text."""

    vision: bool = False
    audio: bool = False


class LlamaProps(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/props`. `model_path` is the model's name: paths are not published."""

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    chat_template: str
    build_info: str
    is_sleeping: bool = False


class LlamaSlot(msgspec.Struct, frozen=True):
    """A slot of the batch."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class SaveTimings(msgspec.Struct, frozen=True):
    """How long a slot was saved."""

    save_ms: float


class SavedSlot(msgspec.Struct, frozen=True):
    """A slot that was saved: tokens of full KV blocks, and the bytes of the file."""

    id_slot: int
    filename: str
    n_saved: int
    n_written: int
    timings: SaveTimings


class RestoreTimings(msgspec.Struct, frozen=True):
    """How long a slot was restored."""

    restore_ms: float


class RestoredSlot(msgspec.Struct, frozen=True):
    """A slot that was restored: tokens that are cached now, and the bytes of the file."""

    id_slot: int
    filename: str
    n_restored: int
    n_read: int
    timings: RestoreTimings


class ErasedSlot(msgspec.Struct, frozen=True):
    """A slot that was forgotten, with so many tokens."""

    id_slot: int
    n_erased: int


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/load`: vLLM's `server_load`, and the scheduler's counts."""

    server_load: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
