"""Tokenises long texts, and renders long conversations, in a process of its own (`text_worker`).

In the server's process they would take processors from the steps of the engine, and the lock of the
interpreter from the event loop: a list of a million token ids is built in one call, which delays
every stream by tens of milliseconds, and a template is interpreted for 30 us a message. `Tokenizer`
and `ChatTemplate` decide what is long. The process starts with the first of it, and ends with its
owner. Long texts wait for it. A conversation, which takes some milliseconds, does not: while the
process starts or is busy, the caller renders it.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quickstep.config import InputConfig
from quickstep.errors import EngineError, RequestError
from quickstep.text.worker_process import WorkerDied, WorkerProcess

_LOG = logging.getLogger("quickstep.server")
_MODULE = "quickstep.text.text_worker"
_TIMEOUT_S = 120.0
_IDS_AT_ONCE = 32_768  # appended in one call: a fraction of a millisecond


class TextsToEncode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What `Tokenizer.encode_all` gets. The answer is a list of int32 arrays."""

    texts: list[str]
    add_special_tokens: bool


class ChatToRender(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What `ChatTemplate.render` gets. The answer is a text, or `RefusedChat`."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    extra: Mapping[str, Any] | None
    continue_final_message: bool


class RefusedChat(msgspec.Struct, frozen=True):
    """A RequestError."""

    message: str
    param: str | None


Work = TextsToEncode | ChatToRender


class TextProcess:
    """Has the tokenizer and the template of the checkpoint at `path`, opened with `inputs`. Any
    thread may call it; it does one piece of work at a time.
    """

    def __init__(self, path: Path, inputs: InputConfig | None = None) -> None:
        self._path = path
        self._inputs = inputs or InputConfig()
        self._lock = threading.Lock()  # held while it starts and while it works
        self._worker: WorkerProcess | None = None

    @property
    def process_id(self) -> int | None:
        """The operating system's id; None before it has started."""
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
            worker = self._running() or self._start()
            answer = self._exchange(worker, frame)
        return [_ids(encoded) for encoded in msgspec.msgpack.decode(answer, type=list[bytes])]

    def render(self, chat: ChatToRender) -> str | None:
        """The text of a conversation. None if the caller has to render it: while the process starts
        or is busy, and for values that MessagePack does not have, as integers of 65 bits.

        Raises:
            RequestError: The template refuses it.
            EngineError: The process died, or took too long.
        """
        try:
            frame = msgspec.msgpack.encode(chat)
        except (OverflowError, TypeError, UnicodeEncodeError):
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            worker = self._running()
            answer = None if worker is None else self._exchange(worker, frame)
        finally:
            self._lock.release()
        if answer is None:
            threading.Thread(target=self._start_ahead, daemon=True).start()
            return None
        text = msgspec.msgpack.decode(answer, type=str | RefusedChat)
        if isinstance(text, RefusedChat):
            raise RequestError(text.message, param=text.param)
        return text

    def _running(self) -> WorkerProcess | None:
        if self._worker is not None and not self._worker.is_alive:  # of no work of ours
            self._worker.end()
            self._worker = None
        return self._worker

    def _start_ahead(self) -> None:
        """Start it for the work that follows."""
        with self._lock:
            if self._running() is None:
                try:
                    self._start()
                except EngineError as error:
                    _LOG.warning("%s; the server does its work", error)

    def _start(self) -> WorkerProcess:
        """Start it, and wait until it has read its files. Raises EngineError."""
        worker = WorkerProcess(_MODULE, str(self._path))
        self._exchange(worker, msgspec.msgpack.encode(self._inputs))
        self._worker = worker
        return worker

    def _exchange(self, worker: WorkerProcess, frame: bytes) -> bytes:
        try:
            return worker.exchange(frame, _TIMEOUT_S)
        except WorkerDied as death:
            self._worker = None
            raise EngineError(
                f"the process that works on long inputs ended with code {death.code}; send the "
                "request again or a shorter input"
            ) from None


def _ids(data: bytes) -> list[int]:
    """The ids of an int32 array; other threads run in between."""
    packed = array("i")
    packed.frombytes(data)
    ids: list[int] = []
    for start in range(0, len(packed), _IDS_AT_ONCE):
        ids.extend(packed[start : start + _IDS_AT_ONCE])
    return ids
