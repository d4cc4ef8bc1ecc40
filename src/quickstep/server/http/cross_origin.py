"""Starlette's CORS middleware, with refusals in OpenAI's shape as everywhere else."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from quickstep.server.http.errors import error_body, json_response

__all__ = ["CrossOriginMiddleware"]


class CrossOriginMiddleware(CORSMiddleware):
    """Answers a browser that asks whether a page of another origin may call."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """Yes, or a refusal that says what is not allowed: 403 for the origin, else 400."""
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        what = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        message = f"pages of other origins may not call like this: {what} is not allowed"
        status = 403 if "origin" in what else response.status_code
        refused = json_response(error_body(message, status), status)
        for name, value in response.headers.items():
            if name not in ("content-length", "content-type"):
                refused.headers[name] = value
        return refused
