"""A description of the machine and the versions, to be printed with measurements.

`python -m benchmarks.machine [--device cuda]` prints all of it; it fails where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import quickstep

__all__ = ["describe_machine", "stolen_s"]

_PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "msgspec", "llguidance")
_OF_GPU = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"


def describe_machine() -> str:
    """CPU, usable cores, GPU and versions, in two lines."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{_cpu()}, {len(os.sched_getaffinity(0))} cores, {gpu}\n"
        f"quickstep {quickstep.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {torch.get_num_threads()} threads"
    )


def stolen_s() -> float:
    """For how long, in sum over cores, the host of this machine has run others instead; 0.0 where
    the system does not say.
    """
    try:
        with Path("/proc/stat").open(encoding="ascii") as counts:
            ticks = int(counts.readline().split()[8])
    except (OSError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Print what is known. Returns 1 if torch sees no GPU and one is wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    args = parser.parse_args()
    import torch

    found: dict[str, object] = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "quickstep": quickstep.__version__,
        "cuda": torch.version.cuda,
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    if (tool := shutil.which("nvidia-smi")) is not None:
        query = [tool, f"--query-gpu={_OF_GPU}", "--format=csv,noheader"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            ran = subprocess.run(query, capture_output=True, text=True, timeout=15.0)
            found["gpu"] = ran.stdout.strip()
    is_there = torch.cuda.is_available()
    if is_there:
        properties = torch.cuda.get_device_properties(0)
        found["device"] = str(properties)
        found["free_gb"] = torch.cuda.mem_get_info()[0] / 1e9
    for name, value in found.items():
        print(json.dumps({"name": name, "value": value}))
    if args.device == "cuda" and not is_there:
        print("there is no GPU that torch can use; --device cpu tries the stages", file=sys.stderr)
        return 1
    return 0


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if names:
            return names[0].partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
