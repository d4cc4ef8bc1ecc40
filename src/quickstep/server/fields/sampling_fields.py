"""`SamplingFields`: the fields of all OpenAI routes that generate, and the forms of their output.

Every field is declared with its class (`field_classes`), so that what we do not do is reported or
refused by name. `null` means "not given" everywhere. Names beyond OpenAI's are vLLM's. Other APIs
translate their fields into these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from quickstep.server.fields.field_classes import effect, hint, note, refused
from quickstep.server.fields.shared_fields import (
    Account,
    AdaptiveTarget,
    CacheSalt,
    DynatempExponent,
    DynatempRange,
    LoRAScales,
    Mirostat,
    MirostatSetting,
    ModelName,
    Priority,
    RequestClassName,
    Stream,
    StrictSchema,
    TopNSigma,
    TtftDeadline,
)

# other servers' names of `thinking_budget`, in which -1 is no limit
BUDGET_NAMES = (
    "thinking_token_budget",
    "reasoning_budget",
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
)
_BUDGET = effect(
    "Another name of thinking_budget; -1 for no limit. Several may be sent if they agree."
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """`stream_options`: a usage chunk at the end, or the running usage in every chunk (vLLM)."""

    include_usage: Annotated[
        bool | None, effect("The last chunk has the usage and no choices.")
    ] = None
    continuous_usage_stats: Annotated[bool | None, effect("Every chunk has the usage so far.")] = (
        None
    )
    include_obfuscation: Annotated[bool | None, hint("chunks are not padded", passes=(False,))] = (
        None
    )


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="text"):
    """Output without a form."""


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_object"):
    """Output that is a JSON object."""

    schema: Annotated[
        dict[str, Any] | None, effect("llama.cpp's name of a schema that the output fits.")
    ] = None


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A named schema; name and description are notes."""

    name: Annotated[str, note("for readers of the request")]
    description: Annotated[str | None, note("for readers of the request")] = None
    schema: Annotated[
        dict[str, Any] | None,
        effect("The JSON schema that the output fits; a keyword that cannot be enforced is 400."),
    ] = None
    strict: StrictSchema = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="json_schema"):
    """Output that fits a JSON schema, given with a name, or by itself as llama.cpp takes it."""

    json_schema: Annotated[JsonSchema | None, effect("The schema, with a name.")] = None
    schema: Annotated[dict[str, Any] | None, effect("The schema by itself.")] = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's `structured_outputs`: one of these; `grammar` is in Lark or GBNF."""

    json: Annotated[
        dict[str, Any] | str | None,
        effect("The output fits this JSON schema, given as an object or as its text."),
    ] = None
    json_object: Annotated[bool | None, effect("The output is a JSON object.")] = None
    regex: Annotated[
        str | None, effect("The complete output matches this regular expression (Rust's syntax).")
    ] = None
    choice: Annotated[list[str] | None, effect("The output is one of these texts.")] = None
    grammar: Annotated[
        str | None, effect("The output derives from this grammar, in llguidance's Lark or in GBNF.")
    ] = None
    structural_tag: Annotated[Any, refused("send a grammar")] = None


class RepetitionDetection(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """vLLM's `repetition_detection`: the same tokens several times in a row end the choice."""

    max_pattern_size: Annotated[
        int, msgspec.Meta(ge=0, le=1024), effect("Most tokens that repeat; 0 ends nothing.")
    ] = 0
    min_pattern_size: Annotated[
        int, msgspec.Meta(ge=0, le=1024), effect("Fewest tokens that repeat; 0 is 1.")
    ] = 0
    min_count: Annotated[
        int, msgspec.Meta(ge=0), effect("How often they occur in a row, at least 2.")
    ] = 0


class SamplingFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The fields that completions, chat and responses share."""

    model: ModelName = None
    n: int | None = None
    preset: Annotated[
        str | None,
        effect(
            "Sets temperature and top_p for a kind of task; the request's own fields override it."
        ),
    ] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_range: int | None = None
    dry_sequence_breakers: list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_budget: int | None = None
    thinking_token_budget: Annotated[int | None, _BUDGET] = None
    reasoning_budget: Annotated[int | None, _BUDGET] = None
    thinking_budget_tokens: Annotated[int | None, _BUDGET] = None
    reasoning_budget_tokens: Annotated[int | None, _BUDGET] = None
    reasoning_budget_message: str | None = None
    repetition_detection: RepetitionDetection | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: Annotated[
        ResponseFormat | None, effect("Enforces the form of the output by a grammar.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        effect("Enforces the form of the output by one of several grammars."),
    ] = None
    stream: Stream = None
    stream_options: Annotated[
        StreamOptions | None,
        effect("What the stream contains in addition to the text; needs stream: true."),
    ] = None
    user: Account = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    retain_s: Annotated[
        float | None,
        effect(
            "Seconds in which the client expects to continue the conversation: until then its "
            "cached prefix is evicted after others, as far as the client's share allows."
        ),
    ] = None
    lora: LoRAScales = None
    timeout_s: Annotated[
        float | None,
        effect("Seconds after which what was generated is the answer, with finish_reason timeout."),
    ] = None
    request_class: RequestClassName = None
    ttft_deadline_ms: TtftDeadline = None
    speculation: Annotated[
        bool | None,
        effect("False generates without draft tokens; the output is the same."),
    ] = None
    fallback: Annotated[
        Literal["auto", "none", "same_model"] | None,
        effect(
            "Which steps of the server's fallback chains may serve the request: all of them, none, "
            "or those that keep its model."
        ),
    ] = None
    quickstep_timings: Annotated[
        bool | None,
        effect(
            "Adds `quickstep` to the response: times of each choice, device seconds, costs; chunks "
            "of a stream whose token is an accepted draft have `draft: true`."
        ),
    ] = None
    grammar: Annotated[
        str | None, effect("llama.cpp's field: the output follows this grammar (GBNF).")
    ] = None
    json_schema: Annotated[
        dict[str, Any] | None, effect("llama.cpp's field: the output fits this JSON schema.")
    ] = None
    n_predict: Annotated[int | None, refused("send max_tokens", passes=(-1,))] = None
    samplers: Annotated[Any, refused("the order of the samplers is fixed")] = None
    mirostat: Mirostat = None
    mirostat_tau: MirostatSetting = None
    mirostat_eta: MirostatSetting = None
    dynatemp_range: DynatempRange = None
    dynatemp_exponent: DynatempExponent = None
    top_n_sigma: TopNSigma = None
    adaptive_target: AdaptiveTarget = None
    repeat_penalty: Annotated[float | None, refused("send repetition_penalty", passes=(1.0,))] = (
        None
    )
    dry_penalty_last_n: Annotated[int | None, refused("send dry_range", passes=(-1,))] = None
    t_max_predict_ms: Annotated[int | None, refused("send timeout_s", passes=(0, -1))] = None
    regex: Annotated[Any, refused("send structured_outputs.regex")] = None
    ebnf: Annotated[Any, refused("send grammar")] = None
    structural_tag: Annotated[Any, refused("send structured_outputs.grammar")] = None
    min_new_tokens: Annotated[int | None, refused("send min_tokens", passes=(0,))] = None
    max_new_tokens: Annotated[int | None, refused("send max_tokens")] = None
    stop_regex: Annotated[Any, refused("send stop")] = None
    guided_choice: Annotated[Any, refused("send structured_outputs.choice")] = None
    guided_grammar: Annotated[Any, refused("send structured_outputs.grammar")] = None
    guided_json: Annotated[Any, refused("send structured_outputs.json")] = None
    guided_regex: Annotated[Any, refused("send structured_outputs.regex")] = None
    logits_processors: Annotated[Any, refused("there are no processors of clients")] = None
