"""`quickstep doctor`: facts about this machine, and which of them Quickstep can use.

The readers of Linux files (`cpu_facts`, `huge_pages`, ...) take the text or the folder that they
read, so that tests can pass files of other machines. A fact that cannot be read is None.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quickstep import __version__
from quickstep.cache_dir import cache_dir
from quickstep.cli.flags.parsing import Parser, command
from quickstep.cli.screen import console_on, print_table
from quickstep.environment import OF_LIBRARIES, OWN, SECRETS
from quickstep.errors import ConfigError, EngineError, how_to_install, size_text
from quickstep.ops.torch_import import has_torch

_READ_SAMPLES = 2
# Flags of /proc/cpuinfo that matter to the kernels, and the names that `doctor` prints.
_ISA_FLAGS: Mapping[str, str] = {
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


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Register the command."""
    parser = command(subparsers, "doctor", "Print what Quickstep finds on this machine.", run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-bandwidth",
        action="store_true",
        help="do not measure memory bandwidth, links between processes of a model, and the speed "
        "of GPUs (1 s each)",
    )
    parser.add_argument(
        "--gpu-check",
        action="store_true",
        help="check Triton's kernels on the GPU; `--kernels auto` uses them from "
        "then on (exit code 1: they are not right)",
    )


def run(args: argparse.Namespace) -> int:
    """Print all facts, or check a GPU."""
    if args.gpu_check:
        return _check_gpus(args.json)
    facts = collect_facts(with_bandwidth=not args.no_bandwidth)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    console = console_on(sys.stdout)
    for part, section in facts.items():
        rows = [(_label(name), _value_text(name, value)) for name, value in section.items()]
        print_table(console, part, ("what", "value"), rows, num_text_columns=2)
        console.print()
    return 0


def _check_gpus(as_json: bool) -> int:
    """Check each model of GPU once, print the parts as they end, and store the results."""
    if not (has_torch() and _has_gpu()):
        raise ConfigError("--gpu-check needs a GPU, and PyTorch for it")
    import torch

    from quickstep.ops.gpu_checks import StoredGpuCheck, gpu_check_key, write_gpu_check
    from quickstep.ops.resolve import resolve_ops
    from quickstep.verify.gpu_check import check_kernels

    keys = {gpu_check_key(index): index for index in reversed(range(torch.cuda.device_count()))}
    outcomes = []
    for key, index in keys.items():
        device = torch.device("cuda", index)
        print(f"{key.gpu}, torch {key.torch}, Triton {key.triton}", file=sys.stderr, flush=True)
        parts = []
        with torch.cuda.device(index):
            for part in check_kernels(resolve_ops(device, "triton"), device):
                parts.append(part)
                outcome = "ok" if part.has_passed else "FAILED"
                print(f"  {outcome}  {part.name}: {part.detail}", file=sys.stderr, flush=True)
        failures = tuple([f"{part.name}: {part.detail}" for part in parts if not part.has_passed])
        path = write_gpu_check(StoredGpuCheck(key, failures))
        print("  stored nowhere" if path is None else f"  stored in {path}", file=sys.stderr)
        outcomes.append({**msgspec.to_builtins(key), "parts": msgspec.to_builtins(parts)})
        if failures:
            break
    if as_json:
        print(json.dumps(outcomes, indent=2))
    return int(any(not part["has_passed"] for outcome in outcomes for part in outcome["parts"]))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def collect_facts(with_bandwidth: bool = True) -> dict[str, dict[str, Any]]:
    """All facts, by part of the machine; the names end in their units."""
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
        "cpu": {
            **cpu,
            "usable_cpus": usable_cpus(),
            "cgroup_cpu_limit": cgroup_cpus(),
            "num_memory_nodes": memory_nodes(),
        },
        "memory": memory,
        "torch": _torch_facts(),
        "native library": _native_facts(),
        "ranks and stages": _link_facts(with_bandwidth),
        "gpu": _gpu_facts(with_bandwidth),
        "optional": {
            "transformers": _version("transformers"),
            "opentelemetry": _version("opentelemetry-sdk"),
        },
        "files": _file_facts(),
        "environment": environment_facts(os.environ),
    }


def _torch_facts() -> dict[str, Any]:
    if not has_torch():
        return {"present": False, "install": how_to_install("torch")}
    import torch

    return {
        "version": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _gpu_facts(with_speed: bool) -> dict[str, Any]:
    if not has_torch():
        return {"present": False}
    import torch

    from quickstep.ops.collective import has_nccl

    if not torch.cuda.is_available():
        return {"present": False}
    driver = driver_version(_text("/proc/driver/nvidia/version"))
    facts: dict[str, Any] = {"present": True, "cuda": torch.version.cuda, "driver": driver}
    facts["nccl"] = has_nccl()  # over which ranks exchange their parts
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        name = f"cuda:{index}"
        facts[name] = device.name
        facts[f"{name}_total_bytes"] = device.total_memory
        facts[f"{name}_free_bytes"] = torch.cuda.mem_get_info(index)[0]
        facts[f"{name}_capability"] = f"{device.major}.{device.minor}"
        if with_speed:
            facts |= {f"{name}_{what}": value for what, value in _gpu_speed(index).items()}
    return facts


def _gpu_speed(index: int) -> dict[str, Any]:
    """What a copy and a product of matrices reach."""
    import torch

    from quickstep.bench.limits import DEFAULT_PROBE_BYTES, open_limits
    from quickstep.ops.tensors import BFLOAT16, Device

    if torch.cuda.mem_get_info(index)[0] < 4 * DEFAULT_PROBE_BYTES:
        return {"measured_how": "not measured: too little free memory"}
    with torch.cuda.device(index):
        device = Device("cuda", index)
        limits = open_limits(device, BFLOAT16, None, None, DEFAULT_PROBE_BYTES, time.perf_counter)
        speed = {
            "copy_bytes_per_s": round(limits.read_bytes_per_s()),
            "bfloat16_flops_per_s": round(limits.flops_per_s()),
        }
        del limits
        torch.cuda.empty_cache()
    return speed


def driver_version(text: str) -> str | None:
    """The version in /proc/driver/nvidia/version."""
    found = re.search(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else None


def _native_facts() -> dict[str, Any]:
    from quickstep.ops.native.backend import native_status

    status = native_status()
    if not status.available:
        return {"present": False, "reason": status.reason}
    return {"present": True, "isa": status.isa, "isa_levels": list(status.levels)}


def _link_facts(with_costs: bool) -> dict[str, Any]:
    """What `--tensor-parallel-size` and `--pipeline-parallel-size` cost on this machine."""
    how = "not measured"
    if with_costs and _native_facts()["present"]:
        from quickstep.engine.ranks.link_costs import HIDDEN_SIZE, measured_link_costs

        if usable_cpus() < 2:
            return {"measured_how": "not measured: one CPU"}
        try:
            costs = measured_link_costs()
        except (EngineError, OSError) as error:
            return {"measured_how": f"not measured: {error}"}
        if costs is not None:
            how = f"two processes, rows of {HIDDEN_SIZE} in bfloat16"
            return {**msgspec.to_builtins(costs), "measured_how": how}
    return {"measured_how": how}


def environment_facts(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set and have an effect here; of a secret only that it is set."""
    return {
        name: "(set)" if name in SECRETS else environ[name]
        for name in (*OWN, *OF_LIBRARIES)
        if name in environ
    }


def _file_facts() -> dict[str, Any]:
    """Where step times are stored and checkpoints are downloaded to, and whether a token is set."""
    from huggingface_hub import constants, get_token

    stored = cache_dir()
    return {
        "cache": None if stored is None else str(stored),
        "checkpoints": str(constants.HF_HUB_CACHE),
        "hub_token": get_token() is not None,
        "offline": bool(constants.HF_HUB_OFFLINE),
    }


def _bandwidth(available_bytes: int | None) -> dict[str, Any]:
    """The best of several reads of a buffer far larger than the caches, with all threads."""
    from quickstep.bench.limits import DEFAULT_PROBE_BYTES, open_limits
    from quickstep.engine.machine import usable_cores
    from quickstep.ops.tensors import CPU, FLOAT32

    if available_bytes is not None and available_bytes < 4 * DEFAULT_PROBE_BYTES:
        return {"read_bytes_per_s": None, "measured_how": "not measured: too little free memory"}
    if not _native_facts()["present"] and not has_torch():
        return {
            "read_bytes_per_s": None,
            "measured_how": "not measured: no native kernels, no PyTorch",
        }
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
    """A fact's name without its unit, which `_value_text` adds to the value."""
    if name.isupper():  # of an environment variable
        return name
    bare = name.removeprefix("num_").removesuffix("_per_s").removesuffix("_bytes")
    bare = bare.removesuffix("_us")
    return {"read": "read bandwidth"}.get(bare, bare.replace("_", " "))


def _value_text(name: str, value: object) -> str:
    """A readable value; the end of the name is the unit."""
    if value is None:
        return "unlimited" if name.endswith("limit") else "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value) or "none"
    if isinstance(value, Mapping):
        return json.dumps(value)
    if name.endswith("flops_per_s"):
        return f"{float(str(value)) / 1e12:.1f} TFLOP/s"
    if name.endswith("bytes_per_s"):
        return f"{float(str(value)) / 1e9:.1f} GB/s"
    if name.endswith("_us"):
        return f"{value} us"
    if name.endswith("bytes"):
        return size_text(float(str(value)))
    return str(value)


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
        "isa": [name for flag, name in _ISA_FLAGS.items() if flag in flags],
    }


def memory_facts(meminfo: str) -> dict[str, int | None]:
    """Total and available bytes, from /proc/meminfo."""
    fields = {}
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        values = value.split()
        if values and values[0].isdigit():
            fields[name] = int(values[0]) * (1024 if values[-1] == "kB" else 1)
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
    """The CPU limit of the control group; None if there is none."""
    limit = _read(folder / "cpu.max")
    if limit is not None:
        quota, _, period = limit.partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    old_quota = _read(folder / "cpu" / "cpu.cfs_quota_us")
    old_period = _read(folder / "cpu" / "cpu.cfs_period_us")
    if old_quota is None or old_period is None or int(old_quota) < 0:
        return None
    return int(old_quota) / int(old_period)


def memory_nodes(folder: Path = Path("/sys/devices/system/node")) -> int | None:
    """Memory nodes that have CPUs: what replicas and ranks are for. None if that is not known."""
    nodes = [_read(node / "cpulist") for node in folder.glob("node[0-9]*")]
    return sum(bool(cpus) for cpus in nodes) or None


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
