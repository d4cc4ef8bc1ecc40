"""From the request schema's sampling fields to bounded, frozen `SamplingParams`.

`SamplingParams` checks the ranges of its own fields; here stand the bounds of the HTTP surface
(how many stops, how many choices) and the names that differ between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quickstep.errors import RequestError
from quickstep.server.options import RequestLimits
from quickstep.server.schemas import SamplingFields
from quickstep.server.surface import Served
from quickstep.types import SamplingParams

__all__ = ["bounded", "label", "sampling_params", "token_ids_of"]

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
_LOGIT_BIAS_LIMIT = 100.0


def sampling_params(
    fields: SamplingFields,
    served: Served,
    own: Mapping[str, Any],
    renamed: Mapping[str, str],
) -> SamplingParams:
    """The request's sampling parameters. Raises RequestError that names the client's field.

    What it leaves open comes from the checkpoint, then `SamplingParams`. `own` goes first: what
    the surface resolved by itself (`max_tokens`, `logprobs`); `renamed` says under which name the
    client gave it.
    """
    limits, vocab_size = served.limits, served.engine.tokenizer.vocab_size
    values: dict[str, Any] = dict(served.engine.default_sampling)
    values |= {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    values["stop"] = _stops(fields.stop, limits)
    values["logit_bias"] = _logit_bias(fields.logit_bias or {}, limits, vocab_size)
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(fields, name) or ()
        bounded(name, len(ids), limits.stop_token_ids, "entries")
        values[name] = token_ids_of(name, ids, vocab_size)
    bounded("n", fields.n or 1, limits.n)
    try:
        return SamplingParams(**{**values, **own})
    except RequestError as error:
        param = error.param or ""
        given = renamed.get(param, param)
        message = str(error).replace(param, given, 1) if given != param else str(error)
        raise RequestError(message, param=given or None) from None


def bounded(name: str, value: int, limit: int, unit: str = "") -> None:
    """Raise RequestError if `value` is above `limit`."""
    if value > limit:
        has = f"has {value} {unit}" if unit else f"is {value}"
        raise RequestError(f"{name} {has}, the limit is {limit}", param=name)


def label(name: str, value: str | None, limits: RequestLimits) -> str:
    """A short text of the client's, "" if not given. Raises RequestError if it is long."""
    bounded(name, len(value or ""), limits.label_chars, "characters")
    return value or ""


def token_ids_of(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as a tuple. Raises RequestError for one that the model does not have."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(
            f"{name} holds token id {wrong}, the model has ids 0 to {vocab_size - 1}", param=name
        )
    return tuple(ids)


def _stops(stop: str | list[str] | None, limits: RequestLimits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    bounded("stop", len(stops), limits.stop, "entries")
    bounded("stop", max(map(len, stops), default=0), limits.stop_chars, "characters in one entry")
    return stops


def _logit_bias(
    bias: Mapping[str, float], limits: RequestLimits, vocab_size: int
) -> dict[int, float]:
    bounded("logit_bias", len(bias), limits.logit_bias, "entries")
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(
                f"logit_bias has the key {key!r}, keys are token ids", param="logit_bias"
            )
        if not abs(value) <= _LOGIT_BIAS_LIMIT:
            raise RequestError(
                f"logit_bias of {key} is {value:g}, it must be between -100 and 100",
                param="logit_bias",
            )
        by_id[int(key)] = value
    token_ids_of("logit_bias", list(by_id), vocab_size)
    return by_id
