"""`ModelResidency`: which models of a server are in memory, within one budget of bytes.

It is to models what `resources.adapter_slots` is to adapters. Requests for a model that is not
ready queue with it. A model that holds requests is never unloaded. Of the idle ones the least
recently used leaves first. A model whose first request has waited for `max_overtake_s` gets its
turn: the least used model takes no new requests until it has none, and is then unloaded; meanwhile
no other model is loaded.

The caller executes the steps of `plan` and reports their ends. No clock: time is an argument.

    ABSENT ─> LOADING ─> READY <─> DRAINING ─> ASLEEP ─> LOADING
                  └────> FAILED ─> LOADING (a new request tries again)
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Set

import msgspec

MAX_OVERTAKE_S = 10.0


class ModelState(enum.Enum):
    """Where a model is. ASLEEP: it was loaded before, and its memory was given back."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    DRAINING = "draining"
    FAILED = "failed"


class ResidencyStep(msgspec.Struct, frozen=True):
    """What the caller is to begin: the loading of a model, or else its unloading."""

    model: str
    is_load: bool


class _Waiting(msgspec.Struct, frozen=True):
    """A request in the queue of a model."""

    request: int
    since_s: float


class _Model(msgspec.Struct):
    """One model. Owned by `ModelResidency`.

    Attributes:
        held: Requests that use it.
        is_unloading: The caller unloads it now.
        preloads: It is loaded although no request waits for it.
        unload_wanted: An operator or a client wants its memory back.
        idle_s: Unloaded after so long without requests; None for never.
    """

    num_bytes: int
    is_pinned: bool
    idle_s: float | None
    state: ModelState = ModelState.ABSENT
    held: set[int] = msgspec.field(default_factory=set)
    waiting: list[_Waiting] = msgspec.field(default_factory=list)
    used_s: float = 0.0
    is_unloading: bool = False
    preloads: bool = False
    unload_wanted: bool = False

    @property
    def takes_memory(self) -> bool:
        return self.state in (ModelState.LOADING, ModelState.READY, ModelState.DRAINING)


class ModelResidency:
    """The states of the models, which this object owns. Requests are numbers of the caller's."""

    def __init__(self, budget_bytes: int, max_overtake_s: float = MAX_OVERTAKE_S) -> None:
        self._budget_bytes = budget_bytes
        self._max_overtake_s = max_overtake_s
        self._models: dict[str, _Model] = {}

    @property
    def budget_bytes(self) -> int:
        """What all models in memory may take together."""
        return self._budget_bytes

    def add(
        self, name: str, num_bytes: int, is_pinned: bool = False, idle_s: float | None = None
    ) -> None:
        """Add a model that is not in memory. A pinned one is never unloaded."""
        self._models[name] = _Model(num_bytes, is_pinned, idle_s)

    def state(self, name: str) -> ModelState:
        """The state of a model."""
        return self._models[name].state

    def num_bytes(self, name: str) -> int:
        """What the model takes in memory."""
        return self._models[name].num_bytes

    def is_pinned(self, name: str) -> bool:
        """Whether the model is never unloaded."""
        return self._models[name].is_pinned

    def idle_s(self, name: str) -> float | None:
        """After how long without requests the model is unloaded; None for never."""
        return self._models[name].idle_s

    def num_waiting(self, name: str) -> int:
        """Requests in the queue of a model."""
        return len(self._models[name].waiting)

    def num_held(self, name: str) -> int:
        """Requests that use a model."""
        return len(self._models[name].held)

    def used_s(self, name: str) -> float:
        """When the model's last request came or ended."""
        return self._models[name].used_s

    def free_for(self, name: str) -> int:
        """The most bytes that the model could ever have: the budget without pinned others."""
        pinned = sum(
            model.num_bytes
            for other, model in self._models.items()
            if model.is_pinned and other != name
        )
        return self._budget_bytes - pinned

    def set_bytes(self, name: str, num_bytes: int) -> None:
        """Correct the size of a model. If all models then have more than the budget, `plan` unloads
        idle ones.
        """
        self._models[name].num_bytes = num_bytes

    def set_idle_s(self, name: str, idle_s: float | None) -> None:
        """Change after how long without requests the model is unloaded; None for never."""
        self._models[name].idle_s = idle_s

    def request(self, name: str, request: int, now_s: float) -> bool:
        """A request for a model comes: True if it may use the model now, else it is queued."""
        model = self._models[name]
        model.used_s = now_s
        model.unload_wanted = False
        if model.state is ModelState.READY and not model.waiting:
            model.held.add(request)
            return True
        if model.state is ModelState.FAILED:
            model.state = ModelState.ABSENT
        model.waiting.append(_Waiting(request, now_s))
        return False

    def end(self, name: str, request: int, now_s: float) -> None:
        """A request has ended, or waits no longer."""
        model = self._models[name]
        model.waiting = [waiting for waiting in model.waiting if waiting.request != request]
        if request in model.held:
            model.held.remove(request)
            model.used_s = now_s

    def unload(self, name: str) -> bool:
        """Unload a model as soon as it has no requests. Returns False for a pinned one."""
        model = self._models[name]
        model.unload_wanted = not model.is_pinned
        return model.unload_wanted

    def preload(self, num_models: int) -> None:
        """Let `plan` load the pinned models, and the first of the others up to `num_models` in all,
        as far as there is room.
        """
        free, num_left = self._free_bytes(), num_models
        in_order = sorted(self._models.values(), key=lambda model: not model.is_pinned)
        for model in in_order:
            num_left -= model.takes_memory
        for model in in_order:
            if model.takes_memory or not (model.is_pinned or num_left > 0):
                continue
            if model.num_bytes <= free:
                model.preloads = True
                free -= model.num_bytes
                num_left -= 1

    def begin_loaded(self, name: str) -> None:
        """A model was loaded before this object knew of it; `loaded` follows."""
        self._models[name].state = ModelState.LOADING

    def loaded(self, name: str, now_s: float) -> list[int]:
        """The loading has ended. Returns the requests that may now use the model, by arrival."""
        model = self._models[name]
        model.state, model.is_unloading = ModelState.READY, False
        model.used_s = now_s
        return self._admit(model)

    def failed(self, name: str) -> list[int]:
        """A model could not be loaded, or its engine was given up. Returns the requests that
        waited, which have to be refused.
        """
        model = self._models[name]
        model.state = ModelState.FAILED
        refused = [waiting.request for waiting in model.waiting]
        model.waiting, model.is_unloading = [], False
        return refused

    def unloaded(self, name: str) -> None:
        """The unloading has ended; the model's memory is free."""
        model = self._models[name]
        model.state = ModelState.ASLEEP
        model.is_unloading = model.unload_wanted = False

    def _admit(self, model: _Model) -> list[int]:
        admitted = [waiting.request for waiting in model.waiting]
        model.held.update(admitted)
        model.waiting = []
        return admitted

    def plan(
        self, now_s: float, busy: Set[str] = frozenset()
    ) -> tuple[list[ResidencyStep], list[int]]:
        """What to begin now, and which requests may now use their models after all. Engines of
        `busy` models have requests that are not known here.
        """
        steps: list[ResidencyStep] = []
        starved = self._starved(now_s)
        victim = self._to_drain(starved)
        admitted = self._set_draining(victim)
        for name, model in self._models.items():
            idle = model.idle_s is not None and now_s - model.used_s >= model.idle_s
            if (idle or model.unload_wanted or name == victim) and self._is_idle(name, busy):
                steps.append(self._begin_unload(name))
        over = -self._free_bytes() - self._leaving_bytes()
        steps += [self._begin_unload(name) for name in self._idle_for(over, busy)]
        order = sorted(self._waiting(), key=lambda name: self._models[name].waiting[0].since_s)
        order += [name for name, model in self._models.items() if model.preloads]
        for name in order if starved is None else [starved]:
            steps += self._make_room(name, busy)
        return steps, admitted

    def next_s(self) -> float | None:
        """When `plan` may have something to do although nothing happens; None for never."""
        times = [
            self._models[name].waiting[0].since_s + self._max_overtake_s for name in self._waiting()
        ]
        times += [
            model.used_s + model.idle_s
            for model in self._models.values()
            if model.idle_s is not None
            and model.state is ModelState.READY
            and not (model.held or model.is_pinned)
        ]
        return min(times, default=None)

    def _waiting(self) -> list[str]:
        """The models that have to be loaded."""
        absent = (ModelState.ABSENT, ModelState.ASLEEP)
        return [n for n, model in self._models.items() if model.waiting and model.state in absent]

    def _starved(self, now_s: float) -> str | None:
        """The model that has waited for longest, if that is too long."""
        times = {name: self._models[name].waiting[0].since_s for name in self._waiting()}
        name = min(times, key=times.__getitem__, default=None)
        if name is None or now_s - times[name] < self._max_overtake_s:
            return None
        return name

    def _to_drain(self, starved: str | None) -> str | None:
        """The model that has to leave for a starved one; None if there is room without that."""
        if starved is None:
            return None
        if self._free_bytes() + self._leaving_bytes() >= self._models[starved].num_bytes:
            return None
        draining = [n for n, m in self._models.items() if m.state is ModelState.DRAINING]
        draining = [name for name in draining if not self._models[name].is_unloading]
        candidates = draining or [
            name
            for name, model in self._models.items()
            if model.state is ModelState.READY and not model.is_pinned
        ]
        return min(
            candidates,
            key=lambda name: (len(self._models[name].held), self._models[name].used_s),
            default=None,
        )

    def _set_draining(self, victim: str | None) -> list[int]:
        """Let `victim` take no new requests, and every other model that is not being unloaded take
        them again. Returns the requests that these admit.
        """
        admitted: list[int] = []
        for name, model in self._models.items():
            if name == victim:
                model.state = ModelState.DRAINING
            elif model.state is ModelState.DRAINING and not model.is_unloading:
                model.state = ModelState.READY
                admitted += self._admit(model)
        return admitted

    def _make_room(self, name: str, busy: Set[str]) -> Sequence[ResidencyStep]:
        """Load a model if it fits; else unload idle ones, if that makes it fit."""
        model = self._models[name]
        missing = model.num_bytes - self._free_bytes()
        if missing <= 0:
            model.state, model.preloads = ModelState.LOADING, False
            return [ResidencyStep(name, is_load=True)]
        missing -= self._leaving_bytes()
        leaving = self._idle_for(missing, busy)
        if sum(self._models[other].num_bytes for other in leaving) < missing:
            return []
        return [self._begin_unload(other) for other in leaving]

    def _idle_for(self, missing: int, busy: Set[str]) -> list[str]:
        """Idle models that have so many bytes together, the least recently used ones; all of them
        if they have fewer.
        """
        idle = sorted(
            (other for other in self._models if self._is_idle(other, busy)),
            key=lambda other: self._models[other].used_s,
        )
        leaving: list[str] = []
        for other in idle:
            if missing <= 0:
                break
            leaving.append(other)
            missing -= self._models[other].num_bytes
        for other in reversed(leaving.copy()):  # those that are not needed stay
            if missing + self._models[other].num_bytes <= 0:
                leaving.remove(other)
                missing += self._models[other].num_bytes
        return leaving

    def _leaving_bytes(self) -> int:
        """Bytes of the models that are being unloaded."""
        return sum(model.num_bytes for model in self._models.values() if model.is_unloading)

    def _is_idle(self, name: str, busy: Set[str]) -> bool:
        model = self._models[name]
        return (
            model.state in (ModelState.READY, ModelState.DRAINING)
            and not (model.held or model.is_pinned or model.is_unloading)
            and (not model.waiting or model.state is ModelState.DRAINING)
            and name not in busy
        )

    def _begin_unload(self, name: str) -> ResidencyStep:
        model = self._models[name]
        model.state, model.is_unloading = ModelState.DRAINING, True
        return ResidencyStep(name, is_load=False)

    def _free_bytes(self) -> int:
        taken = sum(model.num_bytes for model in self._models.values() if model.takes_memory)
        return self._budget_bytes - taken
