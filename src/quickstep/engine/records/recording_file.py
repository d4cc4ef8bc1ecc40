"""`RecordingFile`: where an engine's scheduler records its calls (`quickstep serve --record`).

A thread flushes the file once a second, so that a killed server loses no more than that. A file
that cannot be written any more ends the recording with a line in the log, not the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from pathlib import Path
from typing import IO

from quickstep.config import EngineConfig, RecordingConfig, SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import Policy
from quickstep.core.recordings.recording import Recorder, RecordingScheduler
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.errors import ConfigError
from quickstep.text.tokenizer import Tokenizer

_LOGGER = logging.getLogger(__name__)
_FLUSH_S = 1.0
_MAX_EARLIER = 9  # recordings: more than the deaths after which the server gives an engine up


class RecordingFile:
    """An open recording. Owned by the engine, which closes it; called in its event loop."""

    def __init__(self, is_full: bool, file: IO[bytes], tokenizer: Tokenizer) -> None:
        self._is_full = is_full
        self._file: IO[bytes] | None = file
        self._tokenizer = tokenizer
        self._recorder: Recorder | None = None
        self._closed = threading.Event()
        self._flusher = threading.Thread(target=self._flush, name="recording", daemon=True)

    @staticmethod
    def open(config: RecordingConfig, tokenizer: Tokenizer) -> RecordingFile:
        """Begin a file, which only its owner may read. One that exists becomes FILE.1, FILE.2 and
        so on: it may be of an engine that has failed and was started again, and the first one of
        these shows the cause. At most `_MAX_EARLIER` are kept; then the last of them is replaced.

        Raises:
            ConfigError: It cannot be written.
        """
        path = Path(config.path)
        try:
            if path.is_file() and path.stat().st_size:
                kept = _name_of_earlier(path)
                path.replace(kept)
                _LOGGER.info("the earlier recording %s is kept as %s", path, kept)
            file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        except OSError as error:
            raise ConfigError(f"{config.path} cannot be written: {error.strerror}") from None
        return RecordingFile(config.is_full, file, tokenizer)

    def scheduler(
        self,
        settings: SchedulerConfig,
        pool: KVBlockPool,
        policy: Policy,
        cost_model: LinearCostModel,
        engine: EngineConfig,
        fingerprint: str,
    ) -> RecordingScheduler:
        """The scheduler that is recorded, in a file that is flushed from now on. Called once."""
        self._flusher.start()
        text_of = self._tokenizer.decode if self._is_full else None
        recorder = Recorder(self._write, pool.block_size, secrets.token_bytes(32), text_of)
        self._recorder = recorder
        config = engine if self._is_full else None
        return RecordingScheduler(settings, pool, policy, cost_model, recorder, config, fingerprint)

    def close(self) -> None:
        """Write what has not ended, and close the file. Idempotent."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._closed.set()
        if self._flusher.ident is not None:  # it was started
            self._flusher.join()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush(self) -> None:
        """Flush until `close`. The file has a lock of its own; `_write` reports what fails."""
        while not self._closed.wait(_FLUSH_S):
            file = self._file
            if file is not None:
                with contextlib.suppress(OSError, ValueError):
                    file.flush()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
        except OSError as error:
            _LOGGER.error("the recording ends here: %s", error)
            self._file = None


def _name_of_earlier(path: Path) -> Path:
    """The first free one of FILE.1, FILE.2, ...; the last one if none is free."""
    names = [path.with_name(f"{path.name}.{number}") for number in range(1, _MAX_EARLIER + 1)]
    return next((name for name in names if not name.exists()), names[-1])
