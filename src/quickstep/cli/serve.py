"""`quickstep serve [MODEL]`: the OpenAI-compatible server, its engine in a process of its own.

This process never loads torch: it parses, tokenises and writes events, and lives on when the
engine's process does not.
"""

from __future__ import annotations

import argparse
import gc
import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.cli.flags.engine import (
    add_engine_flags,
    add_format_flags,
    add_model,
    engine_config,
    model_of,
)
from quickstep.cli.flags.files import add_file_flags
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.serve import (
    add_serve_flags,
    input_config,
    log_setup,
    server_options,
    stream_config,
)
from quickstep.cli.screen import loading_bar
from quickstep.config import EngineConfig
from quickstep.deferred import defer

if TYPE_CHECKING:
    from quickstep.engine.logs import LogSetup
    from quickstep.engine.remote.engine import RemoteEngine
    from quickstep.engine.remote.launch import Launched

__all__ = ["add_parser", "run"]

_LOG = logging.getLogger("quickstep.cli")
_MAX_WAITING = 16_384  # every queue of a server has a limit
# Packages whose own code imports what no server of ours calls: their command lines, their process
# supervisors, their web servers, their ready-made tokenizers.
_FRONT_DOORS = ("prometheus_client", "tokenizers", "uvicorn")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "serve", "Serve a model over HTTP, as OpenAI does.", run)
    add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address (default: %(default)s)")
    group.add_argument(
        "--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that clients use; the first stands in responses (default: the model's)",
    )
    group.add_argument(
        "--seed", type=int, help="seeds the draw of seeds for unseeded requests (default: entropy)"
    )
    add_format_flags(group)
    add_file_flags(parser)
    add_serve_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(max_waiting=_MAX_WAITING)


def run(args: argparse.Namespace) -> int:
    """Bind, load, serve until a signal."""
    config = replace(
        engine_config(args, model_of(args), args.seed),
        inputs=input_config(args),
        streams=stream_config(args),
    )
    from quickstep.engine.remote.opening import opening_frame

    # Importing makes nothing but objects that stay: see `engine.remote.worker.main`.
    gc.disable()
    launched: Launched = args.launched  # by `main`, which ends it
    log = log_setup(args)
    launched.send_opening(opening_frame(config, log))
    defer(_FRONT_DOORS)
    _serve(args, config, log, launched)
    return 0


def _serve(
    args: argparse.Namespace, config: EngineConfig, log: LogSetup, launched: Launched
) -> None:
    from quickstep.engine.logs import install
    from quickstep.server.generate.adapter import check_names
    from quickstep.server.run import bind, check_tls, serve

    install(log)
    # the server says these things itself, and strangers' garbage is no news
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    options = server_options(args)
    check_names(options)
    check_tls(options.tls)
    with bind(args.host, args.port) as sock:
        serve(lambda: _opened(config, log, launched, options.stall_s), sock, options)


async def _opened(
    config: EngineConfig, log: LogSetup, launched: Launched, stall_s: float
) -> RemoteEngine:
    """The engine's process with the model loaded; says on stderr what it is."""
    from quickstep.cli.session import print_memory
    from quickstep.engine.remote.engine import RemoteEngine

    _LOG.info("loading %s", config.load.model)
    engine = RemoteEngine(config, log=log, launched=launched, stall_s=stall_s)
    with loading_bar(f"loading {config.load.model}") as progress:
        await engine.open(progress)
    gc.freeze()  # what is there now stays
    gc.enable()
    if engine.memory_plan is not None and not log.as_json:
        print_memory(engine.memory_plan)
    _LOG.info("loaded %s (%s)", engine.model_name, engine.fingerprint)
    if engine.default_sampling:
        _LOG.info("the model's own sampling defaults hold: %s", dict(engine.default_sampling))
    return engine
