"""The routes that batches may call, by the url that a line names; without HTTP.

`quickstep batch` and `/v1/batches` share this table: another generating API is one line here.
Responses of batches have a store of their own, so that they push out no live client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quickstep.server.anthropic.endpoint import Messages
from quickstep.server.batches.lines import Endpoint
from quickstep.server.generate.adapter import Adapter, Served
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.metrics import Metrics
from quickstep.server.openai.chat import Chat
from quickstep.server.openai.completions import Completions
from quickstep.server.openai.embeddings import Embeddings
from quickstep.server.responses.endpoint import Responses
from quickstep.server.responses.store import ResponseStore

__all__ = ["BATCH_URLS", "batch_endpoints"]

BATCH_URLS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/responses",
    }
)


def batch_endpoints(served: Served, metrics: Metrics) -> Mapping[str, Endpoint]:
    """Every endpoint of a batch."""
    adapters: dict[str, Adapter] = {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completions(),
        "/v1/responses": Responses(ResponseStore()),
        "/v1/messages": Messages(),
    }
    generating = {
        url: GeneratingRoute(adapter, served, metrics).whole for url, adapter in adapters.items()
    }
    return MappingProxyType({**generating, "/v1/embeddings": Embeddings(served, metrics).whole})
