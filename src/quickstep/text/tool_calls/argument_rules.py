"""Rules of a Lark grammar for arguments that are no JSON object: Python's keywords, a tag for each
parameter (`tagged`), and Gemma's braces (`gemma`). Called by `call_grammar`.

What the format's reader makes of whatever the rules allow fits the function's schema. A schema must
therefore be an object with known properties, whose order the arguments have. A keyword that these
rules cannot enforce is refused by its name; for a function that is not strict it has no effect.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quickstep.errors import RequestError
from quickstep.text.grammar.json_schema import ONE_LINE
from quickstep.text.grammar.patterns import PatternWriter
from quickstep.text.grammar.schema_logic import check_keywords, resolved
from quickstep.text.tool_calls.parameter_types import value_types

FORM: Mapping[str, object] = {**ONE_LINE, "lenient": False}
GEMMA_QUOTE = '<|"|>'
_ANY = "(.|\\n)*"
_FUNCTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TAG_NAME = re.compile(r"[^<>\n\"'\s](?:[^<>\n\"']*[^<>\n\"'\s])?")
_GEMMA_KEY = re.compile(r"[^:{}<>\"\n\s](?:[^:{}<>\"\n]*[^:{}<>\"\n\s])?")
_ANNOTATIONS = frozenset(
    {"$schema", "$id", "title", "description", "examples", "default", "deprecated", "$comment"}
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_OF_ARRAYS = frozenset({"type", "items", "minItems", "maxItems"})
_OF_STRINGS = frozenset({"type", "minLength", "maxLength", "pattern"})
_STRUCTURED = frozenset({"array", "object"})
_SCALARS = {
    "null": "/null/",
    "boolean": "/true|false/",
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": "/-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?/",
}
_TYPES = ("string", *_SCALARS, "array", "object")
_MAX_LEVELS = 16  # of references and lists of schemas
_MAX_VALUES = 1024  # schemas of one function
_MAX_DEPTH = 32


class ParameterSpelling(msgspec.Struct, frozen=True):
    """How a format of tags writes a parameter.

    Attributes:
        before_string, before_json: After the name, by what the value is: text or JSON.
        line_end: Before the end of the value, as layout.
        stop: Ends a value, wherever it is.
        other_stop: A pattern of what else the reader takes for the end of a value.
        after_stop: After the end of the value.
        says_strings: `before_string` and `before_json` tell the reader the type.
    """

    before_key: tuple[str, ...]
    before_string: tuple[str, ...]
    before_json: tuple[str, ...]
    line_end: str
    stop: str
    other_stop: str = ""
    after_stop: tuple[str, ...] = ()
    says_strings: bool = False


class ArgumentRules:
    """Writes the rules of one function's arguments, `{rule}_arguments` and what it needs.

    `texts` writes texts as parts of a rule, `special_id` is that of `call_grammar`. `loosened`
    names the keywords that have no effect.
    """

    def __init__(
        self,
        function: Mapping[str, Any],
        rule: str,
        texts: Callable[[Sequence[str]], list[str]],
        special_id: Callable[[str], int | None],
        form: str,
    ) -> None:
        self._name: str = function["name"]
        self._schema: Mapping[str, Any] | None = function["parameters"]
        self._root: Mapping[str, Any] = self._schema or {}
        self._is_strict = function.get("strict", True)
        self._rule = rule
        self._texts = texts
        self._special_id = special_id
        self._form = form
        self._values: dict[str, str] = {}
        self._depth = 0
        self._num_branches = 0
        self.lines: list[str] = []
        self.loosened: set[str] = set()
        try:
            check_keywords(self._schema)
        except RequestError:
            raise self._refused("has parameters that are no JSON schema") from None

    def keywords(self) -> list[str]:
        """Arguments in Python's syntax: `a=1, b="x"`; the values are JSON, which is read as well.

        Raises:
            RequestError: The format cannot spell the name or the schema; it names the key.
        """
        rule = self._rule
        if not _FUNCTION_NAME.fullmatch(self._name):
            raise self._refused("begins with no letter")
        if self._schema is None:
            return [
                f'{rule}_arguments: "" | {rule}_any (", " {rule}_any)*',
                f"{rule}_any: /[A-Za-z_][A-Za-z0-9_]*=/ {_json({})}",
            ]
        members: list[tuple[str, bool]] = []
        for key, value, is_required in self._properties(self._schema):
            if not key.isidentifier() or keyword.iskeyword(key):
                raise self._refused(f"has the parameter {key[:64]!r}, which is no Python name")
            members.append((f"{json.dumps(f'{key}=')} {self._json_of(value)}", is_required))
        self._write_members(f"{rule}_arguments", members, ", ")
        return self.lines

    def tags(self, spelling: ParameterSpelling) -> list[str]:
        """Arguments with a tag for each parameter.

        Raises:
            RequestError: The format cannot spell the schema; it names the key.
        """
        rule = self._rule
        if self._schema is None:
            name = f"{rule.upper()}_NAME"
            self.lines.append(f"{name}: /{_TAG_NAME.pattern.replace('?:', '')}/")
            before = " ".join([*self._texts(spelling.before_key), name])
            parameter = self._tagged(before, True, spelling)
            self.lines.append(f"{rule}_arguments: ({parameter})*")
            return self.lines
        parts: list[str] = []
        for key, value, is_required in self._properties(self._schema):
            if not _TAG_NAME.fullmatch(key):
                raise self._refused(f"has the parameter {key[:64]!r}, which is no name of a tag")
            before = " ".join(self._texts([*spelling.before_key, key]))
            here = f"{rule}_parameter_{len(parts)}"
            self.lines.append(f"{here}: {self._tagged(before, value, spelling)}")
            parts.append(here if is_required else f"{here}?")
        self.lines.append(f"{rule}_arguments: {' '.join(parts) or _EMPTY}")
        return self.lines

    def braces(self) -> list[str]:
        """Arguments in Gemma's syntax: `{key:value,...}`.

        Raises:
            RequestError: The format cannot spell the schema; it names the key.
        """
        schema = {"type": "object", **(self._root or {"additionalProperties": True})}
        self.lines.append(f"{self._rule}_arguments: {self._braced_object(schema)}")
        return self.lines

    def _properties(self, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
        """All properties (some may only be named in `required`), and whether each is required."""
        self._check_keys(schema, _OF_OBJECTS)
        listed, names = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(listed, Mapping) or not isinstance(names, list):
            raise self._refused("has parameters that are no JSON schema")
        required = {key for key in names if isinstance(key, str)}
        keys = [*listed, *sorted(required - set(listed))]
        return [(key, listed.get(key, True), key in required) for key in keys]

    def _check_keys(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        """Refuse a keyword that is not enforced."""
        for key in schema:
            if key not in known and key not in _ANNOTATIONS and key not in _DEFINITIONS:
                self._give_up(key, f"has {key[:64]} in its parameters")

    def _give_up(self, key: str, why: str) -> None:
        """A keyword cannot be enforced. Raises RequestError for a strict function."""
        if self._is_strict:
            raise self._refused(why)
        self.loosened.add(key[:64])

    def _refused(self, why: str) -> RequestError:
        return RequestError(
            f"tools has the function {self._name}, whose calls cannot be enforced in the format "
            f"{self._form}: it {why}; send it without strict, and tool_choice auto",
            param="tools",
        )

    def _json_of(self, schema: Any) -> str:
        """JSON of a value, as a part of a rule."""
        own = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
        defs = {key: self._root[key] for key in sorted(_DEFINITIONS) if key in self._root}
        return _json({**defs, **own})

    def _write_members(self, rule: str, members: list[tuple[str, bool]], comma: str) -> None:
        """Members in their order with commas between them, of which some may be missing.

        `{rule}_first_i` is the members from i on, `{rule}_rest_i` what may follow after a member,
        which begins with a comma.
        """
        first, rest, lines = f"{rule}_first", f"{rule}_rest", self.lines
        lines.append(f"{rule}: {first}_0")
        for place, (member, is_required) in enumerate(members):
            here, then = f"{rule}_member_{place}", f"{rest}_{place + 1}"
            lines.append(f"{here}: {member}")
            without = "" if is_required else f" | {first}_{place + 1}"
            lines.append(f"{first}_{place}: {here} {then}{without}")
            without = "" if is_required else f" | {then}"
            lines.append(f"{rest}_{place}: {json.dumps(comma)} {here} {then}{without}")
        lines += [f"{first}_{len(members)}: {_EMPTY}", f"{rest}_{len(members)}: {_EMPTY}"]

    def _tagged(self, before: str, schema: Any, spelling: ParameterSpelling) -> str:
        """A parameter as a part of a rule; `before` is what comes up to its name."""
        as_json = " ".join([before, *self._texts(spelling.before_json)])
        as_text = " ".join([before, *self._texts(spelling.before_string)])
        end = " ".join(self._texts([spelling.line_end, spelling.stop, *spelling.after_stop]))
        types = value_types(schema, self._root)
        if "string" not in types:
            return f"{as_json} {self._json_of(schema)} {end}"
        branches = self._branches(schema)
        structured = [b for b in branches if not _types_here(b).isdisjoint(_STRUCTURED)]
        if spelling.says_strings:
            others = [b for b in branches if "string" not in _types_here(b)]
            structured = others
        texts = [b for b in branches if b not in structured]
        ways = [f"{as_text} {self._text_and_end(texts, spelling, bool(structured))}"]
        if structured:
            ways.append(f"{as_json} {self._json_of({'anyOf': structured})} {end}")
        return ways[0] if len(ways) == 1 else f"({' | '.join(ways)})"

    def _text_and_end(
        self, branches: list[dict[str, Any]], spelling: ParameterSpelling, no_bracket: bool
    ) -> str:
        """A value that is text, up to the end of its tag. `no_bracket`: arrays and objects are
        written in another way, hence no text begins like one.
        """
        text = f"{self._rule.upper()}_TEXT_{len(self.lines)}"
        parts: list[str] = []
        for branch in branches:
            if "enum" in branch:
                parts += [
                    _literal(value) for value in branch["enum"] if self._fits(value, spelling)
                ]
                continue
            (kind,) = [branch["type"]]
            if kind != "string":
                if branch.keys() != {"type"}:
                    key = _first_key(branch)
                    self._give_up(key, f"has {key} for a value that may be text as well")
                parts.append(_SCALARS[kind])
                continue
            refused = [f"/{_ANY}{other}{_ANY}/" for other in self._stops(spelling)]
            if no_bracket:
                refused.append(f"/[ \\t\\r\\n]*[\\[{{]{_ANY}/")
            parts.append(" & ".join([self._text_of(branch), *(f"~{other}" for other in refused)]))
        if not parts:
            raise self._refused("has a parameter without any value")
        names = [f"{text}_{place}" for place in range(len(parts))]
        self.lines += [f"{name}: {part}" for name, part in zip(names, parts, strict=True)]
        self.lines.append(f"{text}: {' | '.join(names)}")
        after = self._texts(spelling.after_stop)
        if self._special_id(spelling.stop) is not None:
            return " ".join([text, *self._texts([spelling.stop]), *after])
        ended = text.lower()
        stop = pattern_of(spelling.line_end + spelling.stop)
        self.lines.append(f"{ended}[lazy]: {text} /{stop}/")
        return " ".join([ended, *after])

    def _stops(self, spelling: ParameterSpelling) -> list[str]:
        """Patterns that no text contains: the reader takes them for its end."""
        is_special = self._special_id(spelling.stop) is not None
        stops = [] if is_special else [pattern_of(spelling.stop)]
        return [*stops, spelling.other_stop] if spelling.other_stop else stops

    def _fits(self, value: object, spelling: ParameterSpelling) -> bool:
        """Whether a listed value can be written as text. Raises RequestError."""
        if not isinstance(value, str):
            return True
        is_spelled = spelling.stop not in value and not re.search(
            spelling.other_stop or "$^", value
        )
        if not is_spelled:
            self._give_up("enum", f"has {spelling.stop} in a listed value")
        return is_spelled

    def _text_of(self, schema: Mapping[str, Any]) -> str:
        """The texts of a schema of strings, as the right side of a terminal."""
        self._check_keys(schema, _OF_STRINGS)
        low, high = _count(schema, "minLength"), _count(schema, "maxLength")
        parts = [f"/{_ANY}/"]
        if low or high is not None:
            parts = [f"/(.|\\n){{{low or 0},{'' if high is None else high}}}/"]
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            written = PatternWriter().common([pattern], [])
            if written:
                body = written.removeprefix("^").removesuffix("$")
                parts.append(f"/{body.replace('/', _SLASH)}/")
            else:
                self._give_up("pattern", f"has the pattern {pattern[:64]!r}")
        return " & ".join(parts)

    def _branches(self, schema: Any, levels: int = _MAX_LEVELS) -> list[dict[str, Any]]:
        """The ways in which a value fits a schema: each has one type, or a list of values."""
        self._num_branches += 1
        if self._num_branches > _MAX_VALUES or not levels:
            raise self._refused(_TOO_LARGE)
        if not isinstance(schema, Mapping):
            return [{"type": name} for name in _TYPES if name != "integer"] if schema else []
        own = {k: v for k, v in schema.items() if k not in _ANNOTATIONS | _DEFINITIONS}
        if not own:
            return self._branches(True)
        values = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(values, list):
            types = value_types({"type": own.get("type", list(_TYPES))}, self._root)
            self._check_keys(own, frozenset({"enum", "const", "type"}))
            listed = [v for v in values if value_types({"const": v}, self._root) <= types]
            texts = [value for value in listed if isinstance(value, str)]
            others = [value for value in listed if not isinstance(value, str)]
            return [{"enum": group} for group in (texts, others) if group]
        applied = next((key for key in ("$ref", "allOf", "anyOf", "oneOf") if key in own), None)
        if applied is not None:
            for key in sorted(set(own) - {applied, "type"}):
                self._give_up(key, f"has {key[:64]} next to {applied}")
            return self._branches_of(own, applied, levels - 1)
        names = own.get("type", [name for name in _TYPES if name != "integer"])
        names = [names] if isinstance(names, str) else names
        if "type" not in own:
            key = _first_key(own)
            self._give_up(key, f"has {key} for values of any type")
        rest = {key: value for key, value in own.items() if key != "type"}
        return [{"type": name, **_keywords_of(name, rest)} for name in names if name in _TYPES]

    def _branches_of(self, own: Mapping[str, Any], key: str, levels: int) -> list[dict[str, Any]]:
        """The ways of a reference, or of a list of schemas."""
        value = own[key]
        if key == "$ref":
            target = resolved(self._root, value)
            if target is None:
                self._give_up(key, f"has the reference {value[:64]}, which is not in its schema")
            return self._branches(True if target is None else target, levels)
        if key == "allOf":
            if len(value) != 1:
                self._give_up("allOf", "has allOf")
            return self._branches(value[0] if value else True, levels)
        return [branch for schema in value for branch in self._branches(schema, levels)]

    def _braced(self, schema: Any) -> str:
        """The rule of a value in Gemma's syntax."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._values:
            if self._depth == _MAX_DEPTH or len(self._values) == _MAX_VALUES:
                raise self._refused(_TOO_LARGE)
            self._depth += 1
            name = self._values[key] = f"{self._rule}_value_{len(self._values)}"
            ways = [way for branch in self._branches(schema) for way in self._braced_ways(branch)]
            if not ways:
                raise self._refused("has a parameter without any value")
            self.lines.append(f"{name}: {' | '.join(ways)}")
            self._depth -= 1
        return self._values[key]

    def _braced_ways(self, branch: dict[str, Any]) -> list[str]:
        if "enum" in branch:
            return [" ".join(self._texts(braced_texts(value))) for value in branch["enum"]]
        kind = branch["type"]
        if kind == "string":
            return [self._braced_string(branch)]
        if kind == "array":
            return [self._braced_array(branch)]
        if kind == "object":
            return [self._braced_object(branch)]
        return [_json(branch)]

    def _braced_string(self, branch: dict[str, Any]) -> str:
        text, stop = self._text_of(branch), pattern_of(GEMMA_QUOTE)
        is_special = self._special_id(GEMMA_QUOTE) is not None
        name = f"{self._rule.upper()}_TEXT_{len(self.lines)}"
        quote = self._texts([GEMMA_QUOTE])[0]
        if is_special:
            self.lines.append(f"{name}: {text}")
            return f"{quote} {name} {quote}"
        self.lines.append(f"{name}: {text} & ~/{_ANY}{stop}{_ANY}/")
        self.lines.append(f"{name.lower()}[lazy]: {name} /{stop}/")
        return f"{quote} {name.lower()}"

    def _braced_array(self, branch: dict[str, Any]) -> str:
        self._check_keys(branch, _OF_ARRAYS)
        item = self._braced(branch.get("items", True))
        low, high = _count(branch, "minItems") or 0, _count(branch, "maxItems")
        if high == 0:
            return '"[" "]"'
        most = "" if high is None else str(high - 1)
        more = f'("," {item}){{{max(low - 1, 0)},{most}}}'
        items = f"{item} {more}"
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _braced_object(self, branch: Mapping[str, Any]) -> str:
        others = branch.get("additionalProperties", not branch.get("properties"))
        properties = self._properties(branch)
        if not properties and (others or others == {}):
            name = f"{self._rule.upper()}_KEY"
            line = f"{name}: /{_GEMMA_KEY.pattern.replace('?:', '')}/"
            self.lines += [] if line in self.lines else [line]
            member = f'{name} ":" {self._braced(others)}'
            return f'"{{" ({member} ("," {member})*)? "}}"'
        members: list[tuple[str, bool]] = []
        for key, value, is_required in properties:
            if not _GEMMA_KEY.fullmatch(key):
                raise self._refused(f"has the parameter {key[:64]!r}, which has no quotes there")
            members.append((f"{json.dumps(f'{key}:')} {self._braced(value)}", is_required))
        name = f"{self._rule}_object_{len(self.lines)}"
        self._write_members(name, members, ",")
        return f'"{{" {name} "}}"'


_EMPTY = '""'
_TOO_LARGE = "has parameters with too many schemas"
_SLASH = "\\/"


def braced_texts(value: Any) -> list[str]:
    """A value in Gemma's syntax, as texts of which some may be special tokens."""
    match value:
        case str():
            return [GEMMA_QUOTE, value, GEMMA_QUOTE] if value else [GEMMA_QUOTE, GEMMA_QUOTE]
        case list():
            items = [braced_texts(item) for item in value]
            return ["[", *_with_commas(items), "]"]
        case dict():
            members = [[f"{key}:", *braced_texts(inner)] for key, inner in value.items()]
            return ["{", *_with_commas(members), "}"]
    return [json.dumps(value)]


def _with_commas(items: list[list[str]]) -> list[str]:
    return [text for place, item in enumerate(items) for text in ([","] * bool(place) + item)]


def pattern_of(text: str) -> str:
    """A regular expression of a text, between slashes."""
    return re.escape(text).replace("/", _SLASH).replace("\n", "n")


def _literal(value: object) -> str:
    """A listed value as text, in a terminal."""
    return json.dumps(value if isinstance(value, str) else json.dumps(value), ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': FORM}, ensure_ascii=False)}"


def _types_here(branch: Mapping[str, Any]) -> frozenset[str]:
    return value_types(branch, {})


def _count(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    is_count = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    return int(value) if is_count and value is not None else None


def _first_key(schema: Mapping[str, Any]) -> str:
    return next((key[:64] for key in schema if key != "type"), "a value")


_KEYWORDS_OF = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"}),
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    ),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
}


def _keywords_of(kind: str, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that may restrict values of a type."""
    numeric = "number" if kind == "integer" else kind
    others = frozenset().union(*(own for name, own in _KEYWORDS_OF.items() if name != numeric))
    return {key: value for key, value in keywords.items() if key not in others}
