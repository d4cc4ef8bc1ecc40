"""Ollama's `keep_alive`: how long a model stays in memory after its last request.

It has an effect on servers of several models, where it takes the place of `--model-idle-s` until
another request says otherwise; on a server with API keys, of admin keys only.
"""

from __future__ import annotations

import math
import re

import msgspec
from starlette.requests import Request

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.body import body_of
from quickstep.server.http.middleware import report_ignored
from quickstep.server.models.registry import ModelRegistry

_FIELD = "keep_alive"
_MOST_CHARS = 64
_FOR_EVER_S = 100 * 365 * 86_400.0
# Of Go's time.ParseDuration.
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h)")


class _KeptModel(msgspec.Struct, frozen=True):
    model: str
    keep_alive: str | float | None = None


_DECODER = msgspec.json.Decoder(_KeptModel)


class KeptModel(msgspec.Struct, frozen=True):
    """A model, and after how long without requests it is unloaded; None for never."""

    name: str
    idle_s: float | None


async def kept_model(request: Request, models: ModelRegistry) -> KeptModel | None:
    """What a request wants to be kept; None if it says nothing, or what has no effect here, which
    is reported. Raises RequestError.
    """
    body, caller, server = body_of(request), caller_of(request), models.server
    try:
        fields = await server.lanes.of(caller).do(len(body), lambda: _DECODER.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # its parser says what is wrong
    if fields.keep_alive is None:
        return None
    idle_s = keep_alive_s(fields.keep_alive)
    why = ""
    if models.residents is None:
        why = "" if idle_s is None else "the server has one model, which stays loaded"
    elif server.api_keys and not server.api_keys.is_admin(caller):
        why = "on this server only an admin key decides how long a model stays loaded"
    else:
        return KeptModel(fields.model, idle_s)
    if why:
        reader = FieldReader(server.field_rules)
        reader.ignore(_FIELD, why)
        report_ignored(request, reader.ignored)
    return None


def keep_alive_s(value: str | float) -> float | None:
    """Seconds, from a number of them or a duration such as `1h30m`; None, for ever, if that is
    negative or above a century. Raises RequestError.
    """
    seconds = value if isinstance(value, float | int) else _duration_s(value.strip())
    if math.isnan(seconds):
        raise RequestError(
            f"keep_alive is {str(value)[:_MOST_CHARS]!r}; it must be seconds, or a duration such "
            "as '5m' or '1h30m'",
            param=_FIELD,
        )
    return None if seconds < 0 or seconds > _FOR_EVER_S else float(seconds)


def _duration_s(text: str) -> float:
    """Seconds; NaN for a text that is no duration."""
    if len(text) > _MOST_CHARS:
        return math.nan
    unsigned = text.removeprefix("-").removeprefix("+")
    sign = -1.0 if text.startswith("-") else 1.0
    try:
        return sign * float(unsigned)
    except ValueError:
        pass
    parts = _PART.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        return math.nan
    return sign * math.fsum(float(number) * _UNITS[unit] for number, unit in parts)
