"""Where LoRA applies in a decoder: its linear layers, by number, and their parts, by name.

A decoder multiplies queries, keys and values in one matrix, gate and up in another. A checkpoint
names them one by one, so each name is a range of the outputs of a numbered matrix.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.model.decoder_spec import ModelSpec
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import Device, torch_device

if TYPE_CHECKING:
    import torch

__all__ = [
    "LoRAModule",
    "Projection",
    "adapter_bytes",
    "lora_modules",
    "module_number",
    "num_modules",
    "on_device",
]


class Projection(enum.IntEnum):
    """The matrices of a layer that an adapter can change."""

    QKV = 0
    O_PROJ = 1
    GATE_UP = 2
    DOWN_PROJ = 3


class LoRAModule(msgspec.Struct, frozen=True):
    """A linear layer of the checkpoint: `num_outputs` outputs from `first_output` on of the
    decoder's matrix `number`.
    """

    number: int
    first_output: int
    num_outputs: int
    num_inputs: int


def num_modules(spec: ModelSpec) -> int:
    """How many matrices an adapter can change."""
    return spec.num_layers * len(Projection)


def module_number(layer: int, projection: Projection) -> int:
    """The number of a matrix."""
    return layer * len(Projection) + projection


def adapter_bytes(spec: ModelSpec, rank: int, itemsize: int) -> int:
    """Bytes of an adapter of this rank on every layer, with elements of `itemsize` bytes."""
    modules = lora_modules(spec).values()
    return rank * itemsize * sum(one.num_inputs + one.num_outputs for one in modules)


def lora_modules(spec: ModelSpec) -> dict[str, LoRAModule]:
    """The linear layers by name, `layers.0.self_attn.q_proj`; the experts of a mixture and the
    output projection are not among them.
    """
    queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    hidden, width, naming = spec.hidden_size, spec.intermediate_size, spec.naming
    qkv = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    if naming.fused_qkv:
        qkv = [("self_attn.qkv_proj", queries + 2 * keys)]
    gate_up = [("mlp.gate_proj", width), ("mlp.up_proj", width)]
    if naming.fused_gate_up:
        gate_up = [("mlp.gate_up_proj", 2 * width)]
    attention = [
        (Projection.QKV, qkv, hidden),
        (Projection.O_PROJ, [("self_attn.o_proj", hidden)], queries),
    ]
    mlp = [
        (Projection.GATE_UP, gate_up, hidden),
        (Projection.DOWN_PROJ, [("mlp.down_proj", hidden)], width),
    ]
    found: dict[str, LoRAModule] = {}
    for layer, kind in enumerate(spec.layers):
        for projection, parts, num_inputs in attention if kind.sparse else attention + mlp:
            first = 0
            for name, num_outputs in parts:
                number = module_number(layer, projection)
                found[f"layers.{layer}.{name}"] = LoRAModule(number, first, num_outputs, num_inputs)
                first += num_outputs
    return found


def on_device(
    modules: Sequence[Sequence[LoRAPart]], device: torch.device | Device
) -> Sequence[Sequence[LoRAPart]]:
    """The same matrices on a model's device; unchanged on a CPU."""
    if device.type == "cpu":
        return modules
    from quickstep.ops.tensors import to_torch

    place = torch_device(device) if isinstance(device, Device) else device
    return [
        [
            replace(part, a=to_torch(part.a).to(place), b=to_torch(part.b).to(place))
            for part in parts
        ]
        for parts in modules
    ]
