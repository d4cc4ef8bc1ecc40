"""`quickstep engine [MODEL] --listen HOST:PORT`: an engine for servers on this host or others.

`quickstep serve MODEL --engines HOST:PORT,...` connects to it. It keeps weights and prefix cache
when a server goes, and serves several of them at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from msgspec.structs import replace

from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.lora import add_lora_flags, lora_config
from quickstep.cli.flags.options import add_options, from_flags
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.serve import add_log_flags, log_setup
from quickstep.cli.screen import loading_bar
from quickstep.config import MAX_WAITING_OF_SERVER, InputConfig, LinkConfig
from quickstep.server.options import ServerOptions

_LINK_OPTIONS = ("listen", "token_file")
_INPUT_OPTIONS = ("schema_bytes", "schema_depth", "regex_bytes", "grammar_s")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "engine",
        "Run a model for servers on this host or others, without HTTP.",
        run,
        examples="quickstep engine MODEL --listen 10.0.0.5:8100 --engine-token-file token\n"
        "quickstep serve MODEL --engines 10.0.0.5:8100 --engine-token-file token",
    )
    add_model(parser)
    group = parser.add_argument_group("connections")
    add_options(group, LinkConfig, *_LINK_OPTIONS)
    add_options(group, ServerOptions, "drain_s")
    add_options(parser.add_argument_group("requests"), InputConfig, *_INPUT_OPTIONS)
    add_log_flags(parser.add_argument_group("log"))
    add_engine_flags(parser)
    add_lora_flags(parser)
    parser.set_defaults(max_waiting=MAX_WAITING_OF_SERVER)


def run(args: argparse.Namespace) -> int:
    """Bind the socket, load the model, serve until a signal."""
    config = replace(
        engine_config(args, model_of(args)),
        inputs=from_flags(InputConfig, args, _INPUT_OPTIONS),
        lora=lora_config(args),
        streams=None,  # the servers have the readers
    )
    link = from_flags(LinkConfig, args, _LINK_OPTIONS)
    options = from_flags(ServerOptions, args, ("drain_s",))
    from quickstep.engine.logs import install
    from quickstep.engine.remote.hello import Hello, protocol, read_token
    from quickstep.engine.remote.host import EngineAddress
    from quickstep.engine.remote.listener import bind
    from quickstep.engine.remote.listening import listen, load

    install(log_setup(args))
    hello = Hello(protocol(), read_token(link.token_file, os.environ))
    with bind(EngineAddress.parse(link.listen, "--listen"), "--listen") as sock:
        with loading_bar(f"loading {config.load.model}") as progress:
            engine = load(config, progress)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(listen(engine, sock, hello, options.drain_s))
    return 0
