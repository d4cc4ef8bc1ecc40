"""Loading and unloading one of several models over HTTP, for operators: llama.cpp's routes, and
vLLM's `/sleep`, `/wake_up` and `/is_sleeping`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.core.model_residency import ModelState
from quickstep.errors import RequestError
from quickstep.server.fields.decode import decode_values
from quickstep.server.fields.field_classes import effect
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.residents import ModelEntry, ResidentModels, StateName


class ModelToChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/models/load` and `/v1/models/unload`."""

    model: Annotated[str, effect("The model, by one of its names.")]


class ChangedModel(msgspec.Struct, frozen=True):
    """A model is loaded, or will be unloaded as soon as it has no requests (`draining`)."""

    success: Literal[True]
    model: str
    state: StateName


class SleepQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of vLLM's routes. Both levels end the engine's process, which frees its memory."""

    level: Literal[1, 2] = 1
    model: str | None = None


class SleepState(msgspec.Struct, frozen=True):
    """Whether the model is not in memory."""

    is_sleeping: bool


class ModelRoutes:
    """The routes, of which all that change something need an admin key."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    def routes(self) -> list[ApiRoute]:
        """Load, unload, and vLLM's names for both."""
        return [
            ApiRoute(
                "POST",
                "/v1/models/load",
                self.load,
                "Load one of several models; returns when it is ready.",
                request=ModelToChange,
                response=ChangedModel,
                aliases=("/models/load",),
                needs_admin=True,
            ),
            ApiRoute(
                "POST",
                "/v1/models/unload",
                self.unload,
                "Give the memory of a model back as soon as it has no requests.",
                request=ModelToChange,
                response=ChangedModel,
                aliases=("/models/unload",),
                needs_admin=True,
            ),
            ApiRoute(
                "POST",
                "/sleep",
                self.sleep,
                "The same as unload, as in vLLM.",
                response=ChangedModel,
                query=SleepQuery,
                needs_admin=True,
            ),
            ApiRoute(
                "POST",
                "/wake_up",
                self.wake_up,
                "The same as load, as in vLLM.",
                response=ChangedModel,
                query=SleepQuery,
                needs_admin=True,
            ),
            ApiRoute(
                "GET",
                "/is_sleeping",
                self.is_sleeping,
                "Whether a model is not in memory.",
                response=SleepState,
                query=SleepQuery,
            ),
        ]

    async def load(self, request: Request) -> Response:
        """Load a model. Raises RequestError, EngineError."""
        return await self._load(self._body(request))

    async def unload(self, request: Request) -> Response:
        """Unload a model. Raises RequestError."""
        return self._unload(self._body(request))

    async def sleep(self, request: Request) -> Response:
        """Unload a model. Raises RequestError."""
        return self._unload(decode_values(request.query_params, SleepQuery).model)

    async def wake_up(self, request: Request) -> Response:
        """Load a model. Raises RequestError, EngineError."""
        return await self._load(decode_values(request.query_params, SleepQuery).model)

    async def is_sleeping(self, request: Request) -> Response:
        """Report on a model. Raises RequestError."""
        name = decode_values(request.query_params, SleepQuery).model
        residents = self._models.residents
        if residents is None:
            self._models.find(name)
            return json_response(SleepState(False))
        state = residents.state(self._models.entry(name))
        return json_response(SleepState(state in (ModelState.ABSENT, ModelState.ASLEEP)))

    def _body(self, request: Request) -> str:
        reader = FieldReader(self._models.server.field_rules)
        name = reader.decode(body_of(request), ModelToChange).model
        report_ignored(request, reader.ignored)
        return name

    async def _load(self, name: str | None) -> Response:
        if self._models.residents is None:
            return json_response(ChangedModel(True, self._models.find(name).name, "ready"))
        entry = self._models.entry(name)
        await self._models.residents.load(entry)
        return json_response(ChangedModel(True, entry.name, "ready"))

    def _unload(self, name: str | None) -> Response:
        residents, entry = self._resident(name)
        residents.unload(entry)
        return json_response(ChangedModel(True, entry.name, residents.state(entry).value))

    def _resident(self, name: str | None) -> tuple[ResidentModels, ModelEntry]:
        residents = self._models.residents
        if residents is None:
            self._models.find(name)  # an unknown name is that first
            raise RequestError(
                "the only model of this server stays in memory; start it with --model-idle-s or "
                "with several models",
                param="model",
            )
        return residents, self._models.entry(name)
