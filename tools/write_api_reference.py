"""Write `docs/reference/api.md` from the API's own document, or check that it is current.

`make reference` writes it; `--check` prints nothing and exits 1 if the committed page differs.
The document is `/openapi.json` with the default limits, of an app over the tests' engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "api.md"
REF = "#/components/schemas/"
STREAMS = {"text/event-stream": "events", "application/x-ndjson": "lines of JSON"}
HEAD = """# The HTTP API, field by field

Written by `make reference` from the schemas, the limits and the tables that the server itself
reads; the same tables are what the tests try. A running server tells the same of itself at
`/openapi.json` and, as a page, at `/docs`, with the limits that it was started with.

Every field is honoured, reported or refused: a value takes effect, or the answer's header
`x-quickstep-ignored` names the field, or the answer is an error that names it. `null` is not
given. A hint is reported where it has no effect; with `--strict` it is refused. A field that is in
no table is dropped and reported; with `--unknown-fields refuse` it is refused. A refused field
passes with the values in its type, which ask for nothing. Where a request is silent about sampling,
the checkpoint's `generation_config.json` goes before the defaults given here.
"""


def document() -> dict[str, Any]:
    """The whole API with the default limits."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "serve")]
    from fake_engine import FakeEngine

    from quickstep.server.generate.adapter import Served, output_formats
    from quickstep.server.metrics import Metrics
    from quickstep.server.options import ServerOptions
    from quickstep.server.route_list import api_routes
    from quickstep.server.schema.field_bounds import SchemaFacts
    from quickstep.server.schema.openapi import openapi_document

    engine, options = FakeEngine(), ServerOptions()
    served = Served(engine, ("model",), options.limits, output_formats(engine, options))
    routes = api_routes(served, Metrics(engine, "model"), options)
    return openapi_document(routes, SchemaFacts(options.limits))


class Page:
    """The lines of the page."""

    def __init__(self, api: Mapping[str, Any]) -> None:
        self.api = api
        self.schemas: Mapping[str, Any] = api["components"]["schemas"]

    def lines(self) -> Iterator[str]:
        """All of them."""
        operations = [
            (method.upper(), path, operation)
            for path, item in self.api["paths"].items()
            for method, operation in item.items()
        ]
        yield HEAD
        yield from self.routes(operations)
        yield from self.errors(operations[0][2])
        bodies = _in_order(name for *_, operation in operations for name in _body(operation))
        yield from self.tables("Requests", bodies)
        parts = self.reachable(bodies)
        yield from self.tables("Parts of requests", [p for p in parts if p not in bodies])
        answers = _in_order(name for *_, operation in operations for name in _answers(operation))
        yield from self.tables("Answers", self.reachable(answers))

    def routes(self, operations: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Iterator[str]:
        """One line each."""
        yield "## Routes\n"
        yield "| route | what it gives | body | answer |"
        yield "|---|---|---|---|"
        for method, path, operation in operations:
            body = ", ".join(map(_link, _body(operation))) or "none"
            content = operation["responses"]["200"]["content"]
            given = [_link(n) for n in _names(content.get("application/json", {}).get("schema"))]
            for media_type, form in STREAMS.items():
                events = content.get(media_type, {}).get("x-events")
                if events is not None:
                    told = ", ".join(map(_link, _names(events)))
                    given.append(f"as {form}: {told}" if told else f"as {form}")
            given = given or [f"`{name}`" for name in content]
            summary = operation["summary"]
            yield f"| `{method} {path}` | {summary} | {body} | {'; '.join(given)} |"
        yield ""

    def errors(self, operation: Mapping[str, Any]) -> Iterator[str]:
        """The statuses of errors."""
        yield "## Errors\n"
        yield "| status | why |"
        yield "|---|---|"
        for status, answer in operation["responses"].items():
            if status != "200":
                yield f"| {status} | {answer['description']} |"
        yield ""

    def tables(self, title: str, names: Sequence[str]) -> Iterator[str]:
        """A chapter with a table for each schema."""
        yield f"## {title}\n"
        for name in names:
            schema = self.schemas[name]
            yield f"### {name}\n"
            yield f"{schema.get('description', '').strip()}\n"
            if schema.get("properties"):
                yield from self.table(schema)

    def table(self, schema: Mapping[str, Any]) -> Iterator[str]:
        """The fields of one schema."""
        required = schema.get("required", ())
        told = any("description" in field for field in schema["properties"].values())
        yield "| field | type | default |" + (" class | effect |" if told else "")
        yield "|---|---|---|" + ("---|---|" if told else "")
        for name, field in schema["properties"].items():
            default = "required" if name in required else _default(field)
            effect = field.get("description", "Says which form this is.")
            if "x-refused" in field:
                effect = f"{field['x-refused'][:1].upper()}{field['x-refused'][1:]}."
            row = f"| `{name}` | {type_text(field)} | {default} |"
            kind = field.get("x-class", "honoured")
            yield row + (f" {kind} | {_cell(effect)} |" if told else "")
        yield ""

    def reachable(self, names: Sequence[str]) -> list[str]:
        """These schemas and those that they are made of, in the order they are met."""
        found: dict[str, None] = {}
        waiting = list(names)
        while waiting:
            name = waiting.pop(0)
            if name not in found:
                found[name] = None
                waiting += _names(self.schemas[name])
        return list(found)


def type_text(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, null left out."""
    if "$ref" in schema:
        return _link(schema["$ref"].removeprefix(REF))
    if "anyOf" in schema:
        texts = [type_text(item) for item in schema["anyOf"] if item != {"type": "null"}]
        return " or ".join(_in_order(texts))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = schema.get("type", "any JSON")
    if "prefixItems" in schema:
        inner = ", ".join(map(type_text, schema["prefixItems"]))
        return f"list of {len(schema['prefixItems'])}: {inner}" if inner else "empty list"
    if kind == "array":
        return f"list of {type_text(schema.get('items', {}))}{_limits(schema, 'Items', 'entries')}"
    if kind == "object":
        values = schema.get("additionalProperties")
        inner = f" of {type_text(values)}" if isinstance(values, dict) and values else ""
        return f"object{inner}{_limits(schema, 'Properties', 'entries')}"
    if kind == "string":
        return f"string{_limits(schema, 'Length', 'characters')}{_pattern(schema)}"
    return f"{kind}{_range(schema)}"


def _range(schema: Mapping[str, Any]) -> str:
    words = (("exclusiveMinimum", "above"), ("minimum", "from"), ("maximum", "to"))
    return "".join(f" {word} {_number(schema[key])}" for key, word in words if key in schema)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else format(value, "g")


def _limits(schema: Mapping[str, Any], of: str, unit: str) -> str:
    low, high = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if high is not None:
        return f" ({f'{low} to' if low else 'at most'} {high} {unit})"
    return f" (not empty, {unit})" if low else ""


def _pattern(schema: Mapping[str, Any]) -> str:
    pattern = schema.get("pattern")
    return f" like `{_cell(pattern)}`" if pattern else ""


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("x-default", field.get("default"))
    return "" if default is None or default == [] else f"`{json.dumps(default)}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _body(operation: Mapping[str, Any]) -> list[str]:
    return _names(operation.get("requestBody"))


def _answers(operation: Mapping[str, Any]) -> list[str]:
    return _names(operation["responses"]["200"]) + _names(operation["responses"]["400"])


def _names(value: Any) -> list[str]:
    """The schemas that are referred to in a part of the document, in order."""
    if isinstance(value, dict):
        here = [value["$ref"].removeprefix(REF)] if "$ref" in value else []
        inner = (item for key, item in value.items() if key != "discriminator")
        return _in_order([*here, *(name for item in inner for name in _names(item))])
    if isinstance(value, list):
        return _in_order(name for item in value for name in _names(item))
    return []


def _in_order(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def text() -> str:
    """The whole page."""
    return "\n".join(Page(document()).lines()).rstrip() + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    if parser.parse_args(arguments).check:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text()
        if not current:
            print(f"{PAGE.relative_to(ROOT)} is not current; run make reference")
        return 0 if current else 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
