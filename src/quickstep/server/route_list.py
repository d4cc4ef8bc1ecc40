"""All routes of the API."""

from __future__ import annotations

from quickstep.server.api_route import ApiRoute
from quickstep.server.chat import Chat
from quickstep.server.choices import ChoicesSurface
from quickstep.server.completions import Completions
from quickstep.server.metrics import Metrics
from quickstep.server.options import ServerOptions
from quickstep.server.probes import Probes
from quickstep.server.routes import GeneratingRoute
from quickstep.server.schemas import ChatRequest, CompletionRequest
from quickstep.server.surface import Served

__all__ = ["api_routes"]


def api_routes(served: Served, metrics: Metrics, options: ServerOptions) -> list[ApiRoute]:
    """Every route, in the order of the reference."""
    return [
        *_generating(served, metrics),
        *_models_and_probes(Probes(served, metrics, options.stall_s)),
    ]


def _generating(served: Served, metrics: Metrics) -> list[ApiRoute]:
    chat = GeneratingRoute(ChoicesSurface(Chat()), served, metrics)
    completions = GeneratingRoute(ChoicesSurface(Completions()), served, metrics)
    return [
        ApiRoute(
            "POST",
            "/v1/chat/completions",
            chat.answer,
            "The assistant's next message.",
            request=ChatRequest,
            streams=True,
        ),
        ApiRoute(
            "POST",
            "/v1/completions",
            completions.answer,
            "Text that continues a prompt.",
            request=CompletionRequest,
            streams=True,
        ),
    ]


def _models_and_probes(probes: Probes) -> list[ApiRoute]:
    return [
        ApiRoute("GET", "/v1/models", probes.models, "All names that are served."),
        ApiRoute("GET", "/v1/models/{model:path}", probes.model, "One served name."),
        ApiRoute("GET", "/health", probes.health, "Whether steps finish.", is_probe=True),
        ApiRoute("GET", "/ready", probes.ready, "Whether requests are welcome.", is_probe=True),
        ApiRoute("GET", "/metrics", probes.metrics, "Prometheus text."),
        ApiRoute("GET", "/version", probes.version, "The version of Quickstep."),
        ApiRoute("GET", "/ping", probes.ping, "The process answers.", is_probe=True),
        ApiRoute("POST", "/ping", probes.ping, "The process answers.", is_probe=True),
    ]
