"""What this process may use of the machine: cores and memory within the container's limits, and
the topology of its CPUs.

Read once when an engine opens. Linux files are read under `root`, which tests replace; where they
are missing, every CPU is a core of its own on one node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from quickstep.ops.thread_placement import Cpu, ThreadPlaces, choose_places

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT, environ: Mapping[str, str] = os.environ) -> int:
    """Cores by affinity, at most the container's quota and OMP_NUM_THREADS, at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    limit = environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of the outermost loops
    limits = [int(limit)] if limit.isdigit() and int(limit) else []
    return max(1, min([cores, *limits, *map(int, _cpu_quotas(root))]))


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Memory available without swapping, within the limits of the process's control groups."""
    available = _meminfo_bytes(root / "proc/meminfo", "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([available, *_left_in_groups(root)])


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of the process's control groups and of all their parents that may set limits of
    `controller`, and whether each is of version 1.

    A container sees its own group as the root; a service or a job outside one has a path below it.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _fields(root / "proc/self/cgroup") or ["0::/", f"1:{controller}:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v1 = controller in controllers.split(",")
        if controllers and not is_v1:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield mounted / (controller if is_v1 else "") / folder, is_v1


def _cpu_quotas(root: Path) -> list[float]:
    """Cores that the quotas of the process's groups allow."""
    quotas = []
    for group, is_v1 in _groups(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
        fields = [field for name in names for field in _fields(group / name)]
        if len(fields) >= 2 and fields[0] not in ("max", "-1"):
            quotas.append(int(fields[0]) / int(fields[1]))  # microseconds per microseconds
    return quotas


def _left_in_groups(root: Path) -> list[int]:
    """For each limit: the limit minus the memory in use, without page cache that can be dropped.

    Above `memory.high` the kernel slows a group down until it has freed memory, so it is as much a
    limit as `memory.max`.
    """
    left = []
    for group, is_v1 in _groups(root, "memory"):
        limits = ("memory.limit_in_bytes",) if is_v1 else ("memory.max", "memory.high")
        values = [value for name in limits for value in _fields(group / name) if value != "max"]
        used = _fields(group / ("memory.usage_in_bytes" if is_v1 else "memory.current"))
        if values and used:
            droppable = _droppable_bytes(group / "memory.stat")
            left.append(max(0, min(map(int, values)) - int(used[0]) + droppable))
    return left


def _droppable_bytes(stat: Path) -> int:
    """Page cache that the kernel drops first. Version 1 counts groups below under `total_`."""
    fields = _fields(stat)
    counts = dict(zip(fields[::2], fields[1::2], strict=False))
    return int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))


def _meminfo_bytes(file: Path, name: str) -> int | None:
    fields = _fields(file)
    if f"{name}:" not in fields:
        return None
    return int(fields[fields.index(f"{name}:") + 1]) * 1024


def _fields(file: Path) -> list[str]:
    """The fields of a small file, [] if it cannot be read."""
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []


def places_for(is_pinned: bool, rank: int = 0, num_ranks: int = 1) -> Callable[[int], ThreadPlaces]:
    """A function from a rank's number of threads to their places
    (`ops.native.backend.load_native`).
    """
    return partial(
        choose_places, usable_cpus(), is_pinned=is_pinned, rank=rank, num_ranks=num_ranks
    )


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
