"""Loading and unloading LoRA adapters over HTTP, for operators, as in vLLM.

An adapter is loaded only from the directories that the operator allows, symbolic links followed.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quickstep.config import adapter_name_problem
from quickstep.errors import RequestError
from quickstep.server.fields.field_classes import effect
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.endpoint import caller_of
from quickstep.server.http.body import body_of
from quickstep.server.http.middleware import report_ignored
from quickstep.server.http.route import ApiRoute
from quickstep.server.http.turns import Places
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel


class LoadLoRAAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/load_lora_adapter`."""

    lora_name: Annotated[str, effect("The model name by which requests select the adapter.")]
    lora_path: Annotated[
        str,
        effect(
            "A directory in `--lora-dir` or `--lora-allowed-dirs`; a relative one is in the first."
        ),
    ]
    load_inplace: Annotated[
        bool, effect("Replace the adapter of this name: running requests end on the old one.")
    ] = False


class UnloadLoRAAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: Annotated[str, effect("The adapter; running requests end on it.")]


def lora_routes(models: ModelRegistry) -> list[ApiRoute]:
    """The routes, all of which need an admin key."""
    rules = models.server.field_rules
    loading: Counter[str] = Counter()  # how many loads of a name are under way
    places = Places()

    async def first_model(request: Request) -> ServedModel:
        """The first model, in memory until the request ends."""
        wait_s = models.server.deadlines.of(None)
        return await models.ready(None, caller_of(request), wait_s=wait_s)

    async def load(request: Request) -> Response:
        reader = FieldReader(rules)
        fields = reader.decode(body_of(request), LoadLoRAAdapter)
        report_ignored(request, reader.ignored)
        name, model = fields.lora_name, models.default
        if (problem := adapter_name_problem(name)) is not None:
            raise RequestError(f"lora_name {name[:100]!a} {problem}", param="lora_name")
        if name in model.names:
            raise RequestError(f"{name!r} is the model's own name", param="lora_name")
        if (name in model.adapters or name in loading) and not fields.load_inplace:
            raise RequestError(
                f"there is an adapter {name!r} already; send load_inplace: true to replace it",
                param="lora_name",
            )
        loading[name] += 1
        try:
            await first_model(request)
            async with places.place(caller_of(request)):
                await model.engine.load_adapter(name, fields.lora_path, is_from_client=True)
        finally:
            loading[name] -= 1
            if not loading[name]:
                del loading[name]
        model.adapters.add(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        reader = FieldReader(rules)
        name = reader.decode(body_of(request), UnloadLoRAAdapter).lora_name
        report_ignored(request, reader.ignored)
        model = await first_model(request)
        await model.engine.unload_adapter(name)
        model.adapters.remove(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return [
        ApiRoute(
            "POST",
            "/v1/load_lora_adapter",
            load,
            "Load a LoRA adapter, or a new version of one.",
            request=LoadLoRAAdapter,
            needs_admin=True,
        ),
        ApiRoute(
            "POST",
            "/v1/unload_lora_adapter",
            unload,
            "Refuse new requests with a LoRA adapter, and free it when its last request has ended.",
            request=UnloadLoRAAdapter,
            needs_admin=True,
        ),
    ]
