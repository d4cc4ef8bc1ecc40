"""The `quickstep` command: parse, run one subcommand, turn its errors into an exit code.

Exit codes: 0 done; 1 failed while running; 2 the command line, the configuration or a request
cannot be used; 130 interrupted. A user's mistake is one sentence on stderr, never a traceback.
Each subcommand is a module with `add_parser(subparsers)` and `run(args) -> int`; what is heavy to
import is imported inside `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from quickstep import __version__
from quickstep.cli.flags.parsing import Parser
from quickstep.cli.launch_ahead import launch_ahead
from quickstep.errors import ConfigError, QuickstepError, RequestError

if TYPE_CHECKING:
    from quickstep.engine.remote.launch import Launched

__all__ = ["main"]

_INTERRUPTED = 130
_COMMANDS = ("serve", "generate", "chat", "batch", "demo", "verify", "doctor", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    launched: Launched | None = None
    try:
        launched = launch_ahead(words)
        args = _parse(words)
        args.launched = launched
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # argparse's way out of --help, --version and its errors
        return done.code if isinstance(done.code, int) else 2
    except (ConfigError, RequestError) as error:
        return _failed(error, 2)
    except (QuickstepError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_gone()
        return _failed(error, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        if launched is not None:
            launched.end()


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="quickstep",
        description="LLM inference and serving.",
        epilog="quickstep COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"quickstep {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    # the modules of the others need not be imported to run one
    for command in words[:1] if words[:1] and words[0] in _COMMANDS else _COMMANDS:
        import_module(f"quickstep.cli.{command}").add_parser(subparsers)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        args.parser.refuse(unknown)
    return args


def _failed(error: Exception, code: int) -> int:
    print(f"quickstep: {error}", file=sys.stderr)
    return code


def _reader_gone() -> int:
    """`quickstep ... | head`: end quietly; the interpreter must not flush into the pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
