"""`python -m benchmarks.gpu`: correctness, exactness and speed on one GPU, in under nine minutes.

`make gpu` runs it. Every stage is a process with a time limit, so that one that hangs or fails
costs nothing else; what time there is left goes to the next ones, so the most important are first.
The tables, the machine and what each stage printed become a Markdown file in `benchmarks/results`.

`--device cpu` runs the same stages on small shapes, to see that they work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.machine import describe_machine

_RESULTS = Path(__file__).parent / "results"
_TOTAL_S = 530.0
# the shapes of the goals: 8B, 1B, 0.5B
_SHAPES = {
    "cuda": ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-0.5b"),
    "cpu": ("tiny2", "tiny2", "tiny2"),
}
_GENERATE = "transformers' generate"
_LEAST_SPEEDUP = 5.0
_KERNELS = {"cuda": ("triton", "reference"), "cpu": ("native",)}


class Goal(msgspec.Struct, frozen=True):
    """A figure that a stage should reach; `read` finds it in the stage's JSON."""

    name: str
    read: Callable[[Any], float]
    bound: float
    is_least: bool = True
    unit: str = ""

    def cells(self, output: str) -> tuple[str, ...]:
        """Name, figure, goal, hit or miss."""
        sign = ">=" if self.is_least else "<="
        goal = f"{sign} {self._text(self.bound)}"
        try:
            value = self.read(json.loads(output))
        except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError):
            return self.name, "not measured", goal, "miss"
        hit = value >= self.bound if self.is_least else value <= self.bound
        return self.name, self._text(value), goal, "hit" if hit else "miss"

    def _text(self, value: float) -> str:
        return f"{value:.0%}" if self.unit == "%" else f"{value:.4g} {self.unit}".strip()


class Stage(msgspec.Struct, frozen=True):
    """One process: its arguments after `python -m`, how long it may take, and its goals."""

    title: str
    argv: tuple[str, ...]
    limit_s: float
    goals: tuple[Goal, ...] = ()


class Done(msgspec.Struct, frozen=True):
    """What a stage printed. `code` is None for one that took too long."""

    stage: Stage
    code: int | None
    seconds: float
    output: str


def main() -> int:
    """Run all stages and write the results. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=_TOTAL_S, help="for all stages together")
    parser.add_argument("--out", type=Path, help="file (default: by date and device)")
    parser.add_argument("--only", metavar="TEXT", help="stages with this in their titles")
    args = parser.parse_args()
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --device cpu tries the stages", file=sys.stderr)
        return 1
    end_s = time.monotonic() + args.seconds
    finished = []
    extra = list(_extra_stages(args.device))
    for stage in (*_stages(args.device), *extra):
        if args.only is not None and args.only not in stage.title:
            continue
        left_s = end_s - time.monotonic()
        if left_s < 5.0:
            print(f"{stage.title}: no time left", flush=True)
            if stage not in extra:
                finished.append(Done(stage, None, 0.0, "no time was left"))
            continue
        done = _run(stage, min(stage.limit_s, left_s))
        print(f"{stage.title}: {_status(done)}, {done.seconds:.0f} s", flush=True)
        finished.append(done)
    out = args.out or _RESULTS / f"{datetime.date.today()}-{_device_name(args.device)}.md"
    out.write_text("\n".join(_report(finished)) + "\n", encoding="utf-8")
    print(f"{out}: written")
    return 0 if all(one.code == 0 for one in finished) else 1


def _stages(device: str) -> Iterator[Stage]:
    """The most important first. Their limits add up to less than `_TOTAL_S`; the time left is for
    `_extra_stages`.
    """
    large, middle, small = _SHAPES[device]
    kernels = _KERNELS[device][0]
    chosen = ("--device", device, "--kernels", kernels)
    # a compiler's error costs seconds here; what is compiled is in Triton's cache for all others
    compiled = ("--jobs", "12") if device == "cuda" else ("--only", "sampling")
    yield Stage("kernels compile", ("tools.compile_kernels", *compiled), 45.0)
    tests = "tests/cuda" if device == "cuda" else "tests/triton/test_device_executor.py"
    yield Stage("tests of kernels and engine", ("pytest", "-q", tests), 105.0)
    yield _verify_stage(device, kernels, "1700" if device == "cuda" else "20")
    yield _step_stage(device, kernels, large, "1", _share_of_bandwidth(0.85), _share_of_peak(0.7))
    measures = "benchmarks.gpu_measures"
    yield Stage(
        "attention",
        (measures, "attention", *chosen),
        25.0,
        (
            Goal("decode, torch's time / ours", lambda of: _ratio(of[0]), 0.95),
            Goal("prefill, torch's time / ours", lambda of: _ratio(of[1]), 0.95),
        ),
    )
    yield _step_stage(device, kernels, large, "8", _share_of_bandwidth(0.85))
    yield _step_stage(device, kernels, middle, "1", _share_of_bandwidth(0.6))
    decode_ms = Goal("decode, a token", lambda of: float(of["decode_ms"]), 0.5, False, "ms")
    yield _step_stage(device, kernels, small, "1", decode_ms)
    of_roofline = Goal(
        "part of the roofline", lambda of: float(of["roofline_share"]), 0.5, True, "%"
    )
    yield Stage("served", (measures, "served", *chosen, "--shape", large), 60.0, (of_roofline,))
    yield Stage(_GENERATE, (measures, "generate", "--device", device, "--shape", large), 45.0)
    slowest = Goal(
        "products, ours / cuBLAS, the worst",
        lambda of: max(1 / _ratio(one) for one in of),
        1.1,
        False,
    )
    flags = ("exactness", *chosen, "--shape", large)
    yield Stage("cost of exactness", (measures, *flags), 25.0, (slowest,))
    cold = Goal(
        "start to first token without torch's own",
        lambda of: of["total_s"] - of["import_torch_s"] - of["cuda_s"],
        4.0,
        False,
        "s",
    )
    yield Stage("cold start", (measures, "cold-start", *chosen, "--shape", small), 30.0, (cold,))


def _extra_stages(device: str) -> Iterator[Stage]:
    """Those that may find no time left."""
    large, _, small = _SHAPES[device]
    kernels = _KERNELS[device][0]
    chosen = ("--device", device, "--kernels", kernels)
    # a profile has the ops of torch on a CPU, and native kernels are none
    of_torch = chosen if device == "cuda" else ("--device", device, "--kernels", "reference")
    profiled = ("bench", "step", "--shape", small, "--profile", "--steps", "16", *of_torch)
    yield Stage("profile of a step", ("quickstep", *profiled, "--max-model-len", "1024"), 40.0)
    throughput = ("bench", "throughput", "demo", "--max-len", "512", "--repeats", "3", *chosen)
    for depth in ("1", "2"):
        flags = (*throughput, "--pipeline-depth", depth)
        yield Stage(f"64 requests at once, steps in flight: {depth}", ("quickstep", *flags), 30.0)
    yield from _sampling_stages(device)
    for other in _KERNELS[device][1:]:
        yield _verify_stage(device, other, "300")
    for quantization in ("fp8", "int4"):
        stage = _step_stage(device, kernels, large, "1")
        flags = ("--quantization", quantization)
        yield Stage(f"{stage.title}, {quantization}", (*stage.argv, *flags), 60.0)
    tuning = ("benchmarks.tune_gpu", "--device", device, "--seconds", "100")
    yield Stage("tiles of products", tuning, 120.0)


def _sampling_stages(device: str) -> Iterator[Stage]:
    module, flags = "benchmarks.bench_sampling", ("--device", device)
    if device == "cuda":
        sampled = (module, *flags, "--repeats", "5", "--rows", "1", "64")
        yield Stage("sampling on the device", sampled, 60.0)
        yield Stage("sampling of copied logits", (*sampled, "--copied"), 30.0)
    else:
        small = ("--triton", "--vocab-size", "500", "--repeats", "1", "--rows", "1")
        yield Stage("sampling on the device", (module, *flags, *small), 60.0)


def _verify_stage(device: str, kernels: str, num_requests: str) -> Stage:
    counts = ("--requests", num_requests, "--threads", "1", "--json")
    argv = ("quickstep", "verify", "--device", device, "--kernels", kernels, *counts)
    goals = (
        Goal("mismatches", lambda of: float(of["mismatches"]), 0, False),
        Goal("comparisons", lambda of: float(of["comparisons"]), 2000),
    )
    return Stage(f"exactness, {kernels}", argv, 75.0, goals)


def _step_stage(device: str, kernels: str, shape: str, batch: str, *goals: Goal) -> Stage:
    argv = ("quickstep", "bench", "step", "--shape", shape, "--batch", batch, "--prefill", "2048")
    flags = ("--repeats", "3", "--json", "--device", device, "--kernels", kernels)
    title = f"step, {kernels}, {shape}, batch {batch}"
    return Stage(title, (*argv, *flags, "--max-model-len", "4096"), 28.0, goals)


def _share_of_bandwidth(bound: float) -> Goal:
    name = "decode, share of the copy bandwidth"
    return Goal(name, lambda of: float(of["decode_bandwidth_share"]), bound, True, "%")


def _share_of_peak(bound: float) -> Goal:
    name = "prefill of 2,048 tokens, share of the peak"
    return Goal(name, lambda of: float(of["prefill_peak_share"]), bound, True, "%")


def _ratio(case: dict[str, float]) -> float:
    return case["torch_us"] / case["ours_us"]


def _run(stage: Stage, limit_s: float) -> Done:
    started_s = time.monotonic()
    try:
        ran = subprocess.run(
            [sys.executable, "-m", *stage.argv],
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if error.stdout else ""
        return Done(stage, None, time.monotonic() - started_s, output)
    output = ran.stdout if ran.returncode == 0 else ran.stdout + ran.stderr
    return Done(stage, ran.returncode, time.monotonic() - started_s, output)


def _status(done: Done) -> str:
    if done.code is None:
        return "took too long"
    return "passed" if done.code == 0 else f"failed with status {done.code}"


def _report(finished: Sequence[Done]) -> Iterator[str]:
    yield "# On a GPU\n"
    yield f"`python -m benchmarks.gpu`, {datetime.date.today()}:\n"
    yield f"```\n{describe_machine()}\n{_versions()}\n```\n"
    yield "| stage | result | s |\n|---|---|---|"
    for done in finished:
        yield f"| {done.stage.title} | {_status(done)} | {done.seconds:.0f} |"
    yield "\n| work | figure | measured | goal | |\n|---|---|---|---|---|"
    for done in finished:
        for goal in done.stage.goals:
            yield f"| {done.stage.title} | {' | '.join(goal.cells(done.output))} |"
    yield from _speedup(finished)
    steps = [one for one in finished if one.stage.title.startswith("step,") and one.code == 0]
    if steps:
        yield "\n| step | decode ms | of the bandwidth | prefill ms | of the peak |"
        yield "|---|---|---|---|---|"
    for done in steps:
        figures = json.loads(done.output)
        cells = (
            f"{figures['decode_ms']:.3g}",
            f"{figures['decode_bandwidth_share']:.0%}",
            f"{figures['prefill_ms']:.4g}",
            f"{figures['prefill_peak_share']:.0%}",
        )
        yield f"| {done.stage.title.removeprefix('step, ')} | {' | '.join(cells)} |"
    yield from _compared(finished)
    for done in finished:
        yield f"\n## {done.stage.title}\n\n`python -m {' '.join(done.stage.argv)}`\n"
        yield f"```\n{done.output[-4000:].strip()}\n```"


def _speedup(finished: Sequence[Done]) -> Iterator[str]:
    """Served tokens per second over those of transformers."""
    rates = {
        one.stage.title: float(json.loads(one.output)["tokens_per_s"])
        for one in finished
        if one.stage.title in ("served", _GENERATE) and one.code == 0
    }
    if len(rates) == 2:
        ratio = rates["served"] / rates[_GENERATE]
        verdict = "hit" if ratio >= _LEAST_SPEEDUP else "miss"
        name = f"tokens/s, ours / {_GENERATE}"
        yield f"| served | {name} | {ratio:.3g} | >= {_LEAST_SPEEDUP} | {verdict} |"


def _compared(finished: Sequence[Done]) -> Iterator[str]:
    """What was measured next to torch's, and what was served."""
    compared = [
        one
        for one in finished
        if one.stage.title in ("attention", "cost of exactness") and one.code == 0
    ]
    if compared:
        yield "\n| next to torch's | us | torch's us | torch's / ours |\n|---|---|---|---|"
    for done in compared:
        for row in json.loads(done.output):
            ours, theirs = row["ours_us"], row["torch_us"]
            yield f"| {row['case']} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.2f} |"
    for done in finished:
        if done.stage.title in ("served", _GENERATE, "cold start") and done.code == 0:
            yield f"\n| {done.stage.title} | |\n|---|---|"
            for name, value in json.loads(done.output).items():
                yield f"| {name} | {value:.4g} |" if name != "case" else f"| {name} | {value} |"


def _versions() -> str:
    import torch

    try:
        import triton
    except ImportError:
        return "no Triton"
    return f"Triton {triton.__version__}, CUDA {torch.version.cuda}"


def _device_name(device: str) -> str:
    if device == "cpu":
        return "gpu-stages-on-a-cpu"
    import torch

    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
