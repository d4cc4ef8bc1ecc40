"""Cores and memory from a stand-in for the machine's files."""

from __future__ import annotations

import os

from quickstep.engine.machine import free_memory_bytes, usable_cores

MEMINFO = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_memory_is_what_is_available(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert free_memory_bytes(tmp_path) == 600 * 1024


def test_a_containers_limit_counts_without_the_page_cache_it_can_drop(tmp_path):
    files = {
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/memory.max": "400000\n",
        "sys/fs/cgroup/memory.current": "300000\n",
        "sys/fs/cgroup/memory.stat": "anon 200000\ninactive_file 50000\n",
    }
    write(tmp_path, files)
    assert free_memory_bytes(tmp_path) == 150000
    write(tmp_path, {"sys/fs/cgroup/memory.max": "max\n"})
    assert free_memory_bytes(tmp_path) == 600 * 1024


def test_a_version_1_limit_counts_too(tmp_path):
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/meminfo": MEMINFO,
        f"{folder}/memory.limit_in_bytes": "100000",
        f"{folder}/memory.usage_in_bytes": "90000",
    }
    write(tmp_path, files)
    assert free_memory_bytes(tmp_path) == 10000


GIB = 2**30
LARGE = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n"


def limit_memory(root, group, limit, used=GIB // 4, name="memory.max"):
    write(root, {f"{group}/{name}": f"{limit}\n", f"{group}/memory.current": f"{used}\n"})


def test_a_memory_limit_of_the_processes_own_group_or_one_above_it_counts(tmp_path):
    write(tmp_path, {"proc/meminfo": LARGE})
    write(tmp_path, {"proc/self/cgroup": "0::/system.slice/quickstep.service\n"})
    limit_memory(tmp_path, "sys/fs/cgroup/system.slice/other.service", GIB)
    assert free_memory_bytes(tmp_path) == 60 * GIB
    service = "sys/fs/cgroup/system.slice/quickstep.service"
    limit_memory(tmp_path, service, 8 * GIB)
    assert free_memory_bytes(tmp_path) == 8 * GIB - GIB // 4
    limit_memory(tmp_path, "sys/fs/cgroup/system.slice", 16 * GIB, used=10 * GIB)
    assert free_memory_bytes(tmp_path) == 6 * GIB
    limit_memory(tmp_path, "sys/fs/cgroup/system.slice", "max", used=10 * GIB)
    assert free_memory_bytes(tmp_path) == 8 * GIB - GIB // 4
    limit_memory(tmp_path, service, 4 * GIB, name="memory.high")
    assert free_memory_bytes(tmp_path) == 4 * GIB - GIB // 4


def test_a_version_1_memory_limit_of_a_group_above_counts_without_its_page_cache(tmp_path):
    write(tmp_path, {"proc/meminfo": LARGE})
    write(tmp_path, {"proc/self/cgroup": "4:memory:/jobs/one\n2:cpu,cpuacct:/elsewhere\n"})
    folder = "sys/fs/cgroup/memory"
    unlimited = {
        "memory.limit_in_bytes": "9223372036854771712",
        "memory.usage_in_bytes": str(2 * GIB),
    }
    write(tmp_path, {f"{folder}/jobs/one/{name}": text for name, text in unlimited.items()})
    assert free_memory_bytes(tmp_path) == 60 * GIB
    files = {
        "memory.limit_in_bytes": str(8 * GIB),
        "memory.usage_in_bytes": str(5 * GIB),
        "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
    }
    write(tmp_path, {f"{folder}/jobs/{name}": text for name, text in files.items()})
    assert free_memory_bytes(tmp_path) == 4 * GIB


def test_a_processor_quota_limits_the_cores(tmp_path):
    without = usable_cores(tmp_path)
    assert 1 <= without <= (os.cpu_count() or 1)
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "150000 100000\n"})
    assert usable_cores(tmp_path) == 1
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert usable_cores(tmp_path) == 1
    write(tmp_path, {"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert usable_cores(tmp_path) == without


def test_a_version_1_quota_limits_the_cores(tmp_path):
    folder = "sys/fs/cgroup/cpu"
    write(
        tmp_path, {f"{folder}/cpu.cfs_quota_us": "100000", f"{folder}/cpu.cfs_period_us": "100000"}
    )
    assert usable_cores(tmp_path) == 1


def test_a_quota_of_the_processes_own_group_or_one_above_it_limits_the_cores(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/jobs.slice/one.service\n"})
    without = usable_cores(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/jobs.slice/other.service/cpu.max": "50000 100000\n"})
    assert usable_cores(tmp_path) == without
    write(tmp_path, {"sys/fs/cgroup/jobs.slice/cpu.max": "120000 100000\n"})
    assert usable_cores(tmp_path) == 1
    write(tmp_path, {"sys/fs/cgroup/jobs.slice/cpu.max": "max 100000\n"})
    write(tmp_path, {"sys/fs/cgroup/jobs.slice/one.service/cpu.max": "100000 100000\n"})
    assert usable_cores(tmp_path) == 1


def test_a_version_1_quota_of_the_processes_own_group_limits_the_cores(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n"})
    folder = "sys/fs/cgroup/cpu/box"
    write(tmp_path, {f"{folder}/cpu.cfs_quota_us": "-1", f"{folder}/cpu.cfs_period_us": "100000"})
    without = usable_cores(tmp_path)
    assert without >= 1
    write(tmp_path, {f"{folder}/cpu.cfs_quota_us": "100000"})
    assert usable_cores(tmp_path) == 1


def test_openmp_limits_the_cores_with_its_outermost_number(tmp_path):
    assert usable_cores(tmp_path, {"OMP_NUM_THREADS": "1,4"}) == 1
    assert usable_cores(tmp_path, {"OMP_NUM_THREADS": "0"}) == usable_cores(tmp_path, {})
