"""Which CPUs the process may use, and which of them share a core or a NUMA node.

Read when an engine opens. Linux files are read under `root`, so that tests can stand in; where
they are missing, every CPU is a core of its own on one node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from quickstep.ops.thread_placement import Cpu, ThreadPlaces, choose_places

__all__ = ["places_for", "usable_cpus"]

_ROOT = Path("/")


def places_for(is_pinned: bool) -> Callable[[int], ThreadPlaces]:
    """Where so many threads of this process go (`ops.native.backend.load_native`)."""
    return partial(choose_places, usable_cpus(), is_pinned=is_pinned)


def usable_cpus(root: Path = _ROOT, allowed: Iterable[int] | None = None) -> tuple[Cpu, ...]:
    """The CPUs of the affinity mask, or those `allowed`; () where the system has no such mask."""
    if allowed is None:
        if not hasattr(os, "sched_getaffinity"):  # not on macOS
            return ()
        allowed = os.sched_getaffinity(0)
    system = root / "sys/devices/system"
    node_of = _node_of(system / "node")
    return tuple(
        Cpu(cpu, _first_sibling(system / f"cpu/cpu{cpu}/topology", cpu), node_of.get(cpu, 0))
        for cpu in sorted(allowed)
    )


def _first_sibling(topology: Path, cpu: int) -> int:
    """The least CPU of the same core, which names the core."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second: before Linux 5.3
        if siblings := _cpu_list(topology / name):
            return min(siblings)
    return cpu


def _node_of(nodes: Path) -> dict[int, int]:
    return {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted(nodes.glob("node[0-9]*"))
        for cpu in _cpu_list(folder / "cpulist")
    }


def _cpu_list(file: Path) -> list[int]:
    """`0-3,8` as numbers; [] if it cannot be read."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return []
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
