"""How output tokens are chosen: the client's parameters, checked on construction.

Each field of `SamplingParams` is declared once, with its bounds and a description for users. The
checks, the JSON schemas, the reference pages and the command line's flags read `sampling_fields()`.

Frozen plain data. The sampler, the scheduler and the engine read it; `types` exports it as well.
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

__all__ = [
    "PRESETS",
    "Bounds",
    "Grammar",
    "GrammarKind",
    "ReasoningTokens",
    "SamplingField",
    "SamplingParams",
    "TokenForms",
    "preset_values",
    "sampling_fields",
]

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf"]


class Grammar(msgspec.Struct, frozen=True):
    """What the whole output must match: plain text, which the engine checks and compiles.

    Attributes:
        text: By kind: the schema as JSON, nothing, the regular expression (Rust's syntax, the
            whole output), the choices as a JSON list, the grammar in llguidance's Lark or in
            llama.cpp's GBNF.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            kinds = ", ".join(get_args(GrammarKind))
            raise RequestError(f"grammar is a {self.kind!r}, known are {kinds}", param="grammar")
        if not isinstance(self.text, str):
            kind = type(self.text).__name__
            raise RequestError(
                f"grammar has a {kind} as its text; build it with Grammar.of_json_schema and the "
                "like",
                param="grammar",
            )

    @classmethod
    def of_json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that fits a schema, given as an object or as its JSON text."""
        return cls("json_schema", schema if isinstance(schema, str) else _json(schema))

    @classmethod
    def of_json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def of_regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from its start to its end."""
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
        """Text that a grammar of llama.cpp's derives from its rule `root`."""
        return cls("gbnf", text)

    @classmethod
    def of_rules(cls, text: str) -> Grammar:
        """A grammar in Lark, or in GBNF or the EBNF that is like it: rules with `::=`."""
        return cls.of_gbnf(text) if _EBNF_RULE.search(text) else cls.of_lark(text)


# At the beginning of a line; Lark writes `name:`.
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"grammar is not JSON: {error}", param="grammar") from None


class ReasoningTokens(msgspec.Struct, frozen=True):
    """The tags around a model's reasoning, and the tokens in which they can be written.

    Attributes:
        opening: Begins the reasoning, as bytes of text.
        closing: Ends it.
        closing_ids: The tokens that write the closing tag.
        pieces: The bytes of each token in which a part of a tag may stand, or white space only.
        starts_open: The prompt has opened the reasoning.
    """

    opening: bytes
    closing: bytes
    closing_ids: tuple[int, ...]
    pieces: Mapping[int, bytes]
    starts_open: bool = False


class TokenForms(msgspec.Struct, frozen=True):
    """What the texts of a request are in token ids: the engine's work, read by the sampler.

    Attributes:
        bad_words: The token sequences that may not be completed.
        dry_breakers: The token sequences that end a repetition.
        dry_breaker_flags: A byte for each token, 1 if it ends a repetition by itself; empty for no
            more than `dry_breakers`. A text of one letter may be in most tokens.
        reasoning: The tags that `thinking_budget` counts between and a grammar follows; None where
            neither is the case.
        max_tokens: Output tokens that there is room for: `max_tokens`, or less by the context.
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
    """The parameters that a preset sets, none for None. Raises RequestError for no such preset."""
    if name is None:
        return {}
    if name not in PRESETS:
        raise RequestError(
            f"preset is {name[:64]!r}, it must be one of {', '.join(PRESETS)}", param="preset"
        )
    return PRESETS[name]


class Bounds(msgspec.Struct, frozen=True):
    """A closed interval, without upper bound if `high` is None. `above` leaves `low` itself out."""

    low: float
    high: float | None = None
    above: bool = False


class SamplingField(msgspec.Struct, frozen=True):
    """A field of `SamplingParams` that clients set.

    Attributes:
        description: What it does, in a sentence for users.
        kind: `int` or `float` for a number, None for another type.
        bounds: Of a number.
    """

    description: str
    kind: type[int] | type[float] | None
    bounds: Bounds | None = None


_LARGEST = 2**31 - 1  # of what counts tokens and sequences: beyond any machine, within any kernel


class SamplingParams(msgspec.Struct, frozen=True):
    """How output tokens are chosen and when a sequence ends. Names are vLLM's and llama.cpp's.

    Order of effects, fixed: penalties (repetition, presence and frequency, DRY) and bias -> masks
    (allowed ids, grammar, ends before `min_tokens`, bad words, reasoning budget) -> temperature ->
    top-k -> typical-p -> top-p -> min-p -> XTC -> draw. Each filter sees the shares of what the one
    before it left. Temperature 0 is argmax, so that what follows it has no effect. Repetition and
    DRY cover prompt and output; presence and frequency cover generated tokens only (OpenAI).
    Logprobs are of the raw logits.

    Attributes (those that clients set have a description at the field):
        seed: Noise seed; None lets the engine choose one (the response names it).
        max_tokens: None generates up to the context limit; 0, with `prompt_logprobs` only, scores
            the prompt and generates nothing.
        logprobs: None for none; k >= 0 gives the chosen token's and the k most likely tokens'.
        prompt_logprobs: The same for each token of the prompt behind the first. Such a request
            computes its whole prompt: it reads no cached prefix.
        shown_special_token_ids: What `skip_special_tokens` leaves in: markup for a parser.
        grammar: What the output must match, None for anything. It ends the output: where it is
            complete only an end token may follow, even before `min_tokens` if nothing else may.
            Near the limit of tokens, what would leave no room to complete it is not drawn.
        dry_multiplier: Above 0, a token that would extend a repetition of L tokens (L at least
            `dry_allowed_length`) loses dry_multiplier x dry_base ^ (L - dry_allowed_length).
        dry_sequence_breakers: A repetition does not reach over a token that holds one of these
            texts, nor over a text's own tokens in a row.
        xtc_probability: How often, at each token, all tokens of at least `xtc_threshold` but the
            least likely one of them are left out. A threshold above 0.5 never does anything.
        bad_words: Texts that may not be written, with or without a space before them: the last
            token of one is banned where the output ends in the tokens before it, unless nothing
            else may follow.
        thinking_budget: Tokens inside the reasoning after which its end is written; None for any.
        reasoning_tags: Texts that open and close the reasoning; None takes the chat template's. A
            grammar begins behind the reasoning of a request that has tags or a budget for it, and
            with the output of any other.
        inside_reasoning: The prompt has begun the reasoning; otherwise its end tells.
        in_tokens: The texts in token ids; the engine sets it.

    Raises:
        RequestError: A value is outside its range; `param` names the field.
    """

    n: Annotated[
        int,
        "How many choices each prompt gets; they share the prompt's computation.",
        Bounds(1, _LARGEST),
    ] = 1
    temperature: Annotated[
        float, "Divides the logits before sampling; 0 takes the most likely token.", Bounds(0.0)
    ] = 1.0
    top_p: Annotated[
        float,
        "Keeps the likeliest tokens that together reach this probability.",
        Bounds(0, 1, above=True),
    ] = 1.0
    top_k: Annotated[
        int, "Keeps this many of the likeliest tokens; 0 or -1 keeps all.", Bounds(-1, _LARGEST)
    ] = 0
    min_p: Annotated[
        float, "Drops tokens less likely than this fraction of the likeliest one.", Bounds(0.0, 1.0)
    ] = 0.0
    presence_penalty: Annotated[
        float, "Subtracted from the logit of every token generated before.", Bounds(-2.0, 2.0)
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
        "Ends each choice after this many tokens, with finish_reason length. If not "
        "given, /v1/completions takes 16, the others what the context leaves.",
        Bounds(0, _LARGEST),
    ] = 16
    min_tokens: Annotated[
        int,
        "No end token, stop token or stop string ends a choice before this many tokens.",
        Bounds(0, _LARGEST),
    ] = 0
    stop: Annotated[
        tuple[str, ...],
        "Ends the choice where one of these texts appears; the text itself is cut off.",
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], "Ends the choice at one of these tokens."] = ()
    include_stop_str_in_output: Annotated[bool, "Leaves the stop string in the text."] = False
    ignore_eos: Annotated[bool, "The model's end token does not end the choice."] = False
    skip_special_tokens: Annotated[
        bool, "Whether special tokens are left out of the text; true if not given."
    ] = True
    logprobs: Annotated[
        int | None,
        "Gives the chosen token's and this many alternatives' logprobs, of the raw logits.",
        Bounds(0, _LARGEST),
    ] = None
    shown_special_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    typical_p: Annotated[
        float,
        "Keeps the tokens whose surprise is nearest to the expected one, up to this probability.",
        Bounds(0, 1, above=True),
    ] = 1.0
    dry_multiplier: Annotated[
        float, "Above 0, penalises the token that would continue a repetition.", Bounds(0.0)
    ] = 0.0
    dry_base: Annotated[float, "Growth of that penalty with each repeated token.", Bounds(1.0)] = (
        1.75
    )
    dry_allowed_length: Annotated[
        int, "Repeated tokens from which the penalty is taken.", Bounds(1, _LARGEST)
    ] = 2
    dry_range: Annotated[
        int, "Tokens that DRY looks back, 0 for the whole context.", Bounds(0, _LARGEST)
    ] = 0
    dry_sequence_breakers: Annotated[tuple[str, ...], "Texts over which no repetition reaches."] = (
        "\n",
        ":",
        '"',
        "*",
    )
    xtc_probability: Annotated[
        float,
        "How often, at each token, the likeliest tokens but one are left out.",
        Bounds(0.0, 1.0),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        "The probability from which XTC counts a token among the likeliest.",
        Bounds(0.0, 1.0),
    ] = 0.1
    bad_words: Annotated[
        tuple[str, ...], "Texts that are not written, with or without a space before them."
    ] = ()
    thinking_budget: Annotated[
        int | None,
        "Tokens inside the reasoning after which its closing tag is written; refused "
        "where the model's reasoning has no tags.",
        Bounds(0, _LARGEST),
    ] = None
    reasoning_tags: tuple[str, str] | None = None
    inside_reasoning: bool = False
    in_tokens: TokenForms | None = None
    prompt_logprobs: Annotated[
        int | None,
        "Gives the prompt's tokens' and this many alternatives' logprobs; not in a stream.",
        Bounds(0, _LARGEST),
    ] = None
    logprob_token_ids: Annotated[
        tuple[int, ...], "Gives the logprobs of these tokens as well; needs logprobs."
    ] = ()

    def __post_init__(self) -> None:
        for name in _TEXTS:
            if isinstance(getattr(self, name), str):
                force_setattr(self, name, (getattr(self, name),))
        for name in (*_TEXTS, *_TOKEN_IDS):
            force_setattr(self, name, tuple(getattr(self, name) or ()))
        force_setattr(self, "logit_bias", MappingProxyType(dict(self.logit_bias or {})))
        for name, bounds in _all_bounds().items():
            _check_range(name, getattr(self, name), bounds)
        for name in _WHOLE_NUMBERS:
            _check_whole(name, getattr(self, name))
        for name in _TEXTS:
            _check_texts(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}",
                param="min_tokens",
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens is 0, it must be at least 1 unless prompt_logprobs is asked for",
                param="max_tokens",
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise RequestError(
                "logprob_token_ids needs logprobs, 0 for these tokens only",
                param="logprob_token_ids",
            )
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_grammar(self, grammar: object) -> None:
        if not isinstance(grammar, Grammar):
            raise RequestError(
                f"grammar is a {type(grammar).__name__}, it must be a Grammar", param="grammar"
            )
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos cannot go with a grammar, whose end is an end token",
                param="ignore_eos",
            )
        if self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids cannot go with a grammar, which allows tokens by itself",
                param="allowed_token_ids",
            )


_TEXTS = ("stop", "bad_words", "dry_sequence_breakers")
_TOKEN_IDS = (
    "stop_token_ids",
    "allowed_token_ids",
    "shown_special_token_ids",
    "logprob_token_ids",
)
_WHOLE_NUMBERS = ("dry_allowed_length", "dry_range", "thinking_budget")


@cache
def sampling_fields() -> Mapping[str, SamplingField]:
    """The fields that clients set, by name."""
    found: dict[str, SamplingField] = {}
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items():
        if get_origin(hint) is Annotated:
            declared, description, *bounds = get_args(hint)
            kinds = (declared, *get_args(declared)) if bounds else ()
            kind = next((one for one in (float, int) if one in kinds), None)
            found[name] = SamplingField(description, kind, *bounds)
    return MappingProxyType(found)


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


def _check_whole(name: str, value: float | None) -> None:
    if value is not None and not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}, it must be a whole number", param=name)


def _check_texts(name: str, texts: Iterable[object]) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"{name} holds {text!r}, it takes texts", param=name)
        if not text:
            raise RequestError(f"{name} holds an empty text, which is everywhere", param=name)
