"""The messages between the server's process and the engine's; `connection` sends them.

    ToEngine     Open, then Request, Abort, Pause, Resume, ReportTimings, ResetPrefixCache,
                 LoadAdapter and UnloadAdapter, SaveSlot and RestoreSlot, FindCachedSlot and
                 FindStoredSlot, in the end Stop
    FromEngine   Loading*, Opened or OpenRefused, then Accepted or Refused per Request, Started,
                 and notes

A listening engine is open already: it sends Opened first, answers each ReadClock, and may send
Draining.

Plain frozen data: `Request` as the server's process has made it, and the domain's own types
(`Delta`, `EngineStats`, ...) inside small tagged messages. Both ends are the same build, so there
are no versions. A request is identified by its id on its connection, which the engine's client does
not reuse until the engine has sent the request's last message. No torch is needed to read any of
it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.records.step_log import SequenceRecord
from quickstep.engine.remote.opening import Open, WireMessage
from quickstep.engine.retrieval.card import Retrieval
from quickstep.engine.stats import EngineStats
from quickstep.errors import EngineError, QuickstepError, RequestError
from quickstep.model.sizing import MemoryPlan
from quickstep.types import Delta, KVTarget, Request, SequenceTimings, SlotPrefix, StepRecord


class TextDigests(msgspec.Struct, frozen=True):
    """Digests of a checkpoint's tokenizer and chat templates: equal texts give equal prompts."""

    tokenizer: str
    chat_template: str


class ModelFacts(msgspec.Struct, frozen=True):
    """`LoadedModel` as it is sent: the receiver opens tokenizer and template at `path` itself.

    Attributes:
        kv_address: Where other engines send KV blocks; None if they are not transferred.
        kv_block_bytes: Of each of them.
        text_digests: Of a listening engine: the receiver opens its own copy of the checkpoint,
            which must have these.
    """

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    path: str
    default_sampling: dict[str, int | float]
    retrieval: Retrieval
    load_s: float
    memory_plan: MemoryPlan | None
    block_size: int
    kv_address: KVTarget | None = None
    kv_block_bytes: int = 0
    text_digests: TextDigests | None = None


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
    """Free every cached block that no sequence uses, and send a PrefixCacheNote."""


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


class SaveSlot(WireMessage, frozen=True):
    """Write a cached prefix into a file, and send a SlotNote with the same `number`."""

    number: int
    filename: str
    adapter: str
    cache_salt: str
    token_ids: tuple[int, ...]


class RestoreSlot(WireMessage, frozen=True):
    """Read a file into the prefix cache, and send a SlotNote with the same `number`."""

    number: int
    filename: str
    cache_salt: str


class FindCachedSlot(WireMessage, frozen=True):
    """Send a SlotNote with the same `number`: what a SaveSlot would write."""

    number: int
    adapter: str
    cache_salt: str
    token_ids: tuple[int, ...]


class FindStoredSlot(WireMessage, frozen=True):
    """Send a SlotNote with the same `number`: what a RestoreSlot would read."""

    number: int
    filename: str
    cache_salt: str


class ReadClock(WireMessage, frozen=True):
    """Send a ClockNote."""

    sent_s: float


class Stop(WireMessage, frozen=True):
    """End all requests with SHUTDOWN, free everything, close the connection, exit. A listening
    engine ends the requests of this connection only, and closes it.
    """


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


class PrefixCacheNote(WireMessage, frozen=True):
    """The answer to a ResetPrefixCache: how many blocks were freed."""

    num_blocks: int


class AdapterNote(WireMessage, frozen=True):
    """The answer to a LoadAdapter or UnloadAdapter: what was loaded, or why it was refused."""

    number: int
    loaded: LoadedAdapter | None = None
    refused: Refused | None = None


class SlotNote(WireMessage, frozen=True):
    """The answer to a message about a slot: what the file has, or why it was refused."""

    number: int
    prefix: SlotPrefix | None = None
    refused: Refused | None = None


class StatsNote(WireMessage, frozen=True):
    """The engine's state; sent when a request came or ended, and regularly while busy, as the
    worker's heartbeat. `computed_s` is the processor time of all threads but the event loop's.
    """

    stats: EngineStats
    computed_s: float


class ClockNote(WireMessage, frozen=True):
    """The answer to the ReadClock of `sent_s`: the engine's clock."""

    sent_s: float
    engine_s: float


class Draining(WireMessage, frozen=True):
    """The engine's process will end: send no more requests; those that run may finish."""


SlotMessage = SaveSlot | RestoreSlot | FindCachedSlot | FindStoredSlot
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
    | SlotMessage
    | ReadClock
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
    | PrefixCacheNote
    | AdapterNote
    | SlotNote
    | StatsNote
    | ClockNote
    | Draining
)
Message = ToEngine | FromEngine


def _plain(value: Any) -> Any:
    """Convert the only values in messages that msgpack does not know: frozen mappings."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no msgpack form")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
TO_ENGINE = msgspec.msgpack.Decoder(list[ToEngine])
FROM_ENGINE = msgspec.msgpack.Decoder(list[FromEngine])
