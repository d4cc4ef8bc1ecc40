"""A client's JSON schema in the keywords that llguidance knows, with the same meaning.

llguidance enforces what it knows and refuses the rest. A keyword that restricts nothing where it is
goes, as does a `format` that an implementation does not know: JSON Schema says that it is an
annotation. What llguidance lacks is written out with keywords that it has:

    not, if                  the schema of what a condition refuses (`schema_logic`)
    oneOf                    anyOf, each branch without what another one allows
    dependencies             the property is absent, or the demand holds
    contains                 an array with the item among the first ones
    uniqueItems              the arrangements of the few values
    propertyNames            properties, or a pattern of names
    minProperties            one of the optional properties is required

Some of these allow less than the schema (a matching item beyond the first ones, ...), none allows
more. What cannot be written out stays, and llguidance refuses it by its name, with two exceptions
that a client is told of: `loosened`.

Called by `grammar_source`, which bounds the schema in size and depth first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.engine.grammar.schema_logic import (
    ALL_TYPES,
    SchemaLogic,
    SchemaTooLarge,
    of_type,
    other_texts,
    resolved,
    types_of,
)
from quickstep.engine.grammar.schema_numbers import with_exact_numbers

__all__ = [
    "ESCAPES_BY_NUMBER",
    "KNOWN_FORMATS",
    "ONE_LINE",
    "RewrittenSchema",
    "for_llguidance",
    "has_escapes_by_number",
    "reference_depth",
]

# llguidance's options for JSON on one line, with a space after each comma and colon. `json.dumps`
# and chat templates write it so, hence models have seen it; without the spaces a small model loses
# track. Fixed spacing also keeps a model from writing white space up to the limit. Without escapes
# by number a name has one spelling, so no additional property can repeat a declared one.
ONE_LINE: Mapping[str, object] = MappingProxyType(
    {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "json_allowed_escapes": 'nrbtf\\"',
    }
)

# For schemas whose texts have characters that are written by number only.
ESCAPES_BY_NUMBER: Mapping[str, object] = MappingProxyType({"json_allowed_escapes": 'nrbtf\\"u'})

# The formats of llguidance 1.x; a test compares them with the installed one.
KNOWN_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration"),
        *("email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"),
    )
)
# The values of these keywords are data or names, not schemas.
_DATA = frozenset(("const", "enum", "default", "example", "examples", "required"))
# The values of these keywords map names to schemas.
_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_CONDITION = ("if", "then", "else")
_APPLICATORS = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "not"),
        *("$dynamicRef", "$recursiveRef", *_DEPENDENCIES),
    )
)
_NEUTRAL = frozenset(("deprecated", "contentSchema", "$vocabulary", "$dynamicAnchor"))
_OLD_DRAFT = re.compile(r"http://json-schema\.org/draft-0[4-7]/schema")
_CALENDAR = (
    r"^(?:[0-9]{4}-(?:0[13-9]|1[0-2])-|[0-9]{4}-02-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|[0-9]{2}(?:0[48]|[2468][048]|[13579][26])-02-29|(?:[02468][048]|[13579][26])00-02-29)"
)
_DEFINITION = re.compile(r"#/(?:\$defs|definitions)/[^/]+")
# Each doubles the ways through an object.
_MAX_DEPENDENCIES = 4
_MAX_BRANCHES = 16  # of a oneOf whose branches may overlap
_MAX_COMPARED = 64  # branches of which any two are compared
_MAX_PLACES = 8  # of the item that `contains` demands
_MAX_FACTORIAL = 4  # values whose arrangements are all written out
_MAX_SUBSETS = 8  # values whose subsets are written out, in the order of the schema
_MAX_VALUES = 64  # values of which any two are written out
_MAX_NAMES = 1024  # of properties that are listed
_CATCH_ALL = frozenset(("", ".*", "^.*$", "^.*", ".*$", "^"))
_MAX_OPTIONAL = 64  # properties one of which is required


class RewrittenSchema(msgspec.Struct, frozen=True):
    """A schema for llguidance. `loosened` names the keywords that it enforces less strictly."""

    schema: dict[str, Any]
    loosened: frozenset[str] = frozenset()


def for_llguidance(schema: dict[str, Any], one_of_as_any_of: bool = False) -> RewrittenSchema:
    """The schema in llguidance's keywords. Recursive: the caller bounds the depth.

    With `one_of_as_any_of`, also a `oneOf` is loosened that could be written out.

    Raises:
        RequestError: A number cannot be enforced exactly, or the schema becomes too large.
    """
    try:
        return _Rewriting(schema, one_of_as_any_of).rewritten()
    except SchemaTooLarge:
        if one_of_as_any_of:
            raise
    return _Rewriting(schema, True).rewritten()


class _Rewriting:
    """One pass over a schema, from the root to the leaves."""

    def __init__(self, root: dict[str, Any], one_of_as_any_of: bool) -> None:
        self._logic = SchemaLogic(root)
        self._one_of_as_any_of = one_of_as_any_of
        self._root = root
        # up to draft 7 what is next to a reference is ignored
        self._ref_is_alone = _OLD_DRAFT.match(str(root.get("$schema"))) is not None
        self._loosened: set[str] = set()
        self._moved: dict[str, str] = {}  # the definitions of references to other places

    def rewritten(self) -> RewrittenSchema:
        """The complete schema."""
        schema = self.of(self._root)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._moved):
            for reference, name in list(self._moved.items()):
                if name not in definitions:
                    definitions[name] = self.of(self._logic.resolved(reference))
        if definitions:
            schema = {**schema, "$defs": {**schema.get("$defs", {}), **definitions}}
        return RewrittenSchema(schema, frozenset(self._loosened))

    def of(self, schema: Any) -> Any:
        """A schema at any place, rewritten with all that is below."""
        self._logic.count()
        if isinstance(schema, list):
            return [self.of(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        found: dict[str, Any] = {}
        for keyword, value in self._here(schema).items():
            if keyword in _DATA:
                found[keyword] = value
            elif keyword == "$ref" and isinstance(value, str):
                found[keyword] = self._reference(value)
            elif keyword in _BY_NAME and isinstance(value, dict):
                found[keyword] = {name: self.of(inner) for name, inner in value.items()}
            else:
                found[keyword] = self.of(value)
        return found

    def _reference(self, reference: str) -> str:
        """A reference, also to a place that is rewritten: such a target becomes a definition."""
        if reference == "#" or _DEFINITION.fullmatch(reference):
            return reference
        if not isinstance(self._logic.resolved(reference), dict):
            return reference
        if reference.startswith("#") or "/" in reference.partition("#")[2]:
            name = self._moved.setdefault(reference, f"quickstep-{len(self._moved)}")
            return f"#/$defs/{name}"
        return reference

    def _here(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The keywords of one schema, without a look at the schemas below."""
        if self._ref_is_alone and "$ref" in schema:
            kept = ("$ref", "$defs", "definitions", "$schema", "$id", "x-guidance")
            return {key: value for key, value in schema.items() if key in kept}
        schema = _without_neutral(schema)
        schema = _with_calendar(schema)
        schema = with_exact_numbers(schema)
        schema = _without_unevaluated(schema)
        schema = _without_catch_all(schema)
        schema = _without_dependencies(schema)
        schema = self._without_condition(schema)
        schema = self._without_not(schema)
        schema = self._without_property_names(schema)
        schema = self._without_contains(schema)
        schema = self._without_unique_items(schema)
        schema = _without_property_counts(schema)
        return self._without_one_of(schema)

    def _without_condition(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`if`: it holds and so does `then`, or it does not and `else` holds."""
        if "if" not in schema:
            return schema
        condition = schema["if"]
        rest = _without(schema, *_CONDITION)
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if _is_everything(then) and _is_everything(otherwise):
            return rest
        negated = self._logic.negated(condition)
        if negated is None:
            if _is_everything(then):
                return _restricted(rest, {"anyOf": [condition, otherwise]})
            return schema  # which is then refused
        choices = [_both(condition, then), _both(negated, otherwise)]
        return _restricted(rest, {"anyOf": [choice for choice in choices if choice is not False]})

    def _without_not(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`not`: the schema of what it does not allow, where that can be expressed."""
        if "not" not in schema:
            return schema
        rest = _without(schema, "not")
        negated = self._logic.negated(schema["not"])
        if negated is None:
            return schema
        return rest if _is_everything(negated) else _restricted(rest, negated)

    def _without_one_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`oneOf`: `anyOf`, each branch without what the others allow."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return schema
        exclusive = self._exclusive(branches)
        if exclusive is None:
            self._loosened.add("oneOf")
            exclusive = branches
        if "anyOf" in schema:
            return _restricted(_without(schema, "oneOf"), {"anyOf": exclusive})
        # in its place: the order of keywords is that of properties
        return {
            "anyOf" if keyword == "oneOf" else keyword: exclusive if keyword == "oneOf" else value
            for keyword, value in schema.items()
        }

    def _exclusive(self, branches: list[Any]) -> list[Any] | None:
        """The branches without their overlaps; None if these cannot be expressed."""
        if self._logic.have_own_values(branches):
            return branches
        if len(branches) > _MAX_COMPARED:
            return None
        found = []
        for place, branch in enumerate(branches):
            others = [
                other
                for at, other in enumerate(branches)
                if at != place and not self._logic.are_disjoint(branch, other)
            ]
            if others and (self._one_of_as_any_of or len(branches) > _MAX_BRANCHES):
                return None
            refused = [self._logic.refused_by(other, branch) for other in others]
            if None in refused:
                return None
            if False not in refused:  # another branch allows the same and more
                found.append({"allOf": [branch, *refused]} if refused else branch)
        return found or None

    def _without_property_names(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`propertyNames`: the declared properties and additional ones that fit it."""
        names = self._logic.target(schema.get("propertyNames"))
        if not isinstance(names, dict):
            return schema
        rest = _without(schema, "propertyNames", "patternProperties", "additionalProperties")
        values = self._logic.finite_values(names, _MAX_NAMES)
        if values is not None:
            allowed = [value for value in values if isinstance(value, str)]
            properties = schema.get("properties", {})
            kept = {name: _property(schema, name) for name in allowed}
            refused = {name: False for name in properties if name not in kept}
            if None in kept.values():
                return schema
            return {**rest, "properties": {**kept, **refused}, "additionalProperties": False}
        found = self._pattern_of(names)
        if found is None or schema.get("patternProperties"):
            return schema
        pattern, fits = found
        declared = {
            name: inner if fits(name) else False
            for name, inner in schema.get("properties", {}).items()
        }
        additional = schema.get("additionalProperties", True)
        if declared:
            rest["properties"] = declared
        if additional is not False:
            rest["patternProperties"] = {pattern: additional}
        return {**rest, "additionalProperties": False}

    def _pattern_of(self, names: dict[str, Any]) -> tuple[str, Callable[[str], bool]] | None:
        """A pattern of the texts that a schema of names allows, and a test of one; None if it is
        not one pattern.
        """
        others = {keyword for keyword in names if keyword in _APPLICATORS or keyword in _DATA}
        keywords = {keyword for keyword in names if of_type(keyword) == "string"}
        if "format" in names and names["format"] not in KNOWN_FORMATS:
            keywords.discard("format")
        if keywords == {"pattern"} and not others:
            return _searched(names["pattern"])
        if keywords and keywords <= {"minLength", "maxLength"} and not others:
            low, high = names.get("minLength", 0), names.get("maxLength", "")
            return _searched(f"^[\\s\\S]{{{low},{high}}}$")
        values = None
        if not keywords and others == {"not"}:
            values = self._logic.finite_values(names["not"], _MAX_NAMES)
        if values is None:
            return None
        refused = frozenset(value for value in values if isinstance(value, str))
        pattern = other_texts(refused)
        return None if pattern is None else (pattern, lambda name: name not in refused)

    def _without_contains(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`contains`: the demanded item is one of the first."""
        if "contains" not in schema:
            return schema
        wanted, low = schema["contains"], schema.get("minContains", 1)
        high, max_items = schema.get("maxContains"), schema.get("maxItems", _MAX_PLACES)
        if not isinstance(low, int) or not isinstance(max_items, int) or low > _MAX_PLACES:
            return schema
        rest = _without(schema, "contains", "minContains", "maxContains")
        if isinstance(high, int) and high >= schema.get("maxItems", high + 1):
            high = None
        if high is None and _is_everything(wanted):
            return _restricted_values(rest, "array", _array([], {}, low))
        num_places = min(max_items, _MAX_PLACES)
        if high is None:
            starts = range(num_places) if low == 1 else [0]
            arrays = [_array([*[{}] * start, *[wanted] * low], {}, start + low) for start in starts]
        else:
            other = self._logic.negated(wanted)
            if other is None or not isinstance(high, int) or high > _MAX_PLACES:
                return schema
            arrays = [_array([wanted] * n, other, n) for n in range(low, high + 1)]
            if high == 1:
                arrays += [_array([*[other] * n, wanted], other, n + 1) for n in range(1, 8)]
        return _restricted_values(rest, "array", {"anyOf": arrays}) if arrays else schema

    def _without_unique_items(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`uniqueItems`: the arrangements of the few values that an item may have."""
        if schema.get("uniqueItems") is not True:
            return schema
        rest = _without(schema, "uniqueItems")
        if schema.get("maxItems", 2) in (0, 1):
            return rest
        values = None
        if not isinstance(schema.get("items"), list) and "prefixItems" not in schema:
            values = self._logic.finite_values(schema.get("items", True), _MAX_VALUES)
        if values is None:
            self._loosened.add("uniqueItems")
            return rest
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", len(values)), len(values))
        arrays = _arrangements(values, low, high)
        if not arrays:
            return schema
        return _restricted_values(_without(rest, "items"), "array", {"anyOf": arrays})


def _without_neutral(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without keywords that restrict nothing where they are."""
    found: dict[str, Any] = {}
    types = types_of({"type": schema["type"]} if "type" in schema else {})
    for keyword, value in schema.items():
        own = of_type(keyword)
        if own is not None and own not in types:
            continue  # for values of another type
        match keyword:
            case "format" if isinstance(value, str) and value not in KNOWN_FORMATS:
                continue
            case "uniqueItems" | "not" if value is False:
                continue
            case "unevaluatedProperties" | "unevaluatedItems" if _is_everything(value):
                continue
            case "propertyNames" if _is_everything(value) or _allows_all_texts(value):
                continue
            case "contains" if schema.get("minContains") == 0 and "maxContains" not in schema:
                continue
            case "minContains" if "contains" not in schema or value == 0:
                if "maxContains" not in schema or "contains" not in schema:
                    continue
            case "maxContains" if "contains" not in schema:
                continue
            case "then" | "else" if "if" not in schema:
                continue
            case "additionalItems" if "prefixItems" in schema:
                if not isinstance(schema.get("items"), list):
                    continue  # of an older draft, and llguidance would forget the other keyword
            case _ if keyword in _NEUTRAL:
                continue
        found[keyword] = value
    return found


def _with_calendar(schema: dict[str, Any]) -> dict[str, Any]:
    """A date is one of the calendar: llguidance allows 29 February in every year."""
    if schema.get("format") not in ("date", "date-time"):
        return schema
    return _restricted(schema, {"pattern": _CALENDAR})


def _without_unevaluated(schema: dict[str, Any]) -> dict[str, Any]:
    """`unevaluatedProperties` and `unevaluatedItems` mean additional ones where no other schema
    applies to the same value.
    """
    if not _APPLICATORS.isdisjoint(schema):
        return schema
    found = dict(schema)
    if "unevaluatedProperties" in found:
        rest = found.pop("unevaluatedProperties")
        found.setdefault("additionalProperties", rest)
    if "unevaluatedItems" in found and "contains" not in found:
        rest = found.pop("unevaluatedItems")
        found.setdefault(
            "additionalItems" if isinstance(found.get("items"), list) else "items", rest
        )
    return found


def _without_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    """A property that demands others, or a schema: either it is absent or the demand holds."""
    values = [schema[keyword] for keyword in _DEPENDENCIES if schema.get(keyword) is not None]
    if not values or not all(isinstance(value, dict) for value in values):
        return schema
    demands = [(name, demand) for value in values for name, demand in value.items()]
    if len(demands) > _MAX_DEPENDENCIES or not all(map(_is_demand, demands)):
        return schema  # which is then refused
    rest = _without(schema, *_DEPENDENCIES)
    if not demands:
        return rest
    choices = [
        {
            "anyOf": [
                {"properties": {name: False}},
                {"required": demand} if isinstance(demand, list) else demand,
            ]
        }
        for name, demand in demands
    ]
    return _restricted(rest, *choices)


def _is_demand(named: tuple[str, Any]) -> bool:
    _, demand = named
    if isinstance(demand, list):
        return all(isinstance(name, str) for name in demand)
    return isinstance(demand, dict | bool)


def _searched(pattern: object) -> tuple[str, Callable[[str], bool]] | None:
    if not isinstance(pattern, str):
        return None
    try:
        search = re.compile(pattern).search
    except re.error:
        return None
    return pattern, lambda name: search(name) is not None


def _property(schema: dict[str, Any], name: str) -> Any:
    """What a schema of an object says of a property; None if a pattern cannot be tried."""
    schemas = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    for pattern, inner in schema.get("patternProperties", {}).items():
        found = _searched(pattern)
        if found is None:
            return None
        if found[1](name):
            schemas.append(inner)
    if not schemas:
        return schema.get("additionalProperties", True)
    return schemas[0] if len(schemas) == 1 else {"allOf": schemas}


def _without_catch_all(schema: dict[str, Any]) -> dict[str, Any]:
    """A pattern of all names next to others, which llguidance wants disjoint."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict) or not _CATCH_ALL & patterns.keys():
        return schema
    everywhere = [patterns[pattern] for pattern in patterns if pattern in _CATCH_ALL]
    rest = everywhere[0] if len(everywhere) == 1 else {"allOf": everywhere}
    found = _without(schema, "patternProperties", "additionalProperties")
    others = {key: inner for key, inner in patterns.items() if key not in _CATCH_ALL}
    for keyword, inner in (("properties", schema.get("properties")), ("patternProperties", others)):
        if inner and isinstance(inner, dict):
            found[keyword] = {name: _both(value, rest) for name, value in inner.items()}
    return {**found, "additionalProperties": rest}


def _without_property_counts(schema: dict[str, Any]) -> dict[str, Any]:
    """`minProperties` and `maxProperties` next to optional properties, which llguidance refuses."""
    properties, names = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(names, list):
        return schema
    low, high = schema.get("minProperties", 0), schema.get("maxProperties")
    optional = [n for n, inner in properties.items() if n not in names and inner is not False]
    if not optional or not (isinstance(low, int) and (high is None or isinstance(high, int))):
        return schema
    found = dict(schema)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if low <= len(names):
        found.pop("minProperties", None)
        low = 0
    if high is not None and high >= len(set(names) | set(properties)):
        found = {**found, "additionalProperties": False}  # room for the declared ones only
        found.pop("patternProperties", None)
        del found["maxProperties"]
        high = None
    if high is not None and high == len(names) + 1 and set(names) <= set(properties):
        found = {**_without(found, "patternProperties"), "additionalProperties": False}
    needs_one = low == len(names) + 1 and high is None and not is_closed
    if needs_one and len(optional) <= _MAX_OPTIONAL:
        del found["minProperties"]
        choice = {"anyOf": [{"required": [name]} for name in optional]}
        return _restricted_values(found, "object", choice)
    return found


def _arrangements(values: list[Any], low: int, high: int) -> list[dict[str, Any]]:
    """Arrays of distinct values: all, or in the order of the schema, or of two at most."""
    if len(values) > _MAX_SUBSETS:
        return _pairs(values, low, high)
    chosen: Iterable[Iterable[tuple[Any, ...]]]
    if len(values) <= _MAX_FACTORIAL:
        chosen = (itertools.permutations(values, n) for n in range(low, high + 1))
    else:
        chosen = (itertools.combinations(values, n) for n in range(low, high + 1))
    return [
        _fixed_array([{"const": value} for value in array])
        for array in itertools.chain.from_iterable(chosen)
    ]


def _pairs(values: list[Any], low: int, high: int) -> list[dict[str, Any]]:
    arrays = [_fixed_array([])] if low == 0 else []
    if low <= 1 <= high:
        arrays.append(_fixed_array([{"enum": values}]))
    if low <= 2 <= high:
        for value in values:
            others = [other for other in values if other is not value]
            arrays.append(_fixed_array([{"const": value}, {"enum": others}]))
    return arrays


def _fixed_array(items: list[Any]) -> dict[str, Any]:
    return {**_array(items, False, len(items)), "maxItems": len(items)}


def _array(items: list[Any], rest: Any, min_items: int) -> dict[str, Any]:
    """An array whose first items have schemas of their own, in the form that all drafts read."""
    found: dict[str, Any] = {"type": "array", "minItems": min_items}
    if items:
        return {**found, "items": items, "additionalItems": rest}
    return {**found, "items": rest}


def _restricted(schema: dict[str, Any], *also: Any) -> dict[str, Any]:
    """The schema with more that must hold."""
    return {**schema, "allOf": [*schema.get("allOf", ()), *also]}


def _restricted_values(schema: dict[str, Any], name: str, also: Any) -> dict[str, Any]:
    """The schema with more that must hold for values of one type."""
    if schema.get("type") == name:
        return _restricted(schema, also)
    others = [other for other in ALL_TYPES if other != name]
    return _restricted(schema, {"anyOf": [{"type": others}, also]})


def _both(first: Any, second: Any) -> Any:
    if _is_everything(second):
        return first
    if _is_everything(first):
        return second
    return False if first is False or second is False else {"allOf": [first, second]}


def _without(schema: dict[str, Any], *keywords: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keywords}


def _is_everything(schema: object) -> bool:
    return schema is True or schema == {}


def _allows_all_texts(schema: object) -> bool:
    return isinstance(schema, dict) and set(schema) == {"type"} and "string" in types_of(schema)


def has_escapes_by_number(text: str) -> bool:
    """Whether the JSON text of a schema has control characters: only they are escaped so."""
    return "\\u00" in text


def reference_depth(schema: Mapping[str, Any], limit: int) -> int:
    """How deep llguidance goes into a schema by way of `$ref`s, each of which it follows once.

    Stops counting beyond `limit`.
    """
    deepest = 0
    followed: set[str] = set()
    pending: list[tuple[Any, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        deepest = max(deepest, depth)
        if deepest > limit:
            break
        if isinstance(value, list):
            pending += [(item, depth + 1) for item in reversed(value)]
        elif isinstance(value, dict):
            pending += [
                (inner, depth + 1)
                for keyword, inner in reversed(value.items())
                if keyword not in ("$defs", "definitions")
            ]
            target = value.get("$ref")
            if isinstance(target, str) and target not in followed:
                followed.add(target)
                pending.append((resolved(schema, target), depth + 1))
    return deepest
