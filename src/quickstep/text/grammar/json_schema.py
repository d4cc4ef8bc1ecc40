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
import json
import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.errors import RequestError
from quickstep.text.grammar.patterns import PatternWriter
from quickstep.text.grammar.schema_logic import (
    ALL_TYPES,
    ANNOTATIONS,
    HAS_SCHEMAS,
    HAS_SCHEMAS_BY_NAME,
    SchemaLogic,
    SchemaTooLarge,
    has_value,
    of_type,
    other_texts,
    references_in,
    resolved,
    types_of,
    unique_values,
)
from quickstep.text.grammar.schema_numbers import with_exact_numbers

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
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_CONDITION = ("if", "then", "else")
_APPLICATORS = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "not"),
        *("$dynamicRef", "$recursiveRef", *_DEPENDENCIES),
    )
)
_NEUTRAL = frozenset(("deprecated", "contentSchema", "$vocabulary", "$dynamicAnchor"))
_OLD_DRAFT = re.compile(r"http://json-schema\.org/draft-0[3-7]/schema")
_DRAFT_3 = re.compile(r"https?://json-schema\.org/draft-03/(?:hyper-)?schema")
_OF_DRAFT_3 = ("extends", "disallow", "divisibleBy")
# A draft by any of the spellings that schemas have: with https, with a hyphen, without the `#`.
_DRAFT = re.compile(r"https?://json-schema[.-]org/(draft-0[4-7]|draft/20[0-9-]+)/(?:hyper-)?schema")
_ANY_DRAFT = re.compile(r"https?://json-schema\.org/(?:hyper-)?schema#?")  # that is, the latest one
_CALENDAR = (
    r"^(?:[0-9]{4}-(?:0[13-9]|1[0-2])-|[0-9]{4}-02-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|[0-9]{2}(?:0[48]|[2468][048]|[13579][26])-02-29|(?:[02468][048]|[13579][26])00-02-29)"
)
# of a name that may be in a URI as it is
_DEFINITION = re.compile(r"#/(?:\$defs|definitions)/[A-Za-z0-9._~!$&'()*+,;=:@%-]+")
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
# Keywords that mean the same whatever other keywords are in the same schema.
_APART = frozenset(
    (
        *("type", "enum", "const", "required", "minProperties", "maxProperties"),
        *("minItems", "maxItems", "minLength", "maxLength", "pattern"),
    )
)
_REPEATED = re.compile(r"\^(\[(?:[^\]\\]|\\.)*\]|\\[dws])([+*])\$")
_MAX_DERIVED = 64  # targets of references in circles with more that must hold
_MAX_OVERLAPPING = 4  # patterns of properties of which each choice is written out
_MAX_OPTIONAL = 64  # properties one of which is required


class RewrittenSchema(msgspec.Struct, frozen=True):
    """A schema for llguidance. `loosened` names the keywords that it enforces less strictly."""

    schema: dict[str, Any]
    loosened: frozenset[str] = frozenset()


def for_llguidance(
    schema: dict[str, Any], one_of_as_any_of: bool = False, merges_references: bool = False
) -> RewrittenSchema:
    """The schema in llguidance's keywords. Recursive: the caller bounds the depth.

    With `one_of_as_any_of`, also a `oneOf` is loosened that could be written out. With
    `merges_references`, references in a circle may have keywords next to them.

    Raises:
        RequestError: A number cannot be enforced exactly, or the schema becomes too large.
    """
    try:
        return _Rewriting(schema, one_of_as_any_of, merges_references).rewritten()
    except SchemaTooLarge:
        if one_of_as_any_of:
            raise
    return _Rewriting(schema, True, merges_references).rewritten()


class _Case(msgspec.Struct, frozen=True):
    """An `if` that asks for the value of one property.

    Attributes:
        name: Of the property.
        values: Those that fulfil the condition.
        is_required: The condition needs the property; otherwise it holds without it.
        is_object: The condition needs an object; otherwise it holds for all other values.
        then: What has to hold if the condition holds.
        otherwise: What has to hold if not.
    """

    name: str
    values: list[Any]
    is_required: bool
    is_object: bool
    then: Any
    otherwise: Any


class _Rewriting:
    """One pass over a schema, from the root to the leaves."""

    def __init__(
        self, root: dict[str, Any], one_of_as_any_of: bool, merges_references: bool
    ) -> None:
        root = with_known_draft(root)
        self._logic = SchemaLogic(root)
        self._one_of_as_any_of = one_of_as_any_of
        self._merges_references = merges_references
        self._root = root
        # up to draft 7 what is next to a reference is ignored
        self._ref_is_alone = _OLD_DRAFT.match(str(root.get("$schema"))) is not None
        self._is_draft_3 = _DRAFT_3.match(str(root.get("$schema"))) is not None
        self._loosened: set[str] = set()
        self._moved: dict[str, str] = {}  # the definitions of references to other places
        # those of a reference's target with more that must hold, by their text, and by name
        self._derived: dict[str, str] = {}
        self._targets: dict[str, dict[str, Any]] = {}
        self._circles: dict[str, bool] = {}
        names = (root.get("$id"), root.get("id"))
        self._own_names = {name.rstrip("#") for name in names if isinstance(name, str)}

    def rewritten(self) -> RewrittenSchema:
        """The complete schema."""
        schema = self.of(self._root)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._moved) + len(self._targets):
            for reference, name in list(self._moved.items()):
                if name not in definitions:
                    definitions[name] = self.of(self._logic.resolved(reference))
            for name, target in list(self._targets.items()):
                if name not in definitions:
                    definitions[name] = self.of(target)
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
        schema = self._here(schema)
        if self._merges_references:
            schema = self._merged(schema)
        for keyword, value in schema.items():
            if keyword in _DATA:
                found[keyword] = value
            elif keyword == "$ref" and isinstance(value, str):
                found[keyword] = self._reference(value)
            elif keyword in HAS_SCHEMAS_BY_NAME:
                found[keyword] = {name: self.of(inner) for name, inner in value.items()}
            elif keyword in HAS_SCHEMAS:
                found[keyword] = self.of(value)
            else:
                found[keyword] = value
        return found

    def _merged(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What must hold next to a reference in a circle becomes part of its target, under another
        name: llguidance cannot intersect such a target while it compiles it.
        """
        notes = {key: schema[key] for key in schema if key in ANNOTATIONS or key == "x-guidance"}
        rest = _without(schema, *notes)
        reference = rest.get("$ref")
        if isinstance(reference, str):
            also = _without(rest, "$ref")
            return self._target_with(reference, also, notes) or schema if also else schema
        listed = rest.get("allOf")
        for item in listed if isinstance(listed, list) else ():
            if isinstance(item, dict) and isinstance(item.get("$ref"), str):
                left = [other for other in rest["allOf"] if other is not item]
                beside = {} if self._ref_is_alone else _without(item, "$ref", *ANNOTATIONS)
                left += [beside] if beside else []
                also = {**_without(rest, "allOf"), **({"allOf": left} if left else {})}
                found = self._target_with(item["$ref"], also, notes) if also else None
                if found is not None:
                    return found
        branches, also = rest.get("anyOf"), _without(rest, "anyOf")
        if not isinstance(branches, list) or not also:
            return schema
        placed = []
        for branch in branches:
            is_reference = isinstance(branch, dict) and isinstance(branch.get("$ref"), str)
            merged = self._target_with(branch["$ref"], also, {}) if is_reference else None
            placed.append(merged or {"allOf": [branch, also]})
        return {**notes, "anyOf": placed}

    def _target_with(
        self, reference: str, also: dict[str, Any], notes: dict[str, Any]
    ) -> dict[str, Any] | None:
        """A reference to the target of another one with more that must hold. None if the target is
        in no circle, or if there are too many of them.
        """
        target = self._logic.resolved(reference)
        if not isinstance(target, dict) or not self._is_in_circle(reference):
            return None
        target = _without(target, *(ANNOTATIONS - {"then", "else", "additionalItems"}))
        is_apart = also.keys() <= _APART and not also.keys() & target.keys()
        if is_apart:
            merged = {**target, **also}
        else:
            held = target.get("allOf", [])
            merged = {**target, "allOf": [*held, *([] if also in held else [also])]}
        text = json.dumps(merged, sort_keys=True)
        name = self._derived.get(text)
        if name is None:
            if len(self._derived) >= _MAX_DERIVED:
                return None
            name = self._derived[text] = f"quickstep-merged-{len(self._derived)}"
            self._targets[name] = merged
        return {**notes, "$ref": f"#/$defs/{name}"}

    def _is_in_circle(self, reference: str) -> bool:
        """Whether a reference's target leads to the reference again."""
        known = self._circles.get(reference)
        if known is None:
            pending, followed = [reference], set[str]()
            while pending and reference not in followed:
                inner = references_in(self._logic.resolved(pending.pop())) - followed
                followed |= inner
                pending += inner
            known = self._circles[reference] = reference in followed
        return known

    def _reference(self, reference: str) -> str:
        """A reference, also to a place that is rewritten: such a target becomes a definition."""
        if reference.rstrip("#") in self._own_names:
            return "#"
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
        if self._is_draft_3:
            schema = _from_draft_3(schema)
        schema = with_known_draft(schema)
        schema = _without_neutral(schema)
        schema = _with_calendar(schema)
        schema = with_exact_numbers(schema)
        schema = _without_unevaluated(schema)
        schema = _without_catch_all(schema)
        schema = _without_dependencies(schema)
        schema = self._without_cases(schema)
        schema = self._without_condition(schema)
        schema = self._without_not(schema)
        schema = self._without_property_names(schema)
        schema = self._without_contains(schema)
        schema = self._without_unique_items(schema)
        schema = _without_property_counts(schema)
        schema = _with_rust_patterns(schema, self._logic.patterns)
        return self._without_one_of(schema)

    def _without_cases(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Several `if`s that ask for the value of the same property: a case for each of its values,
        instead of two ways for each of them, whose combinations are too many.
        """
        listed = schema.get("allOf")
        items = [*listed] if isinstance(listed, list) else []
        own = {keyword: schema[keyword] for keyword in _CONDITION if keyword in schema}
        by_name: dict[str, list[tuple[int, _Case]]] = {}
        for place, item in enumerate([*items, own]):
            case = self._case(item)
            if case is not None:
                by_name.setdefault(case.name, []).append((place, case))
        taken: set[int] = set()
        found: list[dict[str, Any]] = []
        for name, placed in by_name.items():
            branches = self._branches(name, [case for _, case in placed], schema)
            if len(placed) > 1 and branches is not None:
                taken |= {place for place, _ in placed}
                found.append({"anyOf": branches})
        if not found:
            return schema
        rest = _without(schema, "allOf", *(_CONDITION if len(items) in taken else ()))
        left = [item for place, item in enumerate(items) if place not in taken]
        return {**rest, "allOf": [*left, *found]}

    def _case(self, item: Any) -> _Case | None:
        """What an `if` says of the values of one property; None if it says something else."""
        if not isinstance(item, dict) or not set(item) - ANNOTATIONS <= {"if"}:
            return None
        condition = self._logic.target(item.get("if"))
        if not isinstance(condition, dict) or condition.get("type", "object") != "object":
            return None
        properties, required = condition.get("properties"), condition.get("required", [])
        if set(condition) - ANNOTATIONS - {"type", "required"} != {"properties"}:
            return None
        if not isinstance(properties, dict) or len(properties) != 1:
            return None
        ((name, inner),) = properties.items()
        values = self._logic.finite_values(inner, _MAX_VALUES)
        if values is None or required not in ([], [name]):
            return None
        is_object = "type" in condition
        then, otherwise = item.get("then", True), item.get("else", True)
        return _Case(name, values, bool(required), is_object, then, otherwise)

    def _branches(
        self, name: str, cases: list[_Case], schema: dict[str, Any]
    ) -> list[dict[str, Any]] | None:
        """A branch for the values that fulfil the same conditions, one for other values, one for
        objects without the property, and one for what is no object. None if that is not known.
        """
        by_holding: dict[tuple[bool, ...], list[Any]] = {}
        values = unique_values([value for case in cases for value in case.values])
        for value in values:
            holding = tuple(has_value(case.values, value) for case in cases)
            by_holding.setdefault(holding, []).append(value)
        present = {"type": "object", "required": [name]}
        branches = [
            ({**present, "properties": {name: {"enum": chosen}}}, holding)
            for holding, chosen in by_holding.items()
        ]
        declared = schema.get("properties")
        own = declared.get(name, True) if isinstance(declared, dict) else True
        possible = self._logic.finite_values(own, _MAX_VALUES)
        if possible is None or not all(has_value(values, value) for value in possible):
            others = self._logic.negated({"enum": values})
            if others is None:
                return None
            holding = (False,) * len(cases)
            branches.append(({**present, "properties": {name: others}}, holding))
        required = schema.get("required")
        if not isinstance(required, list) or name not in required:
            holding = tuple(not case.is_required for case in cases)
            branches.append(({"type": "object", "properties": {name: False}}, holding))
        if schema.get("type") != "object":
            no_object = [other for other in ALL_TYPES if other != "object"]
            holding = tuple(not case.is_object for case in cases)
            branches.append(({"type": no_object}, holding))
        found = []
        for branch, holding in branches:
            demands = [
                case.then if holds else case.otherwise
                for case, holds in zip(cases, holding, strict=True)
            ]
            demands = [demand for demand in demands if not _is_everything(demand)]
            if False not in demands:
                found.append({**branch, "allOf": demands} if demands else branch)
        return found

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
        if found is None:
            return schema
        pattern, fits = found
        of_names = schema.get("patternProperties") or {}
        writer, matching = self._logic.patterns, dict[str, Any]()
        for key, inner in of_names.items():
            both = writer.common([key, pattern], [])
            if both is None or both in matching:
                return schema
            if both:
                matching[both] = inner
        left = writer.common([pattern], [*of_names]) if of_names else pattern
        if left is None:
            return schema
        declared = {
            name: inner if fits(name) else False
            for name, inner in schema.get("properties", {}).items()
        }
        additional = schema.get("additionalProperties", True)
        if declared:
            rest["properties"] = declared
        if additional is not False and left:
            matching[left] = additional
        if matching:
            rest["patternProperties"] = matching
        return {**rest, "additionalProperties": False}

    def _pattern_of(self, names: dict[str, Any]) -> tuple[str, Callable[[str], bool]] | None:
        """A pattern of the texts that a schema of names allows, and a test of one; None if it is
        not one pattern.
        """
        others = (_APPLICATORS | _DATA) & names.keys() - ANNOTATIONS
        keywords = {keyword for keyword in names if of_type(keyword) == "string"}
        if "format" in names and names["format"] not in KNOWN_FORMATS:
            keywords.discard("format")
        if keywords and keywords <= {"pattern", "minLength", "maxLength"} and not others:
            low, high = names.get("minLength", 0), names.get("maxLength", "")
            of_length = f"^[\\s\\S]{{{low},{high}}}$"
            if "pattern" not in keywords:
                return _searched(of_length)
            found = _searched(names["pattern"])
            if found is None or keywords == {"pattern"}:
                return found
            repeated = _REPEATED.fullmatch(found[0])
            if repeated is not None:  # a text of such characters, of that length
                least = max(low, int(repeated[2] == "+"))
                return _searched(f"^{repeated[1]}{{{least},{high}}}$")
            both, fits = self._logic.patterns.common([found[0], of_length], []), found[1]
            is_short = re.compile(of_length).search
            return (both, lambda name: fits(name) and bool(is_short(name))) if both else None
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


def with_known_draft(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its draft named as that draft says."""
    named = schema.get("$schema")
    if not isinstance(named, str):
        return schema
    if _ANY_DRAFT.fullmatch(named):
        return _without(schema, "$schema")
    found = _DRAFT.match(named)
    if found is None:
        return schema
    draft = found[1].replace("-05", "-04")  # which is the same but for its text
    is_old = draft.startswith("draft-0")
    known = (
        f"http://json-schema.org/{draft}/schema#"
        if is_old
        else f"https://json-schema.org/{draft}/schema"
    )
    return {**schema, "$schema": known}


def _from_draft_3(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the names of required properties, which said so themselves. Raises
    RequestError for what has no keyword today.
    """
    for keyword in _OF_DRAFT_3:
        if keyword in schema:
            raise RequestError(
                f"grammar has {keyword} of JSON Schema's draft 3, which is not supported; write it "
                "as a later draft does",
                param="grammar",
            )
    found = _without(schema, "required") if isinstance(schema.get("required"), bool) else schema
    properties = schema.get("properties")
    if not isinstance(properties, dict) or isinstance(found.get("required"), list):
        return found
    names = [
        name
        for name, inner in properties.items()
        if isinstance(inner, dict) and inner.get("required") is True
    ]
    return {**found, "required": names} if names else found


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
            case "propertyNames" if _allows_all_texts(value):
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


def _with_rust_patterns(schema: dict[str, Any], writer: PatternWriter) -> dict[str, Any]:
    """Patterns in the syntax that llguidance reads, and those of properties without overlaps."""
    pattern, of_names = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str):
        written = writer.rewritten(pattern)
        schema = {**schema, "pattern": written[-1]} if written else _without(schema, "pattern")
        if len(written) > 1:
            schema = _restricted(schema, *({"pattern": other} for other in written[:-1]))
        elif not written:
            no_text = [name for name in ALL_TYPES if name != "string"]
            schema = _restricted(schema, {"type": no_text})
    if isinstance(of_names, dict) and of_names:
        schema = {**schema, "patternProperties": _disjoint(of_names, writer)}
    return schema


def _disjoint(of_names: dict[str, Any], writer: PatternWriter) -> dict[str, Any]:
    """`patternProperties` in which a name matches one pattern at most, where that is possible: for
    each choice of the patterns one that a name matches if it matches all of these and no other one.
    """
    patterns = [*of_names]
    plain = {_one_pattern(pattern, writer): inner for pattern, inner in of_names.items()}
    if len(plain) < len(patterns) or len(patterns) > _MAX_OVERLAPPING:
        return plain if len(plain) == len(patterns) else of_names
    if not any(writer.common(pair, []) for pair in itertools.combinations(patterns, 2)):
        return plain
    found = {}
    for size in range(1, len(patterns) + 1):
        for chosen in itertools.combinations(patterns, size):
            others = [pattern for pattern in patterns if pattern not in chosen]
            common = writer.common(chosen, others)
            if common is None:
                return plain
            if common:
                inner = [of_names[pattern] for pattern in chosen]
                found[common] = inner[0] if size == 1 else {"allOf": inner}
    return found


def _one_pattern(pattern: str, writer: PatternWriter) -> str:
    """The pattern of a name as llguidance reads it, which is one and not several."""
    written = writer.rewritten(pattern)
    return written[0] if len(written) == 1 else writer.common([pattern], []) or pattern


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
    if not all(map(_is_demand, demands)):
        return schema  # which is then refused
    rest = _without(schema, *_DEPENDENCIES)
    if not demands:
        return rest
    # those beyond the limit go together: none of the properties, or all that they demand
    groups = [[demand] for demand in demands[: _MAX_DEPENDENCIES - 1]]
    groups += [demands[_MAX_DEPENDENCIES - 1 :]] if len(demands) >= _MAX_DEPENDENCIES else []
    choices = []
    for group in groups:
        needs = [{"required": d} if isinstance(d, list) else d for _, d in group]
        absent = {"properties": {name: False for name, _ in group}}
        choices.append({"anyOf": [absent, needs[0] if len(needs) == 1 else {"allOf": needs}]})
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
    found, closed = dict(schema), _closed(schema)
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if low <= len(names):
        found.pop("minProperties", None)
        low = 0
    if high is not None and high >= len(set(names) | set(properties)) and closed is not None:
        # room for the declared ones only
        found = {**_without(found, "patternProperties", "maxProperties"), **closed}
        high = None
    has_room_for_one = high == len(names) + 1 and set(names) <= set(properties)
    if high is not None and has_room_for_one and closed is not None:
        found = {**_without(found, "patternProperties"), **closed}
    needs_one = low == len(names) + 1 and high is None and not is_closed
    if needs_one and len(optional) <= _MAX_OPTIONAL:
        del found["minProperties"]
        choice = {"anyOf": [{"required": [name]} for name in optional]}
        return _restricted_values(found, "object", choice)
    return found


def _closed(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Keywords that allow the declared and the required properties only, each with all that the
    schema says of it; None if that is not known.
    """
    names = dict.fromkeys((*schema["properties"], *schema.get("required", ())))
    found = {name: _property(schema, name) for name in names}
    if None in found.values():
        return None
    return {"properties": found, "additionalProperties": False}


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
    if _is_everything(schema):
        return True
    if not isinstance(schema, dict) or "string" not in types_of(schema):
        return False
    known = {"type"} if schema.get("format") in KNOWN_FORMATS else {"type", "format"}
    return set(schema) - ANNOTATIONS <= known


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
