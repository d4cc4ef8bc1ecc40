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
