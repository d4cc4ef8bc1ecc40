"""Values at the edge of a bound: pairs of one just outside and one just inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Pair = tuple[Any, Any]

# Of a number, a text.
_PLAIN: Mapping[str, Callable[[Any], Pair]] = {
    "minimum": lambda bound: (bound - 1, bound),
    "exclusiveMinimum": lambda bound: (bound, bound + 0.001),
    "maximum": lambda bound: (bound + 1, bound),
    "exclusiveMaximum": lambda bound: (bound, bound - 0.001),
    "minLength": lambda bound: ("x" * (bound - 1), "x" * bound),
    "maxLength": lambda bound: ("x" * (bound + 1), "x" * bound),
    "enum": lambda bound: ("none of these", bound[0]),
    "pattern": lambda bound: ("a b", "5"),
}
_ITEM = {"number": 1, "integer": 1, "string": "a"}
_NO_BOUND = ("type", "anyOf")


def beyond(
    keywords: Mapping[str, Any], item: Callable[[int], Any] = lambda index: None
) -> Iterator[Pair]:
    """Of every bound in `keywords`; `item` gives the entries of a list."""
    for name, bound in keywords.items():
        if name in _PLAIN:
            yield _PLAIN[name](bound)
        elif name not in _NO_BOUND:
            yield from _of_many(name, keywords, item)


def _of_many(name: str, keywords: Mapping[str, Any], item: Callable[[int], Any]) -> Iterator[Pair]:
    bound = keywords[name]
    value = _ITEM[keywords.get("additionalProperties", {}).get("type", "string")]
    match name:
        case "minItems":
            yield [*map(item, range(bound - 1))], [*map(item, range(bound))]
        case "maxItems":
            yield [*map(item, range(bound + 1))], [*map(item, range(bound))]
        case "maxProperties":
            entries = {str(index): value for index in range(bound + 1)}
            yield entries, dict(list(entries.items())[:bound])
        case "items":
            yield from (([bad], [good]) for bad, good in beyond(bound))
        case "additionalProperties":
            yield from (({"1": bad}, {"1": good}) for bad, good in beyond(bound))
        case "propertyNames":
            yield from (({bad: value}, {good: value}) for bad, good in beyond(bound))
        case _:
            raise AssertionError(f"nothing tries the bound {name}")
