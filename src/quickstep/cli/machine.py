"""What this machine has: facts read from Linux and torch, for `quickstep doctor`.

Every reader returns plain data and takes the text or folder that it reads, so that it can be
tested on other machines' files. What cannot be read is None, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ISA_FLAGS", "cgroup_cpus", "cpu_facts", "huge_pages", "memory_facts"]

# /proc/cpuinfo's spelling of what the kernels care about
ISA_FLAGS: Mapping[str, str] = {
    "avx2": "avx2",
    "fma": "fma",
    "avx_vnni": "avx-vnni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512_vnni": "avx512-vnni",
    "avx512_bf16": "avx512-bf16",
    "avx512_fp16": "avx512-fp16",
    "amx_tile": "amx-tile",
    "amx_int8": "amx-int8",
    "amx_bf16": "amx-bf16",
    "asimd": "neon",
    "asimddp": "dot-product",
    "sve": "sve",
    "i8mm": "i8mm",
    "bf16": "bf16",
}


def cpu_facts(cpuinfo: str) -> dict[str, object]:
    """Model name, logical and physical cores, instruction sets, from /proc/cpuinfo."""
    fields: dict[str, str] = {}
    num_logical = 0
    physical = set()
    package = ""
    for line in cpuinfo.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        fields.setdefault(name, value)
        num_logical += name == "processor"
        package = value if name == "physical id" else package
        if name == "core id":
            physical.add((package, value))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or None,
        "num_logical_cpus": num_logical or None,
        "num_physical_cores": len(physical) or None,
        "isa": [shown for flag, shown in ISA_FLAGS.items() if flag in flags],
    }


def memory_facts(meminfo: str) -> dict[str, int | None]:
    """Total and available bytes, from /proc/meminfo."""
    fields = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return {
        "total_bytes": fields.get("MemTotal"),
        "available_bytes": fields.get("MemAvailable"),
        "num_huge_pages": fields.get("HugePages_Total"),
        "huge_page_bytes": fields.get("Hugepagesize"),
    }


def huge_pages(folder: Path = Path("/sys/kernel/mm/transparent_hugepage")) -> str | None:
    """The setting of transparent huge pages: `always`, `madvise` or `never`."""
    text = _read(folder / "enabled")
    if text is None or "[" not in text:
        return None
    return text.partition("[")[2].partition("]")[0]


def cgroup_cpus(folder: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the control group allows; None without a limit."""
    limit = _read(folder / "cpu.max")
    if limit is not None:
        quota, _, period = limit.partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    old_quota = _read(folder / "cpu" / "cpu.cfs_quota_us")
    old_period = _read(folder / "cpu" / "cpu.cfs_period_us")
    if old_quota is None or old_period is None or int(old_quota) < 0:
        return None
    return int(old_quota) / int(old_period)


def usable_cpus() -> int:
    """CPUs that the process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except OSError:
        return None
