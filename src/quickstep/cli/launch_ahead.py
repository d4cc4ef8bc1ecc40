"""The engine's process of `serve`, launched before its command line is parsed.

The worker's imports and its loading take longer than all that the server does before it listens,
and parsing imports the flags of everything. So `main` launches it when it sees the word; the worker
waits for its first message meanwhile, and a command line that cannot be used ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quickstep.engine.remote.launch import Launched

__all__ = ["KEY_VARIABLE", "launch_ahead"]

# The server's own secret: the engine's process has no use for it.
KEY_VARIABLE = "QUICKSTEP_API_KEY"
_ASKS_ONLY = frozenset(("-h", "--help", "--version"))


def launch_ahead(words: Sequence[str]) -> Launched | None:
    """The process for a command line; None if that is not going to serve.

    Raises:
        EngineError: The process cannot be started.
    """
    if words[:1] != ["serve"] or not _ASKS_ONLY.isdisjoint(words):
        return None
    from quickstep.engine.remote.launch import launch

    return launch(hidden=(KEY_VARIABLE,))
