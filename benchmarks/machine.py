"""A description of the machine and the versions, to be printed with measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import quickstep

__all__ = ["describe_machine"]


def describe_machine() -> str:
    """CPU, usable cores, GPU and versions, in two lines."""
    import torch

    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, {gpu}\n"
        f"quickstep {quickstep.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {torch.get_num_threads()} threads"
    )
