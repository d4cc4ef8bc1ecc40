"""What a request asks for beside plain text: scores, token ids, the best of several, beams.

Shared by completions and chat. What they ask for becomes parameters of the engine's sampling
(`own_values`), what is shown of it a `RequestedOutput`, and a search `BeamSearchParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.engine.beam_search import BeamSearchParams
from quickstep.errors import RequestError
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.generation import RequestedOutput
from quickstep.server.generate.prompts import check_num_sequences
from quickstep.server.generate.sampling import bounded, num_alternatives, token_ids_of
from quickstep.server.openai.request_types import ChoiceFields, SamplingFields, TextFormat
from quickstep.types import SamplingParams

__all__ = ["beam_params", "own_values", "requested_output", "truncation_of"]

# What a search honours; any other sampling field would have no effect on it.
_WITH_BEAMS = frozenset(
    {
        "model",
        "n",
        "temperature",
        "max_tokens",
        "ignore_eos",
        "skip_special_tokens",
        "seed",
        "user",
        "priority",
        "cache_salt",
        "timeout_s",
    }
)
_ASKS_FOR_NOTHING: tuple[object, ...] = (None, False, [], {}, "")
_DEFAULTS: Mapping[str, Any] = MappingProxyType(msgspec.structs.asdict(SamplingParams()))


def requested_output(
    fields: ChoiceFields, served: Served, logprobs: int | None, echo: bool = False
) -> RequestedOutput:
    """What the answer shows. Raises RequestError; `logprobs` is checked by the caller."""
    num_top = num_alternatives("prompt_logprobs", fields.prompt_logprobs, served)
    if num_top is not None and fields.stream:
        raise RequestError(
            "prompt_logprobs cannot be streamed; send stream: false, or echo with logprobs",
            param="prompt_logprobs",
        )
    return RequestedOutput(
        echo,
        logprobs,
        num_top,
        token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
    )


def own_values(
    fields: ChoiceFields,
    served: Served,
    shown: RequestedOutput,
    num_prompts: int = 1,
    best_of: int | None = None,
) -> dict[str, Any]:
    """`n`, `logprobs` and `prompt_logprobs` of the engine's sampling. Raises RequestError.

    The best of several are picked by their logprobs, and an echoed prompt shows its own.
    """
    n = 1 if fields.n is None else fields.n
    width = n if best_of is None else best_of
    if n < 1:
        raise RequestError(f"n is {n}, it must be at least 1", param="n")
    if width < n:
        raise RequestError(f"best_of is {width}, below n {n}", param="best_of")
    field = "n" if width == n else "best_of"
    bounded(field, width, served.limits.n)
    check_num_sequences(num_prompts, width, served.limits, field)
    picks = width > n and not fields.use_beam_search
    if picks and fields.stream:
        raise RequestError(
            f"best_of is {width}, above n {n}: the best are known at the end only; send stream: "
            "false",
            param="best_of",
        )
    echoed = shown.logprobs if shown.echo else None
    asked = [number for number in (shown.prompt_logprobs, echoed) if number is not None]
    if shown.echo and fields.max_tokens == 0:
        asked.append(0)
    own: dict[str, Any] = {
        "logprobs": 0 if picks and shown.logprobs is None else shown.logprobs,
        "prompt_logprobs": max(asked, default=None),
    }
    if picks:
        own["n"] = width
    if fields.logprob_token_ids:
        own["logprob_token_ids"] = _logprob_token_ids(fields, served, shown)
    return own


def _logprob_token_ids(
    fields: ChoiceFields, served: Served, shown: RequestedOutput
) -> tuple[int, ...]:
    name, ids = "logprob_token_ids", fields.logprob_token_ids or ()
    if shown.logprobs is None:
        raise RequestError(f"{name} needs logprobs", param=name)
    if fields.use_beam_search:
        raise RequestError(f"{name} cannot go with use_beam_search", param=name)
    bounded(name, len(ids), served.limits.logprob_token_ids, "entries")
    return token_ids_of(name, ids, served.engine.tokenizer.vocab_size)


def truncation_of(
    num_tokens: int | None, name: str, max_tokens: int | None, served: Served
) -> int | None:
    """How many of a prompt's last tokens are kept, None for all; -1 is what leaves room for the
    answer. Raises RequestError.
    """
    longest = served.engine.max_model_len
    if num_tokens is None:
        return None
    if num_tokens == -1:
        return max(1, longest - max(1, max_tokens or 1))
    if not 1 <= num_tokens <= longest:
        raise RequestError(
            f"{name} is {num_tokens}, it must be -1 or between 1 and {longest}", param=name
        )
    return num_tokens


def beam_params(
    fields: ChoiceFields, served: Served, sampling: SamplingParams, best_of: int | None = None
) -> BeamSearchParams | None:
    """The search that is asked for; None for none. Raises RequestError."""
    if not fields.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(fields, name) is not None:
                raise RequestError(f"{name} needs use_beam_search: true", param=name)
        return None
    for name in SamplingFields.__struct_fields__:
        value = getattr(fields, name)
        if name in _WITH_BEAMS or value in _ASKS_FOR_NOTHING or isinstance(value, TextFormat):
            continue
        if name not in _DEFAULTS or value != _DEFAULTS[name]:
            raise RequestError(
                f"{name} cannot go with use_beam_search, which would not follow it", param=name
            )
    if sampling.grammar is not None:
        raise RequestError(
            "use_beam_search cannot go with calls that are enforced", param="use_beam_search"
        )
    return BeamSearchParams(
        beam_width=best_of or sampling.n,
        max_tokens=served.engine.max_model_len
        if sampling.max_tokens is None
        else sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        temperature=fields.temperature or 0.0,
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        early_stopping=bool(fields.early_stopping),
    )
