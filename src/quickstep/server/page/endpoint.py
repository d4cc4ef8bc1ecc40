"""The page at `/` and its files, which are the same for every client and need no key.

A browser gets the page, other clients of `/` the text by which clients recognize an Ollama server.
What the page displays comes from the other routes, with the key that its user enters there. The
files in `static` are sent as they are; the policy in `HEADERS` has the browser load nothing else,
and run no script that is part of a page or of a model's output.
"""

from __future__ import annotations

import hashlib
import zlib
from functools import cache, cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from quickstep.server.http.errors import RouteNotFound
from quickstep.server.http.route import ApiRoute

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the browser asks by ETag whether its copy is current
}
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_PREFIX = "/page/"
_STATIC = Path(__file__).parent / "static"


class PageFile:
    """A file of the page, read when it is requested first."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._type = _TYPES[source.name.rpartition(".")[2]]

    @cached_property
    def content(self) -> bytes:
        """The bytes of the file."""
        return self._source.read_bytes()

    @cached_property
    def _compressed(self) -> bytes:
        return zlib.compress(self.content, wbits=31)  # with gzip's header

    @cached_property
    def _etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def response(self, request: Request) -> Response:
        """The file; 304 without it if the browser's copy is current."""
        headers = {**HEADERS, "etag": self._etag, "vary": "accept, accept-encoding"}
        if self._etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        content = self.content
        if "gzip" in request.headers.get("accept-encoding", ""):
            content, headers["content-encoding"] = self._compressed, "gzip"
        return Response(content, headers=headers, media_type=self._type)


class Page:
    """The endpoints `/` and `/page/{file}`; without `is_served`, only Ollama's text."""

    def __init__(self, *, is_served: bool) -> None:
        self._is_served = is_served
        self._files = {name: PageFile(source) for name, source in page_files()} if is_served else {}

    def routes(self) -> list[ApiRoute]:
        """The routes."""
        root = ApiRoute(
            "GET",
            "/",
            self.root,
            "A page for browsers; clients of Ollama check here that a server runs.",
            is_probe=self._is_served,
        )
        if not self._is_served:
            return [root]
        file = ApiRoute(
            "GET",
            f"{_PREFIX}{{file:path}}",
            self.file,
            "A file of the page.",
            content_type="text/javascript",
            open_paths=tuple(_PREFIX + name for name in self._files),
        )
        return [root, file]

    async def root(self, request: Request) -> Response:
        """Return the page to a browser, else Ollama's text."""
        if self._is_served and "text/html" in request.headers.get("accept", ""):
            return self._files["index.html"].response(request)
        return Response("Ollama is running", media_type="text/plain", headers={"vary": "accept"})

    async def file(self, request: Request) -> Response:
        """Return a file. Raises RequestError 404 if there is none of this name."""
        name: str = request.path_params["file"]
        file = self._files.get(name)
        if file is None:
            raise RouteNotFound(
                f"there is no page file {name[:64]!r}", param="file", code="page_file_not_found"
            )
        return file.response(request)


@cache
def page_files() -> tuple[tuple[str, Path], ...]:
    """The files of the page with their paths below `static`, licences and checksums left out."""
    files = [path for path in _STATIC.rglob("*.*") if path.suffix[1:] in _TYPES]
    return tuple((path.relative_to(_STATIC).as_posix(), path) for path in sorted(files))
