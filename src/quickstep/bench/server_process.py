"""`quickstep serve` as a child process: its address, its log, the memory of its processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_ADDRESS = re.compile(r" at (http://\S+)/v1")
_FAULT = re.compile(r" (ERROR|CRITICAL) |Traceback")
_START_S = 120.0
_NAMES = {
    "quickstep.engine.remote.worker": "engine",
    "quickstep.text.grammar.trial_worker": "grammars",
    "quickstep.text.tokenizer_worker": "tokenizer",
}


class ServerProcess:
    """A server on a free port, with `environment` in addition to ours. Call `start`, and `stop` at
    the end.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._argv = [sys.executable, "-m", "quickstep", "serve", "--port", "0", *argv]
        self._environment = environment or {}
        self._process: subprocess.Popen[str] | None = None
        self._serving = threading.Event()
        self.url = ""
        self.log: list[str] = []

    def start(self) -> None:
        """Start the server and wait until it is ready. Raises RuntimeError if it does not start."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            **self._environment,
        }
        self._process = subprocess.Popen(
            self._argv, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        threading.Thread(target=self._read_log, daemon=True).start()
        if not self._serving.wait(_START_S) or not self.url:
            self.stop()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))

    def _read_log(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)
            address = _ADDRESS.search(line)
            if address:
                self.url = address.group(1)
                self._serving.set()
        self._serving.set()  # the process ended

    def faults(self) -> list[str]:
        """Lines of the log that report an error."""
        return [line.rstrip() for line in self.log if _FAULT.search(line)]

    def processes(self) -> dict[str, int]:
        """The process ids by name: `server`, and those of its descendants that run."""
        ids = self.process_ids()
        names = {_NAMES.get(_module_of(process_id), "other"): process_id for process_id in ids[1:]}
        return {"server": ids[0], **names}

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of each of `processes`."""
        return {name: _resident_bytes(one) for name, one in self.processes().items()}

    def process_ids(self) -> list[int]:
        """The process ids of the server and all its descendants."""
        assert self._process is not None
        return with_descendants(self._process.pid)

    def stop(self) -> int:
        """Send SIGTERM, after 60 s SIGKILL; return the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _module_of(process_id: int) -> str:
    """The module that a process runs (`python -m`), "" if none."""
    try:
        words = Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def _resident_bytes(process_id: int) -> int:
    try:
        pages = Path(f"/proc/{process_id}/statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def with_descendants(process_id: int) -> list[int]:
    """A process, and all that descend from it."""
    children, ids = _children(), [process_id]
    for known in ids:
        ids += children.get(known, ())
    return ids


def _children() -> dict[int, list[int]]:
    """The ids of live processes by parent id."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    return children
