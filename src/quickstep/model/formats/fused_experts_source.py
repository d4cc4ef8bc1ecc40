"""A `TensorSource` that reads experts one by one from tensors that hold all of a layer's experts.

MXFP4 (OCP Microscaling Formats, 1.0) is decoded here: quantized values of 4 bits (e2m1, the low
half of a byte first) times a power of two per 32 of them. The products are exact in bfloat16 and
float32; in the model's dtype they are weights like others, so that `--quantization` may round them
to quantized values.

A layer's tensors are held, as they are stored, until another layer's are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.formats.fused_experts import ExpertTensor, FusedExperts
from quickstep.ops.tensors import to_torch
from quickstep.ops.weights import QuantizedWeight, StoredMatrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NO_SCALE = 255


class FusedExpertsSource:
    """Reads by the architecture's names; all but experts as the files have it."""

    def __init__(self, reader: TensorReader, experts: FusedExperts) -> None:
        self._reader = reader
        self._experts = experts
        self._layer = ""
        self._held: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """One tensor."""
        found = self._experts.find(name)
        if found is None:
            return to_torch(self._reader.tensor(name))
        tensor = self._bias(found) if found.is_bias else self._weight(found)
        return _gate_above_up(tensor) if found.interleaved else tensor.contiguous()

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Several tensors, one below the other along the first dimension."""
        if any(self._experts.find(name) is not None for name in names):
            return torch.cat([self.tensor(name) for name in names])
        return to_torch(self._reader.stacked(names))

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """The stacked matrix, not quantized."""
        return self.stacked(names)

    def stored(self, names: tuple[str, ...]) -> StoredMatrix | None:
        """A matrix in its files; None for an expert's, which is packed in another order."""
        if any(self._experts.find(name) is not None for name in names):
            return None
        return self._reader.stored(names)

    def _bias(self, found: ExpertTensor) -> Tensor:
        return self._all_experts(found, found.name)[found.index]

    def _weight(self, found: ExpertTensor) -> Tensor:
        """[outputs, inputs], in the files' order."""
        if not self._experts.is_mxfp4:
            weight = self._all_experts(found, found.name)[found.index]
            return weight if self._experts.outputs_first else weight.t()
        blocks = self._quants(found, f"{found.name}_blocks")
        scales = self._quants(found, f"{found.name}_scales")
        return mxfp4_values(blocks, scales).to(self._reader.dtype)

    def _all_experts(self, found: ExpertTensor, name: str) -> Tensor:
        self._enter(found.layer)
        if name not in self._held:
            self._held[name] = to_torch(self._reader.tensor(name))
        return self._held[name]

    def _quants(self, found: ExpertTensor, name: str) -> Tensor:
        self._enter(found.layer)
        if name not in self._held:
            raw = self._reader.raw(name)
            if raw.dtype != torch.uint8:
                raise ConfigError(f"tensor {name!r} holds {raw.dtype}, MXFP4 is stored as bytes")
            if name.endswith("_scales") and bool((raw == _NO_SCALE).any()):
                raise ConfigError(f"tensor {name!r} holds a scale of 255, which is no number")
            self._held[name] = raw
        return self._held[name][found.index]

    def _enter(self, layer: str) -> None:
        if layer != self._layer:
            self._layer = layer
            self._held.clear()


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks [N, G, 16] and scales [N, G], bytes -> [N, 32 * G] bfloat16, exactly."""
    quants = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.bfloat16)
    # both quantized values of a byte are looked up as one word
    pairs = torch.stack((quants.repeat(16), quants.repeat_interleave(16)), -1).view(torch.int32)
    powers = torch.tensor([2.0 ** (scale - 127) for scale in range(256)], dtype=torch.bfloat16)
    words = pairs.flatten().to(blocks.device).index_select(0, blocks.flatten().int())
    values = words.view(blocks.shape).view(torch.bfloat16)
    return values.mul_(powers.to(scales.device)[scales.int()].unsqueeze(-1)).flatten(1)


def _gate_above_up(rows: Tensor) -> Tensor:
    """Rows in turn of gate and up -> gate's, then up's."""
    return torch.cat((rows[0::2], rows[1::2]))
