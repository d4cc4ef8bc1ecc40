"""Engines on hardware that was not measured here: constants fitted to published figures, and how
far such figures are from what these constants predict.

`engines.yaml` is written by `python -m benchmarks.published --fit`. A range is made by simulating
with steps that take longer or shorter (`Achieved.slowed`), by factors that were found between
predictions and figures of publishers whose cases the prediction did not know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from quickstep.plan.hardware import Achieved, Hardware
from quickstep.yaml_file import read_yaml

ENGINES = ("quickstep", "vllm", "sglang", "tensorrt-llm")
RANGE_POINTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # the middles of five equal parts
ENGINES_FILE = Path(__file__).parent / "engines.yaml"

_Made = TypeVar("_Made")


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of some published cases, each predicted without it: how many, the median of their distances
    and the part that was inside the range.
    """

    num_cases: int
    median_error: float
    inside: float


class EngineFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine.

    Attributes:
        achieved: With requests over HTTP.
        offline_row_overhead_s: Replaces `row_overhead_s` without HTTP.
        factors: How many times as fast the engine was as in the median case, at RANGE_POINTS of
            the cases, each predicted without those of its publisher; 1 in the middle.
        other_gpu_factors: The same, each predicted without those of its GPU.
        errors, gpus, formats: Of all cases, of those on a GPU, and of those in a format.
    """

    achieved: Achieved
    offline_row_overhead_s: float
    factors: tuple[float, ...]
    other_gpu_factors: tuple[float, ...]
    errors: Errors
    gpus: dict[str, Errors]
    formats: dict[str, Errors]


class _EngineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engines: dict[str, EngineFit]


class Evidence(msgspec.Struct, frozen=True):
    """What a range rests on.

    Attributes:
        num_cases, median_error: Of this engine on this GPU; of the engine on all GPUs if there are
            none.
        num_engine_cases: On all GPUs.
        factors: As `EngineFit.factors`.
    """

    engine: str
    gpu: str
    num_cases: int
    num_engine_cases: int
    median_error: float
    factors: tuple[float, ...]

    @property
    def text(self) -> str:
        """A line for people."""
        if not self.num_cases:
            return (
                f"no published case of {self.engine} on {self.gpu}; {self.num_engine_cases} on "
                f"other GPUs, median error {self.median_error:.0%}"
            )
        return (
            f"{self.num_cases} published cases of {self.engine} on {self.gpu} "
            f"({self.num_engine_cases} on all GPUs), median error {self.median_error:.0%}"
        )


@cache
def read_engines() -> dict[str, EngineFit]:
    """The bundled table."""
    return read_yaml(ENGINES_FILE, _EngineTable, "the table of engines").engines


def with_engine(
    hardware: Hardware, engine: str, is_offline: bool = False
) -> tuple[Hardware, Evidence]:
    """Hardware on which an engine reaches what was published of it."""
    fitted = read_engines()[engine]
    achieved = fitted.achieved
    if is_offline:
        achieved = replace(achieved, row_overhead_s=fitted.offline_row_overhead_s)
    here = fitted.gpus.get(hardware.name)
    evidence = Evidence(
        engine,
        hardware.name,
        0 if here is None else here.num_cases,
        fitted.errors.num_cases,
        (here or fitted.errors).median_error,
        fitted.other_gpu_factors if here is None else fitted.factors,
    )
    return replace(hardware, achieved=achieved), evidence


def slowed(hardware: Hardware, factor: float) -> Hardware:
    """Hardware on which each step takes so many times as long, as far as its data sheet allows."""
    link = replace(hardware.link, latency_us=hardware.link.latency_us * factor)
    return replace(hardware, link=link, achieved=hardware.achieved.slowed(factor))


def over_range(
    evidence: Evidence,
    likely: _Made,
    made: Callable[[float], _Made],
    meets: Callable[[_Made], bool],
) -> tuple[_Made, _Made, float]:
    """What the same simulation gives at the low and the high end of a range, and in which part of
    the range it meets a target. `made` gets how many times as long steps take; `likely` is what it
    gives for 1. Faster steps meet what slower ones meet, so one more point is enough to know.
    """
    slow_at = [1.0 / factor for factor in evidence.factors]
    low, high = made(slow_at[0]), made(slow_at[-1])
    if meets(low):
        return low, high, 1.0
    if not meets(high):
        return low, high, 0.0
    middle = len(slow_at) // 2
    at = middle - 1 if meets(likely) else middle + 1
    first = at if meets(made(slow_at[at])) else at + 1
    return low, high, (len(slow_at) - first) / len(slow_at)
