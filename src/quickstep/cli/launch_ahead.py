"""Launching the engine's process of `serve` before the command line is parsed.

The imports and the loading of that process take longer than everything that the server does before
it listens, and parsing the command line imports many modules. So `main` launches the process when
the command is `serve`; the process waits for its first message, and an invalid command line ends
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quickstep.engine.remote.launch import Launched

# A secret of the server, which the engine's process does not need.
KEY_VARIABLE = "QUICKSTEP_API_KEY"
_INFORMATION_FLAGS = frozenset(("-h", "--help", "--version"))
# Of a server without an engine of its own.
_ENGINES_FLAGS = frozenset(("--engines", "--data-parallel-backend", "-dpb"))


def launch_ahead(arguments: Sequence[str]) -> Launched | None:
    """Launch the engine's process if the command line is one of `serve`; otherwise return None.

    Raises:
        EngineError: The process cannot be started.
    """
    if arguments[:1] != ["serve"] or not _INFORMATION_FLAGS.isdisjoint(arguments):
        return None
    if any(argument.partition("=")[0] in _ENGINES_FLAGS for argument in arguments):
        return None
    from quickstep.engine.remote.launch import launch

    return launch(hidden=(KEY_VARIABLE,))
