"""The document of the API: valid, complete, in step with the server's limits and its pages."""

import asyncio
from typing import Any

import httpx
import jsonschema_rs
import pytest
from api_cases import document_of
from client import client_of
from fake_engine import FakeEngine
from starlette.routing import Route

from quickstep.server.app import create_app
from quickstep.server.options import RequestLimits, ServerOptions
from tools import write_api_reference

DOCUMENT = document_of(create_app(FakeEngine()))
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def get(path: str, **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine())) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(run())


def test_every_route_of_the_app_is_in_the_document() -> None:
    served = {
        (method, route.path.replace(":path", ""))
        for route in create_app(FakeEngine()).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    told = {(m.upper(), path) for path, item in DOCUMENT["paths"].items() for m in item}
    assert told == served


def test_every_operation_has_a_name_of_its_own() -> None:
    names = [item["operationId"] for path in DOCUMENT["paths"].values() for item in path.values()]
    assert len(names) == len(set(names))


def test_every_schema_is_valid_and_refers_to_schemas_that_exist() -> None:
    """A validator of all of them at once: each reads the complete document, 40 ms."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **DOCUMENT}
    every = [{"$ref": f"#/components/schemas/{name}"} for name in SCHEMAS]
    jsonschema_rs.validator_for({**schema, "allOf": every})


def test_the_servers_own_limits_are_in_its_document() -> None:
    options = ServerOptions(limits=RequestLimits(n=3, label_chars=7))
    schemas = document_of(create_app(FakeEngine(), options))["components"]["schemas"]
    number, label = (schemas["ChatRequest"]["properties"][name] for name in ("n", "user"))
    assert number["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 3}
    assert label["anyOf"][0] == {"type": "string", "maxLength": 7}
    ids = schemas["ChatRequest"]["properties"]["stop_token_ids"]
    assert ids["anyOf"][0]["items"]["maximum"] == FakeEngine().tokenizer.vocab_size - 1


def test_every_field_of_a_request_shows_its_class() -> None:
    fields = SCHEMAS["ChatRequest"]["properties"]
    assert {name: fields[name]["x-class"] for name in ("n", "store", "reasoning_effort")} == {
        "n": "honoured",
        "store": "hint",
        "reasoning_effort": "hint",
    }
    assert fields["audio"] == {
        "enum": [None],
        "default": None,
        "description": "Refused: the model gives text only.",
        "x-class": "refused",
        "x-refused": "the model gives text only",
    }


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("gzip, deflate, br", True),
        ("br;q=1.0, GZIP;q=0.8, *;q=0.1", True),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip; q=0.0, br", False),
        ("gzipped", False),
        ("", False),
    ],
)
def test_the_document_is_compressed_for_clients_that_accept_it(
    accepted: str, is_compressed: bool
) -> None:
    response = get("/openapi.json", **{"accept-encoding": accepted})
    assert response.json() == DOCUMENT
    assert response.headers["vary"] == "accept-encoding"
    assert response.headers.get("content-encoding") == ("gzip" if is_compressed else None)
    assert (int(response.headers["content-length"]) < 100_000) == is_compressed


def test_the_page_is_one_file_that_loads_nothing_else() -> None:
    response = get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "openapi.json" in response.text
    assert "http://" not in response.text
    assert "https://" not in response.text


def test_the_committed_reference_is_current() -> None:
    assert write_api_reference.PAGE.read_text(encoding="utf-8") == write_api_reference.text()
