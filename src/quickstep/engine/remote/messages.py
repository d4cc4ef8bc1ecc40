"""What the server's process and the engine's say to each other, as msgpack.

Plain frozen data: `Request` as the server's process has made it, and the domain's own types
(`Delta`, `EngineStats`, ...) inside small tagged messages. Both ends are the same installation, so
there are no versions. A request is known by its id, which the client of the engine gives to no
other until the engine has said the last of it. Never pickle, and no torch to read any of it.

    ToEngine     Open, then Request, Abort, Pause and Resume, in the end Stop
    FromEngine   Loading*, Opened or OpenRefused, then a verdict per Request, and notes as they come
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.engine.logs import LogSetup
from quickstep.engine.remote.opening import Open, WireMessage
from quickstep.engine.stats import EngineStats
from quickstep.engine.step_log import SequenceRecord
from quickstep.engine.stream import Delta
from quickstep.errors import EngineError, QuickstepError, RequestError
from quickstep.model.sizing import MemoryPlan
from quickstep.types import Pooling, Request, StepRecord

__all__ = [
    "FROM_ENGINE",
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
    "ToEngine",
    "encode",
]


class ModelFacts(msgspec.Struct, frozen=True):
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


class Abort(WireMessage, frozen=True):
    """End a request; its last deltas come as for any end. Unknown and ended ids are fine."""

    request_id: str


class Pause(WireMessage, frozen=True):
    """The reader of a request is behind: generate no more until Resume. Any id is fine."""

    request_id: str


class Resume(WireMessage, frozen=True):
    """Its reader has caught up."""

    request_id: str


class Stop(WireMessage, frozen=True):
    """End all requests with SHUTDOWN, free everything, close the connection, exit."""


class Loading(WireMessage, frozen=True):
    """How far the weights are."""

    num_bytes: int
    total_bytes: int


class Opened(WireMessage, frozen=True):
    """The engine steps from now on."""

    facts: ModelFacts
    stats: EngineStats


class OpenRefused(WireMessage, frozen=True):
    """There is no engine; `is_config` if the configuration or the checkpoint is to blame."""

    message: str
    is_config: bool


class Accepted(WireMessage, frozen=True):
    """The engine has queued the request; deltas follow. `ignored` as in `Stream`."""

    request_id: str
    ignored: tuple[str, ...] = ()


class Refused(WireMessage, frozen=True):
    """The engine refused the request, or cannot continue with it. A status below 500 makes it
    the client's fault.
    """

    request_id: str
    message: str
    param: str | None
    status: int
    code: str | None = None

    @property
    def error(self) -> QuickstepError:
        """What the request's stream raises."""
        if self.status >= 500:
            return EngineError(self.message)
        return RequestError(self.message, param=self.param, status=self.status, code=self.code)


class DeltaNote(WireMessage, frozen=True):
    """News of one of a request's sequences."""

    request_id: str
    delta: Delta


class StepNote(WireMessage, frozen=True):
    """A step was committed."""

    record: StepRecord


class GapNote(WireMessage, frozen=True):
    """The time between two tokens of a sequence."""

    seconds: float


class SequenceNote(WireMessage, frozen=True):
    """A sequence ended."""

    record: SequenceRecord


class StatsNote(WireMessage, frozen=True):
    """How the engine is doing; sent when a request came or ended, and now and then while busy: it
    is the worker's heartbeat. `computed_s` is the processor time of all threads but the event loop.
    """

    stats: EngineStats
    computed_s: float


ToEngine = Open | Request | Abort | Pause | Resume | Stop
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


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
TO_ENGINE = msgspec.msgpack.Decoder(list[ToEngine])
FROM_ENGINE = msgspec.msgpack.Decoder(list[FromEngine])


def encode(message: Message) -> msgspec.Raw:
    """One message's bytes; a list of them decodes with `TO_ENGINE` or `FROM_ENGINE`.

    Raises:
        UnicodeEncodeError: A string holds half a surrogate pair.
    """
    return msgspec.Raw(_ENCODER.encode(message))
