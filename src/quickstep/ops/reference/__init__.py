"""The PyTorch reference of every op: its definition, one small file each.

Called where no faster implementation runs, and by the agreement tests. Bits of a row depend on
that row alone: by arithmetic (`fixed_point`, `elementary`), not by the good will of a library.
The same holds on CUDA, where fp64 products of these numbers are exact too.
"""

from __future__ import annotations

from quickstep.ops.reference.embedding import embedding
from quickstep.ops.reference.gated_activation import gated_activation
from quickstep.ops.reference.linear import linear, pack_linear
from quickstep.ops.reference.paged_attention import paged_attention
from quickstep.ops.reference.rms_norm import add_rms_norm, rms_norm
from quickstep.ops.reference.rotary import rotary
from quickstep.ops.reference.write_kv import write_kv
from quickstep.ops.table import OpTable

__all__ = ["reference_ops"]


def reference_ops() -> OpTable:
    """The reference op table; it runs on every device."""
    return OpTable(
        name="reference",
        pack_linear=pack_linear,
        linear=linear,
        embedding=embedding,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotary=rotary,
        write_kv=write_kv,
        paged_attention=paged_attention,
        gated_activation=gated_activation,
    )
