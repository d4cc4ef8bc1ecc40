"""A Ray cluster of this machine: a head, and nodes that may be in network namespaces."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from serve_process import environment

START_S = 60


class RayNode(msgspec.Struct):
    """A node: `ray start --block`, with its raylet, in a session of its own."""

    process: subprocess.Popen[str]

    def kill_raylet(self) -> None:
        """SIGKILL to the raylet only."""
        for pid in _children(self.process.pid):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to everything that the node has started."""
        with suppress(ProcessLookupError):
            for pid in (*_descendants(self.process.pid), self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


class RayCluster(msgspec.Struct):
    """A head at `address`, and its nodes."""

    address: str
    folder: str
    nodes: list[RayNode]

    def start_head(self, num_cpus: int) -> RayNode:
        """Start the head, with a raylet."""
        host, _, port = self.address.partition(":")
        return self._start(
            (), "--head", "--port", port, "--node-ip-address", host, "--num-cpus", str(num_cpus)
        )

    def start_node(self, num_cpus: int, host: str, prefix: Sequence[str] = ()) -> RayNode:
        """Start another node, with its address `host`."""
        return self._start(
            prefix,
            "--address",
            self.address,
            "--node-ip-address",
            host,
            "--num-cpus",
            str(num_cpus),
        )

    def _start(self, prefix: Sequence[str], *arguments: str) -> RayNode:
        ray = str(Path(sys.executable).with_name("ray"))
        more = ["--block", "--disable-usage-stats", "--object-store-memory", "80000000"]
        if "--head" in arguments:
            more += ["--include-dashboard", "false", "--temp-dir", self.folder]
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115, the process has it
        process = subprocess.Popen(
            [*prefix, ray, "start", *arguments, *more],
            stdout=log,
            stderr=log,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        until_s = time.monotonic() + START_S
        while True:
            log.seek(0)
            text = log.read()
            if "Ray runtime started" in text:
                break
            if process.poll() is not None or time.monotonic() > until_s:
                raise AssertionError(f"the Ray node did not start: {text}")
            time.sleep(0.1)
        node = RayNode(process)
        self.nodes.append(node)
        return node


@contextmanager
def ray_cluster(host: str = "127.0.0.1") -> Iterator[RayCluster]:
    """A cluster without nodes; its processes and files are gone afterwards."""
    folder = tempfile.mkdtemp(prefix="qsray")  # short: sockets are in it
    with socket.create_server((host, 0)) as free:
        address = f"{host}:{free.getsockname()[1]}"
    cluster = RayCluster(address, folder, [])
    try:
        yield cluster
    finally:
        for node in cluster.nodes:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(folder.name))
    return found


def _descendants(pid: int) -> list[int]:
    return [found for child in _children(pid) for found in (*_descendants(child), child)]
