"""What a driver says and hears, one JSON value a line: a driver runs in its engine's environment.

in   {"requests": path}                                     run these, from a standing start
out  {"ready_s": seconds from the driver's start}           once, when the model is loaded
     {"start_s", "marks": [[s, ...], ...], "rss_bytes"}     per run: each request's token times
     {"failed": why}                                        instead of either; then the driver ends

Standard library only, and nothing of this repository: peers have their own Python environments.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Run", "Work", "serve_driver", "tree_rss_bytes"]


@dataclass(frozen=True)
class Work:
    """One request of a run."""

    prompt: list[int]
    num_outputs: int
    at_s: float


@dataclass
class Run:
    """When the run began and when each request's tokens came, by `time.perf_counter`."""

    start_s: float = 0.0
    marks: list[list[float]] = field(default_factory=list)


def serve_driver(open_engine: Callable[[], Callable[[list[Work]], Run]]) -> None:
    """Load, then run what comes on standard input; what engines print goes to stderr."""
    started_s = time.perf_counter()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    try:
        run = open_engine()
        say({"ready_s": time.perf_counter() - started_s})
        for line in sys.stdin:
            works = [
                Work(**item) for item in json.loads(Path(json.loads(line)["requests"]).read_text())
            ]
            done = run(works)
            say(
                {
                    "start_s": done.start_s,
                    "marks": done.marks,
                    "rss_bytes": tree_rss_bytes(os.getpid()),
                }
            )
    except Exception as error:  # the driver's top: the harness reports it and goes on
        traceback.print_exc()
        say({"failed": f"{type(error).__name__}: {error}"[:500]})


def tree_rss_bytes(root: int) -> int:
    """Peak resident bytes of a process and its living descendants, summed."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _status(int(entry.name), "PPid:")
            children.setdefault(parent, []).append(int(entry.name))
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += _status(pid, "VmHWM:") * 1024
        waiting += children.get(pid, [])
    return total


def _status(pid: int, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
