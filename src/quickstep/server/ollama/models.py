"""What Ollama's API tells of the models: names, what each can do, which version this is.

A name without a tag means `:latest` there, so each served name has both spellings.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import RequestError
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.prompts import infill_markers
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.ollama.request_types import OllamaShowRequest
from quickstep.server.ollama.response_types import (
    OllamaDetails,
    OllamaModel,
    OllamaModels,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShowAnswer,
    OllamaVersion,
)
from quickstep.server.schema.field_reader import FieldReader

__all__ = ["OLLAMA_VERSION", "OllamaModelList", "known_model", "rfc3339"]

# Of the API; tools ask for a version that has what they use (tools, thinking, logprobs).
OLLAMA_VERSION = "0.12.11"
_LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"
_ARCHITECTURE = "quickstep"  # clients look for `<architecture>.context_length`
_PARAMETERS = {
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
}
Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


def known_model(name: str, served: Served) -> str:
    """The served name that a client means. Raises RequestError 404."""
    plain = name.removesuffix(_LATEST)
    return plain if plain in served.names else served.model(name)


def rfc3339(seconds: float) -> str:
    """Seconds since 1970 as a date and time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaModelList:
    """The endpoints that tell."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._since = rfc3339(time.time())

    async def root(self, _: Request) -> Response:
        """Clients ask it whether an Ollama is there."""
        return Response("Ollama is running", media_type="text/plain")

    async def version(self, _: Request) -> Response:
        """The version of the API."""
        return json_response(OllamaVersion(OLLAMA_VERSION))

    async def tags(self, _: Request) -> Response:
        """Every name that is served."""
        models = [
            OllamaModel(
                name=name,
                model=name,
                modified_at=self._since,
                size=self._num_bytes,
                digest=self._digest,
                details=OllamaDetails(),
            )
            for name in map(_tagged, self._served.names)
        ]
        return json_response(OllamaModels(models))

    async def running(self, _: Request) -> Response:
        """The same names: the model is in memory until the server ends."""
        models = [
            OllamaRunningModel(
                name=name,
                model=name,
                size=self._num_bytes,
                digest=self._digest,
                details=OllamaDetails(),
                expires_at=_NEVER,
                size_vram=0,
                context_length=self._served.engine.max_model_len,
            )
            for name in map(_tagged, self._served.names)
        ]
        return json_response(OllamaRunningModels(models))

    async def show(self, request: Request) -> Response:
        """What one of them is. Raises RequestError."""
        reader = FieldReader(self._served.field_rules)
        fields = reader.decode(body_of(request), OllamaShowRequest)
        report_ignored(request, reader.ignored)
        name = fields.model or fields.name
        if name is None:
            raise RequestError("model is missing", param="model")
        served = known_model(name, self._served)
        engine = self._served.engine
        template = engine.chat_template
        return json_response(
            OllamaShowAnswer(
                modelfile=f"FROM {served}\n",
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
                capabilities=self._capabilities(),
                modified_at=self._since,
            )
        )

    def _capabilities(self) -> list[Capability]:
        found: list[Capability] = ["completion", "embedding"]
        formats = self._served.formats
        if formats.renders_tools and formats.tool_calls is not None:
            found.append("tools")
        if formats.reasoning is not None:
            found.append("thinking")
        try:
            infill_markers(self._served.engine.tokenizer)
        except RequestError:
            return found
        return [*found, "insert"]

    @property
    def _num_bytes(self) -> int:
        """Of the weights, 0 where nothing was planned."""
        plan = self._served.engine.memory_plan
        rows = () if plan is None else plan.rows
        return sum(row.num_bytes for row in rows if row.label == "weights")

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self._served.engine.fingerprint.encode()).hexdigest()


def _tagged(name: str) -> str:
    return name if ":" in name else f"{name}{_LATEST}"
