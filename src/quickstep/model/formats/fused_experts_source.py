"""A `TensorSource` that reads experts one by one from tensors that hold all of a layer's experts.

MXFP4 (OCP Microscaling Formats, 1.0): quantized values of 4 bits (e2m1, the low half of a byte
first) times a power of two per 32 of them. The native kernels hold them as they are, in 4 bits:
levels are doubled, so that they are integers, and scales are halved. The products are exact in
bfloat16 and float32; torch's ops get them in the model's dtype, and `--quantization` rounds them to
its own quantized values.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.formats.fused_experts import ExpertTensor, FusedExperts
from quickstep.model.formats.storage import E2M1_LEVELS, factors
from quickstep.ops.tensors import UINT8, AnyTensor, Array, HostTensor, torch_device
from quickstep.ops.weights import QuantizedWeight, StoredMatrix, StoredRows

_NO_SCALE = 255


class FusedExpertsSource:
    """Reads by the architecture's names; all but experts as the files have it.

    `is_rounded`: the experts will be rounded to other quantized values than those of MXFP4.
    """

    def __init__(
        self, reader: TensorReader, experts: FusedExperts, *, is_rounded: bool = False
    ) -> None:
        self._reader = reader
        self._experts = experts
        self._is_rounded = is_rounded
        self._layer = ""  # that biases are held of
        self._biases: dict[str, AnyTensor] = {}

    def tensor(self, name: str) -> AnyTensor:
        """One tensor; of experts, a bias."""
        found = self._experts.find(name)
        if found is None:
            return self._reader.tensor(name)
        assert found.is_bias
        if found.layer != self._layer:
            self._layer, self._biases = found.layer, {}
        if found.name not in self._biases:
            self._biases[found.name] = self._reader.tensor(found.name)
        bias: AnyTensor = self._biases[found.name][found.index]
        return self._reader.joined((bias[0::2], bias[1::2])) if found.interleaved else bias

    def stacked(self, names: tuple[str, ...]) -> AnyTensor:
        """Several tensors, one below the other along the first dimension."""
        if any(self._experts.find(name) is not None for name in names):
            return self._reader.joined([self.tensor(name) for name in names])
        return self._reader.stacked(names)

    def linear(self, names: tuple[str, ...]) -> AnyTensor | QuantizedWeight:
        """The stacked matrix, not quantized."""
        found = [self._experts.find(name) for name in names]
        if all(expert is None for expert in found):
            return self._reader.linear(names)
        # Imported here: it needs torch.
        from quickstep.model.formats.stored_values import decode_rows

        parts = []
        for expert in found:
            assert expert is not None
            rows, num_inputs = self._rows(expert)
            part = decode_rows(rows, num_inputs, torch_device(self._reader.device))
            part = part.dequantized() if isinstance(part, QuantizedWeight) else part
            parts.append(part.to(self._reader.dtype))
        return self._reader.joined(parts)

    def stored(self, names: tuple[str, ...], *, floating: bool = False) -> StoredMatrix | None:
        """A matrix in its files, in MXFP4's quantized values or to be converted to the model's
        dtype.
        """
        found = [self._experts.find(name) for name in names]
        if all(expert is None for expert in found):
            return self._reader.stored(names, floating=floating)
        kind = self._reader.loaded_kind
        if kind is None:
            return None
        parts = [self._rows(expert) for expert in found if expert is not None]
        if self._experts.is_mxfp4 and not (floating or self._is_rounded):
            kind = "LEVELS"
        return StoredMatrix(kind, tuple(rows for rows, _ in parts), parts[0][1])

    def _rows(self, found: ExpertTensor) -> tuple[StoredRows, int]:
        """Where an expert's matrix is, and its number of inputs."""
        if self._experts.is_mxfp4:
            return self._mxfp4_rows(found)
        _, inputs, outputs = self._reader.shape(found.name)
        part = found.index, self._experts.num_experts
        if self._experts.outputs_first:
            return self._reader.rows(found.name, inputs, part=part), outputs
        rows = replace(
            self._reader.rows(found.name, outputs, part=part),
            layout="columns",
            stored_rows=outputs,
            head_size=outputs if found.interleaved else 0,
        )
        return rows, inputs

    def _mxfp4_rows(self, found: ExpertTensor) -> tuple[StoredRows, int]:
        blocks, exponents = f"{found.name}_blocks", f"{found.name}_scales"
        part = found.index, self._experts.num_experts
        _, outputs, groups, _ = self._reader.shape(blocks)
        for name in (blocks, exponents):
            dtype = self._reader.stored_as(name)
            if dtype not in ("U8", "F8_E8M0"):
                raise ConfigError(f"tensor {name!r} holds {dtype}, MXFP4 is stored as bytes")
        stored = self._reader.array(exponents, part=part)
        if (stored == _NO_SCALE).any():
            raise ConfigError(f"tensor {exponents!r} holds a scale of 255, which is no number")
        scales = _POWERS[stored.reshape(outputs, groups)]
        if found.interleaved:
            scales = np.concatenate((scales[0::2], scales[1::2]))
        rows = replace(
            self._reader.rows(blocks, outputs, "LEVELS", part),
            head_size=outputs if found.interleaved else 0,
            stored_rows=outputs,
            scales=factors(scales),
            levels=HostTensor(E2M1_LEVELS, UINT8),
        )
        return rows, groups * 32


# halves of 2^(exponent - 127), by the exponent of 8 bits
_POWERS: Array = np.array([math.ldexp(0.5, exponent - 127) for exponent in range(256)], np.float32)
