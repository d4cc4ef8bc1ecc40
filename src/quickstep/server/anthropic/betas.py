"""Anthropic's header `anthropic-beta`: hints, reported unless they name what is here anyway.

Most betas bring fields of the body, which are checked as any other. Those that are not reported are
old names of what is there without a beta, or permit something that a server may leave undone.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import Endpoint
from quickstep.server.options import FieldRules
from quickstep.server.schema.field_reader import FieldReader

__all__ = ["HARMLESS_BETAS", "with_checked_betas"]

HEADER = "anthropic-beta"
HARMLESS_BETAS = frozenset(
    {
        # there without a beta
        "messages-2023-12-15",
        "tools-2024-04-04",
        "tools-2024-05-16",
        "prompt-caching-2024-07-31",
        "extended-cache-ttl-2025-04-11",
        "token-counting-2024-11-01",
        "structured-outputs-2025-11-13",
        # longer outputs and contexts: the model's own limit holds, and is told
        "max-tokens-3-5-sonnet-2024-07-15",
        "output-128k-2025-02-19",
        "context-1m-2025-08-07",
        # permissions: to spell calls shorter, to send them sooner, to reason between them
        "token-efficient-tools-2025-02-19",
        "fine-grained-tool-streaming-2025-05-14",
        "interleaved-thinking-2025-05-14",
        # who calls
        "claude-code-20250219",
        "oauth-2025-04-20",
    }
)


def with_checked_betas(endpoint: Endpoint, rules: FieldRules) -> Endpoint:
    """The endpoint behind a check of the header."""

    async def answer(request: Request) -> Response:
        reader = FieldReader(rules)
        for value in request.headers.getlist(HEADER):
            for beta in filter(None, map(str.strip, value.split(","))):
                if beta not in HARMLESS_BETAS:
                    reader.ignore(f"{HEADER}={beta[:64]}", "there is no such beta feature")
        report_ignored(request, reader.ignored)
        return await endpoint(request)

    return answer
