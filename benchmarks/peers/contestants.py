"""Engines at precisions, and the processes that drive them.

A driver (`drivers/`) runs in its engine's own environment and takes runs over its standard
streams; all drivers stay loaded, so that one repeat goes round all of them before the next.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.checkpoints import gguf, openvino_ir, w8a8
from benchmarks.peers.environments import Environment, prepare, vllm_preloads

__all__ = ["PRECISIONS", "Contestant", "DriverFailed", "DriverProcess", "contestants"]

_DRIVERS = Path(__file__).parent / "drivers"
_SOURCE = Path(__file__).parents[2] / "src"

# What each engine offers, in the order of the tables.
PRECISIONS = {
    "quickstep": ("bf16", "int8", "int4"),
    "vllm": ("bf16", "int8"),
    "openvino": ("bf16", "int8", "int4"),
    "llama_cpp": ("bf16", "int8", "int4"),
    "transformers": ("bf16",),
}


class DriverFailed(Exception):
    """A driver ended or said why it cannot go on."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine at a precision: its driver's command line."""

    engine: str
    precision: str
    command: tuple[str, ...]

    def _after(self, flag: str) -> str:
        return self.command[self.command.index(flag) + 1]

    @property
    def model(self) -> str:
        """Its checkpoint's path."""
        return self._after("--model")

    @property
    def threads(self) -> int:
        """That it may use."""
        return int(self._after("--threads"))

    def environment(self) -> dict[str, str]:
        """For its processes: a peer sees nothing of this repository."""
        found = {**os.environ, "HF_HUB_OFFLINE": "1"}
        # what several of the engines read beside their own setting
        found["OMP_NUM_THREADS"] = str(self.threads)
        found["PYTHONPATH"] = str(_SOURCE) if self.engine == "quickstep" else ""
        if self.engine == "vllm":
            found["VLLM_CPU_KVCACHE_SPACE"] = "2"
            found["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{self.threads - 1}"
            found["LD_PRELOAD"] = ":".join(vllm_preloads(Path(self.command[0])))
        return found

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.engine} {self.precision}"


def contestants(
    engines: list[str], precisions: list[str], checkpoint: Path, cache: Path, threads: int
) -> list[Contestant]:
    """All that were asked for; prepares environments and converted checkpoints."""
    found = []
    for engine in engines:
        environment = _environment(engine, cache)
        for precision in PRECISIONS[engine]:
            if precision in precisions:
                model, *more = _model(engine, precision, checkpoint, cache, environment)
                command = [str(environment.python), str(_DRIVERS / f"{engine}_driver.py")]
                command += ["--model", model, "--threads", str(threads)]
                command += ["--precision", precision, *more]
                found.append(Contestant(engine, precision, tuple(command)))
    return found


def _environment(engine: str, cache: Path) -> Environment:
    if engine == "quickstep":
        return Environment(Path(sys.executable), cache)
    return prepare(engine, cache)


def _model(
    engine: str, precision: str, checkpoint: Path, cache: Path, environment: Environment
) -> list[str]:
    """The model's path for a driver, and further flags."""
    if engine == "llama_cpp":
        path = gguf(checkpoint, precision, environment)
        return [str(path), "--server", str(environment.llama_server)]
    if engine == "openvino":
        return [str(openvino_ir(checkpoint, precision, prepare("convert", cache)))]
    if engine == "vllm" and precision == "int8":
        return [str(w8a8(checkpoint))]
    return [str(checkpoint)]


class DriverProcess:
    """A running driver. Leave with `close`."""

    def __init__(self, contestant: Contestant, log: Path) -> None:
        self._name = contestant.name
        self._log = log.open("w")
        self._process = subprocess.Popen(
            contestant.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=contestant.environment(),
            start_new_session=True,
        )
        self.ready_s = 0.0

    def wait_ready(self) -> None:
        """Return once the model is loaded. Raises DriverFailed."""
        self.ready_s = self._answer()["ready_s"]

    def hold(self) -> None:
        """Stop its processes until its next `run`: some engines keep cores busy while idle."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def run(self, requests: Path) -> dict[str, Any]:
        """One run; holds it afterwards. Raises DriverFailed."""
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(json.dumps({"requests": str(requests)}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.hold()
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"failed": "the driver ended"}
        if "failed" in answer:
            raise DriverFailed(f"{self._name}: {answer['failed']} (see {self._log.name})")
        return answer

    def close(self) -> None:
        """End the driver and all that it started. Idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
