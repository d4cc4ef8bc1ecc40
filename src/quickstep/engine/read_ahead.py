"""What an engine needs beside its weights, fetched by a thread while they are read.

Reading weights is native work without the interpreter's lock, and what builds the engine around
them is imports and a tokenizer: side by side, the longer of the two is what a start takes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quickstep.engine.text.tokenizer import Tokenizer

__all__ = ["ReadAhead"]

# What `assembly` imports when the weights are there.
_IMPORTED_LATER = (
    "quickstep.engine.text.tokenizer",
    "quickstep.engine.engine",
    "quickstep.engine.grammar.grammars",
    "quickstep.runtime.executor",
    "quickstep.runtime.runner",
)


class ReadAhead:
    """Of one checkpoint. `begin` it when a tensor has been read: what reads them comes first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reading: Future[Tokenizer] | None = None

    def begin(self) -> None:
        """Start the thread. Idempotent."""
        if self._reading is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
            self._reading = thread.submit(_read, self._path)
            thread.shutdown(wait=False)

    def tokenizer(self) -> Tokenizer:
        """Wait for it. Raises ConfigError."""
        return _read(self._path) if self._reading is None else self._reading.result()


def _read(path: Path) -> Tokenizer:
    for name in _IMPORTED_LATER:
        import_module(name)
    from quickstep.engine.text.tokenizer import Tokenizer

    return Tokenizer.open(path)
