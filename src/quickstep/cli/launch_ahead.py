"""Launching the engine's process of `serve` before the command line is parsed.

The imports and the loading of that process take longer than everything that the server does before
it listens, and parsing the command line imports many modules. So `main` launches the process when
the command is `serve`; the process waits for its first message, and an invalid command line ends
it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quickstep.environment import OF_LIBRARIES

if TYPE_CHECKING:
    from quickstep.engine.remote.launch import Launched

KEY_VARIABLE = "QUICKSTEP_API_KEY"
# The names of variables with the keys of upstreams, in a `--config` file.
_KEY_ENV = re.compile(rb"""key_env["']?\s*:\s*["']?(\w+)""")
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

    return launch(hidden=_upstream_keys(arguments))


def _upstream_keys(arguments: Sequence[str]) -> frozenset[str]:
    """The variables of the `--config` files whose values are keys of upstreams; reading the files
    as YAML would take longer. One that a library reads, as `HF_TOKEN`, is not only a key.
    """
    found: set[str] = set()
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        name, equals, value = argument.partition("=")
        if name == "--config":
            with suppress(OSError):  # the parser says what is wrong
                content = Path(value if equals else following).read_bytes()
                found.update(key.decode("ascii", "replace") for key in _KEY_ENV.findall(content))
    return frozenset(found - OF_LIBRARIES.keys())
