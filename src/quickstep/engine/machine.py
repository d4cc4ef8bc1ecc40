"""What this process may use of the machine: processor cores and memory, container limits counted.

Read once when an engine opens. Linux files are read under `root`, so that tests can stand in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

__all__ = ["free_memory_bytes", "usable_cores"]

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
    """Memory that can be had without swapping, within the limits of the process's groups."""
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
    for line in _words(root / "proc/self/cgroup") or ["0::/", f"1:{controller}:/"]:
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
        words = [word for name in names for word in _words(group / name)]
        if len(words) >= 2 and words[0] not in ("max", "-1"):
            quotas.append(int(words[0]) / int(words[1]))  # microseconds per microseconds
    return quotas


def _left_in_groups(root: Path) -> list[int]:
    """For each limit: limit minus use, where page cache that can be dropped is not use.

    Above `memory.high` the kernel slows a group down until it has given memory back, so that it is
    as much a limit as `memory.max`.
    """
    left = []
    for group, is_v1 in _groups(root, "memory"):
        limits = ("memory.limit_in_bytes",) if is_v1 else ("memory.max", "memory.high")
        words = [word for name in limits for word in _words(group / name) if word != "max"]
        used = _words(group / ("memory.usage_in_bytes" if is_v1 else "memory.current"))
        if words and used:
            droppable = _droppable_bytes(group / "memory.stat")
            left.append(max(0, min(map(int, words)) - int(used[0]) + droppable))
    return left


def _droppable_bytes(stat: Path) -> int:
    """Page cache that the kernel drops first. Version 1 counts groups below under `total_`."""
    words = _words(stat)
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return int(counts.get("total_inactive_file", counts.get("inactive_file", "0")))


def _meminfo_bytes(file: Path, name: str) -> int | None:
    words = _words(file)
    if f"{name}:" not in words:
        return None
    return int(words[words.index(f"{name}:") + 1]) * 1024


def _words(file: Path) -> list[str]:
    """The words of a small file, [] if it cannot be read."""
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:
        return []
