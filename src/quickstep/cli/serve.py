"""`quickstep serve [MODEL]`: the OpenAI-compatible server, its engine in a process of its own.

This process never loads torch: it parses, tokenises and writes events, and lives on when the
engine's process does not.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

from quickstep.cli.engine_flags import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.file_flags import add_file_flags, batch_options, file_options
from quickstep.cli.parsing import Parser, bytes_size, command
from quickstep.cli.screen import loading_bar
from quickstep.config import EngineConfig
from quickstep.errors import ConfigError

if TYPE_CHECKING:
    from quickstep.engine.process.remote_engine import RemoteEngine

__all__ = ["add_parser", "run"]

_LOG = logging.getLogger("quickstep.cli")
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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
        "--max-body-bytes",
        type=bytes_size,
        default=4 * 1024 * 1024,
        metavar="SIZE",
        help="largest request body (default: 4MiB)",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="what SIGTERM leaves to running requests (default: %(default)s)",
    )
    group.add_argument(
        "--seed", type=int, help="seeds the draw of seeds for unseeded requests (default: entropy)"
    )
    group.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="format of tool calls: hermes, llama3_json, pythonic, mistral, deepseek_v3, granite, "
        "harmony, or none (default: what the chat template tells)",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="format of reasoning: think, mistral, harmony, or none (default: what the chat "
        "template tells)",
    )
    add_file_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Bind, load, serve until a signal."""
    if args.drain_timeout_s < 0:
        raise ConfigError(f"--drain-timeout-s is {args.drain_timeout_s:g}, it must be at least 0")
    config = engine_config(args, model_of(args), args.seed)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=_LOG_FORMAT)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the server says these things itself
    from quickstep.server.options import RequestLimits, ServerOptions
    from quickstep.server.run import bind, serve
    from quickstep.server.surface import check_names

    options = ServerOptions(
        served_model_names=tuple(args.served_model_name),
        limits=RequestLimits(body_bytes=args.max_body_bytes),
        files=file_options(args),
        batches=batch_options(args),
        drain_s=args.drain_timeout_s,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
    )
    check_names(options)
    with bind(args.host, args.port) as sock:
        serve(lambda: _opened(config), sock, options)
    return 0


async def _opened(config: EngineConfig) -> RemoteEngine:
    """The engine's process with the model loaded; says on stderr what it is."""
    from quickstep.cli.session import print_memory
    from quickstep.engine.process.messages import LogSetup
    from quickstep.engine.process.remote_engine import RemoteEngine

    _LOG.info("loading %s", config.load.model)
    engine = RemoteEngine(config, log=LogSetup(logging.INFO, _LOG_FORMAT))
    with loading_bar(f"loading {config.load.model}") as progress:
        await engine.open(progress)
    if engine.memory_plan is not None:
        print_memory(engine.memory_plan)
    _LOG.info("loaded %s (%s)", engine.model_name, engine.fingerprint)
    if engine.default_sampling:
        _LOG.info("the model's own sampling defaults hold: %s", dict(engine.default_sampling))
    return engine
