"""The LoRA adapters of an engine: loaded by name, held by content, freed when no request uses them.

A request names an adapter; its sequences and the prefix cache use the adapter's content id. So a
new version under the same name serves new requests while running ones finish on the old one.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from quickstep.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from quickstep.config import LoRAConfig
    from quickstep.model.adapters.checkpoint import AdapterCheckpoint
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.interface import Model
    from quickstep.ops.table import LoRAAdapter, OpTable

__all__ = ["Adapters", "LoRARequest", "LoadedAdapter", "open_adapters"]


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter for `LLM.generate`, with vLLM's names: loaded from `lora_path` on first use, and
    again if the path of a name changes. `lora_int_id` is not needed here.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that requests may name. `adapter_id` is a digest of what it computes."""

    name: str
    path: str
    adapter_id: str
    rank: int
    num_bytes: int


def open_adapters(
    lora: LoRAConfig | None, spec: ModelSpec
) -> tuple[tuple[str, AdapterCheckpoint], ...]:
    """Check the adapters that are loaded at the start, by name. Raises ConfigError."""
    if lora is None:
        return ()
    # Imported here: most engines have no adapters.
    from quickstep.model.adapters.checkpoint import open_adapter

    return tuple(
        (name, open_adapter(path, spec, lora.max_lora_rank)) for name, path in lora.modules
    )


class NewAdapter(msgspec.Struct, frozen=True):
    """An adapter that was read and is not in use yet."""

    adapter: LoadedAdapter
    packed: LoRAAdapter


class Adapters:
    """Owns the loaded adapters; used by the engine's thread only, except where stated."""

    def __init__(self, model: Model, spec: ModelSpec, ops: OpTable, lora: LoRAConfig) -> None:
        from quickstep.ops.tensors import host_dtype

        dtype = host_dtype(model.kv_shape.dtype)
        if model.device.type != "cpu" or dtype is None:
            raise ConfigError("adapters run on the CPU only; leave --enable-lora out")
        self._spec = spec
        self._ops = ops
        self._dtype = dtype
        self._lora = lora
        self._loaded: dict[str, LoadedAdapter] = {}
        self._packed: dict[str, LoRAAdapter] = {}

    @property
    def packed(self) -> Mapping[str, LoRAAdapter]:
        """A live view of the packed weights, by content id."""
        return MappingProxyType(self._packed)

    @property
    def loaded(self) -> Sequence[LoadedAdapter]:
        """What requests may name, in the order of loading."""
        return tuple(self._loaded.values())

    @property
    def has_unnamed(self) -> bool:
        """Whether an adapter is loaded that new requests cannot name."""
        return len(self._packed) > len({one.adapter_id for one in self._loaded.values()})

    def read(self, name: str, path: str) -> NewAdapter:
        """Read an adapter for `add`; any thread may call it. Raises ConfigError."""
        from quickstep.model.adapters.checkpoint import open_adapter

        if not name:
            raise ConfigError("an adapter needs a name")
        return self.pack(name, open_adapter(Path(path), self._spec, self._lora.max_lora_rank))

    def pack(self, name: str, checkpoint: AdapterCheckpoint) -> NewAdapter:
        """Read a checked adapter for `add`. Raises ConfigError."""
        weights = checkpoint.read(self._dtype)
        packed = self._ops.pack_lora(weights.modules)
        path, adapter_id = str(checkpoint.directory), weights.content_id
        adapter = LoadedAdapter(name, path, adapter_id, weights.rank, packed.nbytes)
        return NewAdapter(adapter, packed)

    def add(self, new: NewAdapter) -> LoadedAdapter:
        """Let new requests name it; it replaces one of the same name. Raises ConfigError."""
        adapter = new.adapter
        if adapter.name not in self._loaded and len(self._loaded) >= self._lora.max_loras:
            raise ConfigError(
                f"{len(self._loaded)} adapters are loaded, which is the limit; unload one or raise "
                "--max-loras"
            )
        self._packed.setdefault(adapter.adapter_id, new.packed)
        self._loaded[adapter.name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """New requests cannot name it any more. Raises RequestError if they could not before."""
        self.find(name)
        del self._loaded[name]

    def find(self, name: str) -> LoadedAdapter:
        """The adapter of this name. Raises RequestError 404."""
        if name not in self._loaded:
            raise RequestError(
                f"the adapter {name!r} is not loaded",
                param="model",
                status=404,
                code="model_not_found",
            )
        return self._loaded[name]

    def free_unused(self, used: Container[str]) -> None:
        """Free what new requests cannot name and whose id is not in `used`."""
        named = {one.adapter_id for one in self._loaded.values()}
        for adapter_id in [one for one in self._packed if one not in named and one not in used]:
            del self._packed[adapter_id]
