"""LoRA adapters over HTTP: which ones clients may name, and loading and unloading for operators.

The paths, bodies and answers are vLLM's. An adapter is loaded only from the directories that the
operator allows, symbolic links followed.
"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quickstep.engine.adapters import adapter_names_in, path_in
from quickstep.errors import RequestError
from quickstep.server.generate.engine_interface import ServedEngine
from quickstep.server.http.body import body_of
from quickstep.server.http.route import ApiRoute
from quickstep.server.openai.request_types import decode

__all__ = ["LoadLoRAAdapter", "ServedAdapters", "UnloadLoRAAdapter", "lora_adapter_routes"]


class ServedAdapters:
    """The names of adapters: those of the start, those in `directory`, and those loaded since."""

    def __init__(self, names: tuple[str, ...] = (), directory: str | None = None) -> None:
        self._names = dict.fromkeys(names)
        self._directory = directory

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            return True
        return isinstance(name, str) and path_in(self._directory, name) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order of loading, then those of the directory."""
        return tuple(dict.fromkeys((*self._names, *adapter_names_in(self._directory))))

    @property
    def is_empty(self) -> bool:
        """Whether there are none, and none will come from a directory."""
        return not self._names and self._directory is None

    def add(self, name: str) -> None:
        """One was loaded."""
        self._names[name] = None

    def remove(self, name: str) -> None:
        """One was unloaded."""
        self._names.pop(name, None)


class LoadLoRAAdapter(msgspec.Struct, frozen=True):
    """Load an adapter for new requests.

    Attributes:
        lora_name: The model name by which requests select it.
        lora_path: A directory in `--lora-dir` or `--lora-allowed-dirs`; a relative one is in the
            first of these.
        load_inplace: Replace the adapter of this name: running requests end on the old one.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoRAAdapter(msgspec.Struct, frozen=True):
    """Refuse new requests with an adapter; running ones end on it."""

    lora_name: str


def lora_adapter_routes(
    engine: ServedEngine, model_names: tuple[str, ...], adapters: ServedAdapters
) -> list[ApiRoute]:
    """The routes, all of which need an admin key."""

    async def load(request: Request) -> Response:
        fields = decode(body_of(request), LoadLoRAAdapter)
        name = fields.lora_name
        if name in model_names:
            raise RequestError(f"{name!r} is the model's own name", param="lora_name")
        if name in adapters and not fields.load_inplace:
            raise RequestError(
                f"the adapter {name!r} is loaded already; send load_inplace: true to replace it",
                param="lora_name",
            )
        await engine.load_adapter(name, fields.lora_path, is_from_client=True)
        adapters.add(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(request: Request) -> Response:
        name = decode(body_of(request), UnloadLoRAAdapter).lora_name
        await engine.unload_adapter(name)
        adapters.remove(name)
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
