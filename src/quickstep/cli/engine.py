"""`quickstep engine [MODEL] --listen HOST:PORT`: an engine for servers on this host or others.

`quickstep serve MODEL --engines HOST:PORT,...` connects to it. It keeps weights and prefix cache
when a server goes, and serves several of them at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.cli.flags.engine import add_engine_flags, add_model, engine_config, model_of
from quickstep.cli.flags.lora import add_lora_flags, lora_config
from quickstep.cli.flags.options import add_options, from_flags
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.serve import add_log_flags, log_setup
from quickstep.cli.screen import loading_bar
from quickstep.config import MAX_WAITING_OF_SERVER, EngineConfig, InputConfig, LinkConfig
from quickstep.server.options import ServerOptions

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine
    from quickstep.engine.remote.hello import Hello

_LOG = logging.getLogger("quickstep.cli")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
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

    install(log_setup(args))
    hello = Hello(protocol(), read_token(link.token_file, os.environ))
    with bind(EngineAddress.parse(link.listen, "--listen"), "--listen") as sock:
        engine = _load(config)
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_listen(engine, sock, hello, options.drain_s))
    return 0


def _load(config: EngineConfig) -> Engine:
    from quickstep.engine.remote.worker import open_for_prompts
    from quickstep.ops.torch_import import defer_parts_of_torch

    gc.disable()  # see `engine.remote.worker.main`
    defer_parts_of_torch()
    with loading_bar(f"loading {config.load.model}") as progress:
        return open_for_prompts(config, progress)


async def _listen(engine: Engine, sock: socket.socket, hello: Hello, drain_s: float) -> None:
    from quickstep.engine.remote.host import EngineAddress
    from quickstep.engine.remote.listener import EngineListener
    from quickstep.engine.remote.service import begin_serving
    from quickstep.engine.remote.texts import text_digests

    path = engine.model.path
    assert path is not None, "an engine that was loaded has a checkpoint"
    digests = text_digests(path, engine.tokenizer)
    stopping = _signals()
    await engine.start()
    begin_serving()
    listener = EngineListener(engine, hello, digests)
    await listener.start(sock)
    address = EngineAddress(*sock.getsockname()[:2])
    _LOG.info("%s (%s) listens on %s", engine.model_name, engine.fingerprint, address)
    failing = asyncio.create_task(engine.wait_until_failed())
    signaled = asyncio.create_task(stopping.acquire())
    await asyncio.wait((failing, signaled), return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        # a thread may still run a step; servers connect again to the process that follows
        _LOG.critical("the engine failed: %s", engine.stats().failure)
        os._exit(1)
    _LOG.info("no new requests, running ones have %g s; again to end them", drain_s)
    draining = asyncio.create_task(listener.stop(drain_s))
    again = asyncio.create_task(stopping.acquire())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await listener.stop(0.0)
    await engine.stop()
    _LOG.info("stopped")


def _signals() -> asyncio.Semaphore:
    """Counts the signals that end the process, each of which releases it once."""
    counted = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, counted.release)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return counted
