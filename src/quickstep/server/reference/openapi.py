"""`/openapi.json`: OpenAPI 3.1 of every route, written from the route table and the schemas.

    ApiRoute (path, method, types) ------------+
    msgspec types -> msgspec's JSON schemas ---+-> openapi_document -> /docs, docs/reference
    field_reference (effects, bounds) ---------+

No route is described by hand: what a field does, why it has no effect and its bounds come from
`field_reference`, the rest from its type. `x-class` of a field is
`honoured`, `hint`, `note` or `refused`.

Some lists leave the type of their entries open, since the entry's own `type` decides how it is
parsed; `parts_of` lists these types. `ApiPages` serves the document, which is written at the first
request and kept, and `/docs`, a page of the package that reads it in the browser.
"""

from __future__ import annotations

import gzip
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quickstep import __version__
from quickstep.server.anthropic.request_types import CountTokensRequest, CustomToolSpec
from quickstep.server.fields.field_classes import Hint, Honoured, Note, RefusedField, Row
from quickstep.server.fields.sampling_fields import SamplingFields
from quickstep.server.fields.shared_fields import FunctionTool
from quickstep.server.http.errors import (
    OVERLOADED,
    STATUSES,
    ErrorAnswer,
    ErrorShape,
    MessagesError,
    OllamaError,
    anthropic_shape,
    ollama_shape,
)
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.ollama.request_types import OllamaChatRequest
from quickstep.server.openai.request_types import ChatRequest
from quickstep.server.openai.tokenize import ApplyTemplateRequest, TokenizeRequest
from quickstep.server.reference.field_reference import (
    Keywords,
    SchemaFacts,
    bounds_of,
    form_refusal,
    reference_of,
)
from quickstep.server.responses.request_types import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionToolSpec,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    SummaryPart,
)
from quickstep.types import SamplingParams

_NO_CONTENT = 204
_REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ERRORS: Mapping[ErrorShape, type[msgspec.Struct]] = {
    anthropic_shape: MessagesError,
    ollama_shape: OllamaError,
}
# Which keywords of JSON Schema concern values of which type.
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "enum", "examples"}),
    "array": frozenset({"minItems", "maxItems", "items"}),
    "object": frozenset({"maxProperties", "propertyNames", "additionalProperties"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
}

# The defaults if neither the request nor the checkpoint's generation_config.json sets a value;
# each API has a max_tokens of its own.
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        field.name: field.default
        for field in msgspec.structs.fields(SamplingParams)
        if isinstance(field.default, (int, float, tuple)) and field.name != "max_tokens"
    }
)
_Parts = Mapping[str, tuple[type[msgspec.Struct], ...]]

_PARTS: Mapping[type[msgspec.Struct], _Parts] = MappingProxyType(
    {
        ResponsesRequest: {
            "input": (MessageItem, FunctionCallItem, FunctionCallOutputItem, ReasoningItem),
            "tools": (FunctionToolSpec,),
        },
        CountTokensRequest: {"tools": (CustomToolSpec,)},
        ChatRequest: {"tools": (FunctionTool,)},
        OllamaChatRequest: {"tools": (FunctionTool,)},
        TokenizeRequest: {"tools": (FunctionTool,)},
        ApplyTemplateRequest: {"tools": (FunctionTool,)},
    }
)


# The `type` that a tool of this form has; a tool of another type is left out and reported.
TOOL_TYPES: Mapping[type[msgspec.Struct], str] = MappingProxyType(
    {FunctionTool: "function", FunctionToolSpec: "function", CustomToolSpec: "custom"}
)
# The `type` of a form that may leave it out: a tool without one is a function, and where a list has
# one form only, it is of that form.
_DEFAULT_TYPES: Mapping[type[msgspec.Struct], str] = MappingProxyType(
    {**TOOL_TYPES, SummaryPart: "summary_text"}
)


def openapi_document(routes: Sequence[ApiRoute], facts: SchemaFacts) -> dict[str, Any]:
    """The complete document, as plain JSON values."""
    types = {
        struct
        for route in routes
        for declared in (
            *(route.request, *route.requests),
            *(route.response, _error(route), *route.events),
        )
        if declared is not None
        for struct in reachable_structs(declared)
    }
    names, schemas = component_schemas(types)
    _refine_schemas(schemas, names, facts)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quickstep",
            "version": __version__,
            "description": "Every field is honoured, reported in the answer's header "
            "x-quickstep-ignored, or refused with its name; null is not given.",
        },
        "security": [{}, {"key": []}],
        "paths": _paths(routes, names, facts),
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths(
    routes: Sequence[ApiRoute], names: Mapping[type, str], facts: SchemaFacts
) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for path in (route.path, *route.aliases):
            item = paths.setdefault(_PATH_PARAMETER.sub(r"{\1}", path), {})
            item[route.method.lower()] = _operation(route, path, names, facts)
    return paths


def _operation(
    route: ApiRoute, path: str, names: Mapping[type, str], facts: SchemaFacts
) -> dict[str, Any]:
    parts = re.findall(r"\w+", _PATH_PARAMETER.sub(r"\1", path))
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *parts]),
        "summary": route.summary,
        "parameters": [*_path_parameters(path), *_query_parameters(route, facts)],
        "responses": _responses(route, names),
    }
    if route.is_probe:
        operation["security"] = []
    if route.request is not None:
        body = _ref(names[route.request])
        as_list = {"type": "array", "items": body}
        operation["requestBody"] = _request_body(route, as_list if route.takes_list else body)
    elif route.requests:
        forms = [_ref(names[schema]) for schema in route.requests]
        operation["requestBody"] = _request_body(route, {"anyOf": forms})
    return operation


def _request_body(route: ApiRoute, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {route.request_type: {"schema": schema}}}


def _path_parameters(path: str) -> Iterator[dict[str, Any]]:
    for match in _PATH_PARAMETER.finditer(path):
        schema = {"type": "string", "minLength": 1}
        yield {"name": match.group(1), "in": "path", "required": True, "schema": schema}


def _query_parameters(route: ApiRoute, facts: SchemaFacts) -> Iterator[dict[str, Any]]:
    if route.query is None:
        return
    (_,), components = msgspec.json.schema_components([route.query], ref_template=_REF)
    schema = components[route.query.__name__]
    _refine(schema, route.query, facts)
    for name, field in schema["properties"].items():
        description = field.pop("description", "")
        required = name in schema.get("required", ())
        yield {
            "name": name,
            "in": "query",
            "required": required,
            "schema": field,
            "description": description,
        }


def _responses(route: ApiRoute, names: Mapping[type, str]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if route.response is not None:
        answer["application/json"] = {"schema": _typed(route.response, names)}
    if route.streams:
        events = [_ref(names[event]) for event in (*route.events, _error(route))]
        events_schema = {"anyOf": events} if route.events else {"type": "object"}
        # 3.1 has no keyword for the schema of one event's data; 3.2's is not widely supported yet
        answer[route.stream_type] = {"x-events": events_schema}
    if not answer:
        answer[route.content_type] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": _ref(names[_error(route)])}}
    good = {"description": route.summary}
    content = {} if route.status == _NO_CONTENT else {"content": answer}
    responses: dict[str, Any] = {str(route.status): {**good, **content}}
    for status, facts in STATUSES.items():
        if not facts.is_common:
            continue
        reported = OVERLOADED if status == 503 and _error(route) is MessagesError else status
        responses[str(reported)] = {"description": facts.when, "content": error}
    if route.is_probe and route.response is not None:
        both = {"anyOf": [_typed(route.response, names), _ref(names[_error(route)])]}
        responses["503"]["content"] = {"application/json": {"schema": both}}
    return responses


def _typed(declared: Any, names: Mapping[type, str]) -> dict[str, Any]:
    """A struct's schema by its name, a list of them, any object, or one of these."""
    if get_origin(declared) is UnionType:
        return {"anyOf": [_typed(member, names) for member in get_args(declared)]}
    if get_origin(declared) is list:
        return {"type": "array", "items": _typed(get_args(declared)[0], names)}
    if get_origin(declared) is dict:
        return {"type": "object"}
    return _ref(names[declared])


def _error(route: ApiRoute) -> type[msgspec.Struct]:
    return _ERRORS.get(route.error_shape, ErrorAnswer)


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(name=name)}


def _refine_schemas(
    components: dict[str, Any], names: Mapping[type, str], facts: SchemaFacts
) -> None:
    """Add what msgspec does not know of these structs to their schemas."""
    for struct, name in names.items():
        why = form_refusal(struct)
        if why is None:
            _unfold(components[name], struct, names)
            _refine(components[name], struct, facts)
            if struct in _DEFAULT_TYPES:
                required = [field for field in components[name]["required"] if field != "type"]
                components[name]["required"] = required
                components[name]["properties"]["type"]["default"] = _DEFAULT_TYPES[struct]
        else:  # nothing fits
            tag = {"title": name, "description": f"Refused: {why}.", "x-refused": why}
            components[name] = {**tag, "not": {}}


def _unfold(
    schema: dict[str, Any], struct: type[msgspec.Struct], names: Mapping[type, str]
) -> None:
    """The entries of lists that the type leaves open."""
    for name, parts in parts_of(struct).items():
        forms = [_ref(names[part]) for part in parts]
        forms += [_other_tool(TOOL_TYPES[part]) for part in parts if part in TOOL_TYPES]
        entries = {"items": {"anyOf": forms}}
        schema["properties"][name] = _bounded(schema["properties"][name], entries)


def _other_tool(known: str) -> dict[str, Any]:
    """A tool that the client does not run: it is left out of the prompt and reported."""
    kind = {"type": "string", "not": {"const": known}}
    return {"type": "object", "properties": {"type": kind}, "required": ["type"]}


def _refine(schema: dict[str, Any], struct: type[msgspec.Struct], facts: SchemaFacts) -> None:
    """Add effects, bounds and refusals to a struct's schema."""
    properties = schema.get("properties", {})
    if schema.get("additionalProperties") is False and not facts.field_rules.refuse_unknown:
        schema["additionalProperties"] = True  # unknown fields are dropped and reported
    for name, keywords in bounds_of(struct, facts).items():
        properties[name] = _bounded(properties[name], keywords)
    for name, row in reference_of(struct).items():
        if isinstance(row, RefusedField):
            values = [None, *row.passes]
            properties[name] = {
                "enum": values,
                "description": f"Refused: {row.why}.",
                "x-refused": row.why,
            }
            if name not in schema.get("required", ()):
                properties[name]["default"] = None
        else:
            properties[name]["description"] = _description(row)
        properties[name]["x-class"] = _class(row)
    if issubclass(struct, SamplingFields):
        for name in properties.keys() & _DEFAULTS.keys():
            properties[name]["x-default"] = _DEFAULTS[name]


def _description(row: Honoured | Note | Hint) -> str:
    match row:
        case Note(why=why):
            return f"A note without effect: {why}."
        case Hint(why=why):
            return f"A hint without effect: {why}."
        case Honoured(effect=effect, otherwise=None):
            return effect
        case Honoured(effect=effect):
            return f"A hint: {effect[:1].lower()}{effect[1:]} Reported where it has no effect."


def _class(row: Row) -> str:
    match row:
        case Note():
            return "note"
        case Hint():
            return "hint"
        case RefusedField():
            return "refused"
        case Honoured(otherwise=otherwise):
            return "honoured" if otherwise is None else "hint"


def _bounded(schema: dict[str, Any], keywords: Keywords) -> dict[str, Any]:
    """`schema` with the keywords in the branches that they concern."""
    branches = schema.get("anyOf")
    if "anyOf" in keywords:
        null = [branch for branch in branches or () if branch == {"type": "null"}]
        return {**schema, "anyOf": [*keywords["anyOf"], *null]}
    if branches is not None:
        return {**schema, "anyOf": [_bounded(branch, keywords) for branch in branches]}
    kind = "integer" if schema.get("type") == "number" else schema.get("type", "")
    concerned = _KEYWORDS.get(kind, frozenset())
    return schema | {key: value for key, value in keywords.items() if key in concerned}


class ApiDocument(msgspec.Struct, frozen=True):
    """This API in OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, Any]]


class ApiPages:
    """The endpoints `/openapi.json` and `/docs`. `routes` may grow until the first request."""

    def __init__(self, routes: Sequence[ApiRoute], models: ModelRegistry) -> None:
        self._routes = routes
        self._models = models
        self._document = b""
        self._compressed = b""

    async def document(self, request: Request) -> Response:
        """OpenAPI 3.1 with this server's limits and names. Half a megabyte, so for a client that
        accepts gzip it is compressed, a tenth of that.
        """
        if not self._document:
            facts = SchemaFacts(
                self._models.server.limits,
                self._models.default.engine.tokenizer.vocab_size,
                self._models.names,
                self._models.server.field_rules,
                self._models.server.api_keys.priorities,
            )
            self._document = msgspec.json.encode(openapi_document(self._routes, facts))
            self._compressed = gzip.compress(self._document, mtime=0)
        headers = {"vary": "accept-encoding"}
        if not _accepts_gzip(request.headers.get("accept-encoding", "")):
            return Response(self._document, headers=headers, media_type="application/json")
        headers["content-encoding"] = "gzip"
        return Response(self._compressed, headers=headers, media_type="application/json")

    async def page(self, _: Request) -> Response:
        """The page that displays the document."""
        from importlib import resources  # the start has no use for it

        file = resources.files("quickstep.server") / "pages" / "docs.html"
        return HTMLResponse(file.read_text(encoding="utf-8"))


def _accepts_gzip(accepted: str) -> bool:
    """Whether an `accept-encoding` has gzip, and not with a quality of 0 (RFC 9110, 12.5.3)."""
    for coding in accepted.lower().split(","):
        name, *parameters = (part.strip() for part in coding.split(";"))
        if name == "gzip":
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


def reachable_structs(declared: Any) -> Iterator[type[msgspec.Struct]]:
    """The structs in a type, those in their fields included, each once."""
    seen: set[type] = set()
    waiting = [declared]
    while waiting:
        item = waiting.pop()
        waiting.extend(get_args(item))
        if isinstance(item, type) and issubclass(item, msgspec.Struct) and item not in seen:
            seen.add(item)
            waiting.extend(field_types(item).values())
            waiting.extend(part for parts in parts_of(item).values() for part in parts)
            yield item


@cache  # evaluating annotations is most of the work on a document
def field_types(struct: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The types of a struct's fields, under the names that JSON uses."""
    hints = typing.get_type_hints(struct)
    fields = msgspec.structs.fields(struct)
    return MappingProxyType({field.encode_name: hints[field.name] for field in fields})


def branches(declared: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(declared) if get_origin(declared) in (Union, UnionType) else (declared,)


def component_schemas(
    types: Collection[type[msgspec.Struct]],
) -> tuple[dict[type[msgspec.Struct], str], dict[str, Any]]:
    """The name of each struct's schema, unique and in a stable order, and msgspec's schemas by
    these names.
    """
    ordered = sorted(types, key=lambda struct: (struct.__name__, struct.__module__))
    references, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    prefix = _REF.format(name="")
    names = (reference["$ref"].removeprefix(prefix) for reference in references)
    return dict(zip(ordered, names, strict=True)), components


def parts_of(struct: type[msgspec.Struct]) -> _Parts:
    """The types of the entries, by the field that lists them; inherited fields included."""
    found: dict[str, tuple[type[msgspec.Struct], ...]] = {}
    for parent in reversed(struct.__mro__):
        found |= _PARTS.get(parent, {})
    return found
