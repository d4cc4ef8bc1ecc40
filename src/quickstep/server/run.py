"""Serving on a socket: bind first, open the engine, serve until a signal, then drain.

`bind` comes before the model is loaded, so that a taken port costs no minute. SIGTERM or SIGINT
stops accepting and lets running requests continue for `drain_s`; a second one ends them at once.
Opening and serving share one event loop, since an engine in its own process belongs to a loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from types import FrameType

import anyio
import anyio.to_thread
import uvloop
from msgspec.structs import replace
from uvicorn.config import Config
from uvicorn.server import Server

from quickstep.engine.interface import ReplicatedEngine, ServedEngine
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.stats import EngineState
from quickstep.errors import ConfigError, EngineError, QuickstepError
from quickstep.server.app import app_of_models
from quickstep.server.http.protocol import bounded_protocol
from quickstep.server.http.tls import Certificates
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.residents import SeveralModels
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

_LOG = logging.getLogger("quickstep.server")
_BACKLOG = 2048
# How long a thread that parses or renders may keep the interpreter from the event loop. With two
# busy threads the loop was late by 220 ms at p99 with Python's 5 ms, by 46 ms with 1 ms, and by 38
# ms with this (two cores under load).
_SWITCH_S = 0.0005
_OTHER_FILES = 512  # uploads, batches, pipes, refused connections, libraries
_FLUSH_S = 5
_LAST_EVENTS_S = 1.0
_SIGNAL_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """A bound socket that does not listen yet; other servers may share the port with it if all of
    them allow that. Raises ConfigError.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}, it must be between 0 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r} is not an address: {error.strerror}") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            _share_port(sock)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(_refusal(host, port, error)) from None
    return sock


def _share_port(sock: socket.socket) -> None:
    """Let other sockets of this user bind the port. Raises ConfigError where a kernel has no such
    option.
    """
    option = getattr(socket, "SO_REUSEPORT", None)
    if option is None:
        sock.close()
        raise ConfigError("--reuse-port: this system cannot share a port between processes")
    sock.setsockopt(socket.SOL_SOCKET, option, 1)


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with --port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one above 1023 with --port"
    return f"cannot listen on {host}:{port}: {error.strerror}"


class DrainingServer(Server):
    """uvicorn, except that it drains the engine, that a second signal of any kind ends the wait,
    that the process continues to its own end, and that it ends when the engine has failed for good.
    """

    def __init__(
        self,
        config: Config,
        models: ModelRegistry,
        options: ServerOptions,
        certificates: Certificates | None = None,
    ) -> None:
        super().__init__(config)
        self._models = models
        self._certificates = certificates
        self._reload_wanted = False
        self._restarting = OwnedTasks(_LOG)
        self._drain_s = options.drain_s
        self._options = options
        self._keys = options.api_keys
        names, context = ", ".join(models.names), models.default.engine.max_model_len
        several = models.residents is not None and len(models.residents.entries) > 1
        self._what = names if several else f"{names} with a context of {context} tokens"
        self._scheme = "https" if options.tls.certfile else "http"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then log what is served at which address."""
        await super().startup(sockets)
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            address = f"[{host}]" if ":" in host else host
            _LOG.info("serving %s at %s://%s:%d/v1", self._what, self._scheme, address, port)
            warn_without_keys(host, self._keys)
        # Starlette writes large uploads in anyio's threads; that imports for 30 ms, or ten times as
        # long under load, which would delay the streams next to the first upload.
        await anyio.to_thread.run_sync(bool)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: end the server if its engine has failed for good; read keys and
        certificates again, and restart the engines, if that was wanted.
        """
        if self._reload_wanted:
            self._reload_wanted = False
            self._reload()
            self._restarting.start(self._restart_replicas(), "restart")
        if not self.should_exit and self._has_failed():
            _LOG.critical("the engine has failed and is not started again: the server ends")
            self.should_exit = True
        return await super().on_tick(counter)

    def _has_failed(self) -> bool:
        """Whether no model can serve any more."""
        residents = self._models.residents
        return all(model.engine.stats().state is EngineState.FAILED for model in self._models) and (
            residents is None or residents.is_failed
        )

    def _reload(self) -> None:
        """Read keys and certificates again; what cannot be read stays as it is."""
        try:
            self._keys.reload(self._options.check_limits)
        except ConfigError as error:
            _LOG.error("SIGHUP: the API keys stay as they were: %s", error)
        try:
            if self._certificates is not None:
                self._certificates.reload()
        except ConfigError as error:
            _LOG.error("SIGHUP: the certificate stays as it was: %s", error)
        names = ", ".join(self._keys.names) or "none"
        _LOG.info("SIGHUP: read keys and certificates again; keys: %s", names)

    async def _restart_replicas(self) -> None:
        """Restart the engines of a model one by one, if there are several, or if other weights are
        on disk: requests would wait for the only one.
        """
        for model in self._models:
            engine = model.engine
            if not isinstance(engine, ReplicatedEngine):
                continue
            try:
                if engine.num_replicas == 1 and not engine.has_new_files():
                    continue
                changes = await engine.restart_replicas()
            except QuickstepError as error:
                _LOG.error("SIGHUP: the restart of the engines ended: %s", error)
            else:
                _LOG.info("SIGHUP: restarted %d engines", len(changes))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, let running ones continue, then end them with an error event."""
        if self._models.residents is not None:
            self._models.residents.stop()
        draining = asyncio.create_task(self._stop_engines(self._drain_s))
        hurrying = asyncio.create_task(self._stop_at_second_signal(draining))
        # those without a client are running requests as well
        for task in self._models.server.kept_streams.tasks:
            self.server_state.tasks.add(task)
            task.add_done_callback(self.server_state.tasks.discard)
        await super().shutdown(sockets)
        await asyncio.gather(draining, hurrying, return_exceptions=True)
        await self._stop_engines()  # for a drain that was cut short
        if self.force_exit:
            await self._finish_by_force()

    async def _stop_engines(self, drain_s: float = 0.0) -> None:
        await asyncio.gather(*(model.engine.stop(drain_s) for model in self._models))

    async def _finish_by_force(self) -> None:
        """Do what uvicorn skips on a forced exit: send last events, and end the app's lifespan."""
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=_LAST_EVENTS_S)
        await self.lifespan.shutdown()

    async def _stop_at_second_signal(self, draining: asyncio.Task[None]) -> None:
        while not draining.done():
            if self.force_exit:
                draining.cancel()
            await asyncio.sleep(_SIGNAL_POLL_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals while serving, and restore the previous handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self.want_reload)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def want_reload(self, sig: int, frame: FrameType | None) -> None:
        """SIGHUP: read keys and certificates again, and restart the engines, at the next tick."""
        self._reload_wanted = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        name = signal.Signals(sig).name
        if self.should_exit:
            _LOG.info("%s again: ending the running requests", name)
            self.force_exit = True
            return
        self.should_exit = True  # first: the next signal may come while this one is logged
        _LOG.info(
            "%s: no new requests, running ones have %g s; again to end them", name, self._drain_s
        )


def warn_without_keys(host: str, keys: ApiKeys) -> None:
    """Warn if there are no API keys and the address is not the loopback's."""
    if not keys and not ip_address(host.partition("%")[0]).is_loopback:
        _LOG.warning(
            "without API keys, every client that reaches %s may call; set --api-key-file, "
            "or --host 127.0.0.1",
            host,
        )


def _with_open_files(options: ServerOptions) -> ServerOptions:
    """Raise the limit of file descriptors to one per connection, or else lower the number of
    connections: beyond the limit, clients would wait without a response.
    """
    wanted = options.connections.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            possible = max(1, allowed - _OTHER_FILES)
            _LOG.warning(
                "--max-connections is %d: the process may open %d files; raise `ulimit -Hn`",
                possible,
                allowed,
            )
            connections = replace(options.connections, max_connections=possible)
            return replace(options, connections=connections)
    return options


def server_for(models: ModelRegistry, options: ServerOptions) -> DrainingServer:
    """The configured server of these models, not running."""
    certificates = Certificates(options.tls) if options.tls.certfile else None
    config = Config(
        app_of_models(models, options),
        loop="none",  # the caller's
        http=bounded_protocol(options.limits, options.connections, certificates),
        ws="none",
        backlog=_BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # any client may write them
        root_path=options.root_path,
        timeout_keep_alive=options.connections.keep_alive_s,  # type: ignore[arg-type]
        # the engine ends the streams in time; this is for clients that do not read their end
        timeout_graceful_shutdown=round(options.drain_s) + _FLUSH_S,
    )
    return DrainingServer(config, models, options, certificates)


def serve(
    open_engine: Callable[[], Awaitable[ServedEngine]],
    sock: socket.socket,
    options: ServerOptions | None = None,
    several: SeveralModels | None = None,
) -> None:
    """Open the engine and serve it on a bound socket until a signal. Of `several` models it is the
    first one's.

    Raises:
        ConfigError: The engine cannot be opened with this configuration.
        EngineError: The engine failed while it opened, or for good while it served.
    """
    options = _with_open_files(options or ServerOptions())
    sys.setswitchinterval(_SWITCH_S)
    # lanes have threads of their own for long texts; those of the library would have short slices
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read again
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_open_and_serve(open_engine, sock, options, several))
    _LOG.info("stopped")


async def _open_and_serve(
    open_engine: Callable[[], Awaitable[ServedEngine]],
    sock: socket.socket,
    options: ServerOptions,
    several: SeveralModels | None,
) -> None:
    engine = await open_engine()
    try:
        if several is None:
            models = ModelRegistry.of_one(engine, options)
        else:
            models = ModelRegistry.of_several(engine, several)
        if options.warm_prompts:
            from quickstep.server.operate.warm_prompts import (
                warm_prefix_cache,  # few servers need it
            )

            await warm_prefix_cache(models.default, options.warm_prompts)
        await server_for(models, options).serve(sockets=[sock])
        stats = engine.stats()
        if stats.state is EngineState.FAILED:
            raise EngineError(f"the engine failed and was given up: {stats.failure}")
    finally:
        await engine.stop()
