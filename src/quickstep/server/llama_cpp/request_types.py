"""The JSON body of llama.cpp's `/completion`, as msgspec types: all fields."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quickstep.server.schema.field_classes import hint, refused

__all__ = ["LlamaCompletionRequest", "PromptObject"]


class PromptObject(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A prompt with media, of which only the text is supported."""

    prompt_string: str
    multimodal_data: Annotated[
        list[str] | None, refused("the model reads text only", passes=([],))
    ] = None


PromptPart = int | str
Prompt = str | PromptObject | list[PromptPart]


class LlamaCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/completion`. A `prompt` list that contains a number is one prompt."""

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
    mirostat: Annotated[int | None, refused("there is no Mirostat sampler", passes=(0,))] = None
    dynatemp_range: Annotated[
        float | None, refused("there is no dynamic temperature", passes=(0.0,))
    ] = None
    top_n_sigma: Annotated[
        float | None, refused("there is no top-n-sigma sampler", passes=(-1.0, 0.0))
    ] = None
    adaptive_target: Annotated[
        float | None, refused("there is no adaptive-p sampler", passes=(-1.0,))
    ] = None
    min_keep: Annotated[int | None, refused("samplers keep at least one token", passes=(0, 1))] = (
        None
    )
    n_indent: Annotated[int | None, refused("lines are not indented by force", passes=(0,))] = None
    n_discard: Annotated[
        int | None,
        refused("the context does not shift; a completion ends at its limit", passes=(0,)),
    ] = None
    n_cache_reuse: Annotated[
        int | None, hint("prefixes are shared in complete blocks, without shifting", passes=(0,))
    ] = None
    t_max_predict_ms: Annotated[int | None, refused("use n_predict", passes=(0, -1))] = None
    id_slot: Annotated[int | None, hint("the scheduler chooses the slot", passes=(-1,))] = None
    post_sampling_probs: Annotated[
        bool | None, refused("log probabilities are of the raw logits", passes=(False,))
    ] = None
    return_progress: Annotated[
        bool | None, refused("the prompt's progress is not reported", passes=(False,))
    ] = None
    sse_ping_interval: Annotated[int | None, hint("the operator sets it")] = None
    image_data: Annotated[list[Any] | None, refused("the model reads text only", passes=([],))] = (
        None
    )
    lora: Annotated[list[Any] | None, refused("there are no adapters", passes=([],))] = None
