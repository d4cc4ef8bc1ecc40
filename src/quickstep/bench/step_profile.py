"""`quickstep bench step --profile`: what the device ran in decode steps, and when it was idle.

torch.profiler records the kernels of all threads (on a GPU through CUPTI; on a CPU the ops of
torch, in place of kernels). This reads its Chrome trace.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quickstep.bench.measured_engine import MeasuredEngine, random_prompt, run_request
from quickstep.bench.step import StepOptions
from quickstep.errors import EngineError

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_LAUNCH_NAMES = ("LaunchKernel", "GraphLaunch", "Memcpy", "Memset")
_WARM_UPS = 2


class KernelTime(msgspec.Struct, frozen=True):
    """All runs of a kernel, or of an op on a CPU."""

    name: str
    num_runs: int
    total_us: float


class StepProfile(msgspec.Struct, frozen=True):
    """A profiled time.

    Attributes:
        kernels: What ran, the longest first.
        span_us: From the first begin to the last end.
        busy_us: At least one ran.
        gaps_us: Each pause in between.
        num_launches: Calls that launch a kernel, a graph or a copy.
        launch_us: What these calls took on the host.
    """

    kernels: tuple[KernelTime, ...]
    span_us: float
    busy_us: float
    gaps_us: tuple[float, ...]
    num_launches: int
    launch_us: float

    def figures(self, num_steps: int) -> dict[str, float]:
        """Totals, and what they are per step."""
        idle_us = self.span_us - self.busy_us
        return {
            "span_ms": self.span_us / 1e3,
            "busy_share": self.busy_us / self.span_us if self.span_us else 0.0,
            "idle_us_per_step": idle_us / num_steps,
            "longest_gap_us": max(self.gaps_us, default=0.0),
            "runs_per_step": sum(kernel.num_runs for kernel in self.kernels) / num_steps,
            "launches_per_step": self.num_launches / num_steps,
            "launch_us_per_step": self.launch_us / num_steps,
        }


def read_trace(events: Iterable[Mapping[str, Any]]) -> StepProfile:
    """The events of a Chrome trace. Raises EngineError if nothing ran."""
    complete = [event for event in events if event.get("ph") == "X"]
    spans = [event for event in complete if event.get("cat") in _ON_DEVICE]
    if not spans:
        spans = _outermost([event for event in complete if event.get("cat") == "cpu_op"])
    if not spans:
        raise EngineError("the profiler recorded neither a kernel nor an op")
    times: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        times[str(span["name"])].append(float(span["dur"]))
    kernels = [KernelTime(name, len(us), sum(us)) for name, us in times.items()]
    launches = [
        float(event["dur"])
        for event in complete
        if event.get("cat") in _LAUNCHES and any(name in event["name"] for name in _LAUNCH_NAMES)
    ]
    begin_us, busy_us, gaps_us, end_us = _pauses(spans)
    return StepProfile(
        tuple(sorted(kernels, key=lambda one: (-one.total_us, one.name))),
        end_us - begin_us,
        busy_us,
        tuple(gaps_us),
        len(launches),
        sum(launches),
    )


def _outermost(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that no other span of their thread contains: an op of torch calls others."""
    found: list[Mapping[str, Any]] = []
    end_us: dict[object, float] = {}
    for span in sorted(spans, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        begin = float(span["ts"])
        if begin >= end_us.get(span["tid"], float("-inf")):
            found.append(span)
            end_us[span["tid"]] = begin + float(span["dur"])
    return found


def _pauses(spans: Sequence[Mapping[str, Any]]) -> tuple[float, float, list[float], float]:
    """First begin, time in which something ran, the pauses, last end."""
    ordered = sorted((float(span["ts"]), float(span["ts"]) + float(span["dur"])) for span in spans)
    begin_us, end_us = ordered[0]
    busy_us, gaps_us = end_us - begin_us, []
    for begin, end in ordered[1:]:
        if begin > end_us:
            gaps_us.append(begin - end_us)
        busy_us += max(0.0, end - max(begin, end_us))
        end_us = max(end_us, end)
    return ordered[0][0], busy_us, gaps_us, end_us


async def profile_steps(
    measured: MeasuredEngine, options: StepOptions, trace: Path | None = None
) -> StepProfile:
    """Decode on a started engine under the profiler; `trace` gets the Chrome trace.

    The prompts are in the prefix cache by then, and the steps are recorded.
    """
    # public as an argument of `profile`, without a public name; steps run in another thread
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity, profile

    rng = random.Random(options.seed)
    vocab_size = measured.model.vocab_size
    prompts = [
        random_prompt(rng, vocab_size, options.decode_prompt_len) for _ in range(options.batch)
    ]

    async def decode() -> None:
        await asyncio.gather(
            *(run_request(measured, prompt, options.num_outputs) for prompt in prompts)
        )

    for _ in range(_WARM_UPS):
        await decode()
        await measured.engine.wait_until_captured()
    activities = [ProfilerActivity.CPU]
    if measured.model.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, experimental_config=every_thread) as profiler:
        await decode()
    with tempfile.TemporaryDirectory() as folder:
        file = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))  # compressed if its name ends with .gz
        content = file.read_bytes()
        content = gzip.decompress(content) if file.suffix == ".gz" else content
        return read_trace(json.loads(content)["traceEvents"])
