"""A model of a given shape with random weights, in memory only: for benchmarks.

`random_model` uses the loader from the tensors on, so that packing, layout and kernels are those of
a checkpoint. The weights are a function of `ModelSpec` and `RandomValues`: each tensor has its own
generator, seeded by its name.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import torch
from torch import Tensor

from quickstep.model.checkpoint.tensor_reader import Progress
from quickstep.model.checkpoint.tensor_schema import Shapes, layer_tensors, outer_tensors
from quickstep.model.checkpoint.weights import DecoderNames
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.loader import build_decoder, quantizing
from quickstep.ops.table import OpTable
from quickstep.ops.weights import QuantizedWeight


class RandomValues(msgspec.Struct, frozen=True):
    """Which weights to generate: dtype, device, seed, and `--quantization`, if any."""

    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    quantization: str | None = None


def random_model(
    spec: ModelSpec,
    ops: OpTable,
    values: RandomValues,
    max_model_len: int,
    progress: Progress | None = None,
) -> Decoder:
    """Generate and pack the weights of `spec`, a native one, layer by layer."""
    prefix, head = spec.naming.prefixes[0], spec.naming.heads[0]
    shapes = outer_tensors(spec, prefix, head)
    for index in range(spec.num_layers):
        shapes.update(layer_tensors(spec, prefix, index))
    settings = f"random {values} {ops.name} {spec!r}"
    fingerprint = hashlib.blake2b(settings.encode(), digest_size=16).hexdigest()
    names = DecoderNames(prefix, head, not spec.tied)
    source = quantizing(RandomTensors(shapes, values, progress), values.quantization, names, ops)
    return build_decoder(spec, ops, source, names, max_model_len, lambda: fingerprint)


class RandomTensors:
    """A `TensorSource` over shapes: norms are 1, biases 0, matrices normal with variance 1 / inputs
    (so that activations keep their size over the layers).
    """

    def __init__(
        self,
        shapes: Shapes,
        values: RandomValues,
        progress: Progress | None = None,
    ) -> None:
        self._shapes = shapes
        self._dtype = values.dtype
        self._device = values.device
        self._seed = values.seed
        self._progress = progress
        self._total_bytes = sum(map(math.prod, shapes.values())) * values.dtype.itemsize
        self._done_bytes = 0

    def tensor(self, name: str) -> Tensor:
        """One tensor."""
        return self.stacked((name,))

    def stacked(self, names: tuple[str, ...]) -> Tensor:
        """Several tensors, one below the other along the first dimension."""
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        # made where it is needed: one thread of a CPU takes a minute and more for 8B values
        tensor = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        parts = torch.split(tensor, [shape[0] for shape in shapes])
        for name, part in zip(names, parts, strict=True):
            self._fill_(name, part)
        self._done_bytes += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
        return tensor

    def linear(self, names: tuple[str, ...]) -> Tensor | QuantizedWeight:
        """The matrix, not quantized."""
        return self.stacked(names)

    def stored(self, names: tuple[str, ...], *, floating: bool = False) -> None:
        """None: nothing is in a file."""

    def _fill_(self, name: str, tensor: Tensor) -> None:
        if name.endswith(".bias"):
            tensor.zero_()
        elif tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            generator = torch.Generator(self._device).manual_seed(_seed_of(name, self._seed))
            tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
