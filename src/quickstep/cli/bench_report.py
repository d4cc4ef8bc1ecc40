"""What `quickstep bench` prints: what ran where, and each figure's median, least and greatest."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quickstep import __version__
from quickstep.bench.subject import Subject
from quickstep.cli.machine import cpu_facts, usable_cpus
from quickstep.cli.screen import console_on, print_table

__all__ = ["machine_facts", "print_report"]


def print_report(
    args: argparse.Namespace,
    subject: Subject,
    figures: Mapping[str, Sequence[float]],
    asked: Mapping[str, int],
    how: Mapping[str, str] | None = None,
) -> None:
    """JSON (`args.json`) or a table on stdout; `how` says what was measured in what way."""
    ran = _ran(subject, args.repeats, args.seed)
    if args.json:
        medians = {name: statistics.median(values) for name, values in figures.items()}
        spread = {name: [min(values), max(values)] for name, values in figures.items()}
        whole = {**medians, "spread": spread, **asked, **ran, "measured_how": dict(how or {})}
        print(json.dumps({**whole, "machine": machine_facts()}, indent=2))
        return
    console = console_on(sys.stdout)
    for name, value in {**machine_facts(), **ran, **asked, **(how or {})}.items():
        console.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    console.print()
    rows = [
        (name, *(f"{value:.4g}" for value in (statistics.median(values), min(values), max(values))))
        for name, values in figures.items()
    ]
    print_table(console, "", ("figure", "median", "min", "max"), rows)


def machine_facts() -> dict[str, Any]:
    """CPU, GPU, versions, and how busy the machine was: what a figure is worthless without."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = cpu_facts(cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "cpu": cpu["model"] or platform.processor() or platform.machine(),
        "usable_cpus": usable_cpus(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": round(os.getloadavg()[0], 2),
        "quickstep": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _ran(subject: Subject, repeats: int, seed: int) -> dict[str, Any]:
    return {
        "model": subject.engine.model_name,
        "device": subject.model.device.type,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "quantization": subject.quantization,
        "kv_cache_dtype": subject.kv_dtype,
        "kernels": subject.kernels,
        "threads": subject.num_threads,
        "repeats": repeats,
        "seed": seed,
    }
