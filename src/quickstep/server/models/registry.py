"""`ModelRegistry`: the models of a server by name.

Routes get the model of a request here and keep none, so a model may come and go between requests.
A request waits in `ready` until its model can serve it: with one model that is at once, with
several ones `ResidentModels` loads and unloads them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

import msgspec

from quickstep.engine.interface import ServedEngine
from quickstep.errors import RequestError
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.models.residents import ModelEntry, ResidentModels, SeveralModels
from quickstep.server.models.served_model import ServedModel
from quickstep.server.models.server_state import ServerState
from quickstep.server.options import ServerOptions

_LISTED_NAMES = 20


class _NamedModel(msgspec.Struct, frozen=True):
    """The field by which a body of any API names its model."""

    model: str | None = None


_NAMED_MODEL = msgspec.json.Decoder(_NamedModel)


class _TimeLimit(msgspec.Struct, frozen=True):
    """The field by which a body limits how long its request may take."""

    timeout_s: float | None = None


_TIME_LIMIT = msgspec.json.Decoder(_TimeLimit)


class ModelRegistry:
    """The models, the first of which serves requests that name none.

    Attributes:
        residents: What loads and unloads them; None for a server with one model that stays.
    """

    def __init__(self, server: ServerState, models: Sequence[ServedModel]) -> None:
        self.server = server
        self.residents: ResidentModels | None = None
        self._models = list(models)
        self._followers: list[Callable[[ServedModel], Awaitable[None]]] = []

    @classmethod
    def of_one(cls, engine: ServedEngine, options: ServerOptions) -> ModelRegistry:
        """The registry of a server with one engine, which is open. Raises ConfigError."""
        server = ServerState.of(options)
        return cls(server, [ServedModel.of(engine, options, server)])

    @classmethod
    def of_several(cls, engine: ServedEngine, several: SeveralModels) -> ModelRegistry:
        """The registry of models that are loaded when they are needed, except the first one, whose
        engine is open. Raises ConfigError.
        """
        registry = cls.of_one(engine, several.entries[0].options)
        registry.residents = ResidentModels(several, registry.default, registry._add)
        return registry

    def follow(self, opened: Callable[[ServedModel], Awaitable[None]]) -> None:
        """Let `opened` be called for each model that is loaded for the first time from now on."""
        self._followers.append(opened)

    async def _add(self, model: ServedModel) -> None:
        for opened in self._followers:
            await opened(model)
        self._models.append(model)

    def __iter__(self) -> Iterator[ServedModel]:
        """The models that have been loaded, if some of them sleep."""
        return iter(tuple(self._models))

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none, and of routes whose requests cannot name one."""
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of models, without those of adapters."""
        if self.residents is not None:
            return tuple(name for entry in self.residents.entries for name in entry.names)
        return tuple(name for model in self._models for name in model.names)

    def find(self, name: str | None, optional_tag: str = "") -> ServedModel:
        """The model of a name, which may end with a tag that the model's own name lacks.

        Raises:
            RequestError: No model has the name: 404; or it has not been loaded yet: 503.
        """
        if name is None:
            return self.default
        for known in dict.fromkeys((name.removesuffix(optional_tag), name)):
            # a model's own name comes before that of another one's adapter
            owners = [model for model in self._models if known in model.names]
            owners = owners or [model for model in self._models if known in model.adapters]
            if owners:
                return owners[0]
        entry = self.entry(name, optional_tag)
        raise RequestError(
            f"the model {entry.name} is not loaded; POST /v1/models/load loads it",
            status=503,
            param="model",
            code="model_not_ready",
        )

    def entry(self, name: str | None, optional_tag: str = "") -> ModelEntry:
        """The model of a name, loaded or not. Raises RequestError if there is none: 404."""
        if self.residents is not None:
            if name is None:
                return self.residents.entries[0]
            for known in dict.fromkeys((name.removesuffix(optional_tag), name)):
                if (entry := self.residents.entry(known)) is not None:
                    return entry
        raise self._unknown(name or "")

    def _unknown(self, name: str) -> RouteNotFound:
        adapters = [name for model in self._models for name in model.adapters.names]
        all_names = (*self.names, *adapters)
        listed = ", ".join(all_names[:_LISTED_NAMES]) + ", ..." * (len(all_names) > _LISTED_NAMES)
        near: Sequence[str] = ()
        if len(all_names) > 1:
            from difflib import get_close_matches  # few requests have a wrong name

            near = get_close_matches(name[:100], all_names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return RouteNotFound(
            f"the model {name[:100]!r} does not exist; this server has {listed}{hint}",
            param="model",
            code="model_not_found",
        )

    def keep(self, name: str, idle_s: float | None, optional_tag: str = "") -> None:
        """Unload a model after so long without requests; None for never. Of several models only.
        Raises RequestError.
        """
        if self.residents is not None:
            self.residents.keep(self.entry(name, optional_tag), idle_s)

    async def ready(
        self,
        name: str | None,
        caller: str,
        optional_tag: str = "",
        wait_s: float | None = None,
    ) -> ServedModel:
        """The model of a name, once it can serve requests, which may take `wait_s` seconds.

        Raises:
            RequestError: No model has the name, it was not ready in time, or too many requests
                wait.
            EngineError: It could not be loaded.
        """
        if self.residents is None:
            return self.find(name, optional_tag)
        return await self.residents.ready(self.entry(name, optional_tag), wait_s, caller)

    async def of_body(self, body: bytes, caller: str, optional_tag: str = "") -> ServedModel:
        """The model that a JSON body names, once it can serve requests. A body whose name is no
        text gets the default model, whose parser then says what is wrong with it.

        Raises:
            RequestError: No model has the name, it was not ready within the time limit, or too
                many requests wait.
            EngineError: It could not be loaded.
        """
        lane = self.server.lanes.of(caller)
        name = await lane.do(len(body), lambda: _model_name(body))
        if self.residents is None:
            return self.find(name, optional_tag)
        wait_s = await lane.do(len(body), lambda: _timeout_s(body))
        return await self.ready(name, caller, optional_tag, self.server.deadlines.of(wait_s))


def _model_name(body: bytes) -> str | None:
    try:
        return _NAMED_MODEL.decode(body).model
    except (msgspec.DecodeError, RecursionError):
        return None


def _timeout_s(body: bytes) -> float | None:
    """The time limit of a body; None without one, and for one that its parser will refuse."""
    try:
        limit_s = _TIME_LIMIT.decode(body).timeout_s
    except (msgspec.DecodeError, RecursionError):
        return None
    return limit_s if limit_s is not None and limit_s > 0 else None
