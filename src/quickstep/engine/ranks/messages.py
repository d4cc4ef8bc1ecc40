"""The messages to and from a process with another part of a model that are no steps.

    ToRank     OpenRank or OpenStage, then HoldAdapter and DropAdapter
    FromRank   PartOpened or PartRefused, then AdapterHeld per HoldAdapter

On a socket pair. Steps go through shared memory to ranks (`ops.native.ranks`), and from stage to
stage (`runtime.steps.stage_frames`). A connection that closes means that the process
at its other end has ended.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np

from quickstep.config import EngineConfig
from quickstep.engine.logs import LogSetup
from quickstep.engine.remote.opening import LENGTH, WireMessage, framed
from quickstep.model.sizing import MemoryPlan
from quickstep.ops.native.ranks import RankMemory
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import AnyTensor, Array, HostTensor, find_dtype, host_dtype, to_numpy

_Message = TypeVar("_Message")


class WireTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor on the host."""

    shape: tuple[int, ...]
    dtype: str
    content: bytes

    @staticmethod
    def of(tensor: AnyTensor) -> WireTensor:
        """Of a tensor on a CPU."""
        dtype = host_dtype(tensor.dtype)
        assert dtype is not None, "adapters are in dtypes of the kernels"
        return WireTensor(tuple(tensor.shape), dtype.name, to_numpy(tensor.contiguous()).tobytes())

    def tensor(self) -> HostTensor:
        """The tensor again."""
        dtype = find_dtype(self.dtype)
        content = bytearray(self.content)  # torch may wrap it
        elements = np.frombuffer(content, dtype=dtype.storage).reshape(self.shape)
        return HostTensor(elements, dtype)


class OpenRank(WireMessage, frozen=True):
    """Load this rank's part of a stage of the model; `plan` is that of all processes. Ranks that do
    not compute with the native kernels meet in the file `store_path`.
    """

    config: EngineConfig
    plan: MemoryPlan
    memory: RankMemory
    rank: int
    stage: int
    log: LogSetup
    store_path: str = ""


class OpenStage(WireMessage, frozen=True):
    """Load this stage of the model; steps come from `before` and go to `after`, descriptors of
    sockets. `plan` is that of all processes.
    """

    config: EngineConfig
    plan: MemoryPlan
    stage: int
    before: int
    after: int
    log: LogSetup


class PartOpened(WireMessage, frozen=True):
    """The process waits for steps of the model with this fingerprint. `biases` are those of a
    stage's matrices, with their numbers, where adapters may change them.
    """

    fingerprint: str
    biases: tuple[tuple[int, WireTensor], ...] = ()

    def numbered_biases(self) -> Iterator[tuple[int, Array]]:
        """Each bias [N] with the number of its matrix."""
        for number, bias in self.biases:
            yield number, bias.tensor().numpy()


class PartRefused(WireMessage, frozen=True):
    """The process cannot load its part, and ends."""

    reason: str


class WirePart(msgspec.Struct, frozen=True, array_like=True):
    """A `LoRAPart` of the matrix `module`."""

    module: int
    a: WireTensor
    b: WireTensor | None
    rank_scales: WireTensor | None
    bias: WireTensor | None
    first_output: int
    scale: float
    is_embedding: bool

    @staticmethod
    def of(module: int, part: LoRAPart) -> WirePart:
        """Of a part."""
        b, scales, bias = (
            None if tensor is None else WireTensor.of(tensor)
            for tensor in (part.b, part.rank_scales, part.bias)
        )
        place = part.first_output, part.scale, part.is_embedding
        return WirePart(module, WireTensor.of(part.a), b, scales, bias, *place)

    def part(self) -> LoRAPart:
        """The part again."""
        b, scales, bias = (
            None if wire is None else wire.tensor()
            for wire in (self.b, self.rank_scales, self.bias)
        )
        place = self.first_output, self.scale, self.is_embedding
        return LoRAPart(self.a.tensor(), b, *place, scales, bias)


class HoldAdapter(WireMessage, frozen=True):
    """Pack the rank's part of an adapter, which steps will name by this number."""

    number: int
    num_modules: int
    parts: tuple[WirePart, ...]


class AdapterHeld(WireMessage, frozen=True):
    """Steps may name the adapter."""

    number: int


class DropAdapter(WireMessage, frozen=True):
    """No step names the adapter any more."""

    number: int


TO_RANK = msgspec.msgpack.Decoder(list[OpenRank | OpenStage | HoldAdapter | DropAdapter])
FROM_RANK = msgspec.msgpack.Decoder(list[PartOpened | PartRefused | AdapterHeld])


def send(connection: socket.socket, message: WireMessage) -> None:
    """Send a message. Raises OSError."""
    connection.sendall(framed([message]))


def receive(
    connection: socket.socket, decoder: msgspec.msgpack.Decoder[list[_Message]]
) -> _Message | None:
    """Wait for a message: `TO_RANK` or `FROM_RANK`. None once the other end has closed.

    Raises:
        OSError: The connection failed.
        msgspec.DecodeError: It is another message.
    """
    head = _read(connection, LENGTH.size)
    content = None if head is None else _read(connection, LENGTH.unpack(head)[0])
    return None if content is None else decoder.decode(content)[0]


def _read(connection: socket.socket, num_bytes: int) -> bytes | None:
    found = bytearray()
    while len(found) < num_bytes:
        received = connection.recv(num_bytes - len(found))
        if not received:
            return None
        found += received
    return bytes(found)
