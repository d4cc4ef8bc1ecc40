"""Ollama's routes. What would change the set of models is refused: the operator chooses it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.generate.adapter import Served
from quickstep.server.http.errors import ollama_shape
from quickstep.server.http.event_stream import NDJSON
from quickstep.server.http.route import ApiRoute
from quickstep.server.metrics import Metrics
from quickstep.server.ollama.embedding import OllamaEmbedding
from quickstep.server.ollama.endpoint import OllamaChat, OllamaGenerate, OllamaRoute
from quickstep.server.ollama.models import OllamaModelList
from quickstep.server.ollama.request_types import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quickstep.server.ollama.response_types import (
    OllamaChatAnswer,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaGenerateAnswer,
    OllamaModels,
    OllamaRunningModels,
    OllamaShowAnswer,
    OllamaStatus,
    OllamaVersion,
)

__all__ = ["ollama_routes"]

_MANAGING = (
    ("POST", "/api/pull", "pulled"),
    ("POST", "/api/push", "pushed"),
    ("POST", "/api/create", "created"),
    ("POST", "/api/copy", "copied"),
    ("DELETE", "/api/delete", "deleted"),
)


def ollama_routes(served: Served, metrics: Metrics) -> list[ApiRoute]:
    """All of them."""
    models = OllamaModelList(served)
    embedding = OllamaEmbedding(served, metrics)
    return [
        ApiRoute(
            "POST",
            "/api/chat",
            OllamaRoute(OllamaChat(), served, metrics).answer,
            "The assistant's next message, as Ollama has it.",
            request=OllamaChatRequest,
            response=OllamaChatAnswer,
            streams=True,
            events=(OllamaChatAnswer,),
            stream_type=NDJSON,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/generate",
            OllamaRoute(OllamaGenerate(), served, metrics).answer,
            "The answer to a prompt, as Ollama has it.",
            request=OllamaGenerateRequest,
            response=OllamaGenerateAnswer,
            streams=True,
            events=(OllamaGenerateAnswer,),
            stream_type=NDJSON,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/embed",
            embedding.embed,
            "A vector for each input, as Ollama has it.",
            request=OllamaEmbedRequest,
            response=OllamaEmbedAnswer,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/embeddings",
            embedding.embeddings,
            "The vector of one prompt, as older clients of Ollama ask for it.",
            request=OllamaEmbeddingsRequest,
            response=OllamaEmbeddingsAnswer,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/show",
            models.show,
            "What a model is and can do.",
            request=OllamaShowRequest,
            response=OllamaShowAnswer,
            error_shape=ollama_shape,
        ),
        *_lists(models),
        *(_refused(method, path, done, served) for method, path, done in _MANAGING),
    ]


def _lists(models: OllamaModelList) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET",
            "/api/tags",
            models.tags,
            "All names that are served, as Ollama lists them.",
            response=OllamaModels,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "GET",
            "/api/ps",
            models.running,
            "The models in memory.",
            response=OllamaRunningModels,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "GET",
            "/api/version",
            models.version,
            "The version of Ollama whose API this is.",
            response=OllamaVersion,
            error_shape=ollama_shape,
        ),
        ApiRoute("GET", "/", models.root, "Clients of Ollama ask whether a server is there."),
    ]


def _refused(method: str, path: str, done: str, served: Served) -> ApiRoute:
    async def refuse(_: Request) -> Response:
        raise RequestError(
            f"models cannot be {done} here; this server has {', '.join(served.names)}, start "
            "another one with `quickstep serve --model MODEL` for more"
        )

    return ApiRoute(
        method,
        path,
        refuse,
        f"Refused: models cannot be {done}.",
        response=OllamaStatus,
        error_shape=ollama_shape,
    )
