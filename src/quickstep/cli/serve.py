"""`quickstep serve [MODEL]`: the HTTP server, with its engines in processes of their own: children,
or engines that listen (`quickstep engine`).

This process never imports torch. It parses and tokenizes requests and writes responses, and it
keeps running if the engine's process ends.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.cli.flags.engine import (
    add_engine_flags,
    add_model,
    add_template_flags,
    engine_config,
    model_of,
)
from quickstep.cli.flags.lora import add_lora_flags, lora_config
from quickstep.cli.flags.models import (
    NamedModel,
    add_models_flags,
    named_models,
    planned_bytes,
)
from quickstep.cli.flags.options import add_options, from_flags
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.flags.serve import (
    add_serve_flags,
    input_config,
    log_setup,
    recording_config,
    server_options,
    stream_config,
)
from quickstep.cli.screen import loading_bar, print_memory
from quickstep.config import (
    MAX_WAITING_OF_SERVER,
    BackendName,
    EngineConfig,
    LinkConfig,
    ReplicaConfig,
    SchedulerConfig,
)
from quickstep.errors import ConfigError
from quickstep.option import options_of
from quickstep.server.options import ServerOptions

if TYPE_CHECKING:
    from quickstep.cluster.placed_engines import PlacedEngines
    from quickstep.cluster.replicas import ReplicaSet
    from quickstep.engine.logs import LogSetup
    from quickstep.engine.remote.child import StandbyProcess
    from quickstep.engine.remote.launch import Launched
    from quickstep.engine.remote.supervisor import EngineConnector, LoadProgress
    from quickstep.server.models.residents import SeveralModels

_RAY_WAIT_S = 60.0  # for resources
_ENGINES_WAIT_S = 120.0  # for engines that still load when the server starts
_OPTIONS_OF_SERVER = frozenset(("revision", "offline", "seed"))
_LOG = logging.getLogger("quickstep.cli")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(
        subparsers, "serve", "Serve a model over HTTP, with the APIs of OpenAI and others.", run
    )
    add_model(parser)
    add_models_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on; 0 chooses a free one (default: %(default)s)",
    )
    add_options(group, ServerOptions, "served_model_names")
    add_options(group, EngineConfig, "seed")
    add_options(group, ServerOptions, "tool_call_parser", "reasoning_parser")
    add_template_flags(group)
    add_serve_flags(parser)
    group = parser.add_argument_group("replicas")
    add_options(group, ReplicaConfig)
    add_options(group, LinkConfig, "engines", "token_file", "reuse_port")
    add_engine_flags(parser)
    add_lora_flags(parser)
    parser.file_sections = ("models", "routes")
    parser.set_defaults(max_waiting=MAX_WAITING_OF_SERVER)


def _replicas(args: argparse.Namespace, config: EngineConfig) -> tuple[ReplicaConfig, EngineConfig]:
    """The replicas, and the configuration of each: its part of this machine. Raises ConfigError."""
    replicas = from_flags(ReplicaConfig, args)
    if args.reuse_port and args.engines is None:
        raise ConfigError("--reuse-port needs --engines: the servers of a port share their engines")
    if args.reuse_port and args.port == 0:
        raise ConfigError("--reuse-port needs a --port: with 0 each server takes another one")
    if args.engines is not None:
        return _of_hosts(args, replicas, config), config
    if replicas.backend is BackendName.RAY:
        if config.load.num_threads is None:
            raise ConfigError(
                "--data-parallel-backend ray needs --threads: the CPUs of a node for each engine"
            )
        if config.recording is not None:
            raise ConfigError("--record is for an engine of this server, and not for Ray's nodes")
        return replicas, config
    num = replicas.num_engines
    if num == 1:
        return replicas, config
    if replicas.num_prefill:
        config = replace(config, scheduler=replace(config.scheduler, transfers_kv=True))
    from quickstep.engine.machine import free_memory_bytes, usable_cores

    num_cores = usable_cores()
    if num > num_cores:
        _LOG.warning("%d replicas share %d cores: each is slower than one alone", num, num_cores)
    return replicas, config.of_replica(num, num_cores, free_memory_bytes())


def _of_hosts(
    args: argparse.Namespace, replicas: ReplicaConfig, config: EngineConfig
) -> ReplicaConfig:
    """The replicas of `--engines`. Raises ConfigError for flags that those have to be given."""
    if replicas.backend is BackendName.RAY:
        raise ConfigError("--engines names all engines: leave --data-parallel-backend ray out")
    if replicas.num_engines > 1:
        raise ConfigError(
            "--engines names all engines: leave --data-parallel-size, --prefill and --decode out"
        )
    usual = EngineConfig(scheduler=SchedulerConfig(max_waiting=MAX_WAITING_OF_SERVER))
    for given, default in (
        (config.load, usual.load),
        (config.cache, usual.cache),
        (config.scheduler, usual.scheduler),
        (config, usual),
    ):
        for declared in options_of(type(given)).values():
            is_ours = declared.field in _OPTIONS_OF_SERVER
            if not is_ours and getattr(given, declared.field) != getattr(default, declared.field):
                raise ConfigError(
                    f"{declared.flag} is for the engines: give it to `quickstep engine`, and not "
                    "to a server with --engines"
                )
    if config.recording is not None:
        raise ConfigError("--record is for an engine of this server, and not for --engines")
    return replace(replicas, num_replicas=len(args.engines.split(",")))


def _connectors(args: argparse.Namespace) -> list[EngineConnector]:
    """What connects to each of `--engines`. Raises ConfigError."""
    from quickstep.engine.remote.hello import Hello, protocol, read_token
    from quickstep.engine.remote.host import EngineAddress, connector

    addresses = [EngineAddress.parse(text, "--engines") for text in args.engines.split(",")]
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"--engines names {address} twice")
    hello = Hello(protocol(), read_token(args.engine_token_file, os.environ))
    return [connector(address, hello, wait_s=_ENGINES_WAIT_S) for address in addresses]


def _placed_engines(replicas: ReplicaConfig, config: EngineConfig, log: LogSetup) -> PlacedEngines:
    """Engines on the nodes of a Ray cluster, with a token of their own."""
    import secrets

    from quickstep.cluster.placed_engines import PlacedEngines
    from quickstep.cluster.ray_hosts import PlaceGroup
    from quickstep.engine.remote.hello import Hello, protocol
    from quickstep.engine.remote.listening import Listening

    assert config.load.num_threads is not None, "it was checked"
    resources = {"CPU": float(config.load.num_threads)}
    if config.load.device.startswith("cuda"):
        resources["GPU"] = float(config.load.num_ranks)
    hello = Hello(protocol(), secrets.token_hex(32))
    listening = Listening(replace(config, streams=None), log, hello.token, "")
    order = PlaceGroup(
        replicas.ray_address, replicas.num_engines, resources, _RAY_WAIT_S, listening
    )
    return PlacedEngines(order, hello)


def run(args: argparse.Namespace) -> int:
    """Bind the socket, load the model, serve until a signal."""
    models = named_models(args, model_of(args))
    memory_bytes = _models_memory_bytes(args) if models else None
    if models:
        setups = [_setup(model.args, model.model, memory_bytes) for model in models]
    else:
        setups = [_setup(args, model_of(args))]
    replicas, config = setups[0]
    connectors = [] if args.engines is None else _connectors(args)
    # Importing creates only objects that stay alive: see `engine.remote.worker.main`.
    gc.disable()
    try:
        log = log_setup(args)
        launched: Launched | None = args.launched  # `main` has launched it, and ends it
        if launched is not None:
            if connectors or replicas.backend is BackendName.RAY:  # of a --config file
                launched.end()
            else:
                _send_opening(launched, config, log)
        several = _Several(models, setups, memory_bytes) if memory_bytes is not None else None
        _serve(args, config, replicas, log, launched, connectors, several)
    finally:
        gc.enable()  # also if no engine was opened
    return 0


class _Several(msgspec.Struct, frozen=True):
    """The models of a server, and what they may take together."""

    models: Sequence[NamedModel]
    setups: Sequence[tuple[ReplicaConfig, EngineConfig]]
    memory_bytes: int

    def entries(
        self, options: ServerOptions, log: LogSetup, standby: StandbyProcess
    ) -> SeveralModels:
        """For the server: with the size of each by the planner. Raises ConfigError."""
        from quickstep.server.models.residents import ModelEntry, SeveralModels

        entries = []
        for model, (replicas, config) in zip(self.models, self.setups, strict=True):
            own = model.options(options)
            num_bytes = planned_bytes(config) * replicas.num_engines
            entries.append(
                ModelEntry(
                    model.names,
                    own,
                    partial(
                        _open_replicas, config, replicas, log, None, (), options.stall_s, standby
                    ),
                    num_bytes,
                    model.is_pinned,
                )
            )
        num_loaded = options.models.num_loaded
        max_waiting = self.setups[0][1].scheduler.max_waiting  # as in the queue of the first one
        return SeveralModels(tuple(entries), self.memory_bytes, num_loaded, max_waiting)


def _models_memory_bytes(args: argparse.Namespace) -> int:
    """What all models may take together. Raises ConfigError for a GPU without a limit."""
    if args.models_memory_bytes is not None:
        limit: int = args.models_memory_bytes
        return limit
    if args.device.startswith("cuda"):
        raise ConfigError("several models on a GPU need --models-memory-bytes, such as 70GiB")
    from quickstep.engine.machine import free_memory_bytes

    return free_memory_bytes()


def _setup(
    args: argparse.Namespace, model: str, memory_bytes: int | None = None
) -> tuple[ReplicaConfig, EngineConfig]:
    """The replicas of a model, and the configuration of each, which is limited to `memory_bytes`
    if it has no limit of its own. Raises ConfigError.
    """
    config = replace(
        engine_config(args, model, args.seed),
        inputs=input_config(args),
        lora=lora_config(args),
        streams=stream_config(args),
        recording=recording_config(args),
    )
    if config.memory_bytes is None:
        config = replace(config, memory_bytes=memory_bytes)
    return _replicas(args, config)


def _send_opening(launched: Launched, config: EngineConfig, log: LogSetup) -> None:
    from quickstep.engine.remote.opening import opening_frame

    launched.send_opening(opening_frame(config, log))


def _serve(
    args: argparse.Namespace,
    config: EngineConfig,
    replicas: ReplicaConfig,
    log: LogSetup,
    launched: Launched | None,
    connectors: Sequence[EngineConnector],
    several: _Several | None = None,
) -> None:
    from quickstep.engine.logs import install
    from quickstep.engine.remote.child import StandbyProcess
    from quickstep.server.http.tls import check_tls
    from quickstep.server.models.served_model import check_names
    from quickstep.server.run import bind, serve

    install(log)
    # the server has its own messages, and malformed requests are not worth a warning
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    options = server_options(args)
    standby = None if several is None else StandbyProcess()
    entries = None
    if several is not None and standby is not None:
        entries = several.entries(options, log, standby)
    for each in (options,) if entries is None else (entry.options for entry in entries.entries):
        check_names(each)
    check_tls(options.tls)
    if options.metrics.otlp_traces_endpoint is not None:
        from quickstep.server.operate.tracing import check_tracing

        check_tracing(options.metrics.otlp_traces_endpoint)
    placed = None
    if replicas.backend is BackendName.RAY:
        placed = _placed_engines(replicas, config, log)
        connectors = placed.connectors()
    with bind(args.host, args.port, args.reuse_port) as sock:
        try:
            serve(
                lambda: _open_engines(
                    config, replicas, log, launched, connectors, options.stall_s, standby
                ),
                sock,
                options if entries is None else entries.entries[0].options,
                entries,
            )
        finally:
            if standby is not None:
                standby.end()
            if placed is not None:
                placed.end()


async def _open_engines(
    config: EngineConfig,
    replicas: ReplicaConfig,
    log: LogSetup,
    launched: Launched | None,
    connectors: Sequence[EngineConnector],
    stall_s: float,
    standby: StandbyProcess | None = None,
) -> ReplicaSet:
    """Open the engines of the first model, and describe it on stderr."""
    doing = f"loading {config.load.model}"
    if connectors:
        doing = f"connecting to engines of {config.load.model}"
    _LOG.info(doing)
    with loading_bar(doing) as progress:
        engine = await _open_replicas(
            config, replicas, log, launched, connectors, stall_s, standby, progress
        )
    gc.freeze()  # objects that exist now stay alive
    gc.enable()
    if engine.memory_plan is not None and not log.as_json:
        print_memory(engine.memory_plan)
    _LOG.info("loaded %s (%s)", engine.model_name, engine.fingerprint)
    if engine.default_sampling:
        _LOG.info("sampling defaults of the model: %s", dict(engine.default_sampling))
    return engine


async def _open_replicas(
    config: EngineConfig,
    replicas: ReplicaConfig,
    log: LogSetup,
    launched: Launched | None,
    connectors: Sequence[EngineConnector],
    stall_s: float,
    standby: StandbyProcess | None = None,
    progress: LoadProgress | None = None,
) -> ReplicaSet:
    """Load a model in the engines' processes, or connect to those that listen."""
    from quickstep.cluster.replicas import ReplicaSet
    from quickstep.engine.records.step_log import StepLog
    from quickstep.engine.remote.engine import RemoteEngine
    from quickstep.engine.remote.host import RECONNECTIONS

    def make_engine(number: int, step_log: StepLog, watcher: ReplicaSet) -> RemoteEngine:
        return RemoteEngine(
            config,
            log=log,
            launched=None if number else launched,
            standby=standby,
            stall_s=stall_s,
            watcher=watcher,
            replica=number,
            step_log=step_log,
            connect=connectors[number] if connectors else None,
            restart_limits=RECONNECTIONS if connectors else None,
        )

    engine = ReplicaSet(replicas, make_engine, seed=config.seed, streams=config.streams)
    await engine.open(progress)
    return engine
