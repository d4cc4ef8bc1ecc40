"""llama.cpp's slots: `GET /slots`, and `POST /slots/{id_slot}?action=save|restore|erase`.

Our scheduler has no slots of llama.cpp's kind: any request hits any prefix that is cached. A slot
is here what a client means by it, the tokens of the last completion with its `id_slot`; so each key
and each model have slots of their own, and the slots of replicas are numbered together. To save one
is to write the KV of these tokens into a file, to restore one is to make them a cached prefix
again, which the next completion hits, whatever `id_slot` it has.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickstep.engine.interface import ReplicatedEngine
from quickstep.errors import EngineError, RequestError
from quickstep.server.fields.decode import decode_values
from quickstep.server.fields.field_classes import effect
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.body import body_of
from quickstep.server.http.errors import json_response
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.turns import Places
from quickstep.server.llama_cpp.response_types import (
    ErasedSlot,
    LlamaSlot,
    RestoredSlot,
    RestoreTimings,
    SavedSlot,
    SaveTimings,
)
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.usage.api_keys import cache_salt_of

_MAX_SLOTS = 256  # of all keys; the least recently used ones are forgotten
_MAX_ID_DIGITS = 9


class SlotTokens(msgspec.Struct, frozen=True):
    """The tokens of a slot, and what else their KV depends on.

    Attributes:
        model: The name of the model.
        adapter: The adapter's name; "" for none.
        cache_salt: With the part that is the key's.
    """

    model: str
    adapter: str
    cache_salt: str
    token_ids: Sequence[int]

    @classmethod
    def of(cls, model: str, adapter: str, cache_salt: str, token_ids: Sequence[int]) -> SlotTokens:
        """A compact copy."""
        return cls(model, adapter, cache_salt, array("i", token_ids))


class SlotsByKey:
    """The tokens of slots, by key, number and model."""

    def __init__(self) -> None:
        self._slots: OrderedDict[tuple[str, int, str], SlotTokens] = OrderedDict()

    def put(self, caller: str, id_slot: int, tokens: SlotTokens) -> None:
        """A slot has these tokens from now on."""
        key = caller, id_slot, tokens.model
        self._slots[key] = tokens
        self._slots.move_to_end(key)
        if len(self._slots) > _MAX_SLOTS:
            self._slots.popitem(last=False)

    def get(self, caller: str, id_slot: int, model: str | None) -> SlotTokens | None:
        """The tokens of a slot of a model, None for the model that used it last; None if it has
        none.
        """
        found = self._keys(caller, id_slot, model)
        return self._slots[found[-1]] if found else None

    def erase(self, caller: str, id_slot: int, model: str | None) -> int:
        """Forget the tokens of a slot of a model, None for all models; how many there were."""
        found = self._keys(caller, id_slot, model)
        return sum(len(self._slots.pop(key).token_ids) for key in found)

    def _keys(self, caller: str, id_slot: int, model: str | None) -> list[tuple[str, int, str]]:
        """The least recently used one first."""
        return [
            key
            for key in self._slots
            if key[:2] == (caller, id_slot) and (model is None or key[2] == model)
        ]


def num_slots(model: ServedModel) -> int:
    """Sequences that the model's engines compute at a time, at least one."""
    engine = model.engine
    plan = engine.memory_plan
    num_engines = engine.num_replicas if isinstance(engine, ReplicatedEngine) else 1
    return num_engines * (1 if plan is None else plan.max_num_seqs)


def check_slot(id_slot: int, model: ServedModel) -> int:
    """Raise RequestError unless there is such a slot; returns it."""
    if not 0 <= id_slot < num_slots(model):
        raise RequestError(
            f"id_slot is {id_slot}, this server has the slots 0 to {num_slots(model) - 1}",
            param="id_slot",
        )
    return id_slot


class SlotQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /slots`.

    Attributes:
        fail_on_no_slot: With 1, the status is 503 if no slot is free.
        model: Of which model.
    """

    fail_on_no_slot: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    model: str | None = None


class SlotAction(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `POST /slots/{id_slot}`; `model` is used where the body names none."""

    action: Literal["save", "restore", "erase"]
    model: str | None = None


class SlotFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The body of `POST /slots/{id_slot}`; that of `action=erase` is not read."""

    filename: Annotated[
        str, effect("The name of the file in `--slot-save-path`, without a directory.")
    ]
    model: Annotated[
        str | None,
        effect(
            "The model whose slot is saved, or into whose cache the file is read. Default: for a "
            "save the one that used the slot last, for a restore the server's first one."
        ),
    ] = None


class SlotRoutes:
    """The endpoints."""

    def __init__(
        self,
        models: ModelRegistry,
        table: SlotsByKey,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._models = models
        self._table = table
        self._clock = clock
        self._places = Places()  # one file at a time, keys in turn

    def routes(self) -> list[ApiRoute]:
        """The routes of this module."""
        return [
            ApiRoute(
                "GET",
                "/slots",
                self.slots,
                "The slots of the batch.",
                response=list[LlamaSlot],
                query=SlotQuery,
            ),
            ApiRoute(
                "POST",
                "/slots/{id_slot}",
                self.change,
                "Save the KV of a slot in a file of `--slot-save-path`, restore it, or forget the "
                "slot.",
                request=SlotFile,
                response=SavedSlot | RestoredSlot | ErasedSlot,
                query=SlotAction,
                needs_admin=True,
            ),
        ]

    async def slots(self, request: Request) -> Response:
        """Return which slots of the batch are in use."""
        query = decode_values(request.query_params, SlotQuery)
        model = self._models.find(query.model)
        engine = model.engine
        num_running = engine.stats().scheduler.num_running
        slots = [
            LlamaSlot(slot_id, engine.max_model_len, False, slot_id < num_running)
            for slot_id in range(num_slots(model))
        ]
        if query.fail_on_no_slot and num_running >= len(slots):
            raise EngineError("all slots are in use; try again later")
        return json_response(slots)

    async def change(self, request: Request) -> Response:
        """Save, restore or erase a slot. Raises RequestError, EngineError."""
        query = decode_values(request.query_params, SlotAction)
        caller = caller_of(request)
        number: str = request.path_params["id_slot"]
        if not (number.isascii() and number.isdigit() and len(number) <= _MAX_ID_DIGITS):
            raise RequestError(
                f"id_slot is {number[:20]!r}, it must be the number of a slot", param="id_slot"
            )
        id_slot = int(number)
        if query.action == "erase":
            name = None if query.model is None else self._models.find(query.model).name
            return json_response(ErasedSlot(id_slot, self._table.erase(caller, id_slot, name)))
        reader = FieldReader(self._models.server.field_rules)
        fields = reader.decode(body_of(request), SlotFile)
        report_ignored(request, reader.ignored)
        named = query.model if fields.model is None else fields.model
        if query.action == "save":
            return await self._save(caller, id_slot, fields.filename, named)
        model = await self._models.ready(named, caller)
        check_slot(id_slot, model)
        return await self._restore(caller, id_slot, fields.filename, model)

    async def _save(self, caller: str, id_slot: int, filename: str, named: str | None) -> Response:
        name = None if named is None else self._models.find(named).name
        tokens = self._table.get(caller, id_slot, name)
        if tokens is None:
            check_slot(id_slot, self._models.find(name))
            raise RequestError(
                f"slot {id_slot} has no tokens; send a /completion with this id_slot first",
                param="id_slot",
            )
        model = await self._models.ready(tokens.model, caller)
        started_s = self._clock()
        async with self._places.place(caller):
            saved = await model.engine.save_slot(
                filename, tokens.adapter, tokens.cache_salt, tokens.token_ids
            )
        timings = SaveTimings(1e3 * (self._clock() - started_s))
        return json_response(
            SavedSlot(id_slot, filename, len(saved.token_ids), saved.num_bytes, timings)
        )

    async def _restore(
        self, caller: str, id_slot: int, filename: str, model: ServedModel
    ) -> Response:
        started_s = self._clock()
        salt = cache_salt_of(caller, "", model.server.shares_prefix_cache)
        async with self._places.place(caller):
            found = await model.engine.restore_slot(filename, salt)
        timings = RestoreTimings(1e3 * (self._clock() - started_s))
        tokens = SlotTokens.of(model.name, found.adapter, salt, found.token_ids)
        self._table.put(caller, id_slot, tokens)
        return json_response(
            RestoredSlot(id_slot, filename, len(found.token_ids), found.num_bytes, timings)
        )
