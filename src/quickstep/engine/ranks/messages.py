"""The messages between rank 0 and another rank that are no steps, on a socket pair.

    ToRank     OpenRank, then HoldAdapter and DropAdapter
    FromRank   RankOpened or RankRefused, then AdapterHeld per HoldAdapter

Steps go through shared memory (`ops.native.ranks`). A connection that closes means that the process
at its other end has ended.
"""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec
import numpy as np

from quickstep.config import EngineConfig
from quickstep.engine.logs import LogSetup
from quickstep.engine.remote.opening import LENGTH, WireMessage, framed
from quickstep.model.sizing import MemoryPlan
from quickstep.ops.native.ranks import RankMemory
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import AnyTensor, HostTensor, find_dtype, host_dtype, to_numpy

_Message = TypeVar("_Message")


class OpenRank(WireMessage, frozen=True):
    """Load this rank's part of the model; `plan` is that of all ranks."""

    config: EngineConfig
    plan: MemoryPlan
    memory: RankMemory
    rank: int
    log: LogSetup


class RankOpened(WireMessage, frozen=True):
    """The rank waits for steps of the model with this fingerprint."""

    fingerprint: str


class RankRefused(WireMessage, frozen=True):
    """The rank cannot load its part, and ends."""

    reason: str


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
        elements = np.frombuffer(self.content, dtype=dtype.storage).reshape(self.shape)
        return HostTensor(elements, dtype)


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


TO_RANK = msgspec.msgpack.Decoder(list[OpenRank | HoldAdapter | DropAdapter])
FROM_RANK = msgspec.msgpack.Decoder(list[RankOpened | RankRefused | AdapterHeld])


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
