"""What this process may use of the machine: processor cores and memory, container limits counted.

Read once when an engine opens. Linux files are read under `root`, so that tests can stand in.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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
    """Memory that can be had without swapping, within the container's limit."""
    available = _meminfo_bytes(root / "proc/meminfo", "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = _left_in_cgroup(root / "sys/fs/cgroup")
    return available if left is None else min(available, left)


def _cpu_quotas(root: Path) -> list[float]:
    """Cores that the quotas of the process's groups are worth, of all that stand above it.

    A container sees its own group as the root; a service or a job outside one has a path below it.
    """
    mounted = root / "sys/fs/cgroup"
    quotas = []
    for line in _words(root / "proc/self/cgroup") or ["0::/", "1:cpu:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_old = "cpu" in controllers.split(",")
        if controllers and not is_old:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            within = mounted / ("cpu" if is_old else "") / folder
            quotas.append(_quota_v1(within) if is_old else _quota_v2(within))
    return [quota for quota in quotas if quota is not None]


def _quota_v2(group: Path) -> float | None:
    return _quota(_words(group / "cpu.max"))


def _quota_v1(group: Path) -> float | None:
    return _quota([*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")])


def _quota(words: list[str]) -> float | None:
    """Microseconds of running per microseconds; None for no limit."""
    return None if len(words) < 2 or words[0] in ("max", "-1") else int(words[0]) / int(words[1])


def _left_in_cgroup(cgroup: Path) -> int | None:
    """Limit minus use, where page cache that can be dropped is not use; None for no limit."""
    limit, used = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    stat = cgroup / "memory.stat"
    if not limit:
        limit = _words(cgroup / "memory/memory.limit_in_bytes")
        used = _words(cgroup / "memory/memory.usage_in_bytes")
        stat = cgroup / "memory/memory.stat"
    if not limit or not used or limit[0] == "max":
        return None
    words = _words(stat)
    counts = dict(zip(words[::2], words[1::2], strict=False))
    return max(0, int(limit[0]) - int(used[0]) + int(counts.get("inactive_file", "0")))


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
