"""How output tokens are chosen: the client's parameters, checked on construction.

Frozen plain data over the standard library. The sampler, the scheduler and the engine read it;
`types` exports it beside the values that carry it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, get_args

from quickstep.errors import RequestError

__all__ = ["Grammar", "GrammarKind", "SamplingParams"]

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must match: plain text, which the engine checks and compiles.

    Attributes:
        text: By kind: the schema as JSON, nothing, the regular expression (Rust's syntax, the
            whole output), the choices as a JSON list, the grammar in llguidance's Lark.
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


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"grammar is not JSON: {error}", param="grammar") from None


_EMPTY_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen and when a sequence ends. Names are vLLM's.

    Order of effects: penalties and bias -> allowed mask (ids, grammar) -> temperature -> top-k
    -> top-p -> min-p -> draw. Temperature 0 is argmax. Repetition penalty covers prompt and output;
    presence and frequency cover generated tokens only (OpenAI). Logprobs are of the raw logits.

    Attributes:
        n: Sequences per request, at least 1.
        seed: Noise seed; None lets the engine draw one (the response names it).
        top_k: 0 or -1 keeps all tokens.
        max_tokens: None generates up to the context limit; 0, with `prompt_logprobs` only, scores
            the prompt and generates nothing.
        min_tokens: No EOS, stop token or stop string ends the sequence before this many tokens.
        logprobs: None for none; k >= 0 gives the chosen token's and the k most likely tokens'.
        prompt_logprobs: The same for each token of the prompt behind the first. Such a request
            computes its whole prompt: it reads no cached prefix.
        shown_special_token_ids: What `skip_special_tokens` leaves in: markup for a parser.
        grammar: What the output must match, None for anything. It ends the output: where it is
            complete only an end token may follow, even before `min_tokens` if nothing else may.

    Raises:
        RequestError: A value is outside its range; `param` names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    shown_special_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "shown_special_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias or {})))
        for name, (low, high) in _RANGES.items():
            _check_range(name, getattr(self, name), low, high)
        if self.min_p > 1.0 or not 0.0 < self.top_p <= 1.0:
            name = "min_p" if self.min_p > 1.0 else "top_p"
            raise RequestError(f"{name} is {getattr(self, name)}, it must be in (0, 1]", param=name)
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
        if self.grammar is not None:
            self._check_grammar(self.grammar)
        if any(not text for text in self.stop):
            raise RequestError("stop holds an empty string, which would end at once", param="stop")

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


# Closed intervals; None where there is no bound. OpenAI's limits where OpenAI states one.
_RANGES: Mapping[str, tuple[float, float | None]] = MappingProxyType(
    {
        "n": (1, None),
        "temperature": (0.0, None),
        "top_p": (0.0, 1.0),
        "top_k": (-1, None),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "repetition_penalty": (1e-6, None),
        "seed": (-(2**63), 2**64 - 1),
        "max_tokens": (0, None),
        "min_tokens": (0, None),
        "logprobs": (0, None),
        "prompt_logprobs": (0, None),
    }
)


def _check_range(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    wrong_type = isinstance(value, bool) or not isinstance(value, (int, float))
    if wrong_type or value != value or value in (float("inf"), float("-inf")):
        raise RequestError(f"{name} is {value!r}, it must be a finite number", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
        raise RequestError(f"{name} is {value}, it must be {limit}", param=name)
