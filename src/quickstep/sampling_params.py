"""The sampling parameters of a request, validated on construction.

Each field of `SamplingParams` is declared once, with its bounds and a description for users. The
checks, the JSON schemas, the reference pages and the command line's flags read `sampling_fields()`.

Frozen plain data, read by the sampler, the scheduler and the engine. `types` exports it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import force_setattr

from quickstep.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]


class Grammar(msgspec.Struct, frozen=True):
    """What the complete output must match. The engine checks and compiles it.

    Attributes:
        text: Depends on the kind: the schema as JSON; empty for `json_object`; a regular
            expression in Rust's syntax that matches the complete output; the choices as a JSON
            list; a grammar in llguidance's Lark or in llama.cpp's GBNF.
        strict: A schema that cannot be enforced exactly is refused; otherwise the keyword that is
            enforced less strictly is reported.
    """

    kind: GrammarKind
    text: str = ""
    strict: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise RequestError(f"grammar is a {self.kind!r}, known are {kinds}", param="grammar")
        if not isinstance(self.text, str):
            kind = type(self.text).__name__
            raise RequestError(
                f"grammar has a {kind} as its text; use Grammar.of_json_schema or another method",
                param="grammar",
            )

    @classmethod
    def of_json_schema(cls, schema: Mapping[str, Any] | str, strict: bool = False) -> Grammar:
        """JSON that conforms to a schema, which is an object or its JSON text."""
        text = schema if isinstance(schema, str) else _json(schema)
        return cls("json_schema", text, strict)

    @classmethod
    def of_json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def of_regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches completely."""
        return cls("regex", pattern)

    @classmethod
    def of_choice(cls, choices: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls("choice", _json(list(choices)))

    @classmethod
    def of_lark(cls, text: str) -> Grammar:
        """Text that a Lark grammar derives from its rule `start`."""
        return cls("lark", text)

    @classmethod
    def of_gbnf(cls, text: str) -> Grammar:
        """Text that a GBNF grammar (llama.cpp's) derives from its rule `root`."""
        return cls("gbnf", text)

    @classmethod
    def of_rules(cls, text: str) -> Grammar:
        """A grammar in Lark, or in GBNF or similar EBNF, whose rules have `::=`."""
        return cls.of_gbnf(text) if _EBNF_RULE.search(text) else cls.of_lark(text)


# A rule starts a line; a Lark rule is `name:`.
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"grammar is not JSON: {error}", param="grammar") from None


class StructuredOutputsParams(msgspec.Struct, frozen=True):
    """vLLM's form of a `Grammar`; exactly one field is given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def chosen(self) -> tuple[str, Grammar]:
        """The name of the field, and what it means. Raises RequestError."""
        found: dict[str, Grammar] = {}
        if self.json is not None:
            found["json"] = Grammar.of_json_schema(self.json)
        if self.json_object:
            found["json_object"] = Grammar.of_json_object()
        if self.regex is not None:
            found["regex"] = Grammar.of_regex(self.regex)
        if self.choice is not None:
            found["choice"] = Grammar.of_choice(self.choice)
        if self.grammar is not None:
            found["grammar"] = Grammar.of_rules(self.grammar)
        if len(found) != 1:
            given = " and ".join(found) or "nothing"
            raise RequestError(
                f"structured_outputs has {given}, it takes one of json, json_object, regex, choice "
                "and grammar",
                param="structured_outputs",
            )
        [chosen] = found.items()
        return chosen


class RepetitionDetectionParams(msgspec.Struct, frozen=True):
    """Which repetition at the end of an output ends it. Names and meaning are vLLM's.

    Attributes:
        max_pattern_size: Largest number of tokens that repeat; 0 ends nothing.
        min_pattern_size: Smallest number of them; 0 is 1.
        min_count: How often they occur in a row, at least 2.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        for name, highest in (
            ("max_pattern_size", _LARGEST_PATTERN),
            ("min_pattern_size", _LARGEST_PATTERN),
            ("min_count", _LARGEST),
        ):
            value, param = getattr(self, name), f"repetition_detection.{name}"
            _check_range(param, value, Bounds(0, highest))
            _check_integer(param, value)
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"repetition_detection.min_pattern_size is {self.min_pattern_size}, above "
                f"max_pattern_size {self.max_pattern_size}",
                param="repetition_detection.min_pattern_size",
            )
        if self.max_pattern_size and self.min_count < 2:
            raise RequestError(
                f"repetition_detection.min_count is {self.min_count}, it must be at least 2 to end "
                "a repetition",
                param="repetition_detection.min_count",
            )


class ReasoningTokens(msgspec.Struct, frozen=True):
    """The tags around a model's reasoning, and the tokens that can write them.

    Attributes:
        opening: The text that starts the reasoning, in UTF-8.
        closing: The text that ends it, in UTF-8.
        closing_ids: The tokens that write the closing tag.
        pieces: The bytes of each token that may contain part of a tag or is only white space.
        starts_open: The reasoning starts in the prompt.
        message_ids: What is written before the closing tag when the budget is used up.
    """

    opening: bytes
    closing: bytes
    closing_ids: tuple[int, ...]
    pieces: Mapping[int, bytes]
    starts_open: bool = False
    message_ids: tuple[int, ...] = ()


class TokenForms(msgspec.Struct, frozen=True):
    """The texts of a request in token ids. The engine makes it; the sampler reads it.

    Attributes:
        bad_words: The token sequences that may not be completed.
        dry_breakers: The token sequences that end a repetition.
        dry_breaker_flags: A byte per token, 1 if the token by itself ends a repetition; empty if
            `dry_breakers` has them all. A text of one letter can be in most tokens.
        reasoning: The tags, if the request has a `thinking_budget`, or a grammar that starts after
            the reasoning; otherwise None.
        max_tokens: `max_tokens`, or less if the context is shorter.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    dry_breaker_flags: bytes = b""
    reasoning: ReasoningTokens | None = None
    max_tokens: int | None = None


PRESETS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "code": MappingProxyType({"temperature": 0.2, "top_p": 0.95}),
        "factual": MappingProxyType({"temperature": 0.2, "top_p": 1.0}),
        "chat": MappingProxyType({"temperature": 0.7, "top_p": 0.9}),
        "creative": MappingProxyType({"temperature": 1.0, "top_p": 0.95}),
        "brainstorm": MappingProxyType({"temperature": 1.2, "top_p": 1.0}),
    }
)


def preset_values(name: str | None) -> Mapping[str, float]:
    """The parameters that a preset sets. Raises RequestError for an unknown name."""
    if name is None:
        return {}
    if name not in PRESETS:
        raise RequestError(
            f"preset is {name[:64]!r}, it must be one of {', '.join(PRESETS)}", param="preset"
        )
    return PRESETS[name]


class Bounds(msgspec.Struct, frozen=True):
    """A closed interval; without upper bound if `high` is None, without `low` itself if `above`."""

    low: float
    high: float | None = None
    above: bool = False


class SamplingField(msgspec.Struct, frozen=True):
    """A field of `SamplingParams` that clients can set.

    Attributes:
        description: Its effect, in a sentence for users.
        kind: `int` or `float` for a number, None for another type.
        bounds: The bounds of a number.
    """

    description: str
    kind: type[int] | type[float] | None
    bounds: Bounds | None = None


_LARGEST = 2**31 - 1  # of tokens or sequences; an int32 in kernels
_LARGEST_PATTERN = 1024  # of tokens that repeat: bounds the time that each token takes


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are sampled and when a sequence ends. Names are vLLM's and llama.cpp's.

    Fixed order: penalties (repetition, presence and frequency, DRY) and bias -> masks (allowed ids,
    grammar, ends before `min_tokens`, bad words, reasoning budget) -> temperature -> top-k ->
    typical-p -> top-p -> min-p -> XTC -> sample. Each filter renormalizes the probabilities that
    the one before it left. Temperature 0 is argmax, so the filters have no effect then. Repetition
    and DRY apply to prompt and output; presence and frequency to generated tokens only (as in
    OpenAI's API). Logprobs are those of the raw logits.

    Attributes (the ones that clients set have a description at the field):
        seed: Seed of the sampling noise; None lets the engine choose one (it is in the response).
        max_tokens: None generates up to the context limit; 0, with `prompt_logprobs` only, scores
            the prompt and generates nothing.
        logprobs: None for none; k >= 0 for those of the sampled and the k most likely tokens.
        prompt_logprobs: The same for each prompt token after the first. Such a request computes its
            complete prompt and does not use the prefix cache.
        shown_special_token_ids: Exceptions to `skip_special_tokens`: markup that a parser needs.
        grammar: What the output must match; None for no constraint. A complete match allows only an
            end token next, even before `min_tokens` if the grammar allows nothing else. Near
            `max_tokens`, tokens after which the match could not be completed in time are masked.
        dry_multiplier: Above 0, a token that would extend a repetition of L tokens (L at least
            `dry_allowed_length`) loses dry_multiplier x dry_base ^ (L - dry_allowed_length).
        dry_sequence_breakers: A repetition does not extend past a token that contains one of these
            texts, nor past the tokens of such a text in a row.
        xtc_probability: For each output token, the probability that XTC removes all tokens with a
            probability of at least `xtc_threshold` except the least likely one of them. It has no
            effect with a threshold above 0.5.
        bad_words: Texts that may not be generated, with or without a space before them: the last
            token of one is masked after its other tokens, unless no other token is allowed.
        thinking_budget: Reasoning tokens after which its closing tag is forced; None for no limit.
        reasoning_budget_message: Its tokens are forced before that tag, and count as reasoning
            beyond the budget. A model that has begun to write the tag by itself gets no message.
        reasoning_tags: Texts around the reasoning; None uses those of the chat template. A grammar
            starts after the reasoning if the request has tags or a budget for it, and otherwise at
            the start of the output.
        inside_reasoning: The reasoning starts in the prompt; if False, the end of the prompt
            decides.
        stop_after_reasoning: Texts that open and close the reasoning, in order: a stop string is
            looked for after the last one, if the output begins with the first one. Empty: a stop
            string ends the output anywhere.
        in_tokens: The texts in token ids; the engine sets it.
        structured_outputs: vLLM's name for `grammar`, which it becomes.
        repetition_detection: Ends a sequence, after `min_tokens`, with the token that completes the
            last occurrence. Only the output is searched, not the prompt.

    Raises:
        RequestError: A value is outside its range; `param` names the field.
    """

    n: Annotated[
        int,
        "Number of choices per prompt; the prompt is computed once.",
        Bounds(1, _LARGEST),
    ] = 1
    temperature: Annotated[
        float, "Divides the logits before sampling; 0 chooses the most likely token.", Bounds(0.0)
    ] = 1.0
    top_p: Annotated[
        float,
        "Keeps the most likely tokens that together reach this probability.",
        Bounds(0, 1, above=True),
    ] = 1.0
    top_k: Annotated[
        int, "Keeps this many of the most likely tokens; 0 or -1 keeps all.", Bounds(-1, _LARGEST)
    ] = 0
    min_p: Annotated[
        float,
        "Removes tokens less likely than this fraction of the most likely one.",
        Bounds(0.0, 1.0),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        "Subtracted from the logit of every token that was generated before.",
        Bounds(-2.0, 2.0),
    ] = 0.0
    frequency_penalty: Annotated[
        float, "Subtracted from a token's logit for each time it was generated.", Bounds(-2.0, 2.0)
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        Bounds(1e-6),
    ] = 1.0
    logit_bias: Annotated[Mapping[int, float], "Added to the logits of these token ids."] = (
        msgspec.field(default_factory=dict)
    )
    allowed_token_ids: Annotated[tuple[int, ...], "Only these tokens may be generated."] = ()
    seed: Annotated[
        int | None,
        "Determines the sampled tokens: the same request with the same seed gives the "
        "same tokens. If not given, one is chosen and the response names it.",
        Bounds(-(2**63), 2**64 - 1),
    ] = None
    max_tokens: Annotated[
        int | None,
        "Ends each choice after this many tokens, with finish_reason length; 0 only with "
        "prompt_logprobs, or with echo and logprobs. The default is 16 for /v1/completions, and "
        "the rest of the context for the others.",
        Bounds(0, _LARGEST),
    ] = 16
    min_tokens: Annotated[
        int,
        "No end token, stop token or stop string ends a choice before this many tokens.",
        Bounds(0, _LARGEST),
    ] = 0
    stop: Annotated[
        tuple[str, ...],
        "Ends the choice at one of these texts, which is removed from the output; in a "
        "conversation only after the reasoning.",
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], "Ends the choice at one of these tokens."] = ()
    include_stop_str_in_output: Annotated[bool, "Keeps the stop string in the output."] = False
    ignore_eos: Annotated[bool, "The model's end token does not end the choice."] = False
    skip_special_tokens: Annotated[
        bool, "Removes special tokens from the text; true by default."
    ] = True
    logprobs: Annotated[
        int | None,
        "Returns logprobs of the sampled token and this many alternatives, from raw logits.",
        Bounds(0, _LARGEST),
    ] = None
    shown_special_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    typical_p: Annotated[
        float,
        "Keeps the tokens whose information content is nearest to the entropy, up to this "
        "probability.",
        Bounds(0, 1, above=True),
    ] = 1.0
    dry_multiplier: Annotated[
        float, "Above 0, penalizes a token that would continue a repetition.", Bounds(0.0)
    ] = 0.0
    dry_base: Annotated[
        float, "Factor of the DRY penalty for each further repeated token.", Bounds(1.0)
    ] = 1.75
    dry_allowed_length: Annotated[
        int, "Shortest repetition in tokens that DRY penalizes.", Bounds(1, _LARGEST)
    ] = 2
    dry_range: Annotated[
        int,
        "Number of last tokens that DRY searches; 0 for the complete context.",
        Bounds(0, _LARGEST),
    ] = 0
    dry_sequence_breakers: Annotated[tuple[str, ...], "Texts that end a repetition for DRY."] = (
        "\n",
        ":",
        '"',
        "*",
    )
    xtc_probability: Annotated[
        float,
        "Probability, per output token, that XTC removes the most likely tokens except one.",
        Bounds(0.0, 1.0),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        "Least probability of a token that XTC may remove.",
        Bounds(0.0, 1.0),
    ] = 0.1
    bad_words: Annotated[
        tuple[str, ...], "Texts that are not generated, with or without a space before them."
    ] = ()
    thinking_budget: Annotated[
        int | None,
        "Largest number of reasoning tokens, after which the closing tag is forced; an "
        "error if the model's reasoning has no tags.",
        Bounds(0, _LARGEST),
    ] = None
    reasoning_budget_message: Annotated[
        str,
        "Written at the end of a reasoning that has used up its budget, before the closing tag.",
    ] = ""
    reasoning_tags: tuple[str, str] | None = None
    inside_reasoning: bool = False
    stop_after_reasoning: tuple[str, ...] = ()
    in_tokens: TokenForms | None = None
    prompt_logprobs: Annotated[
        int | None,
        "Returns logprobs of the prompt tokens and this many alternatives; not in a stream.",
        Bounds(0, _LARGEST),
    ] = None
    logprob_token_ids: Annotated[
        tuple[int, ...], "Returns the logprobs of these tokens too; needs logprobs."
    ] = ()
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: Annotated[
        RepetitionDetectionParams | None,
        "Ends the choice where it repeats itself, with finish_reason repetition.",
    ] = None

    def __post_init__(self) -> None:
        self._take_structured_outputs()
        for name in _TEXTS:
            if isinstance(getattr(self, name), str):
                force_setattr(self, name, (getattr(self, name),))
        for name in (*_TEXTS, *_TOKEN_IDS):
            force_setattr(self, name, tuple(getattr(self, name) or ()))
        force_setattr(self, "logit_bias", MappingProxyType(dict(self.logit_bias or {})))
        for name, bounds in _all_bounds().items():
            _check_range(name, getattr(self, name), bounds)
        for name in _INTEGERS:
            _check_integer(name, getattr(self, name))
        for name in _TEXTS:
            _check_texts(name, getattr(self, name))
        if self.reasoning_budget_message:
            _check_texts("reasoning_budget_message", (self.reasoning_budget_message,))
            if self.thinking_budget is None:
                raise RequestError(
                    "reasoning_budget_message needs thinking_budget, at whose end it is written",
                    param="reasoning_budget_message",
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens is 0, it must be at least 1 unless prompt_logprobs is set",
                param="max_tokens",
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError(
                "logprob_token_ids needs logprobs; set it to 0 for these tokens only",
                param="logprob_token_ids",
            )
        if self.grammar is not None:
            self._check_grammar(self.grammar)
        detection: object = self.repetition_detection
        if not isinstance(detection, RepetitionDetectionParams | None):
            raise RequestError(
                f"repetition_detection is a {type(detection).__name__}, it must be "
                "RepetitionDetectionParams",
                param="repetition_detection",
            )

    def _take_structured_outputs(self) -> None:
        """Make it the grammar."""
        outputs = self.structured_outputs
        if outputs is None:
            return
        if not isinstance(outputs, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs is a {type(outputs).__name__}, it must be "
                "StructuredOutputsParams",
                param="structured_outputs",
            )
        if self.grammar is not None:
            raise RequestError(
                "grammar and structured_outputs are both given; give one",
                param="structured_outputs",
            )
        force_setattr(self, "grammar", outputs.chosen()[1])
        force_setattr(self, "structured_outputs", None)

    def _check_grammar(self, grammar: object) -> None:
        if not isinstance(grammar, Grammar):
            raise RequestError(
                f"grammar is a {type(grammar).__name__}, it must be a Grammar", param="grammar"
            )
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos cannot be combined with a grammar, which ends with an end token",
                param="ignore_eos",
            )
        if self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids cannot be combined with a grammar",
                param="allowed_token_ids",
            )


_TEXTS = ("stop", "bad_words", "dry_sequence_breakers", "stop_after_reasoning")
_TOKEN_IDS = (
    "stop_token_ids",
    "allowed_token_ids",
    "shown_special_token_ids",
    "logprob_token_ids",
)
_INTEGERS = ("dry_allowed_length", "dry_range", "thinking_budget")


@cache
def sampling_fields() -> Mapping[str, SamplingField]:
    """The fields that clients can set, by name."""
    fields: dict[str, SamplingField] = {}
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        if get_origin(hint) is Annotated:
            declared, description, *bounds = get_args(hint)
            kinds = (declared, *get_args(declared)) if bounds else ()
            kind = next((number for number in (float, int) if number in kinds), None)
            fields[name] = SamplingField(description, kind, *bounds)
    return MappingProxyType(fields)


@cache
def _all_bounds() -> Mapping[str, Bounds]:
    return {
        name: known.bounds for name, known in sampling_fields().items() if known.bounds is not None
    }


def _check_range(name: str, value: float | None, bounds: Bounds) -> None:
    if value is None:
        return
    wrong_type = isinstance(value, bool) or not isinstance(value, (int, float))
    if wrong_type or value != value or value in (float("inf"), float("-inf")):
        raise RequestError(f"{name} is {value!r}, it must be a finite number", param=name)
    low, high = bounds.low, bounds.high
    if value < low or (high is not None and value > high):
        limit = f"at least {low:g}" if high is None else f"between {low:.10g} and {high:.10g}"
        raise RequestError(f"{name} is {value}, it must be {limit}", param=name)
    if bounds.above and value == low:
        raise RequestError(f"{name} is {low:g}, it must be in ({low:g}, {high:g}]", param=name)


def _check_integer(name: str, value: float | None) -> None:
    if value is not None and not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, it must be an integer", param=name)


def _check_texts(name: str, texts: Iterable[object]) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(
                f"{name} contains {text!r}, it must contain strings only", param=name
            )
        if not text:
            raise RequestError(f"{name} contains an empty string", param=name)
