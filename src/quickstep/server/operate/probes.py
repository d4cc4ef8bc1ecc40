"""The routes that do not generate: models, health, readiness, metrics, version.

`/health` is about progress: it fails while the engine restarts, when it has failed for good, and
when work is pending and no step has finished for `stall_s`; requests that are paused for their
readers are not pending. `/ready` also fails when the engine's process has work and has not reported
for a quarter of `stall_s`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quickstep import __version__
from quickstep.core.accounting import KVTierStats
from quickstep.core.model_residency import ModelState
from quickstep.engine.stats import EngineState, EngineStats, ReplicaStats
from quickstep.server.http.errors import json_response
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.residents import ModelEntry, ModelStatus, ResidentModels, StateName
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.response_types import (
    ModelCard,
    ModelCardStatus,
    ModelList,
    RopeScaling,
)
from quickstep.server.operate.metrics import CONTENT_TYPE, ServerMetrics

# Of `stall_s`, after which the process is replaced; it reports ten times a second.
_SILENT_FRACTION = 0.25


class ReplicaHealth(msgspec.Struct, frozen=True):
    """One of several engines with the same model; it gets requests while it is `up`."""

    replica: int
    state: Literal["up", "draining", "down"]
    engine: str
    failure: str | None
    process_id: int | None
    num_restarts: int
    num_requests: int
    num_running: int
    num_waiting: int
    seconds_without_progress: float
    role: Literal["", "prefill", "decode"] = ""
    address: str = ""


class Health(msgspec.Struct, frozen=True):
    """The engine's progress; anything but `ok` comes with status 503. Of several replicas it is
    `ok` while one serves and none is stalled. `exchange_seconds` of all steps so far were spent
    waiting for the other ranks of an engine, and for `bubble_seconds` stages of its pipeline waited
    for others with steps in flight (their mean). Of several models the figures are the first one's;
    it is `ok` while none is stalled and one can be used, and `models` has the state of each.
    """

    status: Literal["ok", "stalled", "restarting", "failed"]
    engine: str
    failure: str | None
    num_restarts: int
    num_requests: int
    num_running: int
    num_waiting: int
    num_paused: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_steps: int
    seconds_without_progress: float
    replicas: tuple[ReplicaHealth, ...] = ()
    num_moved_requests: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    exchange_seconds: float = 0.0
    bubble_seconds: float = 0.0
    num_handovers: int = 0
    kv_store: KVTierStats | None = None
    models: dict[str, StateName] | UnsetType = UNSET


class Readiness(msgspec.Struct, frozen=True):
    """Whether the server accepts new requests; false comes with status 503."""

    ready: bool


class Version(msgspec.Struct, frozen=True):
    """The version of Quickstep."""

    version: str


class Pong(msgspec.Struct, frozen=True):
    """An empty object: the process answers."""


class Probes:
    """The endpoints of health, readiness, metrics, version and models."""

    def __init__(self, models: ModelRegistry, metrics: ServerMetrics, stall_s: float) -> None:
        self._models = models
        self._metrics = metrics
        self._stall_s = stall_s
        self._created = int(time.time())

    async def health(self, _: Request) -> Response:
        """200 while steps finish or nothing is pending, else 503."""
        stats = self._models.default.engine.stats()
        load = stats.scheduler
        status = self._status_of_all()
        state = Health(
            status=status,
            engine=stats.state.value,
            failure=stats.failure or None,
            num_restarts=stats.num_restarts,
            num_requests=stats.num_requests,
            num_running=load.num_running,
            num_waiting=load.num_waiting + load.num_preempted,
            num_paused=load.num_paused,
            num_used_blocks=load.blocks.num_used,
            num_cached_blocks=load.blocks.num_cached,
            num_free_blocks=load.blocks.num_free,
            num_steps=load.totals.num_steps,
            seconds_without_progress=round(stats.stalled_s, 3),
            replicas=tuple(map(_replica, stats.replicas)),
            num_moved_requests=stats.num_moves,
            tensor_parallel_size=stats.tensor_parallel_size,
            pipeline_parallel_size=stats.pipeline_parallel_size,
            exchange_seconds=round(load.totals.exchange_s, 3),
            bubble_seconds=round(load.totals.bubble_s, 3),
            num_handovers=stats.num_handovers,
            kv_store=load.kv_tier,
            models=self._model_states(),
        )
        return json_response(state, 200 if status == "ok" else 503)

    def _status(self, stats: EngineStats) -> Literal["ok", "stalled", "restarting", "failed"]:
        if stats.state is EngineState.RESTARTING:
            return "restarting"
        if stats.failure:
            return "failed"
        return "stalled" if stats.stalled_s > self._stall_s else "ok"

    def _status_of_all(self) -> Literal["ok", "stalled", "restarting", "failed"]:
        """The status of the model; of several, `stalled` if one is, else `ok` if one is."""
        residents = self._models.residents
        if residents is None:
            return self._status(self._models.default.engine.stats())
        found = {self._status(model.engine.stats()) for model in self._models}
        if "stalled" in found:
            return "stalled"
        return "failed" if residents.is_failed else "ok"

    def _model_states(self) -> dict[str, StateName] | UnsetType:
        residents = self._models.residents
        if residents is None:
            return UNSET
        return {status.name: status.state.value for status in residents.status()}

    async def ready(self, _: Request) -> Response:
        """200 while the server accepts new requests, else 503."""
        if self._models.residents is not None:
            is_ok = self._status_of_all() == "ok"
            return json_response(Readiness(is_ok), 200 if is_ok else 503)
        stats = self._models.default.engine.stats()
        silent = stats.silent_s > _SILENT_FRACTION * self._stall_s
        ready = stats.state is EngineState.RUNNING and self._status(stats) == "ok" and not silent
        return json_response(Readiness(ready), 200 if ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Prometheus text."""
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def version(self, _: Request) -> Response:
        """The version of Quickstep."""
        return json_response(Version(__version__))

    async def ping(self, _: Request) -> Response:
        """The process answers."""
        return json_response(Pong())

    async def models(self, _: Request) -> Response:
        """All names that are served; an adapter has a parent."""
        data = [
            self._described(name, model)
            for model in self._models
            for name in (*model.names, *model.adapters.names)
        ]
        if self._models.residents is not None:
            data = list(self._resident_cards(self._models.residents))
        return json_response(ModelList("list", data))

    def _resident_cards(self, residents: ResidentModels) -> Iterator[ModelCard]:
        """The names of all of several models, loaded or not."""
        opened = {model.name: model for model in self._models}
        for status, entry in zip(residents.status(), residents.entries, strict=True):
            model = opened.get(entry.name)
            if model is None:
                names = (*entry.names, *entry.options.adapter_names)
                cards = [self._unopened(name, entry) for name in names]
            else:
                names = (*model.names, *model.adapters.names)
                cards = [self._described(name, model) for name in names]
            for card in cards:
                yield replace(card, status=_card_status(status))

    def _unopened(self, name: str, entry: ModelEntry) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=self._created,
            owned_by="quickstep",
            root=entry.name,
            parent=None if name in entry.names else entry.name,
            max_model_len=None,
            rope_scaling=None,
        )

    async def model(self, request: Request) -> Response:
        """One model, or 404."""
        name: str = request.path_params["model"]
        if self._models.residents is not None:
            self._models.entry(name)
            cards = self._resident_cards(self._models.residents)
            return json_response(next(card for card in cards if card.id == name))
        return json_response(self._described(name, self._models.find(name)))

    def _described(self, name: str, model: ServedModel) -> ModelCard:
        engine = model.engine
        scaling = None if engine.memory_plan is None else engine.memory_plan.long_context
        return ModelCard(
            id=name,
            object="model",
            created=self._created,
            owned_by="quickstep",
            root=engine.model_name,
            parent=None if name in model.names else model.name,
            max_model_len=engine.max_model_len,
            rope_scaling=None
            if scaling is None
            else RopeScaling(
                scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings
            ),
        )


def _card_status(status: ModelStatus) -> ModelCardStatus:
    state = status.state
    is_loaded = state in (ModelState.READY, ModelState.DRAINING)
    return ModelCardStatus(
        value="loaded" if is_loaded else "loading" if state is ModelState.LOADING else "unloaded",
        state=state.value,
        size_bytes=status.num_bytes,
        is_pinned=status.is_pinned,
        num_waiting=status.num_waiting,
        failed=state is ModelState.FAILED,
        failure=status.failure or None,
    )


def _replica(stats: ReplicaStats) -> ReplicaHealth:
    return ReplicaHealth(
        replica=stats.replica,
        state="draining" if stats.is_draining else "up" if stats.is_up else "down",
        engine=stats.state.value,
        failure=stats.failure or None,
        process_id=stats.process_id,
        num_restarts=stats.num_restarts,
        num_requests=stats.num_requests,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        seconds_without_progress=round(stats.stalled_s, 3),
        role=stats.role,
        address=stats.address,
    )
