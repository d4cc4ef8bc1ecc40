"""The routes that a server has from its first moment: chat, completions, models, health.

`lazy_app` serves these before it has imported the other APIs, so this module must not import them.
`app.api_routes` lists all routes.
"""

from __future__ import annotations

from quickstep.server.generate.adapter import Served
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.http.route import ApiRoute
from quickstep.server.metrics import Metrics
from quickstep.server.openai.chat import Chat
from quickstep.server.openai.completions import Completions
from quickstep.server.openai.request_types import ChatRequest, CompletionRequest
from quickstep.server.openai.response_types import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Model,
    ModelList,
)
from quickstep.server.options import ServerOptions
from quickstep.server.probes import Health, Pong, Probes, Readiness, Version

__all__ = ["generating_routes", "probe_routes", "startup_routes"]


def startup_routes(served: Served, metrics: Metrics, options: ServerOptions) -> list[ApiRoute]:
    """Every route that is available before `app` is imported."""
    return [*generating_routes(served, metrics), *probe_routes(served, metrics, options)]


def probe_routes(served: Served, metrics: Metrics, options: ServerOptions) -> list[ApiRoute]:
    """Models, health, readiness, metrics, version."""
    probes = Probes(served, metrics, options.stall_s)
    return [*_models(probes), *_probes(probes)]


def generating_routes(served: Served, metrics: Metrics) -> list[ApiRoute]:
    """Chat and completions."""
    chat = GeneratingRoute(Chat(), served, metrics)
    completions = GeneratingRoute(Completions(), served, metrics)
    return [
        ApiRoute(
            "POST",
            "/v1/chat/completions",
            chat.answer,
            "The assistant's next message.",
            request=ChatRequest,
            response=ChatCompletion,
            streams=True,
            events=(ChatCompletionChunk,),
            aliases=("/chat/completions",),
        ),
        ApiRoute(
            "POST",
            "/v1/completions",
            completions.answer,
            "Text that continues a prompt.",
            request=CompletionRequest,
            response=Completion,
            streams=True,
            events=(CompletionChunk,),
            aliases=("/completions",),
        ),
    ]


def _models(probes: Probes) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET",
            "/v1/models",
            probes.models,
            "All names that are served.",
            None,
            ModelList,
            aliases=("/models",),
        ),
        ApiRoute("GET", "/v1/models/{model:path}", probes.model, "One served name.", None, Model),
    ]


def _probes(probes: Probes) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET", "/health", probes.health, "Whether steps finish.", None, Health, is_probe=True
        ),
        ApiRoute(
            "GET",
            "/ready",
            probes.ready,
            "Whether requests are welcome.",
            None,
            Readiness,
            is_probe=True,
        ),
        ApiRoute("GET", "/metrics", probes.metrics, "Prometheus text."),
        ApiRoute("GET", "/version", probes.version, "The version of Quickstep.", None, Version),
        ApiRoute("GET", "/ping", probes.ping, "The process answers.", None, Pong, is_probe=True),
        ApiRoute("POST", "/ping", probes.ping, "The process answers.", None, Pong, is_probe=True),
    ]
