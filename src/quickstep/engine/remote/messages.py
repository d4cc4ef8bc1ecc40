"""The messages between the server's process and the engine's, and how they are sent.

    ToEngine     Open, then Request, Abort, Pause, Resume, ReportTimings, ResetPrefixCache,
                 LoadAdapter and UnloadAdapter, in the end Stop
    FromEngine   Loading*, Opened or OpenRefused, then Accepted or Refused per Request, Started,
                 and notes

Plain frozen data: `Request` as the server's process has made it, and the domain's own types
(`Delta`, `EngineStats`, ...) inside small tagged messages. Both ends are the same installation, so
there are no versions. A request is identified by its id, which the engine's client does not reuse
until the engine has sent the request's last message. Never pickle, and no torch to read any of it.

On the socket, messages are frames of a length and a msgpack list:

    4 bytes, big endian: length | msgpack [message, message, ...]
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.engine.remote.opening import LENGTH, Open, WireMessage, framed
from quickstep.engine.stats import EngineStats
from quickstep.errors import EngineError, QuickstepError, RequestError
from quickstep.model.sizing import MemoryPlan
from quickstep.types import Delta, KVTarget, Pooling, Request, SequenceTimings, StepRecord

# What a connection's reader buffers before the socket has to wait.
BUFFER_BYTES = 256 * 1024
# Decoding a frame must not block the reader's loop for long.
_MESSAGES_PER_FRAME = 256

_Received = TypeVar("_Received")


class ModelFacts(msgspec.Struct, frozen=True):
    """`LoadedModel` as it is sent: the receiver opens tokenizer and template at `path` itself.

    Attributes:
        kv_address: Where other engines send KV blocks; None if they are not transferred.
        kv_block_bytes: Of each of them.
    """

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    path: str
    default_sampling: dict[str, int | float]
    default_pooling: Pooling
    load_s: float
    memory_plan: MemoryPlan | None
    kv_address: KVTarget | None = None
    kv_block_bytes: int = 0


class Abort(WireMessage, frozen=True):
    """End a request; its last deltas follow as for any end. Unknown and ended ids are ignored."""

    request_id: str


class Pause(WireMessage, frozen=True):
    """The reader of a request is too slow: generate no more until Resume. Any id is allowed."""

    request_id: str


class Resume(WireMessage, frozen=True):
    """The reader of a paused request has caught up."""

    request_id: str


class ReportTimings(WireMessage, frozen=True):
    """Send a TimingsNote of a request."""

    request_id: str


class ResetPrefixCache(WireMessage, frozen=True):
    """Free every cached block that no sequence uses, and send a PrefixCacheReset."""


class LoadAdapter(WireMessage, frozen=True):
    """Let new requests name a LoRA adapter, and send an AdapterNote with the same `number`."""

    number: int
    name: str
    path: str
    is_from_client: bool


class UnloadAdapter(WireMessage, frozen=True):
    """Refuse new requests with an adapter, and send an AdapterNote with the same `number`."""

    number: int
    name: str


class Stop(WireMessage, frozen=True):
    """End all requests with SHUTDOWN, free everything, close the connection, exit."""


class Loading(WireMessage, frozen=True):
    """How much of the weights is loaded."""

    num_bytes: int
    total_bytes: int


class Opened(WireMessage, frozen=True):
    """The engine is open and runs."""

    facts: ModelFacts
    stats: EngineStats


class OpenRefused(WireMessage, frozen=True):
    """The engine could not be opened; `is_config`: because of the configuration or checkpoint."""

    message: str
    is_config: bool


class Accepted(WireMessage, frozen=True):
    """The engine has queued the request; deltas follow. `ignored` as in `Stream`."""

    request_id: str
    ignored: tuple[str, ...] = ()
    adapter_id: str = ""


class Refused(WireMessage, frozen=True):
    """The engine refused the request, or cannot continue with it. A status below 500 means that
    the client caused it; one of 500 or above with a code is a RequestError all the same.
    """

    request_id: str
    message: str
    param: str | None
    status: int
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def error(self) -> QuickstepError:
        """What the request's stream raises."""
        if self.status >= 500 and self.code is None:
            return EngineError(self.message)
        return RequestError(
            self.message,
            param=self.param,
            status=self.status,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )


class Started(WireMessage, frozen=True):
    """The next step is the first that computes these requests, or does so again after they were
    preempted. Sent before it: if it ends the process, they may be the cause.
    """

    request_ids: tuple[str, ...]


class StepNote(WireMessage, frozen=True):
    """All that came of a step; without a record, what came without one.

    Attributes:
        sequences: Those that ended.
        deltas: Of sequences, with the ids of their requests.
        record: The step's.
    """

    sequences: tuple[SequenceRecord, ...] = ()
    deltas: tuple[tuple[str, Delta], ...] = ()
    record: StepRecord | None = None


class TimingsNote(WireMessage, frozen=True):
    """The timings so far of a request's live sequences, by index; empty if there are none."""

    request_id: str
    timings: dict[int, SequenceTimings]


class PrefixCacheReset(WireMessage, frozen=True):
    """The answer to a ResetPrefixCache: how many blocks were freed."""

    num_blocks: int


class AdapterNote(WireMessage, frozen=True):
    """The answer to a LoadAdapter or UnloadAdapter: what was loaded, or why it was refused."""

    number: int
    loaded: LoadedAdapter | None = None
    refused: Refused | None = None


class StatsNote(WireMessage, frozen=True):
    """The engine's state; sent when a request came or ended, and regularly while busy, as the
    worker's heartbeat. `computed_s` is the processor time of all threads but the event loop's.
    """

    stats: EngineStats
    computed_s: float


ToEngine = (
    Open
    | Request
    | Abort
    | Pause
    | Resume
    | ReportTimings
    | ResetPrefixCache
    | LoadAdapter
    | UnloadAdapter
    | Stop
)
FromEngine = (
    Loading
    | Opened
    | OpenRefused
    | Accepted
    | Refused
    | Started
    | StepNote
    | TimingsNote
    | PrefixCacheReset
    | AdapterNote
    | StatsNote
)
Message = ToEngine | FromEngine


def _plain(value: Any) -> Any:
    """Convert the only values in messages that msgpack does not know: frozen mappings."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no msgpack form")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
TO_ENGINE = msgspec.msgpack.Decoder(list[ToEngine])
FROM_ENGINE = msgspec.msgpack.Decoder(list[FromEngine])


def encode(message: Message) -> msgspec.Raw:
    """One message's bytes; a list of them decodes with `TO_ENGINE` or `FROM_ENGINE`.

    Raises:
        UnicodeEncodeError: A string contains half a surrogate pair.
    """
    return msgspec.Raw(_ENCODER.encode(message))


class Sender:
    """The sending half of a connection, used in one event loop. `run` is its task.

    Everything that was put since the last frame is sent in the next one, so a step's deltas for all
    requests are one frame. `put` never waits: while the reader is slow, encoded messages queue up
    here, bounded by what the live requests may still generate, and the engine's loop continues.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._pending: deque[msgspec.Raw] = deque()
        self._num_bytes = 0  # of what is pending
        self._has_pending = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """The size of the messages that are not sent yet."""
        return self._num_bytes

    def put(self, message: Message) -> None:
        """Queue a message; it is lost if the other end has closed.

        Raises:
            UnicodeEncodeError: A string contains half a surrogate pair.
            OverflowError: An integer has more than 64 bits.
        """
        encoded = encode(message)
        self._pending.append(encoded)
        self._num_bytes += len(encoded)
        self._has_pending.set()

    async def run(self) -> None:
        """Send messages until cancelled, or until the other end has closed."""
        try:
            while True:
                await self._has_pending.wait()
                self._has_pending.clear()
                await self.flush()
        except ConnectionError:
            return  # the task that reads this connection notices its end

    async def flush(self) -> None:
        """Send all queued messages. Raises ConnectionError."""
        while self._pending:
            count = min(len(self._pending), _MESSAGES_PER_FRAME)
            messages = [self._pending.popleft() for _ in range(count)]
            self._num_bytes -= sum(map(len, messages))
            self._writer.write(framed(messages))
            await self._writer.drain()


async def read_messages(
    reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[list[_Received]]
) -> AsyncGenerator[_Received, None]:
    """All messages until the other end closes. Raises EngineError for an invalid one."""
    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            messages = decoder.decode(await reader.readexactly(length))
        except msgspec.DecodeError as error:
            raise EngineError(f"what came from the other process is no message: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        for message in messages:
            yield message
