"""The LoRA adapters of an engine: named by requests, held by content, in up to three places.

    disk ──open, pack──> compute memory ──evict──> host memory ──> disk
          checked, digested     │    └────────────────┘
                                └ what is there, the scheduler decides (`core.resources`)

A request names an adapter; its sequences and the prefix cache use the adapter's content id. So a
new version under the same name serves new requests while running ones finish on the old one. An
adapter in `lora_dir` is opened when a request first names it. Several adapters at their scales, or
one at another scale than 1, are an adapter of their own (`mix_name`), made when first named.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from quickstep.config import adapter_name_problem
from quickstep.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from quickstep.config import LoRAConfig
    from quickstep.model.adapters.checkpoint import AdapterCheckpoint, LoRAWeights
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.interface import Model
    from quickstep.ops.table import LoRAAdapter, OpTable
    from quickstep.ops.tensors import Array

_MAX_MIXES = 1024  # that stay named; requests of an older one make it again
MAX_SCALE = 100.0  # of an adapter in a mix
_NUM_OPENED = 4  # that are kept as they were read until they are loaded; others are read again
_USUAL_RANK = 16
_WEIGHTS_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter for `LLM.generate`, with vLLM's names: loaded from `lora_path` on first use, and
    again if the path of a name changes. `lora_int_id` is not needed here.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that requests may name. `adapter_id` is a digest of what it computes; `num_bytes`
    is what it takes in compute memory. A mix has no path, and the adapters and scales of which it
    is made in `parts`.
    """

    name: str
    path: str
    adapter_id: str
    rank: int
    num_bytes: int
    parts: tuple[tuple[LoadedAdapter, float], ...] = ()


class OpenedAdapter(msgspec.Struct, frozen=True):
    """An adapter that was read and checked."""

    adapter: LoadedAdapter
    weights: LoRAWeights


def open_adapters(
    lora: LoRAConfig | None, spec: ModelSpec
) -> tuple[tuple[str, AdapterCheckpoint], ...]:
    """Check the adapters that are named at the start, by name. Raises ConfigError."""
    if lora is None:
        return ()
    # Imported here: most engines have no adapters.
    from quickstep.model.adapters.checkpoint import open_adapter

    return tuple(
        (name, open_adapter(path, spec, lora.max_lora_rank)) for name, path in lora.modules
    )


def adapter_memory(
    lora: LoRAConfig,
    spec: ModelSpec,
    itemsize: int,
    at_start: Sequence[tuple[str, AdapterCheckpoint]],
) -> int:
    """Bytes that adapters may take in compute memory, for a model in elements of `itemsize` bytes:
    what is configured, or the `max_loras` largest that are known at the start. Those that may be
    loaded later from elsewhere count with rank 16 on every layer.
    """
    from quickstep.model.adapters.lora_modules import adapter_bytes

    if lora.memory_bytes is not None:
        return lora.memory_bytes
    itemsize = lora.itemsize(itemsize)
    sizes = [one.num_bytes(itemsize) for _, one in at_start]
    for name in adapter_names_in(lora.directory):
        # the header would say more; for a thousand adapters the size of the file is enough
        file = Path(lora.directory or "") / name / _WEIGHTS_FILE
        size = file.stat().st_size * itemsize // 2 if file.is_file() else 0
        sizes.append(size + size // 8 if itemsize == 1 else size)  # int8 has scales, too
    if spec.native and (lora.allowed_dirs or not any(sizes)):
        usual = adapter_bytes(spec, _USUAL_RANK, itemsize)
        sizes += [usual] * (lora.max_loras - len(sizes))
    return sum(sorted(sizes)[-lora.max_loras :])


def mix_name(scales: Mapping[str, float]) -> str:
    """The name of adapters at their scales, as `sql*0.5+docs*1`: "" if all scales are 0, that of
    the adapter for one at scale 1.

    Raises:
        RequestError: A scale is not finite, or too large, or a name has + or * in it.
    """
    for name, scale in scales.items():
        if not math.isfinite(scale) or abs(scale) > MAX_SCALE:
            raise RequestError(
                f"the scale of the adapter {name!r} is {scale:g}, it must be from "
                f"{-MAX_SCALE:g} to {MAX_SCALE:g}",
                param="lora",
            )
    # rounded, so that scales which differ by less than that are one adapter
    rounded = {name: f"{scale:.6g}" for name, scale in sorted(scales.items())}
    parts = [(name, scale) for name, scale in rounded.items() if float(scale)]
    if len(parts) == 1 and float(parts[0][1]) == 1.0:
        return parts[0][0]
    unclear = next((name for name, _ in parts if "+" in name or "*" in name), None)
    if unclear is not None:
        raise RequestError(
            f"the adapter {unclear!r} has + or * in its name, so it has no scales; rename it",
            param="lora",
        )
    return "+".join(f"{name}*{scale}" for name, scale in parts)


def mix_parts(name: str) -> tuple[tuple[str, float], ...]:
    """The adapters and scales of a mix; () for a name that is none."""
    parts = []
    for part in name.split("+"):
        adapter, _, scale = part.rpartition("*")
        try:
            parts.append((adapter, float(scale)))
        except ValueError:
            return ()
    return tuple(parts) if all(adapter for adapter, _ in parts) else ()


def path_in(directory: str | None, name: str) -> Path | None:
    """The folder of an adapter in `lora_dir`; None if there is none of this name."""
    if directory is None or not _may_be_folder(name):
        return None
    path = Path(directory) / name
    return path if os.path.isfile(path / _CONFIG_FILE) else None  # noqa: PTH113


def adapter_names_in(directory: str | None, misnamed: set[str] | None = None) -> tuple[str, ...]:
    """The names of the adapters in `lora_dir`, sorted. Those that no request can name are left out,
    and added to `misnamed`.
    """
    if directory is None or not os.path.isdir(directory):  # noqa: PTH112
        return ()
    names = sorted(path.parent.name for path in Path(directory).glob(f"*/{_CONFIG_FILE}"))
    if misnamed is not None:
        misnamed.update(name for name in names if not _may_be_folder(name))
    return tuple(name for name in names if _may_be_folder(name))


def _may_be_folder(name: str) -> bool:
    """Whether an adapter in `lora_dir` may have this name."""
    is_path = name in (".", "..") or "/" in name or "\\" in name
    return not is_path and adapter_name_problem(name) is None


def _names_in(adapter: LoadedAdapter) -> tuple[str, ...]:
    return (adapter.name, *(part.name for part, _ in adapter.parts))


class Adapters:
    """What requests may name, and the weights. Used by the engine's thread only, except where
    stated.
    """

    def __init__(
        self,
        model: Model,
        spec: ModelSpec,
        ops: OpTable,
        lora: LoRAConfig,
        max_bytes: int,
        base_biases: Mapping[int, Array],
    ) -> None:
        from quickstep.ops.tensors import host_dtype

        dtype = host_dtype(model.kv_layout.dtype)
        if dtype is None:
            raise ConfigError(
                f"there are no adapters for {model.kv_layout.dtype}; leave --enable-lora out"
            )
        self._device = model.device
        self._spec = spec
        self._ops = ops
        self._dtype = dtype
        self._base_biases = base_biases
        self._lora = lora
        self.max_bytes = max_bytes
        self._named: dict[str, LoadedAdapter] = {}
        self._by_id: dict[str, LoadedAdapter] = {}  # also those that are retired
        self._retired: set[str] = set()
        self._failed: set[str] = set()  # content ids whose load failed, to be read again
        self._opened: OrderedDict[str, LoRAWeights] = OrderedDict()  # by content id
        self._on_host: OrderedDict[str, LoRAAdapter] = OrderedDict()  # packed, the latest last
        self._packed: dict[str, LoRAAdapter] = {}

    @property
    def packed(self) -> Mapping[str, LoRAAdapter]:
        """A live view of the packed weights, by content id."""
        return MappingProxyType(self._packed)

    @property
    def loaded(self) -> Sequence[LoadedAdapter]:
        """What requests may name and has been opened, in the order of opening."""
        return tuple(self._named.values())

    @property
    def retired(self) -> Collection[str]:
        """Content ids that no new request can name, and that may still be in use."""
        return tuple(self._retired)

    def is_pinned(self, name: str) -> bool:
        """Whether an adapter stays in compute memory once it is there."""
        return name in self._lora.pinned

    def has_pinned_name(self, adapter_id: str) -> bool:
        """Whether one of the names of this content is pinned."""
        names = [other.name for other in self.loaded if other.adapter_id == adapter_id]
        return any(map(self.is_pinned, names))

    def named(self, name: str) -> LoadedAdapter | None:
        """The adapter that requests get by this name; None if there is none."""
        return self._named.get(name)

    def is_opened(self, name: str) -> bool:
        """Whether `find` has nothing to read."""
        adapter = self._named.get(name)
        return adapter is not None and adapter.adapter_id not in self._failed

    def has_content(self, adapter_id: str) -> bool:
        """Whether the adapter with this content has a name, or is retired and still kept."""
        return adapter_id in self._by_id

    def path_of(self, name: str) -> Path | None:
        """Where an adapter is read from; None if it does not exist. Any thread may call it."""
        adapter = self._named.get(name)
        if adapter is not None and not adapter.parts:
            return Path(adapter.path)
        return path_in(self._lora.directory, name)

    def open(self, name: str, path: str | Path, *, is_from_client: bool = False) -> OpenedAdapter:
        """Read an adapter for `add`; any thread may call it. Raises ConfigError.

        `is_from_client`: only from the directories that clients may load from.
        """
        from quickstep.model.adapters.checkpoint import open_adapter

        if (problem := adapter_name_problem(name)) is not None:
            raise ConfigError(f"the adapter's name {name[:100]!a} {problem}")
        roots = None
        if is_from_client:
            roots = [Path(client_dir) for client_dir in self._lora.client_dirs]
            if not roots:
                raise ConfigError(
                    "this server loads no adapters by request; start it with --lora-dir or "
                    "--lora-allowed-dirs"
                )
            path = roots[0] / path  # an absolute path stays as it is
        checkpoint = open_adapter(Path(path), self._spec, self._lora.max_lora_rank, roots)
        return self.read(name, checkpoint)

    def open_mix(self, name: str, parts: Sequence[tuple[LoadedAdapter, float]]) -> OpenedAdapter:
        """Make a mix for `add`; any thread may call it. Raises ConfigError."""
        from quickstep.model.adapters.mix import mixed

        num_bytes = sum(adapter.num_bytes for adapter, _ in parts)
        self._check_size(name, num_bytes)
        scaled = []
        for part, scale in parts:
            weights = self._weights_of(part)
            if weights.has_complete_matrices:
                raise ConfigError(
                    f"the adapter {part.name!r} has matrices in place of the base model's "
                    "('modules_to_save'), so it has no scale; use it by its name"
                )
            scaled.append((weights, scale))
        weights = mixed(scaled)
        adapter_id = self._adapter_id(weights)
        adapter = LoadedAdapter(name, "", adapter_id, weights.rank, num_bytes, tuple(parts))
        return OpenedAdapter(adapter, weights)

    def read(self, name: str, checkpoint: AdapterCheckpoint) -> OpenedAdapter:
        """Read a checked adapter for `add`. Raises ConfigError."""
        num_bytes = checkpoint.num_bytes(self._lora.itemsize(self._dtype.itemsize))
        self._check_size(name, num_bytes)
        weights = checkpoint.read(self._dtype, self._base_biases)
        path, adapter_id = str(checkpoint.directory), self._adapter_id(weights)
        adapter = LoadedAdapter(name, path, adapter_id, weights.rank, num_bytes)
        return OpenedAdapter(adapter, weights)

    def _adapter_id(self, weights: LoRAWeights) -> str:
        """Of what it computes here: its content, and the form in which it is held."""
        return f"{weights.content_id}-int8" if self._lora.dtype == "int8" else weights.content_id

    def _check_size(self, name: str, num_bytes: int) -> None:
        pinned = [
            other for other in self.loaded if self.is_pinned(other.name) and other.name != name
        ]
        room = self.max_bytes - sum(other.num_bytes for other in pinned)
        if num_bytes > room:
            left = "all adapters in memory may take" if not pinned else "the pinned ones leave"
            raise ConfigError(
                f"the adapter {name!r} takes {num_bytes:,} bytes, {left} {room:,}; raise "
                "--lora-memory-bytes" + (" or pin fewer" if pinned else "")
            )

    def add(self, opened: OpenedAdapter) -> LoadedAdapter:
        """Let new requests name it; it replaces one of the same name, and mixes with that."""
        adapter = opened.adapter
        self._drop(adapter.name)
        if adapter.parts:
            mixes = [other.name for other in self._named.values() if other.parts]
            for name in mixes[: max(0, len(mixes) - _MAX_MIXES + 1)]:
                self._drop(name)
        self._named[adapter.name] = self._by_id[adapter.adapter_id] = adapter
        self._retired.discard(adapter.adapter_id)
        self._failed.discard(adapter.adapter_id)
        if adapter.adapter_id not in self._packed:
            self._opened[adapter.adapter_id] = opened.weights
            self._shrink_opened()
        return adapter

    def unload(self, name: str) -> None:
        """New requests cannot name it any more. Raises RequestError if they could not before."""
        self._drop(self.find(name).name)

    def find(self, name: str) -> LoadedAdapter:
        """The opened adapter of this name. Raises RequestError 404."""
        if name not in self._named:
            raise RequestError(
                f"the adapter {name[:100]!r} is not loaded",
                param="model",
                status=404,
                code="model_not_found",
            )
        return self._named[name]

    def pack(self, adapter_id: str) -> LoRAAdapter:
        """The weights for compute memory, for `put`; any thread may call it.

        Raises:
            ConfigError: It is no longer on disk as it was opened, or it was unloaded meanwhile.
        """
        packed = self._on_host.get(adapter_id)
        if packed is not None:
            return packed
        adapter = self._by_id.get(adapter_id)
        if adapter is None:
            raise ConfigError("the adapter was unloaded before it was in memory")
        from quickstep.model.adapters.lora_modules import on_device

        modules = self._weights_of(adapter).modules
        if self._lora.dtype == "int8":
            from quickstep.model.adapters.int8 import as_int8

            modules = as_int8(modules)
        return self._ops.pack_lora(on_device(modules, self._device))

    def _weights_of(self, adapter: LoadedAdapter) -> LoRAWeights:
        """As they were opened, from disk if need be. Raises ConfigError."""
        weights = self._opened.get(adapter.adapter_id)
        if weights is not None:
            return weights
        if adapter.parts:
            return self.open_mix(adapter.name, adapter.parts).weights
        # other names may have the same content, in folders that are still there
        named = [other for other in self.loaded if other.adapter_id == adapter.adapter_id]
        failure = None
        for version in (adapter, *named):
            try:
                weights = self.open(version.name, version.path).weights
            except ConfigError as error:
                failure = failure or error
                continue
            if self._adapter_id(weights) == adapter.adapter_id:
                return weights
        raise failure or ConfigError(
            f"the adapter {adapter.name!r} was changed on disk while requests waited for "
            "it; send the request again"
        )

    def put(self, adapter_id: str, packed: LoRAAdapter) -> None:
        """Let steps use packed weights."""
        self._packed[adapter_id] = packed
        self._opened.pop(adapter_id, None)
        self._on_host.pop(adapter_id, None)

    def evict(self, adapter_ids: Collection[str]) -> None:
        """Remove packed weights from compute memory; as many as allowed stay in host memory, and
        those of retired adapters, which may be gone from disk.
        """
        for adapter_id in adapter_ids:
            packed = self._packed.pop(adapter_id, None)
            if packed is not None and adapter_id in self._by_id:
                self._on_host[adapter_id] = packed
        named = [name for name in self._on_host if name not in self._retired]
        for adapter_id in named[: max(0, len(named) - self._lora.num_host_loras)]:
            del self._on_host[adapter_id]

    def read_again(self, adapter_id: str) -> None:
        """A load has failed: the next request that names the adapter reads it from disk again."""
        self._failed.add(adapter_id)
        self._opened.pop(adapter_id, None)
        self._on_host.pop(adapter_id, None)

    def forget(self, adapter_id: str) -> None:
        """Free everything of a retired adapter."""
        self._retired.discard(adapter_id)
        self._failed.discard(adapter_id)
        del self._by_id[adapter_id]
        self._opened.pop(adapter_id, None)
        self._on_host.pop(adapter_id, None)
        self._packed.pop(adapter_id, None)

    def _drop(self, name: str) -> None:
        """Take a name and the mixes with it from new requests, and retire what has no name now."""
        dropped = [other for other in self._named.values() if name in _names_in(other)]
        for other in dropped:
            del self._named[other.name]
        named = {other.adapter_id for other in self._named.values()} if dropped else set()
        self._retired.update({other.adapter_id for other in dropped} - named)

    def _shrink_opened(self) -> None:
        """Keep the latest, and retired ones, which may be gone from disk."""
        if len(self._opened) <= _NUM_OPENED:
            return
        extra = [name for name in self._opened if name not in self._retired]
        for adapter_id in extra[: max(0, len(extra) - _NUM_OPENED)]:
            del self._opened[adapter_id]
