"""The PyTorch reference of every op: its definition.

Called where no faster implementation runs, and by the agreement tests. Bits of a row depend on
that row only: by arithmetic (`exact_math`), not by the properties of a library.
The same holds on CUDA, where fp64 products of these numbers are exact too.
"""

from __future__ import annotations

from quickstep.ops.reference.elementary import (
    activation,
    add_layer_norm,
    add_rms_norm,
    gated_activation,
    layer_norm,
    rms_norm,
    rotary,
)
from quickstep.ops.reference.latent import latent_ops
from quickstep.ops.reference.linear import embedding, linear, pack_linear, pack_quantized
from quickstep.ops.reference.logits import Logits
from quickstep.ops.reference.lora import add_lora_, pack_lora
from quickstep.ops.reference.paged_attention import move_kv, paged_attention, write_kv
from quickstep.ops.reference.quantize import quantize
from quickstep.ops.table import OpTable

# fp64 copies of a layer's widest activation that are alive together, up to seven (measured, hidden
# 512, width 1536, bf16: 2048 tokens 292 MiB, 1024 tokens 177 MiB at the peak of a step; the
# planner's bound with this figure is 368 and 184).
_SCRATCH_BYTES = 56


def reference_ops() -> OpTable:
    """The reference op table; it runs on every device."""
    return OpTable(
        name="reference",
        pack_linear=pack_linear,
        pack_quantized=pack_quantized,
        quantize=quantize,
        linear=linear,
        pack_lora=pack_lora,
        add_lora_=add_lora_,
        embedding=embedding,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary=rotary,
        write_kv=write_kv,
        paged_attention=paged_attention,
        gated_activation=gated_activation,
        layer_norm=layer_norm,
        add_layer_norm=add_layer_norm,
        activation=activation,
        logits=Logits(linear, add_lora_),
        scratch_bytes=_SCRATCH_BYTES,
        move_kv=move_kv,
        latent=latent_ops(),
    )
