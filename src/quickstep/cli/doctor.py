"""`quickstep doctor`: what this machine has, and what Quickstep can use of it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quickstep import __version__
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.machine import (
    cgroup_cpus,
    cpu_facts,
    huge_pages,
    memory_facts,
    usable_cpus,
)
from quickstep.cli.screen import console_on, print_table, size_text
from quickstep.ops.torch_import import has_torch

__all__ = ["add_parser", "collect_facts", "run"]

_READ_SAMPLES = 2


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "doctor", "Tell what this machine has.", run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-bandwidth", action="store_true", help="leave out the measurement (a second)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    facts = collect_facts(with_bandwidth=not args.no_bandwidth)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    console = console_on(sys.stdout)
    for part, section in facts.items():
        rows = [(_label(name), _shown(name, value)) for name, value in section.items()]
        print_table(console, part, ("what", "value"), rows, num_text_columns=2)
        console.print()
    return 0


def collect_facts(with_bandwidth: bool = True) -> dict[str, dict[str, Any]]:
    """All facts, by part of the machine."""
    cpu = cpu_facts(_text("/proc/cpuinfo"))
    cpu["model"] = cpu["model"] or platform.processor() or platform.machine()
    memory: dict[str, Any] = dict(memory_facts(_text("/proc/meminfo")))
    memory["transparent_huge_pages"] = huge_pages()
    memory |= _bandwidth(memory["available_bytes"]) if with_bandwidth else {}
    return {
        "quickstep": {
            "version": __version__,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "cpu": {**cpu, "usable_cpus": usable_cpus(), "cgroup_cpu_limit": cgroup_cpus()},
        "memory": memory,
        "torch": _torch_facts(),
        "native library": _native_facts(),
        "gpu": _gpu_facts(),
        "optional": {"transformers": _version("transformers")},
    }


def _torch_facts() -> dict[str, Any]:
    if not has_torch():
        return {"present": False, "install": "pip install 'quickstep[torch]'"}
    import torch

    return {
        "version": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _gpu_facts() -> dict[str, Any]:
    if not has_torch():
        return {"present": False}
    import torch

    if not torch.cuda.is_available():
        return {"present": False}
    facts: dict[str, Any] = {"present": True, "cuda": torch.version.cuda}
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        facts[f"device_{index}"] = device.name
        facts[f"device_{index}_bytes"] = device.total_memory
        facts[f"device_{index}_capability"] = f"{device.major}.{device.minor}"
    return facts


def _native_facts() -> dict[str, Any]:
    if importlib.util.find_spec("quickstep.ops.native.backend") is None:
        return {"present": False, "reason": "this build has no native kernels"}
    status = importlib.import_module("quickstep.ops.native.backend").native_status()
    if not status.available:
        return {"present": False, "reason": status.reason}
    return {"present": True, "isa": status.isa, "isa_levels": list(status.levels)}


def _bandwidth(available_bytes: int | None) -> dict[str, Any]:
    """The best of some passes over a buffer far larger than the caches, on all threads."""
    from quickstep.bench.limits import DEFAULT_PROBE_BYTES, open_limits
    from quickstep.engine.machine import usable_cores
    from quickstep.ops.tensors import CPU, FLOAT32

    if available_bytes is not None and available_bytes < 4 * DEFAULT_PROBE_BYTES:
        return {"read_bytes_per_s": None, "measured_how": "not: too little memory is free"}
    if not _native_facts()["present"] and not has_torch():
        return {"read_bytes_per_s": None, "measured_how": "not: no native kernels and no PyTorch"}
    isa = os.environ.get("QUICKSTEP_CPU_ISA")
    num_threads = usable_cores()
    limits = open_limits(CPU, FLOAT32, num_threads, isa, DEFAULT_PROBE_BYTES, time.perf_counter)
    best = max(limits.read_bytes_per_s() for _ in range(_READ_SAMPLES))
    how = f"{limits.read_how}, {num_threads} threads"
    return {"read_bytes_per_s": round(best), "measured_how": how}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text() if file.exists() else ""


def _label(name: str) -> str:
    """A fact's name without its unit, which stands in the value."""
    bare = name.removeprefix("num_").removesuffix("_per_s").removesuffix("_bytes")
    return {"read": "read bandwidth"}.get(bare, bare.replace("_", " "))


def _shown(name: str, value: object) -> str:
    """A value as people read it; the name's ending says the unit."""
    if value is None:
        return "unlimited" if name.endswith("limit") else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if isinstance(value, Mapping):
        return json.dumps(value)
    if name.endswith("bytes_per_s"):
        return f"{float(str(value)) / 1e9:.1f} GB/s"
    if name.endswith("bytes"):
        return size_text(float(str(value)))
    return str(value)
