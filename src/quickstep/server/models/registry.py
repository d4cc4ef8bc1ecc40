"""`ModelRegistry`: the models of a server by name.

Routes get the model of a request here and keep none, so a model may come and go between requests.
A request waits in `ready` until its model can serve it: all of today's models are loaded before the
server listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from quickstep.engine.interface import ServedEngine
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.models.served_model import ServedModel
from quickstep.server.models.server_state import ServerState
from quickstep.server.options import ServerOptions

_LISTED_NAMES = 20


class _NamedModel(msgspec.Struct, frozen=True):
    """The field by which a body of any API names its model."""

    model: str | None = None


_NAMED_MODEL = msgspec.json.Decoder(_NamedModel)


class ModelRegistry:
    """The models, the first of which serves requests that name none."""

    def __init__(self, server: ServerState, models: Sequence[ServedModel]) -> None:
        self.server = server
        self._models = tuple(models)

    @classmethod
    def of_one(cls, engine: ServedEngine, options: ServerOptions) -> ModelRegistry:
        """The registry of a server with one engine, which is open. Raises ConfigError."""
        server = ServerState.of(options)
        return cls(server, [ServedModel.of(engine, options, server)])

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none, and of routes whose requests cannot name one."""
        return self._models[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of models, without those of adapters."""
        return tuple(name for model in self._models for name in model.names)

    def find(self, name: str | None, optional_tag: str = "") -> ServedModel:
        """The model of a name, which may end with a tag that the model's own name lacks.

        Raises:
            RequestError: No model has the name: 404.
        """
        if name is None:
            return self.default
        for known in dict.fromkeys((name.removesuffix(optional_tag), name)):
            # a model's own name comes before that of another one's adapter
            owners = [model for model in self._models if known in model.names]
            owners = owners or [model for model in self._models if known in model.adapters]
            if owners:
                return owners[0]
        adapters = [name for model in self._models for name in model.adapters.names]
        all_names = (*self.names, *adapters)
        listed = ", ".join(all_names[:_LISTED_NAMES]) + ", ..." * (len(all_names) > _LISTED_NAMES)
        raise RouteNotFound(
            f"the model {name[:100]!r} does not exist; this server has {listed}",
            param="model",
            code="model_not_found",
        )

    async def ready(self, name: str | None, optional_tag: str = "") -> ServedModel:
        """The model of a name, once it can serve requests. Raises RequestError as `find`."""
        return self.find(name, optional_tag)

    async def of_body(self, body: bytes, caller: str, optional_tag: str = "") -> ServedModel:
        """The model that a JSON body names, once it can serve requests. A body whose name is no
        text gets the default model, whose parser then says what is wrong with it.

        Raises:
            RequestError: No model has the name: 404.
        """
        lane = self.server.lanes.of(caller)
        name = await lane.parse(len(body), lambda: _model_name(body))
        return await self.ready(name, optional_tag)


def _model_name(body: bytes) -> str | None:
    try:
        return _NAMED_MODEL.decode(body).model
    except (msgspec.DecodeError, RecursionError):
        return None
