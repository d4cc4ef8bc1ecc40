"""The `quickstep` command: parse arguments, run a subcommand, turn its errors into an exit code.

Exit codes: 0 success; 1 failure while running; 2 invalid arguments, configuration or request; 130
interrupted. A user's mistake is reported in one sentence on stderr, never as a traceback.
Each subcommand is a module with `add_parser(subparsers)` and `run(args) -> int`; heavy imports are
inside `run`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from quickstep import __version__
from quickstep.cli import INTERRUPTED
from quickstep.cli.flags.parsing import Parser
from quickstep.cli.launch_ahead import launch_ahead
from quickstep.errors import ConfigError, QuickstepError, RequestError

if TYPE_CHECKING:
    from quickstep.engine.remote.launch import Launched

COMMANDS = (
    "serve",
    "engine",
    "generate",
    "chat",
    "batch",
    "demo",
    "usage",
    "why",
    "top",
    "trace",
    "calibrate",
    "verify",
    "doctor",
    "bench",
    "cache",
    "plan",
    "simulate",
    "replay",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    launched: Launched | None = None
    try:
        launched = launch_ahead(arguments)
        args = _parse(arguments)
        args.launched = launched
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SystemExit as exit_:  # argparse raises it for --help, --version and errors
        return exit_.code if isinstance(exit_.code, int) else 2
    except (ConfigError, RequestError) as error:
        return _report(error, 2)
    except (QuickstepError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _end_quietly()
        return _report(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if launched is not None:
            launched.end()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="quickstep",
        description="LLM inference and serving.",
        epilog="quickstep COMMAND --help shows the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"quickstep {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    # to run one command, only its module is imported
    known = [name for name in arguments[:1] if name in COMMANDS]
    for command in known or COMMANDS:
        import_module(f"quickstep.cli.{command}").add_parser(subparsers)
    args, unknown = parser.parse_known_args(arguments or ["--help"])
    if unknown:
        args.parser.reject(unknown)
    return args


def _report(error: Exception, code: int) -> int:
    print(f"quickstep: {error}", file=sys.stderr)
    return code


def _end_quietly() -> int:
    """The reader has closed the pipe (`quickstep ... | head`): avoid an error at the last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
