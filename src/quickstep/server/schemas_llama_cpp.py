"""The JSON body of llama.cpp's `/completion`, as msgspec types: its whole schema."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["LlamaCompletionRequest", "PromptObject"]


class PromptObject(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A prompt with media; a text alone is fine."""

    prompt_string: str
    multimodal_data: list[str] | None = None


PromptPart = int | str
Prompt = str | PromptObject | list[PromptPart]


class LlamaCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/completion`. A flat list in `prompt` with a number in it is one prompt."""

    prompt: str | PromptObject | list[int | str | PromptObject | list[PromptPart]]
    model: str | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    samplers: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[tuple[int | str, float | bool]] | dict[str, float | bool] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_probs: int | None = None
    n_cmpl: int | None = None
    stream: bool | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None
    n_keep: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    dynatemp_range: float | None = None
    top_n_sigma: float | None = None
    adaptive_target: float | None = None
    min_keep: int | None = None
    n_indent: int | None = None
    n_discard: int | None = None
    n_cache_reuse: int | None = None
    t_max_predict_ms: int | None = None
    id_slot: int | None = None
    post_sampling_probs: bool | None = None
    return_progress: bool | None = None
    sse_ping_interval: int | None = None
    image_data: list[Any] | None = None
    lora: list[Any] | None = None
