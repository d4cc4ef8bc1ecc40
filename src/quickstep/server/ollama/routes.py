"""Ollama's routes, and the endpoints about the models: names, abilities, version.

A name without a tag means `:latest`, so each served name has both spellings. Routes that would
change the set of models are refused: the operator chooses it.
"""

from __future__ import annotations

import hashlib
import time
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from quickstep.core.model_residency import ModelState
from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import Observers
from quickstep.server.generate.prompts import infill_markers
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import json_response, ollama_shape
from quickstep.server.http.event_stream import NDJSON
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.ollama.endpoint import (
    OllamaChat,
    OllamaEmbedding,
    OllamaGenerate,
    OllamaRoute,
    rfc3339,
)
from quickstep.server.ollama.request import LATEST, known_model
from quickstep.server.ollama.request_types import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from quickstep.server.ollama.response_types import (
    OllamaChatResponse,
    OllamaDetails,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaGenerateResponse,
    OllamaModel,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShowResponse,
    OllamaStatus,
    OllamaVersion,
)

# The version of the API; clients require one with the features they use (tools, thinking, ...).
_OLLAMA_VERSION = "0.12.11"
_NEVER = "9999-12-31T23:59:59Z"
_ARCHITECTURE = "quickstep"  # clients look for `<architecture>.context_length`
_PARAMETERS = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
}
Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]

_MANAGING = (
    ("POST", "/api/pull", "pulled"),
    ("POST", "/api/push", "pushed"),
    ("POST", "/api/create", "created"),
    ("POST", "/api/copy", "copied"),
    ("DELETE", "/api/delete", "deleted"),
)


def ollama_routes(registry: ModelRegistry, observers: Observers) -> list[ApiRoute]:
    """The routes of Ollama's API."""
    models = OllamaModelList(registry)
    embedding = OllamaEmbedding(registry, observers)
    return [
        ApiRoute(
            "POST",
            "/api/chat",
            OllamaRoute(OllamaChat(), registry, observers).answer,
            "The assistant's next message, in the format of Ollama.",
            is_repeatable=True,
            request=OllamaChatRequest,
            response=OllamaChatResponse,
            streams=True,
            events=(OllamaChatResponse,),
            stream_type=NDJSON,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/generate",
            OllamaRoute(OllamaGenerate(), registry, observers).answer,
            "The response to a prompt, in the format of Ollama.",
            is_repeatable=True,
            request=OllamaGenerateRequest,
            response=OllamaGenerateResponse,
            streams=True,
            events=(OllamaGenerateResponse,),
            stream_type=NDJSON,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/embed",
            embedding.embed,
            "A vector for each input, in the format of Ollama.",
            is_repeatable=True,
            request=OllamaEmbedRequest,
            response=OllamaEmbedResponse,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/embeddings",
            embedding.embeddings,
            "The vector of one prompt, for older clients of Ollama.",
            is_repeatable=True,
            request=OllamaEmbeddingsRequest,
            response=OllamaEmbeddingsResponse,
            error_shape=ollama_shape,
        ),
        ApiRoute(
            "POST",
            "/api/show",
            models.show,
            "A model's details and capabilities.",
            request=OllamaShowRequest,
            response=OllamaShowResponse,
            error_shape=ollama_shape,
        ),
        *_lists(models),
        *(_refused(method, path, done, registry) for method, path, done in _MANAGING),
    ]


def _lists(models: OllamaModelList) -> list[ApiRoute]:
    return [
        ApiRoute(
            "GET",
            "/api/tags",
            models.tags,
            "All served names, in the format of Ollama.",
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
    ]


def _refused(method: str, path: str, done: str, models: ModelRegistry) -> ApiRoute:
    async def refuse(_: Request) -> Response:
        raise RequestError(
            f"models cannot be {done} here; this server has {', '.join(models.names)}, start "
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


class OllamaModelList:
    """The endpoints that report on the models and the version."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._since = rfc3339(time.time())

    async def version(self, _: Request) -> Response:
        """Return the version of Ollama whose API this is."""
        return json_response(OllamaVersion(_OLLAMA_VERSION))

    async def tags(self, _: Request) -> Response:
        """Return all served names."""
        models = [
            OllamaModel(
                name=name,
                model=name,
                modified_at=self._since,
                size=_num_bytes(model),
                digest=_digest(model),
                details=OllamaDetails(),
            )
            for model in self._models
            for name in map(_tagged, model.names)
        ]
        return json_response(OllamaModels(models))

    async def running(self, _: Request) -> Response:
        """Return the names of the models in memory, and until when they stay without requests."""
        expiries = self._expiries()
        models = [
            OllamaRunningModel(
                name=name,
                model=name,
                size=_num_bytes(model),
                digest=_digest(model),
                details=OllamaDetails(),
                expires_at=expiries[model.name],
                size_vram=0,
                context_length=model.engine.max_model_len,
            )
            for model in self._models
            if model.name in expiries
            for name in map(_tagged, model.names)
        ]
        return json_response(OllamaRunningModels(models))

    def _expiries(self) -> dict[str, str]:
        """When each model in memory leaves it, if no request comes."""
        residents = self._models.residents
        if residents is None:
            return {model.name: _NEVER for model in self._models}
        return {
            status.name: _NEVER if status.left_s is None else rfc3339(time.time() + status.left_s)
            for status in residents.status()
            if status.state in (ModelState.READY, ModelState.DRAINING)
        }

    async def show(self, request: Request) -> Response:
        """Return the details of one model. Raises RequestError."""
        reader = FieldReader(self._models.server.field_rules)
        fields = reader.decode(body_of(request), OllamaShowRequest)
        report_ignored(request, reader.ignored)
        name = fields.model or fields.name
        if name is None:
            raise RequestError("model is missing", param="model")
        model = self._models.find(name, LATEST)
        engine = model.engine
        template = engine.chat_template
        return json_response(
            OllamaShowResponse(
                modelfile=f"FROM {known_model(name, model)}\n",
                parameters="\n".join(
                    f"{_PARAMETERS.get(field, field)} {value:g}"
                    for field, value in engine.default_sampling.items()
                ),
                template="" if template is None else template.source,
                details=OllamaDetails(),
                model_info={
                    "general.architecture": _ARCHITECTURE,
                    "general.basename": engine.model_name,
                    f"{_ARCHITECTURE}.context_length": engine.max_model_len,
                    f"{_ARCHITECTURE}.vocab_size": engine.tokenizer.vocab_size,
                },
                capabilities=_capabilities(model),
                modified_at=self._since,
            )
        )


def _capabilities(model: ServedModel) -> list[Capability]:
    capabilities: list[Capability] = ["completion", "embedding"]
    if model.formats.renders_tools and model.formats.tool_calls is not None:
        capabilities.append("tools")
    if model.formats.reasoning is not None:
        capabilities.append("thinking")
    try:
        infill_markers(model.engine.tokenizer)
    except RequestError:
        return capabilities
    return [*capabilities, "insert"]


def _num_bytes(model: ServedModel) -> int:
    """The bytes of the weights, 0 without a memory plan."""
    plan = model.engine.memory_plan
    rows = () if plan is None else plan.rows
    return sum(row.num_bytes for row in rows if row.label == "weights")


def _digest(model: ServedModel) -> str:
    return hashlib.sha256(model.engine.fingerprint.encode()).hexdigest()


def _tagged(name: str) -> str:
    return name if ":" in name else f"{name}{LATEST}"
