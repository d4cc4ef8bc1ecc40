"""A running server of a contestant: started, measured, held while others have their turn.

A server runs in a process group of its own on a free port; its first token ends the cold start.
Peak memory is that of all its processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.peers.client import Api, fault_of, send_all
from benchmarks.peers.contestants import Launch, process_environment
from benchmarks.peers.workloads import PeerRequest

__all__ = ["PeerServer", "ServerFailed", "memory_of"]

_START_S = 600.0
_POLL_S = 0.005
# A server that is loading closes connections or answers 503.
_LOADING = (0, 503)


class ServerFailed(Exception):
    """A server ended, or gave no token in time."""


class PeerServer:
    """One server process with all that it starts. `start` it, leave with `close`."""

    def __init__(self, name: str, launch: Launch, log: Path) -> None:
        self.launch = launch
        self.cold_start_s = 0.0
        self._name = name
        self._log_path = log
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def api(self) -> Api:
        """How to speak to it."""
        return self.launch.api

    @property
    def port(self) -> int:
        """On this machine's loopback; known once started."""
        return self._port

    def start(self, first: PeerRequest) -> None:
        """Return after the last token of `first`. Raises ServerFailed."""
        self._port = _free_port()
        address = ("--host", "127.0.0.1", "--port", str(self._port))
        started_s = time.perf_counter()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*self.launch.command, *address],
                stdout=log,
                stderr=log,
                env=process_environment(self.launch),
                start_new_session=True,
            )
        try:
            first_s = self._first_token(first, started_s)
        except BaseException:  # an interrupted start leaves no process either
            self.close()
            raise
        self.cold_start_s = first_s - started_s

    def _first_token(self, first: PeerRequest, started_s: float) -> float:
        """When the first token of `first` came; it is sent until the server has loaded."""
        while True:
            self._check(started_s)
            if _listens(self._port):  # a request to a server that does not listen costs it time
                [reply] = send_all(self._port, self.api, [first])
                fault = fault_of(first, reply)
                if fault is None:
                    return reply.marks[0]
                if reply.status not in _LOADING:
                    raise ServerFailed(f"{self._name}: {fault}")
            time.sleep(_POLL_S)

    def _check(self, started_s: float) -> None:
        """Raises ServerFailed if it has ended or takes too long."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None or time.perf_counter() - started_s > _START_S:
            why = f"ended with {code}" if code is not None else f"had no token in {_START_S:.0f} s"
            raise ServerFailed(f"{self._name}: its server {why}, see {self._log_path}")

    def memory(self) -> dict[str, float]:
        """Figures of its processes' memory so far, in GB."""
        assert self._process is not None
        return memory_of(self._process.pid)

    def hold(self) -> None:
        """Stop its processes where they are until `resume`: an idle server can keep cores busy."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `hold`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End it and all that it started. Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self.resume()
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):  # all have ended
            self._signal(signal.SIGKILL)
        self._process.wait()


def memory_of(root: int) -> dict[str, float]:
    """Of a process and its living descendants, in GB: `rss_gb` is the sum of their peaks with
    mapped files, `anonymous_gb` what is resident now and no file backs.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _status(int(entry.name)).get("PPid", 0)
            children.setdefault(parent, []).append(int(entry.name))
    peak, anonymous, waiting = 0, 0, [root]
    while waiting:
        pid = waiting.pop()
        status = _status(pid)
        peak += status.get("VmHWM", 0) * 1024
        anonymous += (status.get("RssAnon", 0) + status.get("RssShmem", 0)) * 1024
        waiting += children.get(pid, [])
    return {"rss_gb": peak / 1e9, "anonymous_gb": anonymous / 1e9}


def _status(pid: int) -> dict[str, int]:
    """The decimal numbers of a process's status; none if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines)
    words = ((name, rest.split()[:1]) for name, rest in pairs)
    return {name: int(first) for name, found in words for first in found if first.isdecimal()}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
