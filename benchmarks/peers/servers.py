"""Each engine's own HTTP server, for w4 and for what a cold start takes.

A server starts in a process group of its own on a free port; its first token ends the cold start.
Peak memory is that of all its processes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.peers.contestants import Contestant, DriverFailed
from benchmarks.peers.drivers.protocol import tree_rss_bytes
from quickstep.bench.serve import ServedRequest, Target, find_target, send_all
from quickstep.errors import ConfigError, EngineError

__all__ = ["SERVERS", "PeerServer"]

_START_S = 300.0
_POLL_S = 0.02

# The engines that have a server with OpenAI's completions over token ids.
SERVERS = ("quickstep", "vllm", "llama_cpp")


class PeerServer:
    """A running server. `start` it, leave with `close`."""

    def __init__(self, contestant: Contestant, log: Path) -> None:
        self._contestant = contestant
        self._log_path = log
        self._process: subprocess.Popen[bytes] | None = None
        self.target: Target | None = None
        self.cold_start_s = 0.0

    def start(self) -> None:
        """Return after its first token. Raises DriverFailed."""
        port = _free_port()
        command = _command(self._contestant, port)
        log = self._log_path.open("wb")
        started_s = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=self._contestant.environment(),
            start_new_session=True,
        )
        log.close()
        first = ServedRequest(tuple(range(100, 132)), 2, 0.0)
        while self.target is None:
            self._check(started_s)
            if not _listens(port):  # cheap: a client that asks in full takes time from the start
                time.sleep(_POLL_S)
                continue
            try:
                self.target = find_target(f"http://127.0.0.1:{port}")
                [answer] = send_all(self.target, [first])
                self.cold_start_s = answer.marks[0] - started_s
            except (ConfigError, EngineError):  # llama-server lists its model before it is loaded
                self.target = None
                time.sleep(_POLL_S)

    def _check(self, started_s: float) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None or time.perf_counter() - started_s > _START_S:
            why = f"ended with {code}" if code is not None else f"had no token in {_START_S:.0f} s"
            self.close()
            raise DriverFailed(f"{self._contestant.name}: its server {why} ({self._log_path})")

    @property
    def rss_bytes(self) -> int:
        """Peak resident bytes of its processes so far."""
        assert self._process is not None
        return tree_rss_bytes(self._process.pid)

    def hold(self) -> None:
        """Stop its processes where they are, until `let_run`."""
        self._signal(signal.SIGSTOP)

    def let_run(self) -> None:
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
            self.let_run()
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
        self._process.wait()


def _command(contestant: Contestant, port: int) -> list[str]:
    """The server's command line."""
    python, model = contestant.command[0], contestant.model
    if contestant.engine == "quickstep":
        command = [python, "-m", "quickstep", "serve", model, "--dtype", "bfloat16"]
        command += ["--threads", str(contestant.threads), "--max-model-len", "4096"]
        if contestant.precision != "bf16":
            command += ["--quantization", contestant.precision]
    elif contestant.engine == "vllm":
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        command += ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64"]
    else:
        tool = contestant.command[contestant.command.index("--server") + 1]
        command = [tool, "-m", model, "-t", str(contestant.threads), "-np", "16"]
        command += ["-c", str(4096 * 16), "-cb", "--no-webui"]
    return [*command, "--host", "127.0.0.1", "--port", str(port)]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
