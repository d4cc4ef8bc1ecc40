"""What an engine needs beside its weights, fetched by a thread while they are read.

Reading weights is native work without the interpreter's lock, and what builds the engine around
them is imports and a tokenizer: side by side, the longer of the two is what a start takes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quickstep.engine.tokenizer import Tokenizer

__all__ = ["read_ahead"]

# What `assembly` imports when the weights are there.
_IMPORTED_LATER = (
    "quickstep.engine.tokenizer",
    "quickstep.engine.engine",
    "quickstep.engine.grammars",
    "quickstep.runtime.executor",
    "quickstep.runtime.runner",
)


def read_ahead(path: Path) -> Callable[[], Tokenizer]:
    """Begin; calling the result waits for the tokenizer at `path`, or raises what it raised."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    reading = thread.submit(_read, path)
    thread.shutdown(wait=False)
    return reading.result


def _read(path: Path) -> Tokenizer:
    for name in _IMPORTED_LATER:
        import_module(name)
    from quickstep.engine.tokenizer import Tokenizer

    return Tokenizer.open(path)
