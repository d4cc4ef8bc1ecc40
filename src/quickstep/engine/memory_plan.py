"""How the memory of an engine is divided: before anything is loaded, when it is, and on a GPU by
a step that is measured. The sizes themselves are `model.sizing`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.config import EngineConfig, LoRAConfig, SchedulerConfig
from quickstep.engine.machine import free_memory_bytes
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from quickstep.model.adapters.checkpoint import AdapterCheckpoint
    from quickstep.model.decoder import Decoder
    from quickstep.model.decoder_spec import ModelSpec
    from quickstep.model.interface import KVLayout, Model
    from quickstep.model.sizing import DraftSizes, MemoryPlan
    from quickstep.ops.tensors import Device, DType

_LOGGER = logging.getLogger("quickstep.engine")
# The scratch of the native kernels and float32 sums, in bytes per element at a layer's widest
# point, where a plan is made without kernels.
SCRATCH_BYTES = 8


def expected_plan(config: EngineConfig) -> MemoryPlan | None:
    """What the engine of `config` will plan, by the headers of its files, without torch; None if
    they are not on this machine.

    Raises:
        ConfigError: A checkpoint is broken.
        ModelTooLarge: The model does not fit into the memory that the config allows.
    """
    from quickstep.engine.adapters import open_adapters
    from quickstep.engine.speculation import draft_sizes
    from quickstep.model.checkpoint.placement import choose_dtype
    from quickstep.model.checkpoint.source import cached_checkpoint
    from quickstep.model.checkpoint.weights import open_checkpoint_files
    from quickstep.model.loader import quantized_weight_bytes
    from quickstep.model.spec import read_spec, with_context
    from quickstep.ops.tensors import Device

    checkpoint = cached_checkpoint(config.load)
    if checkpoint is None:
        return None
    spec = read_spec(checkpoint.path)
    spec = with_context(spec, config.max_model_len, config.allow_long_context)
    dtype = choose_dtype(config.load.dtype, spec, open_checkpoint_files(checkpoint.path))
    device = Device("cuda" if config.load.device.startswith("cuda") else "cpu")
    held_bytes = None
    if spec.native:
        files = checkpoint.path, spec, config.load.quantization, dtype.itemsize
        held_bytes = quantized_weight_bytes(*files, natively=device.type == "cpu")
    at_start = open_adapters(config.lora, spec)
    adapter_bytes = sum(adapter_bytes_of(config.lora, spec, dtype.itemsize, at_start))
    here = replace(config, load=replace(config.load, offline=True))
    try:
        sizes = draft_sizes(here, spec, dtype.itemsize, SCRATCH_BYTES)
    except ConfigError:  # not on this machine yet, or broken, which its engine will say
        sizes = ()
    return plan_for(config, spec, dtype, device, SCRATCH_BYTES, held_bytes, adapter_bytes, sizes)


def adapter_bytes_of(
    lora: LoRAConfig | None,
    spec: ModelSpec,
    dtype_bytes: int,
    at_start: Sequence[tuple[str, AdapterCheckpoint]],
) -> tuple[int, int]:
    """Bytes of the adapters in compute memory, and of those that stay in host memory after an
    eviction, of the mean size.
    """
    if lora is None:
        return 0, 0
    from quickstep.engine.adapters import adapter_memory

    num_bytes = adapter_memory(lora, spec, dtype_bytes, at_start)
    return num_bytes, lora.num_host_loras * num_bytes // lora.max_loras


def max_drafts(config: EngineConfig) -> int:
    """Most drafts of a row."""
    speculation = config.speculation
    return speculation.num_speculative_tokens if speculation.is_on else 0


def plan_for(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: DType | torch.dtype,
    device: torch.device | Device,
    scratch_bytes: int,
    held_bytes: int | None = None,
    adapter_bytes: int = 0,
    drafts: Sequence[DraftSizes] = (),
) -> MemoryPlan:
    """What fits into the memory that the config allows, or that is free now, next to `drafts`;
    `scratch_bytes` are those of the ops (`OpTable.scratch_bytes`), `held_bytes` is the size of
    quantized weights, `adapter_bytes` that of the adapters. Ranks on GPUs have a part of the model
    in the memory of each.

    Raises:
        ModelTooLarge: The model does not fit.
    """
    from quickstep.model.sharding import planned_part
    from quickstep.model.sizing import DEFAULT_KV_BYTES, ElementBytes, plan_memory

    elements = ElementBytes(
        dtype.itemsize,
        scratch_bytes,
        config.load.quantization,
        config.cache.kv_dtype,
        held_bytes,
        adapter_bytes,
    )
    if device.type != "cpu" and config.load.tensor_parallel_size > 1:
        spec, elements = planned_part(spec, elements, config.load.tensor_parallel_size)
    return plan_memory(
        spec,
        elements,
        config.cache,
        _for_texts(
            replace(config.scheduler, max_model_len=config.max_model_len or spec.max_model_len),
            spec,
        ),
        config.memory_bytes or _free_bytes(device),
        DEFAULT_KV_BYTES if device.type == "cpu" else None,
        drafts,
        max_drafts(config),
    )


def _for_texts(scheduler: SchedulerConfig, spec: ModelSpec) -> SchedulerConfig:
    """With steps that have space for a complete text, where the model computes texts so."""
    if spec.encoder is None:
        return scheduler
    most = max(scheduler.max_num_batched_tokens, scheduler.max_model_len)
    return replace(scheduler, max_num_batched_tokens=most)


def measured_plan(
    config: EngineConfig, model: Model, kv_layout: KVLayout, plan: MemoryPlan
) -> MemoryPlan:
    """On a GPU, the plan with the activations of the largest step, measured before the KV cache is
    allocated; no prompt then needs more. Ranks, which all call it, take the KV blocks for which
    each of them has memory.
    """
    from quickstep.model.decoder import Decoder

    if model.device.type != "cuda" or not isinstance(model, Decoder):
        return plan
    return _fitted_plan(config, model, kv_layout, plan)


def _fitted_plan(
    config: EngineConfig, model: Decoder, kv_layout: KVLayout, plan: MemoryPlan
) -> MemoryPlan:
    import torch

    from quickstep.model.sizing import KVBlockSize, with_measured_activations
    from quickstep.ops.collective import CollectiveRanks
    from quickstep.runtime.activation_probe import measured_activation_bytes

    block_size = config.cache.block_size
    sizes = plan.max_num_batched_tokens, plan.max_num_seqs, plan.max_model_len
    try:
        measured_bytes = measured_activation_bytes(model, kv_layout, block_size, *sizes)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {plan.max_num_batched_tokens} tokens does not fit next to the weights: "
            f"{error}; lower --max-num-batched-tokens"
        ) from None
    free_bytes = _free_bytes(model.device)
    if config.memory_bytes is not None:
        held_bytes = sum(row.num_bytes for row in plan.rows if row.label in ("weights", "adapters"))
        free_bytes = min(free_bytes, config.memory_bytes - held_bytes)
    block = KVBlockSize(block_size, kv_layout.bytes_per_token * block_size)
    ranks = model.ops.ranks
    least = ranks.least if isinstance(ranks, CollectiveRanks) else None
    measured = with_measured_activations(plan, measured_bytes, free_bytes, block, least)
    for note in measured.notes[len(plan.notes) :]:
        _LOGGER.info("%s", note)
    return measured


def _free_bytes(device: torch.device | Device) -> int:
    """Memory that is free, without what torch keeps of tensors that are gone."""
    if device.type == "cpu":
        return free_memory_bytes()
    import torch

    from quickstep.ops.tensors import torch_device
    from quickstep.runtime.executors.out_of_memory import free_device_memory

    free_device_memory()
    return torch.cuda.mem_get_info(torch_device(device))[0]
