"""What a JSON schema does not allow, as a schema: `not`, `if` and overlapping `oneOf` need it.

`SchemaLogic.negated(S)` allows only values that S does not, keyword by keyword:

    type, enum, const        the other types; other texts by a pattern, other numbers by ranges
    required                 an object that lacks one of the names
    properties               an object with one of the properties, whose value its schema refuses
    minimum, maxItems, ...   the opposite bound
    allOf, anyOf, not        de Morgan
    $ref                     its target, unless that refers to itself

Everything here reads the client's schema; `json_schema` rewrites the result with the rest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote

from quickstep.errors import RequestError
from quickstep.text.grammar.patterns import PatternWriter

ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")
_MAX_REFERENCES = 16
_MAX_STEPS = 15_000  # in addition to two for each value of the schema, some 30 microseconds each
_MAX_PATTERN = 16 * 1024
ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title"),
        *("description", "default", "example", "examples", "readOnly", "writeOnly", "deprecated"),
        *("contentMediaType", "contentEncoding", "contentSchema", "then", "else"),
        *("minContains", "maxContains", "additionalItems"),
    )
)
# Keywords that apply to one type, with the opposite keyword and what is added to the number.
_OPPOSITES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}
_TYPE_OF_KEYWORD = {
    **{keyword: opposite[0] for keyword, opposite in _OPPOSITES.items()},
    **dict.fromkeys(("pattern", "format"), "string"),
    "multipleOf": "number",
    **dict.fromkeys(
        ("items", "prefixItems", "contains", "uniqueItems", "unevaluatedItems", "minContains"),
        "array",
    ),
    **dict.fromkeys(("additionalItems", "maxContains"), "array"),
    **dict.fromkeys(
        (
            *("properties", "patternProperties", "additionalProperties", "required"),
            *("propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
            "unevaluatedProperties",
        ),
        "object",
    ),
}


# Keywords whose value is a schema or a list of schemas, and those with schemas by name.
HAS_SCHEMAS = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems"),
        *("contains", "additionalItems", "additionalProperties", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
HAS_SCHEMAS_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "enum"))
_NUMBERS = frozenset(
    (
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains", "minimum", "maximum", "multipleOf"),
    )
)


def check_keywords(schema: object) -> None:
    """Raise RequestError where a keyword has a value of a type that no draft has there."""
    pending = [schema]
    while pending:
        found = pending.pop()
        if isinstance(found, list):
            pending += found
        if not isinstance(found, dict):
            continue
        for keyword, value in found.items():
            wanted = _wanted(keyword, value)
            if wanted:
                raise RequestError(
                    f"grammar has a schema whose {keyword} is no {wanted}",
                    param="grammar",
                )
            if keyword in HAS_SCHEMAS:
                pending.append(value)
            elif keyword in HAS_SCHEMAS_BY_NAME:
                pending += value.values()


def _wanted(keyword: str, value: object) -> str:
    """What a keyword's value should be; "" if it is that."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if keyword in _LISTS:
        return "" if isinstance(value, list) else "list"
    if keyword in HAS_SCHEMAS_BY_NAME or keyword == "dependentRequired":
        return "" if isinstance(value, dict) else "object"
    if keyword in HAS_SCHEMAS:
        is_list = isinstance(value, list) and keyword == "items"
        return "" if is_list or isinstance(value, dict | bool) else "schema"
    if keyword in _NUMBERS:
        return "" if is_number else "number"
    if keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        return "" if is_number or isinstance(value, bool) else "number"
    if keyword in ("pattern", "$ref"):
        return "" if isinstance(value, str) else "text"
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if keyword == "type":
        return "" if is_list or isinstance(value, str) else "name or list of names"
    if keyword == "required":  # draft 3 has a flag there
        return "" if is_list or isinstance(value, bool) else "list of names"
    return ""


def of_type(keyword: str) -> str | None:
    """The type of values that a keyword applies to; None for all types."""
    return _TYPE_OF_KEYWORD.get(keyword)


def types_of(schema: object) -> frozenset[str]:
    """The types of the values that a schema may allow, by its own `type`, `const` and `enum`."""
    if not isinstance(schema, dict):
        return frozenset() if schema is False else frozenset(ALL_TYPES)
    found = frozenset(ALL_TYPES)
    declared = schema.get("type")
    if declared is not None:
        names = [declared] if isinstance(declared, str) else declared
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            found = frozenset("number" if name == "integer" else name for name in names)
    for values in _listed(schema):
        found &= frozenset(map(_type_of_value, values))
    return found


def resolved(root: Mapping[str, Any], reference: str) -> Any:
    """The target of a reference within the schema; None where it points elsewhere."""
    base, has_pointer, pointer = reference.partition("#")
    if base and base != str(root.get("$id", "")).partition("#")[0]:
        return None
    value: Any = root
    if not has_pointer or not pointer.startswith("/"):
        return None if pointer or not has_pointer else root
    for part in pointer[1:].split("/"):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            return None
    return value


def references_in(schema: object) -> set[str]:
    """The references in a schema."""
    found = (value.get("$ref") for value in _values_in(schema) if isinstance(value, dict))
    return {reference for reference in found if isinstance(reference, str)}


class SchemaTooLarge(RequestError):
    """The work on a schema reached its bound."""


class SchemaLogic:
    """Questions about the parts of one client's schema, whose references it follows.

    The work for one schema is bounded: beyond that every method raises SchemaTooLarge.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        check_keywords(root)
        self._root = root
        self._checked: set[str] = set()  # references
        # A schema below with an address of its own is the root of the references in it; one that
        # is a fragment only names the schema.
        self._has_one_root = not any(
            isinstance(value, dict)
            and isinstance(value.get("$id"), str)
            and not value["$id"].startswith("#")
            for value in _values_in([*root.values()])
        )
        self._steps_left = _MAX_STEPS + 2 * sum(1 for _ in _values_in(root))
        self.patterns = PatternWriter(self.count)
        self._left_out = False  # a way to be refused, since it cannot be expressed

    def count(self, steps: int = 1) -> None:
        """Count steps of work on the schema."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise SchemaTooLarge(
                "grammar has a schema that is too large once its not, if and oneOf are written"
                " out; send a smaller one",
                param="grammar",
            )

    def resolved(self, reference: str) -> Any:
        """The target of a reference; None where that is not within the schema."""
        target = resolved(self._root, reference) if self._has_one_root else None
        if reference not in self._checked:  # it may be where no schema is looked for
            self._checked.add(reference)
            check_keywords(target)
        return target

    def target(self, schema: object) -> object:
        """The schema, or what it refers to if it is a reference and nothing else."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            if not set(schema) - ANNOTATIONS <= {"$ref"}:
                return schema
            target = self.resolved(schema["$ref"])
            if not isinstance(target, dict | bool):
                return schema
            schema = target
        return schema

    def negated(self, schema: object) -> Any:
        """A schema of values that `schema` refuses; None if llguidance cannot express it."""
        ways = self._ways(schema, False, ())
        return None if ways is None else _any_of(ways)

    def refused_by(self, other: object, branch: object) -> Any:
        """The same for values of `branch`: some ways to be refused may be left out that cannot be
        expressed, as long as another one is left.
        """
        self._left_out = False
        ways = self._ways(other, True, ())
        if ways is None:
            return None
        useful = [way for way in ways if not self.are_disjoint(branch, way)]
        if self._left_out and not useful:
            return None
        return _any_of(useful)

    def finite_values(self, schema: object, limit: int) -> list[Any] | None:
        """All values that a schema allows, at most `limit`; None if that is not known."""
        schema = self.target(schema)
        if not isinstance(schema, dict):
            return [] if schema is False else None
        rest = set(schema) - ANNOTATIONS - {"type", "const", "enum"}
        listed = _listed(schema)
        if rest == {"anyOf"} and not listed and "type" not in schema:
            found = [self.finite_values(branch, limit) for branch in _schemas(schema["anyOf"])]
            values = [value for branch in found if branch is not None for value in branch]
            unique = unique_values(values)
            return None if None in found or len(unique) > limit else unique
        if rest:
            return None
        types = types_of(schema)
        if listed:
            values = [v for v in listed[0] if _type_of_value(v) in types]
            if schema.get("type") == "integer":
                values = [v for v in values if v == int(v)]
            values = [v for v in values if all(has_value(other, v) for other in listed[1:])]
        elif types <= {"null", "boolean"} and types:
            values = [None] * ("null" in types) + [False, True] * ("boolean" in types)
        else:
            return None
        values = unique_values(values)
        return values if len(values) <= limit else None

    def have_own_values(self, schemas: Sequence[object]) -> bool:
        """Whether each schema lists values of its own, or such values of the same property."""
        found = [self.target(schema) for schema in schemas]
        if not all(isinstance(schema, dict) for schema in found):
            return False
        if _are_distinct(found):
            return True
        first, *_ = found
        assert isinstance(first, dict)
        for key in _strings(first.get("required")):
            if all(key in _strings(s.get("required")) for s in found if isinstance(s, dict)):
                values = [_property(s, key) for s in found if isinstance(s, dict)]
                if _are_distinct([self.target(value) for value in values]):
                    return all(types_of(schema) == {"object"} for schema in found)
        return False

    def are_disjoint(self, first: object, second: object, depth: int = 4) -> bool:
        """Whether two schemas are known to allow no common value."""
        self.count()
        first, second = self.target(first), self.target(second)
        if first is False or second is False:
            return True
        if not isinstance(first, dict) or not isinstance(second, dict) or not depth:
            return False
        types = types_of(first) & types_of(second)
        if not types:
            return True
        for one, other in ((first, second), (second, first)):
            for keyword in ("anyOf", "oneOf"):
                branches = _schemas(one.get(keyword))
                if branches and all(self.are_disjoint(b, other, depth - 1) for b in branches):
                    return True
            parts = [*_schemas(one.get("allOf"))]
            if "$ref" in one and self.target({"$ref": one["$ref"]}) is not one:
                parts.append({"$ref": one["$ref"]})
            if any(self.are_disjoint(part, other, depth - 1) for part in parts):
                return True
            if one.get("not") is not None and depth > 1 and one["not"] == other:
                return True
        values, others = _listed(first), _listed(second)
        if any(not _overlap(a, b) for a in values for b in others):
            return True
        return all(self._differ(first, second, name, depth) for name in types)

    def _differ(self, first: dict[str, Any], second: dict[str, Any], name: str, depth: int) -> bool:
        """Whether no value of one type fits both."""
        ranges = {
            "string": (("minLength", "maxLength"),),
            "array": (("minItems", "maxItems"),),
            "object": (("minProperties", "maxProperties"),),
            "number": (("minimum", "maximum"),),
        }
        for low, high in ranges.get(name, ()):
            for one, other in ((first, second), (second, first)):
                if low in one and high in other and one[low] > other[high]:
                    return True
        if name != "object":
            return False
        for one, other in ((first, second), (second, first)):
            for key in _strings(one.get("required")):
                mine, theirs = _property(one, key), _property(other, key)
                if theirs is False or self.are_disjoint(mine, theirs, depth - 1):
                    return True
        return False

    def _ways(
        self, schema: object, is_partial: bool, followed: tuple[str, ...]
    ) -> list[Any] | None:
        """The ways to be refused; None if one that matters is unknown."""
        self.count()
        if isinstance(schema, bool):
            return [] if schema else [{}]
        if not isinstance(schema, dict):
            return None
        found: list[Any] = []
        types = types_of({"type": schema["type"]} if "type" in schema else {})
        for keyword, value in schema.items():
            own = of_type(keyword)
            if keyword in ANNOTATIONS or (own is not None and own not in types):
                continue
            ways = self._ways_of(keyword, value, schema, is_partial, followed)
            if ways is not None:
                found += ways
            elif not is_partial:
                return None
            else:
                self._left_out = True
        return found

    def _ways_of(
        self,
        keyword: str,
        value: Any,
        schema: dict[str, Any],
        is_partial: bool,
        followed: tuple[str, ...],
    ) -> list[Any] | None:
        """The ways to be refused by one keyword. [] if it refuses nothing."""

        def ways_of(inner: object) -> list[Any] | None:
            return self._ways(inner, is_partial, followed)

        match keyword:
            case "type":
                if isinstance(value, str | list) and "integer" in value and "number" not in value:
                    self._left_out = True  # a number that is no integer
                return _other_types(value)
            case "const":
                return _other_values([value])
            case "enum":
                return _other_values(value) if isinstance(value, list) else None
            case "required":
                return [{"type": "object", "properties": {n: False}} for n in _strings(value)]
            case "properties" if isinstance(value, dict):
                return self._ways_of_properties(value, is_partial, followed)
            case "anyOf" | "oneOf":
                all_ways = [ways_of(branch) for branch in _schemas(value)]
                if any(ways is None for ways in all_ways) or not all_ways:
                    return None
                if any(not ways for ways in all_ways):
                    return []
                return [{"allOf": [_any_of(ways) for ways in all_ways if ways is not None]}]
            case "allOf":
                return self._joined((ways_of(branch) for branch in _schemas(value)), is_partial)
            case "not":
                return [value]
            case "$ref":
                if not isinstance(value, str) or value in followed:
                    return None
                if len(followed) >= _MAX_REFERENCES:
                    return None
                target = self.resolved(value)
                return self._ways(target, is_partial, (*followed, value))
            case "if":
                return self._ways_of_condition(schema, is_partial, followed)
            case "items" if isinstance(value, dict | bool) and "prefixItems" not in schema:
                ways = ways_of(value)
                return ways and [{"type": "array", "contains": _any_of(ways)}]
            case "items" | "prefixItems" if isinstance(value, list):
                return self._ways_of_items(value, is_partial, followed)
            case "contains" if "minContains" not in schema and "maxContains" not in schema:
                ways = ways_of(value)
                if ways is None:
                    return None
                return [{"type": "array", "items": _any_of(ways)}]
            case "dependentRequired" | "dependentSchemas" | "dependencies":
                return self._ways_of_dependencies(value, is_partial, followed)
            case "pattern" if isinstance(value, str):
                other = self.patterns.other(value)
                if other == "":
                    return []
                return None if other is None else [{"type": "string", "pattern": other}]
            case "uniqueItems" | "unevaluatedProperties" | "unevaluatedItems" if value is False:
                return None if keyword != "uniqueItems" else []
            case "propertyNames" if value is True or value == {}:
                return []
            case "additionalProperties" if "patternProperties" not in schema:
                ways = ways_of(value)
                known = schema.get("properties")
                declared = dict.fromkeys(known if isinstance(known, dict) else (), False)
                others = {"properties": declared, "minProperties": 1}
                return ways and [
                    {"type": "object", **others, "additionalProperties": _any_of(ways)}
                ]
        if keyword in _OPPOSITES:
            return _opposite(keyword, value, schema)
        return None if _restricts(keyword) else []

    def _joined(self, all_ways: Iterable[list[Any] | None], is_partial: bool) -> list[Any] | None:
        found: list[Any] = []
        num_known = 0
        for ways in all_ways:
            if ways is None:
                if not is_partial:
                    return None
                self._left_out = True
            num_known += ways is not None
            found += ways or []
        return found if num_known else None

    def _ways_of_properties(
        self, properties: dict[str, Any], is_partial: bool, followed: tuple[str, ...]
    ) -> list[Any] | None:
        inside = [(inner, partial(_object_with, name)) for name, inner in properties.items()]
        return self._ways_inside(inside, is_partial, followed)

    def _ways_of_items(
        self, items: list[Any], is_partial: bool, followed: tuple[str, ...]
    ) -> list[Any] | None:
        inside = [(inner, partial(_array_with, place)) for place, inner in enumerate(items)]
        return self._ways_inside(inside, is_partial, followed)

    def _ways_inside(
        self,
        inside: Iterable[tuple[Any, Callable[[Any], Any]]],
        is_partial: bool,
        followed: tuple[str, ...],
    ) -> list[Any] | None:
        """The ways of schemas of parts: each with what makes the schema of the value that has such
        a part.
        """
        found = []
        for inner, of_value in inside:
            ways = self._ways(inner, is_partial, followed)
            if ways is None:
                if not is_partial:
                    return None
                self._left_out = True
            if ways:
                found.append(of_value(_any_of(ways)))
        return found

    def _ways_of_condition(
        self, schema: dict[str, Any], is_partial: bool, followed: tuple[str, ...]
    ) -> list[Any] | None:
        condition = schema["if"]
        otherwise = self._ways(condition, False, followed)
        found = []
        for keyword, holds in (("then", [condition]), ("else", otherwise)):
            ways = self._ways(schema.get(keyword, True), is_partial, followed)
            if ways is None or holds is None:
                return None
            if ways and holds:
                found.append({"allOf": [_any_of(holds), _any_of(ways)]})
        return found

    def _ways_of_dependencies(
        self, value: Any, is_partial: bool, followed: tuple[str, ...]
    ) -> list[Any] | None:
        if not isinstance(value, dict):
            return None
        inside = []
        for name, demand in value.items():
            inner = {"required": demand} if isinstance(demand, list) else demand
            inside.append((inner, partial(_object_of, name)))
        return self._ways_inside(inside, is_partial, followed)


def _object_with(name: str, schema: Any) -> dict[str, Any]:
    """An object whose property `name` fits a schema."""
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _object_of(name: str, schema: Any) -> dict[str, Any]:
    """An object that has the property `name` and fits a schema."""
    return {"type": "object", "required": [name], "allOf": [schema]}


def _array_with(place: int, schema: Any) -> dict[str, Any]:
    """An array whose item at `place` fits a schema."""
    first: list[Any] = [{}] * place
    return {"type": "array", "items": [*first, schema], "minItems": place + 1}


def other_texts(texts: Iterable[str]) -> str | None:
    """A pattern of all texts but these; None if it would be too long."""
    ends: dict[str, Any] = {}
    for text in texts:
        node = ends
        for character in text:
            node = node.setdefault(character, {})
        node[""] = True
    pattern = f"^(?:{_rest(ends, 0)})$" if _depth_of(texts) < 200 else ""
    return pattern if 0 < len(pattern) <= _MAX_PATTERN else None


def _depth_of(texts: Iterable[str]) -> int:
    return max((len(text) for text in texts), default=0)


def _rest(node: dict[str, Any], level: int) -> str:
    """A pattern of what may follow the beginning of some texts, so that none of them results."""
    children = {key: inner for key, inner in node.items() if key}
    if not children:
        return "[\\s\\S]+"
    others = "".join(map(_escaped, children))
    ways = [f"[^{others}][\\s\\S]*"]
    ways += [f"{_escaped(key)}(?:{_rest(inner, level + 1)})" for key, inner in children.items()]
    pattern = "|".join(ways)
    return pattern if "" in node else f"(?:{pattern})?"


def _escaped(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def _are_distinct(schemas: Iterable[object]) -> bool:
    """Whether each schema lists its values, and none is listed twice."""
    keys: list[str] = []
    for schema in schemas:
        listed = _listed(schema) if isinstance(schema, dict) else []
        if not listed:
            return False
        keys += {_key(value) for value in listed[0]}
    return len(keys) == len(set(keys))


def _values_in(value: object) -> Iterator[object]:
    """A JSON value and all that is in it, without recursion."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _any_of(ways: list[Any]) -> Any:
    if not ways:
        return False
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


def _other_types(value: object) -> list[Any] | None:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    left = [name for name in ALL_TYPES if name not in names]
    if "integer" in names and "number" in left:
        left.remove("number")  # a number that is no integer cannot be expressed
    return [{"type": left if len(left) > 1 else left[0]}] if left else []


def _other_values(values: list[Any]) -> list[Any] | None:
    by_type: dict[str, list[Any]] = {name: [] for name in ALL_TYPES}
    for value in values:
        by_type[_type_of_value(value)].append(value)
    free = [name for name in ALL_TYPES if not by_type[name]]
    found: list[Any] = [{"type": free if len(free) > 1 else free[0]}] if free else []
    left = [value for value in (False, True) if value not in by_type["boolean"]]
    if by_type["boolean"]:
        found += [{"const": value} for value in left]
    if by_type["string"]:
        pattern = other_texts(by_type["string"])
        if pattern is None:
            return None
        found.append({"type": "string", "pattern": pattern})
    if by_type["number"]:
        found += _other_numbers(by_type["number"])
    if by_type["array"] or by_type["object"]:
        if any(by_type["array"] + by_type["object"]):
            return None
        if by_type["array"] == [[]]:
            found.append({"type": "array", "minItems": 1})
        if by_type["object"] == [{}]:
            found.append({"type": "object", "minProperties": 1})
    return found


def _other_numbers(numbers: list[Any]) -> list[Any]:
    edges = sorted(set(numbers))
    found: list[Any] = [{"type": "number", "exclusiveMaximum": edges[0]}]
    for low, high in itertools.pairwise(edges):
        found.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return [*found, {"type": "number", "exclusiveMinimum": edges[-1]}]


def _opposite(keyword: str, value: Any, schema: dict[str, Any]) -> list[Any] | None:
    name, opposite, change = _OPPOSITES[keyword]
    if isinstance(value, bool):  # draft 4: a flag at minimum or maximum
        return []
    if not isinstance(value, int | float):
        return None
    if change == -1 and value <= 0:
        return []
    flag = f"exclusive{keyword[0].upper()}{keyword[1:]}"
    if schema.get(flag) is True:
        opposite = {"minimum": "maximum", "maximum": "minimum"}[keyword]
    return [{"type": name, opposite: value + change}]


def _restricts(keyword: str) -> bool:
    return (
        of_type(keyword) is not None
        or keyword.startswith(("$dynamic", "$recursive"))
        or keyword.startswith("unevaluated")
    )


def _property(schema: dict[str, Any], key: str) -> object:
    """The schema of a property as far as `properties` and `additionalProperties` say."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return properties[key]
    if schema.get("patternProperties"):
        return True
    return schema.get("additionalProperties", True)


def _listed(schema: Mapping[str, Any]) -> list[list[Any]]:
    found = [[schema["const"]]] if "const" in schema else []
    values = schema.get("enum")
    return [*found, values] if isinstance(values, list) else found


def _type_of_value(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _key(value: object) -> str:
    """A text that is equal for equal JSON values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def has_value(values: list[Any], value: object) -> bool:
    """Whether a JSON value is in a list."""
    return _key(value) in map(_key, values)


def _overlap(values: list[Any], others: list[Any]) -> bool:
    return not set(map(_key, values)).isdisjoint(map(_key, others))


def unique_values(values: list[Any]) -> list[Any]:
    """The values without repetitions."""
    return list({_key(value): value for value in values}.values())


def _schemas(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
