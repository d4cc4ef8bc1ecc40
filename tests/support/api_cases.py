"""Requests drawn from our own `/openapi.json`, and what every answer to one has to be.

They are positive (fit the schema) or negative (do not) and travel to the app in memory. Most of the
bodies come from `generated_bodies`; schemathesis makes a few, as a second opinion, many in a search
(`--hypothesis-profile=search`): one of its bodies takes as long as fifty of ours. The types of the
answers are closed here, so that an answer cannot say more than the document does.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Self

import httpx
import jsonschema_rs
import schemathesis
from client import client_of
from example_counts import examples
from fake_engine import FakeEngine
from field_places import url_of
from generated_bodies import BodyDrawer
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.applications import Starlette

from quickstep.server.app import create_app

CASE_TIMEOUT_S = 20
BASE_URL = "http://server"
JSON = "application/json"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


def document_of(app: Starlette) -> dict[str, Any]:
    """The app's own document."""

    async def fetch() -> dict[str, Any]:
        async with client_of(app) as client:
            answer: dict[str, Any] = (await client.get("/openapi.json")).json()
            return answer

    return asyncio.run(fetch())


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with every object of an answer closed: no property beyond the declared ones."""
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Method and path of each."""
    for path, item in document["paths"].items():
        for method in item:
            yield method.upper(), path


def endpoints(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The same without the second paths of an endpoint, which are OpenAI's without `/v1`."""
    for method, path in operations(document):
        if f"/v1{path}" not in document["paths"]:
            yield method, path


def num_cases(num: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As many examples as told, but more of them when new ones are searched for."""
    return settings(examples(num), phases=[Phase.generate], suppress_health_check=list(HealthCheck))


class Api:
    """One document, for drawing from it and for judging answers."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = closed(document)
        self._schema = schemathesis.openapi.from_dict(self.document)
        self._validators: dict[str, Any] = {}

    def operation(self, method: str, path: str) -> APIOperation:
        """One operation, to draw from."""
        operation: APIOperation = self._schema[path][method]
        return operation

    def has_body(self, method: str, path: str) -> bool:
        """Whether its cases differ by more than headers."""
        return "requestBody" in self.document["paths"][path][method.lower()]

    def drawer(self, method: str, path: str) -> BodyDrawer:
        """Draws its bodies."""
        return BodyDrawer(self.document, self._body_schema(method, path))

    def fields(self, method: str, path: str) -> set[str]:
        """The fields of its body."""
        schema = self._body_schema(method, path)
        forms = schema.get("anyOf", [schema])
        names = [form.get("items", form)["$ref"].rpartition("/")[2] for form in forms]
        schemas = self.document["components"]["schemas"]
        return {field for name in names for field in schemas[name]["properties"]}

    def judge(self, case: schemathesis.Case, response: httpx.Response) -> None:
        """Fail on an answer that the document does not allow."""
        case.validate_response(response, checks=CHECKS)
        self.judge_shape(case.method, case.operation.path, response)

    def judge_mode(
        self, method: str, path: str, mode: GenerationMode, response: httpx.Response
    ) -> None:
        """Fail on an answer that the document does not allow to a body of this mode."""
        self.judge_shape(method, path, response)
        assert response.status_code < 500, response.text
        assert mode is POSITIVE or response.status_code >= 400, "it breaks the schema"

    def judge_shape(self, method: str, path: str, response: httpx.Response) -> None:
        """The shape only: status, media type, JSON schema, and each event of a stream."""
        answer = self.document["paths"][path][method.lower()]["responses"][
            str(response.status_code)
        ]
        if "content" not in answer:
            assert not response.content
            return
        media_type = response.headers["content-type"].partition(";")[0]
        told = answer["content"][media_type]
        if media_type == JSON:
            self._fits(told["schema"], response.json())
        if response.status_code >= 400:
            assert media_type == JSON
            assert message_of(response)
        if media_type == "application/x-ndjson":
            assert not response.text or response.text.endswith("\n")
            for line in response.text.splitlines():
                self._fits(told["x-events"], json.loads(line))
        if media_type == "text/event-stream":
            for event in _data(response.text):
                self._fits(told["x-events"], event)

    def _body_schema(self, method: str, path: str) -> dict[str, Any]:
        body = self.document["paths"][path][method.lower()]["requestBody"]
        (media,) = body["content"].values()
        schema: dict[str, Any] = media["schema"]
        return schema

    def _fits(self, schema: dict[str, Any], value: Any) -> None:
        key = json.dumps(schema)
        if key not in self._validators:
            complete = {**schema, "components": self.document["components"]}
            self._validators[key] = jsonschema_rs.validator_for(complete)
        self._validators[key].validate(value)


def message_of(response: httpx.Response) -> str:
    """What an error says; Ollama's is its message alone."""
    error = response.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    return message


def _data(text: str) -> Iterator[Any]:
    """The JSON of each event's data."""
    assert text.endswith("\n\n"), text[-200:]
    for line in text.split("\n"):
        assert re.match(r"$|:|data: |event: |id: |retry: ", line), line
        data = line.removeprefix("data: ")
        if data != line and data != "[DONE]":
            yield json.loads(data)


def as_integers(value: Any) -> Any:
    """JSON Schema takes 100.0 for an integer; we do not, and no client sends it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [as_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: as_integers(item) for key, item in value.items()}
    return value


def request_of(case: schemathesis.Case) -> dict[str, Any]:
    """The case as arguments of an httpx request."""
    told = case.as_transport_kwargs(base_url=BASE_URL)
    kept = {name: told.get(name) for name in ("method", "url", "params", "headers", "json")}
    data = told.get("data")
    if isinstance(data, (bytes, str)):
        kept["content"] = data
    elif data is not None:
        kept["data"] = data
    if told.get("files"):
        kept["files"] = told["files"]
    return {name: value for name, value in kept.items() if value is not None}


@cache
def default_api() -> Api:
    """The API of a server with default options."""
    return Api(document_of(create_app(FakeEngine())))


class OpenApp:
    """An app with a scripted engine. It answers requests, one after the other, until the block
    ends.
    """

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self._runner = asyncio.Runner()
        self._opened = client_of(create_app(self.engine))

    def __enter__(self) -> Self:
        self._client = self._runner.run(self._opened.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._opened.__aexit__(None, None, None))
        self._runner.close()

    def send(self, **request: Any) -> httpx.Response:
        """The response; fails where no answer comes."""

        async def exchange() -> httpx.Response:
            async with asyncio.timeout(CASE_TIMEOUT_S):
                return await self._client.request(**request)

        return self._runner.run(exchange())

    def until_idle(self) -> None:
        """Wait for responses in the background, which end without their client."""

        async def idle() -> None:
            async with asyncio.timeout(CASE_TIMEOUT_S):
                while self.engine.open_streams:
                    await asyncio.sleep(0)

        if self.engine.open_streams:
            self._runner.run(idle())


def json_request(method: str, path: str, body: Any) -> dict[str, Any]:
    """A body as arguments of an httpx request; `json=None` would send none."""
    content = json.dumps(body).encode()
    return {
        "method": method,
        "url": url_of(path),
        "content": content,
        "headers": {"content-type": JSON},
    }


POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
