"""The op table of the Triton kernels, and whether they can run.

Ops without a kernel here (rows of a float embedding, which torch gathers in one kernel) are the
reference's, which run on every device.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable

if TYPE_CHECKING:
    import torch

    from quickstep.ops.tensors import Device


def load_triton(device: torch.device | Device) -> OpTable | None:
    """The table, or None where Triton is not installed or has no kernels for `device`.

    On a CPU they run interpreted, far too slowly to serve, if TRITON_INTERPRET=1 was set before
    Triton was imported: that is for tests.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if importlib.util.find_spec("triton") is None:
        return None
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreted):
        return None
    import msgspec

    from quickstep.ops.reference.logits import Logits
    from quickstep.ops.triton.attention import paged_attention, plan_attention
    from quickstep.ops.triton.elementary import (
        activation,
        add_layer_norm,
        add_rms_norm,
        gated_activation,
        layer_norm,
        rms_norm,
    )
    from quickstep.ops.triton.experts import TritonExperts, pack_experts
    from quickstep.ops.triton.linear import embedding, gated_linear, linear, pack_linear
    from quickstep.ops.triton.logits import finished_logits
    from quickstep.ops.triton.lora import TritonAdapterTable, TritonLoRA
    from quickstep.ops.triton.move_kv import move_kv
    from quickstep.ops.triton.quantized_linear import pack_quantized
    from quickstep.ops.triton.rotary import rotary, rotary_write_kv
    from quickstep.ops.triton.routing import route
    from quickstep.ops.triton.write_kv import write_kv

    lora = TritonLoRA()
    return msgspec.structs.replace(
        reference_ops(),
        name="triton",
        samples_on_device=True,
        pack_linear=pack_linear,
        pack_part=pack_linear,
        pack_quantized=pack_quantized,
        linear=linear,
        pack_lora=lora.pack_lora,
        add_lora_=lora.add_lora_,
        embedding=embedding,
        logits=Logits(linear, lora.add_lora_, finished_logits),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary=rotary,
        gated_activation=gated_activation,
        layer_norm=layer_norm,
        add_layer_norm=add_layer_norm,
        activation=activation,
        gated_linear=gated_linear,
        write_kv=write_kv,
        rotary_write_kv=rotary_write_kv,
        paged_attention=paged_attention,
        plan_attention=plan_attention,
        move_kv=move_kv,
        pack_experts=pack_experts,
        route=route,
        experts=TritonExperts(lora),
        reads_lengths=True,
        has_chunks=False,
        adapter_table=TritonAdapterTable,
        latent=None,
    )
