"""What a format of quantized checkpoints is: which tensors hold a matrix, and where its rows are.

One storage per format, over the tensor files of one checkpoint; `formats.detect.find_storage`
chooses it, `checkpoint.weights` and `formats.quantized_reader` query it matrix by matrix. A matrix
has the architecture's name (`...q_proj.weight`), whatever the files call its parts. A storage reads
the small tensors, with NumPy; quantized values stay in the files (`StoredRows`), to be packed by
the native kernels or decoded by `formats.stored_values`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.tensor_schema import Shape, Shapes
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.tensors import FLOAT32, Array, HostTensor
from quickstep.ops.weights import StoredRows

_LEAST_GROUP = 16

# By a tensor's name: the size of heads whose rows are stored as 0, size / 2, 1, ...; 0 for rows in
# order.
PairedHeads = Callable[[str], int]


class MatrixStorage(Protocol):
    """One format, for one checkpoint's files. `shape` is the matrix's own, [N, C]."""

    @property
    def name(self) -> str:
        """As the checkpoint calls the format, for messages."""

    def parts(self, name: str, shape: Shape) -> Shapes | None:
        """The tensors that hold a matrix, with their shapes; None if it is not quantized.

        Raises:
            ConfigError: The matrix is stored in a variant that is not supported.
        """

    def form(self, name: str, shape: Shape) -> MatrixFormat:
        """How a matrix with parts is held once it is read."""

    def rows(self, name: str, shape: Shape, reader: TensorReader) -> StoredRows:
        """Where the files have a matrix with parts, with its scales. Raises ConfigError."""

    def has_no_effect(self, name: str) -> bool:
        """Whether a tensor that the architecture lacks changes nothing (a bias of zeros)."""


def module_of(name: str) -> str:
    """`...q_proj.weight` -> `...q_proj`."""
    return name.removesuffix(".weight")


def checked_group(name: str, group_size: int | None, num_inputs: int) -> int:
    """The group size of a matrix; None and -1 take all inputs. Raises ConfigError."""
    if group_size is None or group_size in (-1, num_inputs):
        return num_inputs
    if group_size < _LEAST_GROUP or group_size % _LEAST_GROUP or num_inputs % group_size:
        raise ConfigError(
            f"{name} is quantized in groups of {group_size} of its {num_inputs} inputs; supported "
            f"are multiples of {_LEAST_GROUP} that divide the inputs, and all inputs (-1)"
        )
    return group_size


def factors(values: Array) -> HostTensor:
    """Scales or zeros [N, G] as `StoredRows` has them."""
    return HostTensor(np.require(values, np.float32, ["C", "W"]), FLOAT32)


# The 16 values of e2m1 (OCP Microscaling Formats, 1.0) times 2, about 32: of 6 bits. Also in
# csrc/stored_rows.cpp.
E2M1_LEVELS: Array = np.array(
    [32 + sign * value for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12)], np.uint8
)
