"""Random LoRA adapters for the exactness checker: ranks, targets and scales vary. A function of
the model's sizes and a seed. Called by `verify.checker`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from quickstep.model.adapters.lora_modules import (
    LoRAModule,
    lora_modules,
    num_modules,
    on_device,
)
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.ops.table import LoRAAdapter, LoRAPart
from quickstep.ops.tensors import FLOAT32, Array, DType, HostTensor, host_dtype

_RANKS = (0, 1, 2, 4, 7, 16)  # 0 of a part that only adds a bias
_COMPLETE = 0.05  # of the matrices, in place of the base model's
_WITH_BIAS = 0.3


def adapter_ids(model: Model, count: int) -> Sequence[str]:
    """The content ids of `count` adapters; none for a model that has no adapters."""
    return [f"adapter-{number}" for number in range(count if isinstance(model, Decoder) else 0)]


def random_adapters(model: Model, count: int, seed: int) -> dict[str, LoRAAdapter]:
    """`count` packed adapters by content id."""
    ids = adapter_ids(model, count)
    dtype = host_dtype(model.kv_layout.dtype)
    if not ids or not isinstance(model, Decoder) or dtype is None:
        return {}
    known = lora_modules(model.spec)
    packed = {}
    for adapter_id in ids:
        rng = random.Random(f"{adapter_id} {seed}")
        noise = np.random.default_rng(rng.getrandbits(64))
        modules: list[list[LoRAPart]] = [[] for _ in range(num_modules(model.spec))]
        for module in known.values():
            if rng.random() < 0.7:
                modules[module.number].append(_part(module, rng, noise, dtype))
        packed[adapter_id] = model.ops.pack_lora(on_device(modules, model.device))
    return packed


def _part(
    module: LoRAModule, rng: random.Random, noise: np.random.Generator, dtype: DType
) -> LoRAPart:
    """Of a size that changes most outputs and keeps them finite."""
    is_complete = rng.random() < _COMPLETE
    rank = module.num_outputs if is_complete else rng.choice(_RANKS)
    scale = 1.0 if is_complete else rng.uniform(0.1, 0.5)
    inputs = (module.num_inputs, rank) if module.is_embedding else (rank, module.num_inputs)
    a = noise.normal(size=inputs) / (1 if module.is_embedding else module.num_inputs**0.5)
    b = None
    if not is_complete:
        b = _tensor(noise.normal(size=(module.num_outputs, rank)) / max(1, rank) ** 0.5, dtype)
    bias = None
    if rank == 0 or rng.random() < _WITH_BIAS:
        bias = _tensor(noise.normal(size=module.num_outputs) * 0.1, FLOAT32)
    place = module.first_output, scale, module.is_embedding
    return LoRAPart(_tensor(a, dtype), b, *place, bias=bias)


def _tensor(values: Array, dtype: DType) -> HostTensor:
    return HostTensor(values.astype(np.float32), FLOAT32).to(dtype)
