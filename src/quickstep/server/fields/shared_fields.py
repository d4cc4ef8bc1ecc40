"""Fields that several schemas have: their type, and what they do, in one place.

The request types of the APIs use these as annotations; a field of one schema is declared there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from quickstep.engine.adapters import MAX_SCALE
from quickstep.server.fields.field_classes import effect, hint, note, refused

# Reasoning tokens by the level of effort, for models whose template has no levels; None for no
# limit. Those of Google's OpenAI endpoint, with half of `low` as `minimal`.
EFFORT_BUDGETS: Mapping[str, int | None] = MappingProxyType(
    {"minimal": 512, "low": 1024, "medium": 8192, "high": 24_576, "xhigh": None, "max": None}
)


class LoRAScale(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A LoRA adapter by its number, and how much of it applies; 1 is as it was trained."""

    id: Annotated[int, msgspec.Meta(ge=0), effect("The `id` in `GET /lora-adapters`.")]
    scale: Annotated[
        float,
        msgspec.Meta(ge=-MAX_SCALE, le=MAX_SCALE),
        effect("1 is the adapter as it was trained; 0 leaves it out."),
    ]


Account = Annotated[
    str | None, effect("The account of the request, below the name of the API key.")
]
AdaptiveTarget = Annotated[float | None, refused("there is no adaptive-p sampler", passes=(-1.0,))]
AddGenerationPrompt = Annotated[
    bool | None, effect("Whether the template opens an assistant message; true if not given.")
]
AllowedCallers = Annotated[list[str] | None, refused("only the model calls", passes=(["direct"],))]
InputTruncation = Annotated[
    int | None,
    effect(
        "Reads only so many of each input's first tokens; -1 for as many as the model takes. "
        "A longer input is refused if not given."
    ),
]
AnswerTimeout = Annotated[
    float | None, effect("After this many seconds the answer is the error 408.")
]
CacheSalt = Annotated[
    str | None,
    effect("Cached prefixes are shared only with requests of the same API key and salt."),
]
ChatTemplateKwargs = Annotated[
    dict[str, Any] | None, effect("Further variables for the chat template.")
]
DeferLoading = Annotated[bool | None, hint("every tool is in the prompt", passes=(False,))]
Dimensions = Annotated[
    int | None, effect("Keeps the first ones and scales them to length 1 again.")
]
DynatempExponent = Annotated[
    float | None, note("it acts with dynatemp_range only, which is refused")
]
DynatempRange = Annotated[float | None, refused("there is no dynamic temperature", passes=(0.0,))]
LoRAScales = Annotated[
    list[LoRAScale] | None,
    effect(
        "The LoRA adapters of this request, by their `id` in `GET /lora-adapters`, each with "
        "its scale; those that are not listed have the scale 0. It replaces what `model` selects."
    ),
]
Mirostat = Annotated[int | None, refused("there is no Mirostat sampler", passes=(0,))]
MirostatSetting = Annotated[float | None, note("it acts with mirostat only, which is refused")]
NumKeep = Annotated[int | None, note("the context does not shift, so all is kept")]
ModelName = Annotated[
    str | None,
    effect("Which served name answers; the first one if not given, 404 for an unknown one."),
]
ParallelToolCalls = Annotated[bool | None, effect("False keeps the first call only.")]
Priority = Annotated[
    int | None,
    effect(
        "A lower number goes first, and may take the place of a running higher one; 0 if not given."
    ),
]
PromptCacheKey = Annotated[str | None, hint("one engine has every prefix in its reach")]
PromptCacheOptions = Annotated[
    dict[str, Any] | None, hint("prefixes are cached without a lifetime")
]
PromptCacheRetention = Annotated[
    str | None, hint("prefixes are cached in memory only", passes=("in_memory",))
]
ReasoningEffort = Annotated[
    Annotated[str, msgspec.Meta(examples=["none", *EFFORT_BUDGETS])] | None,
    effect(
        "Turns reasoning off (none), or sets the level where the chat template has one; where it"
        " has none, minimal, low, medium and high are a thinking_budget of 512, 1024, 8192 and"
        " 24576 tokens, and xhigh and max no limit. A budget of the request goes first."
    ),
    hint("the model has no such level", conditional=True),
]
RepeatPenalty = Annotated[
    float | None, effect("Divides positive and multiplies negative logits of tokens seen before.")
]
RequestClassName = Annotated[
    Literal["interactive", "batch"] | None,
    effect(
        "Requests of the class batch are served after interactive ones; interactive if not given."
    ),
]
ReturnProgress = Annotated[
    bool | None,
    effect(
        "A stream has chunks with prompt_progress while the prompt is computed: total, cache and "
        "processed in tokens (the cached ones are processed), and time_ms."
    ),
    hint("the response is not streamed", passes=(False,), conditional=True),
]
SafetyIdentifier = Annotated[str | None, effect("OpenAI's later name of user.")]
ServiceTier = Annotated[str | None, hint("there is one service tier", passes=("auto", "default"))]
Stream = Annotated[
    bool | None, effect("Sends the answer as server-sent events while it is generated.")
]
StrictSchema = Annotated[
    bool | None,
    effect(
        "A schema that cannot be enforced exactly is 400; without it, x-quickstep-ignored names"
        " the keyword that is enforced less strictly."
    ),
]
StrictArguments = Annotated[
    bool | None, effect("Whether arguments have to fit where the model may choose to call.")
]
TemplateTools = Annotated[list[dict[str, Any]] | None, effect("Functions that the template shows.")]
ToolChoice = Annotated[
    str | dict[str, Any] | None,
    effect("Whether calls are possible, forbidden, or enforced by a grammar."),
]
Tools = Annotated[list[dict[str, Any]] | None, effect("Functions that the model may call.")]
TopLogprobs = Annotated[
    int | None, effect("Adds this many alternatives per token; needs logprobs: true.")
]
TopNSigma = Annotated[float | None, refused("there is no top-n-sigma sampler", passes=(-1.0, 0.0))]
TtftDeadline = Annotated[
    float | None,
    effect(
        "Milliseconds in which the first token has to come; a request that cannot have it in time "
        "gets 503 with the predicted wait."
    ),
]
WithLogprobs = Annotated[
    bool | None, effect("Gives the chosen tokens' logprobs, of the raw logits.")
]


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A function that the model may call; `parameters` is the JSON schema of an object."""

    name: Annotated[str, effect("The name in a call; each one once.")]
    description: Annotated[str | None, effect("Included in the prompt.")] = None
    parameters: Annotated[
        dict[str, Any] | None,
        effect(
            "The JSON schema of the arguments, part of the prompt, and enforced where a call is."
        ),
    ] = None
    strict: StrictArguments = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag="function"):
    """A tool that the client runs."""

    function: Annotated[FunctionSpec, effect("The function that may be called.")]
