"""`quickstep doctor`'s readers, on texts as Linux writes them."""

from pathlib import Path

import pytest

from quickstep.cli.doctor import (
    cgroup_cpus,
    cpu_facts,
    driver_version,
    environment_facts,
    huge_pages,
    memory_facts,
    memory_nodes,
)

CPUINFO = "\n\n".join(
    f"""processor\t: {number}
model name\t: Some CPU @ 2.0GHz
physical id\t: {number // 4}
core id\t\t: {number % 4 // 2}
flags\t\t: fpu avx2 fma avx512f avx512_vnni amx_bf16"""
    for number in range(8)
)


def test_cpu_facts_count_threads_and_cores() -> None:
    facts = cpu_facts(CPUINFO)
    assert facts["model"] == "Some CPU @ 2.0GHz"
    assert facts["num_logical_cpus"] == 8
    assert facts["num_physical_cores"] == 4
    assert facts["isa"] == ["avx2", "fma", "avx512f", "avx512-vnni", "amx-bf16"]


def test_arm_spells_features() -> None:
    facts = cpu_facts("processor\t: 0\nFeatures\t: fp asimd asimddp sve i8mm bf16\n")
    assert facts["isa"] == ["neon", "dot-product", "sve", "i8mm", "bf16"]
    assert facts["model"] is None


def test_no_cpuinfo_gives_no_guess() -> None:
    assert cpu_facts("") == {
        "model": None,
        "num_logical_cpus": None,
        "num_physical_cores": None,
        "isa": [],
    }


def test_memory_facts_are_bytes() -> None:
    text = "MemTotal: 16 kB\nMemAvailable: 8 kB\nHugePages_Total: 3\nHugepagesize: 2048 kB\n"
    assert memory_facts(text) == {
        "total_bytes": 16384,
        "available_bytes": 8192,
        "num_huge_pages": 3,
        "huge_page_bytes": 2 * 2**20,
    }


@pytest.mark.parametrize(("text", "setting"), [("always [madvise] never", "madvise"), ("", None)])
def test_huge_pages_show_the_chosen_setting(tmp_path: Path, text: str, setting: str | None) -> None:
    (tmp_path / "enabled").write_text(text)
    assert huge_pages(tmp_path) == setting


@pytest.mark.parametrize(
    ("file", "text", "cpus"),
    [("cpu.max", "150000 100000", 1.5), ("cpu.max", "max 100000", None), ("other", "", None)],
)
def test_the_control_groups_limit(tmp_path: Path, file: str, text: str, cpus: float | None) -> None:
    (tmp_path / file).write_text(text)
    assert cgroup_cpus(tmp_path) == cpus


def test_the_old_control_groups_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroup_cpus(tmp_path) == 2.0


def test_the_version_of_the_gpu_driver() -> None:
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Wed Apr  3 2024\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert driver_version(text) == "535.161.08"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    assert driver_version(opened) == "570.86.15"
    assert driver_version("") is None


def test_memory_nodes_are_those_with_cpus(tmp_path: Path) -> None:
    for number, cpus in enumerate(("0-3\n", "4-7\n", "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus)
    (tmp_path / "power").mkdir()
    assert memory_nodes(tmp_path) == 2
    assert memory_nodes(tmp_path / "missing") is None


def test_a_secret_in_the_environment_is_not_printed() -> None:
    environ = {"HF_TOKEN": "hf_secret", "OMP_NUM_THREADS": "2", "HOME": "/root"}
    assert environment_facts(environ) == {"OMP_NUM_THREADS": "2", "HF_TOKEN": "(set)"}
