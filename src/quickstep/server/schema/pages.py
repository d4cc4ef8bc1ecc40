"""`/openapi.json` and `/docs`: what this server answers, for programs and for people.

The document is written at the first request and kept; the page is a file of the package that
reads it in the browser and asks nobody else for anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quickstep.server.generate.adapter import Served
from quickstep.server.http.route import ApiRoute
from quickstep.server.schema.field_bounds import SchemaFacts
from quickstep.server.schema.openapi import openapi_document

__all__ = ["ApiDocument", "ApiPages"]


class ApiDocument(msgspec.Struct, frozen=True):
    """This API in OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, Any]]


class ApiPages:
    """The two endpoints. `routes` may grow until the first request."""

    def __init__(self, routes: Sequence[ApiRoute], served: Served) -> None:
        self._routes = routes
        self._served = served
        self._document: bytes | None = None

    async def document(self, _: Request) -> Response:
        """OpenAPI 3.1 with this server's limits and names."""
        if self._document is None:
            facts = SchemaFacts(
                self._served.limits,
                self._served.engine.tokenizer.vocab_size,
                self._served.names,
                self._served.field_rules,
                self._served.api_keys.priorities,
            )
            self._document = msgspec.json.encode(openapi_document(self._routes, facts))
        return Response(self._document, media_type="application/json")

    async def page(self, _: Request) -> Response:
        """The page that shows the document."""
        file = resources.files("quickstep.server") / "pages" / "docs.html"
        return HTMLResponse(file.read_text(encoding="utf-8"))
