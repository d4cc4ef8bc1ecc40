"""What a measurement is worthless without: the machine, the versions, the spread."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

import quickstep

__all__ = ["describe_machine", "spread"]


def describe_machine() -> str:
    """CPU, cores that this process may use, GPU, and versions, on two lines."""
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


def spread(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    """`median [min - max]` of the values."""
    median = statistics.median(values)
    return f"{median:.{digits}f}{unit} [{min(values):.{digits}f} - {max(values):.{digits}f}]"
