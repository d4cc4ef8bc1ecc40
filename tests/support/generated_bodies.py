"""Bodies drawn from the schemas of our document: bodies that fit, and bodies that break one rule.

`schemathesis` draws from any schema and takes 30 to 90 ms for a body of ours. This takes less than
one: it knows the keywords that our document uses, and fails on any other.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs

MAX_DEPTH = 6  # below it: as little as the schema allows
NAME_CHARS = string.ascii_letters + string.digits + "_-"
TEXTS = (
    *("", "a", "x1", "7", "0", "-1", "true", "null", "auto", "user", "function", "json_object"),
    *(" ", "\n", "\t\r", "\x00", "\x7f", '"', "\\", "{}", "[1]", "<think>", "</s>", "%s", "../a"),
    *("é", "漢字", "😀", "\u202e", "\ufeff", "\U0010ffff", "e\u0301", "\x85", "ÿ" * 40, "a" * 600),
    *("demo", "quickstep", "data:,a", "http://a/b", "1e999", "NaN", "{{ messages }}", "{% if %}"),
)
KEYS = ("a", "type", "name", "$ref", "__proto__", "properties", "é", "", "n", "role", "stop")
INTEGERS = (0, 1, 2, 3, 7, 100, 255, 256, 4096, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1)
HUGE = (2**63, 2**64, 10**40)
NUMBERS = (0.5, 1e-9, 1.0, 1.5, 3, 1e9, 1e300, 5e-324, 0.1)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = {"title", "description", "default", "discriminator", "components", "format"}
KEYWORDS = {
    *("$ref", "anyOf", "type", "enum", "const", "not", "items", "prefixItems", "properties"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
    *("required", "additionalProperties", "minItems", "maxItems", "maxProperties", "pattern"),
    *("propertyNames", "examples"),
}

Schema = dict[str, Any]


class NothingFits(Exception):
    """No value fits the schema."""


class BodyDrawer:
    """Draws from one schema of a document."""

    def __init__(self, document: Schema, schema: Schema) -> None:
        self.components: Schema = document["components"]["schemas"]
        self.schema = schema
        self._validator = jsonschema_rs.validator_for(
            {**schema, "components": document["components"]}
        )

    def fitting(self, seed: int) -> Any:
        """A body that fits the schema."""
        body = _Drawing(self.components, seed).value(self.schema)
        self._validator.validate(body)
        return body

    def breaking(self, seed: int) -> Any:
        """A body that breaks the schema at one place."""
        rng = random.Random(seed)
        for attempt in range(200):
            one = rng.getrandbits(60)
            counted = _Drawing(self.components, one)
            counted.value(self.schema)
            # the first ones are the fields of the body itself: half of the time one of these
            last = min(counted.num_places, 30) if rng.random() < 0.5 else counted.num_places
            place = 0 if attempt == 0 and rng.random() < 0.02 else rng.randint(1, max(1, last))
            body = _Drawing(self.components, one, broken_place=place).value(self.schema)
            if not self._validator.is_valid(body):
                return body
        raise AssertionError("no body breaks the schema")


class _Drawing:
    """One body. The same seed passes the same places, so one of them can be broken."""

    def __init__(self, components: Schema, seed: int, broken_place: int | None = None) -> None:
        self._rng = random.Random(seed)
        self._components = components
        self._broken_place = broken_place
        self.num_places = 0
        # how much of what may be left out is there
        self._fullness = self._rng.choice((0.03, 0.1, 0.1, 0.3, 0.8))

    def value(self, schema: Schema | bool, depth: int = 0) -> Any:
        """A value that fits, or a broken one at the place to break."""
        schema = self._resolved(schema)
        if not schema.keys() & KEYWORDS:
            return self.anything(depth)
        place, self.num_places = self.num_places, self.num_places + 1
        if place == self._broken_place:
            return self._rng.choice(list(self._breaks(schema, depth)))()
        return self._fitting(schema, depth)

    def anything(self, depth: int) -> Any:
        """Any JSON."""
        leaf = depth >= MAX_DEPTH or self._rng.random() < 0.6
        return self._of_type(self._rng.choice(TYPES[:5] if leaf else TYPES[5:]), {}, depth)

    def _resolved(self, schema: Schema | bool) -> Schema:
        if isinstance(schema, bool):
            return {} if schema else {"not": {}}
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        unknown = {key for key in schema if key not in KEYWORDS | ANNOTATIONS and key[:2] != "x-"}
        assert not unknown, f"draw {unknown} as well"
        return schema

    def _fitting(self, schema: Schema, depth: int) -> Any:
        if schema.get("not") == {}:
            raise NothingFits
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        if "anyOf" in schema:
            return self._one_of(schema["anyOf"], depth)
        types = schema["type"]
        kind = self._rng.choice(types) if isinstance(types, list) else types
        value = self._of_type(kind, schema, depth)
        while value == schema.get("not", {}).get("const", self):
            value = self._of_type(kind, schema, depth)
        return value

    def _one_of(self, forms: list[Schema], depth: int) -> Any:
        forms = self._rng.sample(forms, len(forms))
        if depth > MAX_DEPTH:
            forms.sort(key=lambda form: self._resolved(form).get("type") in ("array", "object"))
        for form in forms:
            before = self.num_places
            try:
                return self.value(form, depth)
            except NothingFits:
                self.num_places = before
        raise NothingFits

    def _of_type(self, kind: str, schema: Schema, depth: int) -> Any:
        match kind:
            case "null":
                return None
            case "boolean":
                return self._rng.random() < 0.5
            case "integer":
                return self._integer(schema)
            case "number":
                return self._number(schema)
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema, depth)
            case _:
                return self._object(schema, depth)

    def _integer(self, schema: Schema) -> int:
        low, high = schema.get("minimum"), schema.get("maximum")
        pool = [*INTEGERS, *(-number for number in INTEGERS), *HUGE, -HUGE[-1]]
        pool += [bound + step for bound in (low, high) if bound is not None for step in (-1, 0, 1)]
        return int(self._rng.choice([n for n in pool if _is_in_bounds(n, schema)]))

    def _number(self, schema: Schema) -> float:
        bounds = [schema[key] for key in _BOUNDS if key in schema]
        pool = [*NUMBERS, *(-number for number in NUMBERS), 0, -0.0, *bounds]
        pool += [bound + step for bound in bounds for step in (-1e-7, 1e-7)]
        number: float = self._rng.choice([n for n in pool if _is_in_bounds(n, schema)])
        return number

    def _string(self, schema: Schema) -> str:
        if "examples" in schema and self._rng.random() < 0.5:
            return str(self._rng.choice(schema["examples"]))
        low, high = schema.get("minLength", 0), schema.get("maxLength", 10**9)
        pattern = re.compile(schema.get("pattern", "").replace("$", r"\Z"))
        for _ in range(100):
            text = self._rng.choice(TEXTS)
            if self._rng.random() < 0.3:
                chars = self._rng.choice((NAME_CHARS, string.digits, "".join(TEXTS)))
                text = "".join(self._rng.choices(chars, k=self._rng.randint(0, 12)))
            if self._rng.random() < 0.05 and high < 10**6:
                text = (text or "a") * high
            text = text[:high] + "a" * (low - len(text))
            if pattern.search(text):
                return text
        raise AssertionError(f"no text is drawn that matches {pattern.pattern}")

    def _size(self, low: int, high: int, depth: int) -> int:
        if depth >= MAX_DEPTH:
            return low
        if self._rng.random() < 0.02 and high < 100:
            return high
        return max(low, min(high, self._rng.choice((0, 1, 1, 1, 2, 3))))

    def _array(self, schema: Schema, depth: int) -> list[Any]:
        head = schema.get("prefixItems", [])
        size = self._size(schema.get("minItems", 0), schema.get("maxItems", 10**9), depth)
        values = [self.value(item, depth + 1) for item in head]
        items = schema.get("items", True)
        if items is False:
            return values
        try:
            values += [self.value(items, depth + 1) for _ in range(size - len(head))]
        except NothingFits:
            if schema.get("minItems", 0) > len(values):
                raise
        return values

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        values = {}
        required = schema.get("required", ())
        fullness = 0.0 if depth > MAX_DEPTH else self._fullness
        for name, field in schema.get("properties", {}).items():
            if name in required or self._rng.random() < fullness:
                try:
                    values[name] = self.value(field, depth + 1)
                except NothingFits:
                    if name in required:
                        raise
        more = schema.get("additionalProperties", True)
        is_map = "properties" not in schema
        if more is not False and (is_map or self._rng.random() < 0.1):
            names = schema.get("propertyNames", {})
            for _ in range(self._size(0, schema.get("maxProperties", 10**9), depth)):
                name = self._string(names) if names or is_map else self._rng.choice(KEYS)
                if name not in schema.get("properties", ()):
                    values[name] = self.value(more, depth + 1)
        return values

    def _breaks(self, schema: Schema, depth: int) -> Iterator[Callable[[], Any]]:
        """Ways to break it; not all do, where it allows several forms."""
        yield lambda: self.anything(depth)
        yield lambda: self._of_type(self._rng.choice(TYPES), {}, depth)
        yield lambda: self._rng.choice((10**40, -1, 1.5, "a", [], {}, [None], {"a": None}))
        if "anyOf" in schema:
            for form in map(self._resolved, schema["anyOf"]):
                if form.get("type") != "null" and form.keys() & KEYWORDS:
                    yield from self._breaks(form, depth)
        yield from self._out_of_bounds(schema, depth)
        if "enum" in schema or "const" in schema:
            known = [str(one) for one in schema.get("enum", [schema.get("const")])]
            near = self._rng.choice(known)
            yield lambda: self._rng.choice((near + "s", near.upper(), near[:-1], f" {near}", ""))
        if required := schema.get("required"):
            yield lambda: self._without(self._rng.choice(required), schema, depth)
        if schema.get("type") == "integer":
            yield lambda: self._rng.choice((0.5, "1", 1e-9, True, [1]))

    def _out_of_bounds(self, schema: Schema, depth: int) -> Iterator[Callable[[], Any]]:
        for key, step in _BOUNDS.items():
            if key in schema:
                beyond = schema[key] + (step if "exclusive" not in key else 0)
                yield lambda beyond=beyond: beyond
                yield lambda beyond=beyond, step=step: beyond + step * self._rng.choice(INTEGERS)
        if "maxLength" in schema:
            yield lambda: "a" * (schema["maxLength"] + 1)
        if schema.get("minLength"):
            yield lambda: "a" * (schema["minLength"] - 1)
        if "pattern" in schema:
            yield lambda: self._rng.choice(TEXTS)
            yield lambda: self._string(schema) + "\n"  # which `$` of a Python pattern lets pass
        most = schema.get("maxItems", 0)
        if most and schema.get("items") and (most < 10_000 or self._rng.random() < 0.02):
            yield lambda: self._sized(schema, most + 1, depth)
        if schema.get("minItems") and schema.get("items"):
            yield lambda: self._sized(schema, schema["minItems"] - 1, depth)
        if "maxProperties" in schema:
            more = schema.get("additionalProperties", True)
            yield lambda: {
                f"{self._string(schema['propertyNames'])}\n": self.value(more, MAX_DEPTH)
            }
            yield lambda: {
                str(one): self.value(more, MAX_DEPTH) for one in range(schema["maxProperties"] + 1)
            }

    def _sized(self, schema: Schema, size: int, depth: int) -> list[Any]:
        return [self.value(schema["items"], max(depth, MAX_DEPTH - 1))] * size

    def _without(self, name: str, schema: Schema, depth: int) -> Any:
        value = self._fitting(schema, depth)
        value.pop(name, None)
        return value


_BOUNDS = {"minimum": -1, "maximum": 1, "exclusiveMinimum": -1, "exclusiveMaximum": 1}


def _is_in_bounds(number: float, schema: Schema) -> bool:
    low, high = schema.get("minimum", number), schema.get("maximum", number)
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    in_bounds: bool = low <= number <= high
    return in_bounds and (above is None or above < number) and (below is None or number < below)
