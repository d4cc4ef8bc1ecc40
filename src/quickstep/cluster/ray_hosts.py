"""Ray places engines on the nodes of its cluster, and nothing else: a process of its own, which is
the driver of a Ray job, `python -m quickstep.cluster.ray_hosts SOCKET_FD PARENT_PID`.

    server's process ── socket pair ── this process ── Ray ── HostedEngine (an actor per bundle)
           └──────────────────── TCP, with a token ─────────── engine (its child, `listening`)

A placement group has a bundle per engine. The actor of a bundle launches an ordinary engine on its
node, and that ends with it; all actors end with this process, and this process with the server.
Requests and tokens never pass through Ray. A driver may be ended by Ray itself, when its raylet or
the head is gone, so it is not the server's process: that starts another one (`placed_engines`).

Only this module imports ray, in functions.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from quickstep.engine.remote.listening import COMMAND, BinaryFile, Listening, ListensAt
from quickstep.engine.remote.listening import read_message as read
from quickstep.engine.remote.listening import write_message as write
from quickstep.engine.remote.opening import WireMessage
from quickstep.engine.remote.worker import die_with, leave_signals
from quickstep.errors import ConfigError, EngineError, QuickstepError, how_to_install

RAY_COMMAND = (sys.executable, "-P", "-m", "quickstep.cluster.ray_hosts")
_LOAD_S = 1800.0  # of a model, on a node that may have to download it
_PING_S = 5.0


class PlaceGroup(WireMessage, frozen=True):
    """The first message: what to place. Answered by `Placed` if it cannot be.

    Attributes:
        address: Of the Ray cluster: `auto` or HOST:PORT.
        num_engines: Bundles of the placement group.
        resources: Of each bundle, by Ray's names: CPU, GPU.
        wait_s: Longest wait for resources.
        listening: What each engine is to do; its `host` becomes the node's address.
    """

    address: str
    num_engines: int
    resources: dict[str, float]
    wait_s: float
    listening: Listening


class PlaceEngine(WireMessage, frozen=True):
    """Answer with the place of a replica's engine, which is launched if it does not run; `is_new`:
    in any case, because the one that runs does not answer.
    """

    replica: int
    is_new: bool = False


class Placed(WireMessage, frozen=True):
    """Where a replica's engine listens, or why there is none.

    Attributes:
        node: Ray's id of the node.
    """

    replica: int
    host: str = ""
    port: int = 0
    node: str = ""
    refused: str = ""


class HostedEngine:
    """The actor: an engine on its node, launched by `start`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answer = ListensAt()

    def node(self) -> str:
        """Ray's id of the node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def start(self, order: bytes) -> bytes:
        """Launch the engine if none runs: a `Listening`. Returns its `ListensAt`."""
        if self._process is None or self._process.poll() is not None:
            listening = msgspec.msgpack.decode(order, type=Listening)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            environment.pop("OMP_NUM_THREADS", None)  # Ray's: the engine has a number of its own
            command = (sys.executable, *COMMAND[1:])  # of this node, not of the driver's
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                )
            except OSError as error:
                return msgspec.msgpack.encode(ListensAt(refused=f"{command[0]}: {error}"))
            self._answer = _launched(self._process, listening)
        return msgspec.msgpack.encode(self._answer)


def _launched(process: subprocess.Popen[bytes], listening: Listening) -> ListensAt:
    assert process.stdin is not None and process.stdout is not None
    try:
        write(process.stdin, listening)
        return read(process.stdout, ListensAt)
    except (EngineError, OSError):
        return ListensAt(refused=f"the engine exited with code {process.wait()} while it loaded")


class RayHosts:
    """The driver: a placement group and its actors. Used by one thread per replica."""

    def __init__(self, order: PlaceGroup, ray: Any) -> None:
        self._order = order
        self._ray = ray
        self._group: Any = None
        self._actors: dict[int, Any] = {}

    def open(self) -> None:
        """Reserve the resources. Raises ConfigError if there is no cluster, or not enough in it."""
        order, ray = self._order, self._ray
        try:
            ray.init(address=order.address, log_to_driver=True, logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--ray-address {order.address}: no Ray cluster can be used from this machine "
                f"({_line(error)}); `ray start` makes it a node of one"
            ) from None
        bundles = [dict(order.resources) for _ in range(order.num_engines)]
        self._group = ray.util.placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(timeout_seconds=order.wait_s):
            missing = self._missing(order.num_engines)
            ray.util.remove_placement_group(self._group)
            raise ConfigError(missing)

    def place(self, replica: int, is_new: bool = False) -> Placed:
        """The place of a replica's engine, which is launched if it does not run, or in any case if
        `is_new`. Raises EngineError if it cannot be.
        """
        ray, errors = self._ray, self._ray.exceptions
        if is_new and replica in self._actors:
            self._forget(replica)
        for is_new in (False, True):
            actor = self._new_actor(replica) if is_new else self._actors.get(replica)
            if actor is None:
                continue
            is_placed = False
            try:
                wait_s = self._order.wait_s if is_new else _PING_S
                node = ray.get(actor.node.remote(), timeout=wait_s)
                host = self._address_of(node)
                order = msgspec.msgpack.encode(replace(self._order.listening, host=host))
                is_placed = True
                content = ray.get(actor.start.remote(order), timeout=_LOAD_S)
            except errors.GetTimeoutError:
                if is_placed:
                    self._forget(replica)
                    raise EngineError(
                        f"the engine of replica {replica} has not loaded its model in {_LOAD_S:g} s"
                    ) from None
                if is_new:
                    self._forget(replica)
                    raise EngineError(self._missing(1)) from None
                raise EngineError(f"the node of replica {replica} does not answer Ray") from None
            except errors.RayTaskError as error:  # an exception in the actor
                self._forget(replica)
                raise EngineError(
                    f"the engine of replica {replica} cannot be launched: {_line(error)}"
                ) from None
            except errors.RayActorError as error:
                self._forget(replica)
                if is_new:
                    raise EngineError(
                        f"Ray's actor of replica {replica} ended: {_line(error)}; the same build "
                        "of Quickstep must be installed on every node"
                    ) from None
                continue
            answer = msgspec.msgpack.decode(content, type=ListensAt)
            if answer.refused:
                raise EngineError(f"on {host}: {answer.refused}")
            return Placed(replica, host, answer.port, node)
        raise AssertionError("a new actor has a place or an error")

    def _address_of(self, node: str) -> str:
        """A node's address in the cluster, of several that its host may have."""
        for found in self._ray.nodes():
            if found["NodeID"] == node:
                return str(found["NodeManagerAddress"])
        raise EngineError(f"the node {node} has left the Ray cluster")

    def _new_actor(self, replica: int) -> Any:
        """An actor in the replica's bundle; outside of it an actor would wait for ever."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = dict(self._order.resources)
        actor = self._ray.remote(HostedEngine).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,  # the server has it placed again
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=replica
            ),
        )
        self._actors[replica] = created = actor.remote()
        return created

    def _forget(self, replica: int) -> None:
        self._ray.kill(self._actors.pop(replica))

    def _missing(self, num_engines: int) -> str:
        """The requested resources, and those of the cluster."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        totals = [
            f"{node['NodeManagerAddress']} has {_resources(node['Resources'])}" for node in nodes
        ]
        free = _resources(self._ray.available_resources())
        engines = f"{num_engines} engines" if num_engines > 1 else "an engine"
        each = " each" if num_engines > 1 else ""
        return (
            f"Ray has found no place for {engines} with {_resources(self._order.resources)}{each} "
            f"in {self._order.wait_s:g} s: {'; '.join(totals) or 'no node is alive'}; "
            f"free in total: {free}; add nodes, or lower --threads or --data-parallel-size"
        )


def _resources(found: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {found.get(name, 0):g}" for name in ("CPU", "GPU") if name in found
    ) or ("nothing")


def _line(error: BaseException) -> str:
    """The first line of a text that may have many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def serve(file: BinaryFile, ray: Any) -> None:
    """Answer the server's messages until it ends."""
    order = read(file, PlaceGroup)
    hosts = RayHosts(order, ray)
    sending = threading.Lock()

    def answer(placed: Placed) -> None:
        with sending:
            write(file, placed)

    def place(message: PlaceEngine) -> None:
        replica = message.replica
        try:
            answer(hosts.place(replica, message.is_new))
        except QuickstepError as error:
            answer(Placed(replica, refused=str(error)))
        except Exception as error:  # the thread's top: the state of Ray is unknown
            answer(Placed(replica, refused=f"Ray failed: {_line(error)}"))
            os._exit(1)

    try:
        hosts.open()
    except ConfigError as error:
        answer(Placed(-1, refused=str(error)))
        return
    leave_signals()  # `ray.init` installs its own
    answer(Placed(-1))
    while True:
        try:
            message = read(file, PlaceEngine)
        except EngineError:
            return
        threading.Thread(target=place, args=(message,), daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Place engines until the server ends. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    leave_signals()
    die_with(int(arguments[1]))
    with socket.socket(fileno=int(arguments[0])) as sock, sock.makefile("rwb") as file:
        try:
            import ray
        except ImportError:
            read(file, PlaceGroup)
            refused = f"--data-parallel-backend ray needs Ray: {how_to_install('ray')}"
            write(file, Placed(-1, refused=refused))
            return 1
        serve(file, ray)
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
