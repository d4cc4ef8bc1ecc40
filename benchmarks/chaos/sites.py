"""The servers of the chaos run: replicas on this machine, engines on other hosts, several models.

A site has what differs between them: the flags of `quickstep serve`, the engines' processes, and
what is held outside of the server. A new one is a class and a row of `SITES`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from benchmarks.pulled_cable import Cable, cable

__all__ = ["OVERTAKE_S", "SITES", "Host", "Hosts", "Site"]

_ADAPTERS = Path(__file__).parents[2] / "src" / "quickstep" / "bundled"
_LORA = ("--enable-lora", "--lora-allowed-dirs", str(_ADAPTERS))
_ENGINE = (
    *("--threads", "2", "--num-blocks", "400", "--max-num-seqs", "16"),
    *("--scheduling-policy", "fair", "--kv-cache-disk-bytes", "16M"),
)
_TOKEN = "a-token-for-chaos-of-32-characters"
_AGAIN_S = 0.2  # after the end of a host's engine, until the next one is started
_END_S = 20.0  # for an engine to end when it is told to
# Room for `draft` and one of the others; their sizes are in `/v1/models`.
_MODELS_BYTES = 200 * 2**20
OVERTAKE_S = 1.0  # a model that waits for longer makes another one leave
_MODELS = (
    {"model": "demo", "name": "first"},
    {"model": "demo", "name": "int8", "quantization": "int8"},
    {"model": "demo-draft", "name": "draft"},
)


class Site(Protocol):
    """A server and its engines.

    Attributes:
        name: As faults and `--site` have it.
        models: The names that requests have, () for one model.
    """

    name: str
    models: tuple[str, ...]

    def open(self, folder: Path, environment: Mapping[str, str]) -> Sequence[str]:
        """Start what is outside of the server; returns the server's flags."""

    def roots(self) -> list[int]:
        """The processes outside of the server, without their descendants."""

    def held(self) -> dict[str, int]:
        """Counts of what is held outside of the server."""

    def close(self) -> list[str]:
        """End what is outside of the server. Returns what is left, or was wrong."""

    def remove(self) -> None:
        """Remove it in any case."""


class Local:
    """Engines that are children of the server."""

    def __init__(
        self, name: str, models: tuple[str, ...], flags: Callable[[Path], Sequence[str]]
    ) -> None:
        self.name = name
        self.models = models
        self._flags = flags

    def open(self, folder: Path, environment: Mapping[str, str]) -> Sequence[str]:
        """`Site.open`."""
        return self._flags(folder)

    def roots(self) -> list[int]:
        """None."""
        return []

    def held(self) -> dict[str, int]:
        """Nothing."""
        return {}

    def close(self) -> list[str]:
        """They end with the server."""
        return []

    def remove(self) -> None:
        """They end with the server."""


def _replicas(folder: Path) -> Sequence[str]:
    return ["demo", "-dp", "2", *_engine(folder), *_LORA]


def _several_models(folder: Path) -> Sequence[str]:
    path = folder / "models.yaml"
    path.write_text(json.dumps({"models": _MODELS}))
    budget = ("--models-memory-bytes", str(_MODELS_BYTES))
    turn = ("--model-overtake-s", f"{OVERTAKE_S:g}")
    return ["--config", str(path), *budget, *turn, *_engine(folder), *_LORA]


def _engine(folder: Path) -> Sequence[str]:
    """The flags of each engine."""
    return [*_ENGINE, "--kv-cache-dir", str(folder / "kv")]


class Host:
    """A network namespace whose engine is started again whenever it has ended."""

    def __init__(self, number: int, command: Sequence[str], link: Cable, log: Path) -> None:
        self.number = number
        self.link = link
        self.log = log
        self._command = [*link.prefix, *command, "--listen", link.listen]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the engine."""
        self._environment = environment
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ending.is_set():
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, stderr=log, env=dict(self._environment), start_new_session=True
                )
            self._process.wait()
            self._is_ending.wait(_AGAIN_S)

    @property
    def process_id(self) -> int | None:
        """The engine's, None between two of them."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def send(self, number: signal.Signals) -> None:
        """Send the engine a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def connections(self) -> int:
        """TCP connections in the namespace, as far as they are no memory of closed ones."""
        command = [*self.link.prefix, "cat", "/proc/net/tcp"]
        listed = subprocess.run(command, capture_output=True, text=True).stdout
        states = [line.split()[3] for line in listed.splitlines()[1:]]
        return sum(state not in ("06", "0A") for state in states)  # TIME_WAIT, LISTEN

    def end(self) -> list[str]:
        """Tell the engine to end. Returns what was wrong, and what is left."""
        self._is_ending.set()
        self.send(signal.SIGTERM)
        self._thread.join(_END_S)
        process = self._process
        wrong = [] if process is None or process.returncode == 0 else [f"exit {process.returncode}"]
        if self.link.namespace:
            listed = ["ip", "netns", "pids", self.link.namespace]
            wrong += subprocess.run(listed, capture_output=True, text=True).stdout.split()
        return [f"host {self.number}: {found}" for found in wrong]

    def remove(self) -> None:
        """End it in any case."""
        self._is_ending.set()
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._thread.join(_END_S)


class Hosts:
    """Two engines in network namespaces, which the server reaches over links that can be cut."""

    name = "hosts"
    models: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._links = ExitStack()

    def open(self, folder: Path, environment: Mapping[str, str]) -> Sequence[str]:
        """`Site.open`."""
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(_TOKEN)
        shared = ("--engine-token-file", str(token), *_LORA)
        command = [sys.executable, "-m", "quickstep", "engine", "demo", *shared]
        command += _engine(folder)
        for number in range(2):
            link = self._links.enter_context(cable(number))
            host = Host(number, command, link, folder / f"host-{number}.log")
            self.hosts.append(host)
            host.start(environment)
        addresses = ",".join(host.link.listen for host in self.hosts)
        return ["demo", "--engines", addresses, *shared]

    def roots(self) -> list[int]:
        """The hosts' engines."""
        found = (host.process_id for host in self.hosts)
        return [process_id for process_id in found if process_id is not None]

    def held(self) -> dict[str, int]:
        """Connections in the namespaces."""
        return {f"connections of host {host.number}": host.connections() for host in self.hosts}

    def close(self) -> list[str]:
        """End the engines, whose server has ended."""
        left = [f"{what}: {num}" for what, num in self.held().items() if num]
        return left + [wrong for host in self.hosts for wrong in host.end()]

    def remove(self) -> None:
        """End the engines and remove the namespaces."""
        for host in self.hosts:
            host.remove()
        self._links.close()


# Made anew for each run.
SITES: dict[str, Callable[[], Site]] = {
    "replicas": lambda: Local("replicas", (), _replicas),
    "hosts": Hosts,
    "models": lambda: Local("models", tuple(model["name"] for model in _MODELS), _several_models),
}
