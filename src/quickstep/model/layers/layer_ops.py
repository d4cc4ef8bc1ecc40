"""The ops of one layer: products with the tokens' adapters, norms, and what ranks exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quickstep.model.adapters.lora_modules import Projection, module_number
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.sharding import Shard
from quickstep.ops.table import LoRAMapping, OpTable, StreamOps
from quickstep.ops.tensors import AnyTensor, TensorT
from quickstep.ops.weights import LinearWeight

if TYPE_CHECKING:
    from torch import Tensor


def scaled(x: Tensor, factor: float) -> Tensor:
    """x times a number; x itself for 1."""
    return x if factor == 1.0 else x * factor


class LayerOps(msgspec.Struct, frozen=True):
    """What the parts of layer `index` compute with.

    Attributes:
        table: The op table.
        spec: The complete model, with the layer's sizes.
        own: The part of it that this rank's weights compute (`sharding.shard_spec`).
        shard: Which part that is.
        index: The layer's number, from 0.
    """

    table: OpTable
    spec: ModelSpec
    own: ModelSpec
    shard: Shard
    index: int

    def linear(
        self, x: Tensor, weight: LinearWeight, projection: Projection, lora: LoRAMapping | None
    ) -> Tensor:
        """A product of the layer, with the tokens' adapters."""
        y = self.table.linear(x, weight)
        if lora is not None:
            self.table.add_lora_(y, x, module_number(self.index, projection), lora)
        return y

    def norm(self, x: Tensor, weight: AnyTensor, bias: AnyTensor | None = None) -> Tensor:
        """As the architecture norms."""
        eps, offset = self.spec.norm_eps, self.spec.norm_offset
        if not self.spec.layer_norm:
            return self.table.rms_norm(x, weight, eps, offset)
        if self.table.layer_norm is not None:
            return self.table.layer_norm(x, weight, bias, eps, offset)
        from quickstep.ops.reference.elementary import layer_norm  # it computes with torch

        return layer_norm(x, weight, bias, eps, offset)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: AnyTensor, bias: AnyTensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        eps, offset = self.spec.norm_eps, self.spec.norm_offset
        if not self.spec.layer_norm:
            return self.table.add_rms_norm(x, residual, weight, eps, offset)
        if self.table.add_layer_norm is not None:
            return self.table.add_layer_norm(x, residual, weight, bias, eps, offset)
        from quickstep.ops.reference.elementary import add_layer_norm  # it computes with torch

        return add_layer_norm(x, residual, weight, bias, eps, offset)

    def activation(self, x: Tensor, factor: Tensor | None) -> Tensor:
        """The architecture's, times the factor."""
        if self.table.activation is not None:
            return self.table.activation(x, factor, self.spec.activation)
        from quickstep.ops.reference.elementary import activation  # it computes with torch

        return activation(x, factor, self.spec.activation)

    def gated(self, x: Tensor, gates: Tensor) -> Tensor:
        """x [T, N] times the sigmoid of gates [T, G], one for each of G equal parts."""
        gate = self.table.gate
        if gate is None:
            from quickstep.ops.reference import states  # it computes with torch

            gate = states.gate
        return gate(x, gates)

    @property
    def streams(self) -> StreamOps:
        """Of several residual streams."""
        if self.table.streams is not None:
            return self.table.streams
        from quickstep.ops.reference.streams import stream_ops  # it computes with torch

        return stream_ops()

    def gather(self, x: TensorT, num_columns: int) -> TensorT:
        """x [T, n], this rank's outputs of `num_columns` -> [T, num_columns]."""
        return self._gather(x, self.shard.outputs(num_columns), num_columns)

    def gather_heads(self, x: Tensor, num_heads: int, size: int | None = None) -> Tensor:
        """x [T, n * D] of this rank's heads -> [T, num_heads * D]; `size` is D where it is not the
        spec's.
        """
        size = size or self.spec.head_size
        return self._gather(x, self.head_columns(num_heads, size), num_heads * size)

    def head_columns(self, num_heads: int, size: int | None = None) -> range:
        """Which of [T, num_heads * D] are the rank's."""
        own, size = self.shard.heads(num_heads), size or self.spec.head_size
        return range(own.start * size, own.stop * size)

    def _gather(self, x: TensorT, own: range, num_columns: int) -> TensorT:
        ranks = self.table.ranks
        return x if ranks is None else ranks.gather(x, own, num_columns)
