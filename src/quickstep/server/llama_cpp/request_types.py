"""The JSON body of llama.cpp's `/completion`, as msgspec types: all fields."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quickstep.server.fields.field_classes import effect, hint, refused
from quickstep.server.fields.sampling_fields import RepetitionDetection
from quickstep.server.fields.shared_fields import (
    AdaptiveTarget,
    DynatempExponent,
    DynatempRange,
    LoRAScales,
    Mirostat,
    MirostatSetting,
    ModelName,
    NumKeep,
    RepeatPenalty,
    ReturnProgress,
    Stream,
    TopNSigma,
)


class PromptObject(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A prompt with media, of which only the text is supported."""

    prompt_string: Annotated[str, effect("The text.")]
    multimodal_data: Annotated[
        list[str] | None, refused("the model reads text only", passes=([],))
    ] = None


PromptPart = int | str


Prompt = str | PromptObject | list[PromptPart]


class LlamaCompletionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of `/completion`. A `prompt` list that contains a number is one prompt."""

    prompt: Annotated[
        str | PromptObject | list[int | str | PromptObject | list[PromptPart]],
        effect("What to continue: a text, token ids, both in one list, or several prompts."),
    ]
    model: ModelName = None
    n_predict: Annotated[
        int | None,
        effect("Ends each choice after this many tokens; -1 or not given is the context."),
    ] = None
    max_tokens: Annotated[
        int | None, effect("Another name of n_predict; both may be given if they agree.")
    ] = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: RepeatPenalty = None
    repeat_last_n: Annotated[
        int | None, effect("-1 for the whole context, 0 to switch penalties off; others are 400.")
    ] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: Annotated[
        int | None, effect("How far DRY looks back: -1 for the whole context, 0 for off.")
    ] = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    samplers: Annotated[
        list[str] | None, effect("Which samplers run; the order is fixed, another one is 400.")
    ] = None
    repetition_detection: RepetitionDetection | None = None
    seed: Annotated[int | None, effect("Determines the sampling; -1 chooses a seed.")] = None
    stop: Annotated[
        str | list[str] | None, effect("Ends the choice where one of these texts appears.")
    ] = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        list[tuple[int | str, float | bool]] | dict[str, float | bool] | None,
        effect("Added to the logits of these token ids or texts; false bans."),
    ] = None
    grammar: Annotated[str | None, effect("The output follows this grammar (GBNF).")] = None
    json_schema: Annotated[dict[str, Any] | None, effect("The output fits this JSON schema.")] = (
        None
    )
    n_probs: Annotated[int | None, effect("Gives this many alternatives per token.")] = None
    n_cmpl: Annotated[int | None, effect("How many choices each prompt gets.")] = None
    stream: Stream = None
    cache_prompt: Annotated[bool | None, effect("False computes the complete prompt again.")] = None
    return_tokens: Annotated[bool | None, effect("Adds the token ids.")] = None
    timings_per_token: Annotated[bool | None, effect("Every event has the timings so far.")] = None
    response_fields: Annotated[list[str] | None, effect("Keeps these fields of the answer.")] = None
    n_keep: NumKeep = None
    mirostat_tau: MirostatSetting = None
    mirostat_eta: MirostatSetting = None
    dynatemp_exponent: DynatempExponent = None
    mirostat: Mirostat = None
    dynatemp_range: DynatempRange = None
    top_n_sigma: TopNSigma = None
    adaptive_target: AdaptiveTarget = None
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
    id_slot: Annotated[
        int | None, effect("The slot that keeps the tokens, for `POST /slots/{id_slot}`.")
    ] = None
    post_sampling_probs: Annotated[
        bool | None, refused("log probabilities are of the raw logits", passes=(False,))
    ] = None
    return_progress: ReturnProgress = None
    sse_ping_interval: Annotated[int | None, hint("the operator sets it")] = None
    image_data: Annotated[list[Any] | None, refused("the model reads text only", passes=([],))] = (
        None
    )
    lora: LoRAScales = None
