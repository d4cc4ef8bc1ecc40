"""Tokenises long texts in a process of its own (`tokenizer_worker`), at low priority.

In the server's process they would take processors from the steps of the engine, and the lock of the
interpreter from the event loop: a list of a million token ids is built in one call, which delays
every stream by tens of milliseconds. `Tokenizer` decides what is long. The process starts with the
first long text and ends with its owner.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from quickstep.errors import EngineError, RequestError
from quickstep.text.worker_process import WorkerDied, WorkerProcess

_MODULE = "quickstep.text.tokenizer_worker"
_TIMEOUT_S = 120.0
_IDS_AT_ONCE = 32_768  # appended in one call: a fraction of a millisecond


class TextsToEncode(msgspec.Struct, frozen=True, array_like=True):
    """A request: what `Tokenizer.encode_all` gets. The answer is a list of int32 arrays."""

    texts: list[str]
    add_special_tokens: bool


class TokenizerProcess:
    """Tokenises with the checkpoint at `path`. Any thread may call `encode_all`; calls queue."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._worker: WorkerProcess | None = None

    @property
    def process_id(self) -> int | None:
        """The operating system's id; None before the first text."""
        worker = self._worker
        return None if worker is None else worker.process_id

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text.

        Raises:
            RequestError: A text is not Unicode.
            EngineError: The process cannot be started, died, or took too long.
        """
        try:
            frame = msgspec.msgpack.encode(TextsToEncode(list(texts), add_special_tokens))
        except UnicodeEncodeError as error:
            raise RequestError(
                "the text is not valid Unicode: it holds half a surrogate pair", param="prompt"
            ) from error
        with self._lock:
            if self._worker is not None and not self._worker.is_alive:  # of no text of ours
                self._worker.end()
                self._worker = None
            if self._worker is None:
                self._worker = WorkerProcess(_MODULE, str(self._path))
            try:
                answer = self._worker.exchange(frame, _TIMEOUT_S)
            except WorkerDied as death:
                self._worker = None
                raise EngineError(
                    f"the process that tokenises long texts ended with code {death.code};"
                    " send the request again or a shorter text"
                ) from None
        return [_ids(encoded) for encoded in msgspec.msgpack.decode(answer, type=list[bytes])]


def _ids(data: bytes) -> list[int]:
    """The ids of an int32 array; other threads run in between."""
    packed = array("i")
    packed.frombytes(data)
    ids: list[int] = []
    for start in range(0, len(packed), _IDS_AT_ONCE):
        ids.extend(packed[start : start + _IDS_AT_ONCE])
    return ids
