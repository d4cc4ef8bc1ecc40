"""What the server's process and the engine's say to each other, as msgpack.

Plain frozen data: the domain's own dataclasses (`Delta`, `SamplingParams`, `EngineStats`, ...)
inside small tagged messages. Both ends are the same installation, so there are no versions. A
request is known by its `number`, which is never used twice, so that a late delta cannot reach a
newer request that took the same id. Never pickle, and no torch to read any of it.

    ToEngine     Open, then Submit, Abort, Pause and Resume, in the end Stop
    FromEngine   Loading*, Opened or OpenRefused, then a verdict per Submit, and notes as they come
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.config import EngineConfig
from quickstep.dataclass import dataclass
from quickstep.engine.logs import LogSetup
from quickstep.engine.stats import EngineStats
from quickstep.engine.step_log import SequenceRecord
from quickstep.engine.stream import Delta
from quickstep.model.sizing import MemoryPlan
from quickstep.types import Pooling, SamplingParams, StepRecord

__all__ = [
    "FROM_ENGINE",
    "LENGTH",
    "TO_ENGINE",
    "Abort",
    "Accepted",
    "DeltaNote",
    "FromEngine",
    "GapNote",
    "Loading",
    "LogSetup",
    "Message",
    "ModelFacts",
    "Open",
    "OpenRefused",
    "Opened",
    "Pause",
    "Refused",
    "Resume",
    "SequenceNote",
    "StatsNote",
    "StepNote",
    "Stop",
    "Submit",
    "ToEngine",
    "encode",
    "framed",
    "opening_of",
]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`LoadedModel` as it travels: the receiver opens tokenizer and template at `path` itself."""

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    path: str
    default_sampling: dict[str, int | float]
    default_pooling: Pooling
    load_s: float
    memory_plan: MemoryPlan | None


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoding that all messages have: an array that begins with the class's name."""


class Open(_Message, frozen=True):
    """Load this model; the first message, sent once."""

    config: EngineConfig
    log: LogSetup


class Submit(_Message, frozen=True):
    """A request with its seed drawn. `deadline_s` counts from its arrival at the engine."""

    number: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    tenant: str
    cache_salt: str
    deadline_s: float | None
    pooling: Pooling | None


class Abort(_Message, frozen=True):
    """End a request; its last deltas come as for any end. Unknown and ended numbers are fine."""

    number: int


class Pause(_Message, frozen=True):
    """The reader of a request is behind: generate no more until Resume. Any number is fine."""

    number: int


class Resume(_Message, frozen=True):
    """Its reader has caught up."""

    number: int


class Stop(_Message, frozen=True):
    """End all requests with SHUTDOWN, free everything, close the connection, exit."""


class Loading(_Message, frozen=True):
    """How far the weights are."""

    num_bytes: int
    total_bytes: int


class Opened(_Message, frozen=True):
    """The engine steps from now on."""

    facts: ModelFacts
    stats: EngineStats


class OpenRefused(_Message, frozen=True):
    """There is no engine; `is_config` if the configuration or the checkpoint is to blame."""

    message: str
    is_config: bool


class Accepted(_Message, frozen=True):
    """The engine has queued the request; deltas follow."""

    number: int


class Refused(_Message, frozen=True):
    """The engine did not take the request. A status below 500 makes it the client's fault."""

    number: int
    message: str
    param: str | None
    status: int


class DeltaNote(_Message, frozen=True):
    """News of one of a request's sequences."""

    number: int
    delta: Delta


class StepNote(_Message, frozen=True):
    """A step was committed."""

    record: StepRecord


class GapNote(_Message, frozen=True):
    """The time between two tokens of a sequence."""

    seconds: float


class SequenceNote(_Message, frozen=True):
    """A sequence ended."""

    record: SequenceRecord


class StatsNote(_Message, frozen=True):
    """How the engine is doing; sent when a request came or ended, and now and then while busy."""

    stats: EngineStats


ToEngine = Open | Submit | Abort | Pause | Resume | Stop
FromEngine = (
    Loading
    | Opened
    | OpenRefused
    | Accepted
    | Refused
    | DeltaNote
    | StepNote
    | GapNote
    | SequenceNote
    | StatsNote
)
Message = ToEngine | FromEngine


def _plain(value: Any) -> Any:
    """Frozen mappings are the only values here that msgpack does not know."""
    if isinstance(value, MappingProxyType):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no msgpack form")


def opening_of(config: EngineConfig, log: LogSetup | None = None) -> Open:
    """The first message. Who reads the streams is at this end, and so is the bound on them."""
    return Open(replace(config, streams=None), log or LogSetup())


LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
TO_ENGINE = msgspec.msgpack.Decoder(list[ToEngine])
FROM_ENGINE = msgspec.msgpack.Decoder(list[FromEngine])


def encode(message: Message) -> msgspec.Raw:
    """One message's bytes; a list of them decodes with `TO_ENGINE` or `FROM_ENGINE`.

    Raises:
        UnicodeEncodeError: A string holds half a surrogate pair.
    """
    return msgspec.Raw(_ENCODER.encode(message))


def framed(messages: Sequence[msgspec.Raw]) -> bytes:
    """Encoded messages as one frame of the connection (see `wire`)."""
    content = msgspec.msgpack.encode(messages)
    return LENGTH.pack(len(content)) + content
