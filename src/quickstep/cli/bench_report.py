"""The output of `quickstep bench`: settings, machine, and the median and range of each figure."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quickstep import __version__
from quickstep.cli import INTERRUPTED
from quickstep.cli.doctor import cpu_facts, usable_cpus
from quickstep.cli.screen import console_on, print_table
from quickstep.ops.torch_import import has_torch


def print_figures(
    figures: Mapping[str, Sequence[float]],
    settings: Mapping[str, object],
    as_json: bool,
    methods: Mapping[str, str] | None = None,
    num_repeats: int | None = None,
) -> int:
    """Print JSON or a table to stdout; returns the exit code.

    Args:
        figures: A value per repeat.
        settings: What was measured, and with which options.
        as_json: Print JSON.
        methods: How limits and overhead were measured, by a short name.
        num_repeats: How many values are wanted: with fewer, Ctrl-C has ended the measurement.
    """
    medians = {name: statistics.median(values) for name, values in figures.items()}
    machine = _machine_facts()
    if as_json:
        spread = {name: [min(values), max(values)] for name, values in figures.items()}
        report: dict[str, Any] = {**medians, "spread": spread, **settings}
        if methods is not None:
            report["measured_how"] = dict(methods)
        print(json.dumps({**report, "machine": machine}, indent=2))
        return _exit_code(figures, num_repeats)
    console = console_on(sys.stdout)
    for name, value in {**machine, **settings, **(methods or {})}.items():
        console.print(f"{name.replace('_', ' ')}: {value}", markup=False)
    console.print()
    rows = [
        (name, *(f"{value:.4g}" for value in (medians[name], min(values), max(values))))
        for name, values in figures.items()
    ]
    print_table(console, "", ("figure", "median", "min", "max"), rows)
    return _exit_code(figures, num_repeats)


def _exit_code(figures: Mapping[str, Sequence[float]], num_repeats: int | None) -> int:
    num_done = min(len(values) for values in figures.values())
    if num_repeats in (None, num_done):
        return 0
    print(f"interrupted: these are {num_done} of {num_repeats} repeats", file=sys.stderr)
    return INTERRUPTED


def _machine_facts() -> dict[str, Any]:
    """CPU, GPU, versions and load: figures of two machines are not comparable without them."""
    gpu = torch_version = None
    if has_torch():
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        torch_version = str(torch.__version__)
    cpuinfo = Path("/proc/cpuinfo")
    cpu = cpu_facts(cpuinfo.read_text() if cpuinfo.exists() else "")
    return {
        "cpu": cpu["model"] or platform.processor() or platform.machine(),
        "usable_cpus": usable_cpus(),
        "gpu": gpu,
        "load_average": round(os.getloadavg()[0], 2),
        "quickstep": __version__,
        "torch": torch_version,
        "python": platform.python_version(),
    }
