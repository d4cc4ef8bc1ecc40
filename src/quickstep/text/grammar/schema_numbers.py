"""The numbers of a schema as llguidance enforces them exactly, or an error that names the number.

llguidance reads every number as a double. An integer that a double cannot hold would become another
one, so it is refused as a value. As a bound it is moved to the next double inside the range: the
output stays valid. Bounds beyond 64 bits, which llguidance cannot write out, are moved inside too.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, TypeGuard

from quickstep.errors import RequestError

_MAX_EXACT = 2**53  # every integer up to here is a double
_LARGEST = 2**63 - 1024  # the largest double that llguidance's ranges take
_INT64_MAX = 2**63 - 1  # an integer's maximum: its double is read as exactly this
# From here on llguidance needs a maximum to write out a minimum.
_NEEDS_MAXIMUM = 10**17
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_INEXACT = "; a value of a schema can be an integer up to 2^53, or a string"


class _InexactFloat(float):
    """A number of a JSON text that is not the value of its shortest form as a double."""

    text: str


def exact_float(text: str) -> float:
    """Read a JSON number with a fraction or an exponent; `with_exact_numbers` refuses inexact ones
    where they matter.
    """
    value = float(text)
    if math.isfinite(value) and Decimal(repr(value)) == Decimal(text):
        return value
    inexact = _InexactFloat(value)
    inexact.text = text
    return inexact


def with_exact_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the levels below, its bounds and values exact. Raises RequestError."""
    if "const" in schema:
        _check_value(schema["const"], "const")
    if isinstance(schema.get("enum"), list):
        _check_value(schema["enum"], "enum")
    if "multipleOf" in schema:
        _check_value(schema["multipleOf"], "multipleOf")
    if not any(_is_number(schema.get(keyword)) for keyword in _BOUNDS):
        return schema
    return _with_exact_bounds(schema)


def _check_value(value: object, keyword: str) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _check_value(inner, keyword)
    elif isinstance(value, list):
        for inner in value:
            _check_value(inner, keyword)
    elif isinstance(value, _InexactFloat):
        raise _refused(value.text, keyword)
    elif isinstance(value, int) and abs(value) > _MAX_EXACT and not _is_double(value):
        raise _refused(str(value), keyword)


def _is_double(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _refused(number: str, keyword: str) -> RequestError:
    digits = number if len(number) <= 40 else f"{number[:37]}..."
    return RequestError(
        f"grammar has the number {digits} in {keyword}, which has too many digits to be enforced"
        f" exactly{_INEXACT}",
        param="grammar",
    )


def _with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    is_integer = schema.get("type") == "integer"
    found = dict(schema)
    for keyword in _BOUNDS:
        bound = schema.get(keyword)
        if not _is_number(bound):
            continue
        if isinstance(bound, _InexactFloat):
            raise _refused(bound.text, keyword)
        if is_integer and keyword == "exclusiveMinimum" and abs(bound) >= _MAX_EXACT:
            del found[keyword]
            bound, keyword = math.floor(bound) + 1, "minimum"
            found[keyword] = max(bound, found.get(keyword, bound))
        elif is_integer and keyword == "exclusiveMaximum" and abs(bound) >= _MAX_EXACT:
            del found[keyword]
            bound, keyword = math.ceil(bound) - 1, "maximum"
            found[keyword] = min(bound, found.get(keyword, bound))
        else:
            found[keyword] = bound
    for keyword in _BOUNDS:
        bound = found.get(keyword)
        if not _is_number(bound):
            continue
        is_maximum = keyword.endswith("aximum")
        exact = -_at_least(-bound) if is_maximum else _at_least(bound)
        if is_integer and keyword == "maximum" and bound >= _INT64_MAX:
            exact = _INT64_MAX
        if abs(exact) > _LARGEST and exact != _INT64_MAX:
            raise _refused(str(bound), keyword)
        found[keyword] = exact
    lowest = max(found.get("minimum", 0), _number(found.get("exclusiveMinimum")))
    if lowest >= _NEEDS_MAXIMUM and "maximum" not in found and "exclusiveMaximum" not in found:
        found["maximum"] = _LARGEST
    return found


def _at_least(bound: float) -> float:
    """The least double that is not below a bound and that a range can have; one below any other
    is -`_LARGEST`.
    """
    if bound <= -_LARGEST:
        return -_LARGEST
    if isinstance(bound, float) or abs(bound) <= _MAX_EXACT or bound > _LARGEST:
        return bound
    nearest = float(bound)
    return int(nearest if int(nearest) >= bound else math.nextafter(nearest, math.inf))


def _number(value: object) -> float:
    return value if _is_number(value) else 0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
