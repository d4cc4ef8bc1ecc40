"""The stages of `benchmarks.gpu`, as data: what each run starts, how long it may take, its goals.

    correct   what the GPU is, whether kernels compile, and whether their bits are right
    fast      steps, kernels and serving of the goals' models
    compared  the same requests in transformers; faster tiles; exactness with another seed

The most important first: what there is no time for is at the end. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Rows = Mapping[str, Sequence[Mapping[str, Any]]]

RUNS = ("correct", "fast", "compared")
# Those of `tests/cuda/test_cuda_ops.py` and their number of processes; the slowest to compile first
OPS = {
    "paged_attention": 8,
    "linear": 2,
    "gated_linear": 2,
    "quantized_linear": 2,
    "experts": 2,
    "experts_lora": 2,
    "lora": 2,
    "packed_rows": 1,
    "quantized_rows": 1,
    "embedding": 1,
    "logits": 1,
    "rotary_write_kv": 1,
    "write_kv": 1,
    "rotary": 1,
    "rms_norm": 1,
    "add_rms_norm": 1,
    "layer_norm": 1,
    "add_layer_norm": 1,
    "gated_activation": 1,
    "activation": 1,
    "route": 1,
    "add": 1,
    "scale": 1,
}
_OP_TESTS = "tests/cuda/test_cuda_ops.py"
_OP_CHECKS = (
    "test_results_on_a_gpu_are_near_float64",
    "test_a_token_on_a_gpu_has_the_same_bits_in_every_batch",
)
_NUM_PARTS = 8  # of an op's cases, there
_MEASURES, _KERNELS = "benchmarks.gpu_measures", "benchmarks.gpu_kernels"
_TILES = "benchmarks.tune_gpu"
_SERVED = "served"
_GENERATE, _GENERATE_BATCH = "transformers' generate", "transformers' generate_batch"
# the shapes of the goals: 8B, 1B, 0.5B
_SHAPES = {
    "cuda": ("llama-3.1-8b", "llama-3.2-1b", "qwen2.5-0.5b"),
    "cpu": ("tiny2", "tiny2", "tiny2"),
}
# rows of decode steps, tokens of prompts, rows of profiled steps
_STEPS = {
    "cuda": (("1", "8", "32", "128"), ("512", "2048", "8192"), ("1", "32")),
    "cpu": (("1", "2", "3"), ("32", "64"), ("1",)),
}
_SERVED_REQUESTS = {"cuda": ("1", "8", "64", "128"), "cpu": ("1", "4")}


@dataclass(frozen=True)
class Goal:
    """A figure to reach; `read` finds it in the rows of all stages, by their titles."""

    name: str
    read: Callable[[Rows], float]
    bound: float
    is_least: bool = True
    unit: str = ""


@dataclass(frozen=True)
class Stage:
    """A process.

    Attributes:
        argv: After `python -m`; `{out}` is the folder of the results, `{junit}` a file for pytest,
            and `{seconds}` a little less than the time that the stage gets.
        limit_s: When it is killed.
        group: Neighbours of the same group run at the same time.
        under: A program that runs it.
        environment: Variables of its own.
        is_needed: Without it, the run ends.
    """

    title: str
    argv: tuple[str, ...]
    limit_s: float
    goals: tuple[Goal, ...] = ()
    group: str = ""
    under: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    is_needed: bool = False

    def command(self, python: str) -> list[str]:
        """What is started."""
        return [*self.under, python, "-m", *self.argv]


def stages(run: str, device: str) -> Iterator[Stage]:
    """Those of a run, in order."""
    yield Stage("machine", ("benchmarks.machine", "--device", device), 60.0, is_needed=True)
    yield from _RUNS[run](device)


def _correct(device: str) -> Iterator[Stage]:
    is_gpu = device == "cuda"
    different = Goal(
        "products whose bits depend on the tokens",
        lambda of: sum(not result["same_bits"] for result in of["bits of products"]),
        0,
        False,
    )
    if is_gpu:
        yield Stage("doctor --gpu-check", ("quickstep", "doctor", "--gpu-check"), 90.0)
    of_products = (_KERNELS, "bits", *_chosen(device))
    interpreted = () if is_gpu else (("TRITON_INTERPRET", "1"),)
    yield Stage("bits of products", of_products, 75.0, (different,), environment=interpreted)
    of_tiles = (_KERNELS, "tile-bits", *_chosen(device))
    yield Stage("bits of tiles", of_tiles, 60.0, environment=interpreted)
    compiled = ("--jobs", "14") if is_gpu else ("--only", "sampling")
    yield Stage("kernels compile", ("tools.compile_kernels", *compiled), 120.0)
    if is_gpu:
        yield _tests("tests: engine", ("tests/cuda/test_cuda_engine.py",), 100.0)
        yield from _op_tests()
        yield _tests("tests: graphs", ("tests/cuda/test_graphs_on_cuda.py",), 100.0)
    else:
        yield _tests("tests: executor", ("tests/triton/test_device_executor.py",), 200.0)
        for op in ("rms_norm", "write_kv"):
            names = ("tests/triton/test_triton_ops.py", "-k", f"float64 and {op}")
            yield _tests(f"ops: {op}", names, 100.0, "ops")
    count = "300" if is_gpu else "10"
    yield _verify("exactness", device, ("--requests", count), 100.0, least=400 if is_gpu else 10)
    yield _exact(device, _SHAPES[device][0])
    yield Stage("limits", (_KERNELS, "limits", "--device", device), 45.0)
    if is_gpu:
        yield from _sanitized()
        yield _exact(device, _SHAPES[device][-1])


def _exact(device: str, shape: str) -> Stage:
    title = f"exactness, two layers of {shape}"
    mismatches = Goal(
        "mismatches", lambda of: sum(result["mismatches"] for result in of[title]), 0, False
    )
    argv = (_MEASURES, "exact", *_chosen(device), "--shape", shape)
    return Stage(title, argv, 90.0, (mismatches,))


def _op_tests() -> Iterator[Stage]:
    """A process for each op, or for parts of its cases: after an illegal access to memory, nothing
    else runs in a process.
    """
    for op, num_processes in OPS.items():
        for process in range(num_processes):
            parts = range(process, _NUM_PARTS, num_processes)
            title = f"ops: {op}" + (f" {process + 1}" if num_processes > 1 else "")
            names = [
                f"{_OP_TESTS}::{check}[{op}-{part}-triton]"
                for check in _OP_CHECKS
                for part in parts
            ]
            yield _tests(title, names, 150.0, "ops")
    sampling = ("tests/cuda/test_cuda_sampling.py",)
    yield _tests("tests: sampling", sampling, 150.0, "ops")
    yield _tests("ops: reference", (_OP_TESTS, "-k", "reference"), 150.0, "ops")


def _sanitized() -> Iterator[Stage]:
    """A few kernels of each kind under NVIDIA's compute-sanitizer, which may be missing."""
    check = f"{_OP_TESTS}::{_OP_CHECKS[0]}"
    ops = (
        "linear",
        "gated_linear",
        "quantized_linear",
        "paged_attention",
        "lora",
        "experts",
        "rotary_write_kv",
    )
    for op in ops:
        names = (f"{check}[{op}-0-triton]",)
        yield _sanitize(_tests(f"memcheck: {op}", names, 120.0, "sanitizer"), "memcheck")
    sampling = ("tests/cuda/test_cuda_sampling.py", "-k", "test_on_a_gpu")
    for tool in ("memcheck", "racecheck"):
        yield _sanitize(_tests(f"{tool}: sampling", sampling, 120.0, "sanitizer"), tool)


def _sanitize(stage: Stage, tool: str) -> Stage:
    quiet = ("--report-api-errors", "no")  # some calls of torch fail on purpose
    under = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *quiet)
    # a tensor has an allocation of its own, so that what is read behind its end is found
    alone = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
    return replace(stage, under=under, environment=alone)


def _fast(device: str) -> Iterator[Stage]:
    large, middle, small = _SHAPES[device]
    rates = (_rate(large, 32, 4800), _rate(large, 128, 12500))
    goals = (_bandwidth(large, 1, 0.85), _peak(large, 0.65), *rates)
    yield _steps(device, large, 120.0, *goals)
    if device == "cuda":
        yield _steps(device, small, 80.0, _milliseconds(small, 0.7))
        yield _steps(device, middle, 80.0, _bandwidth(middle, 1, 0.6))
    products = Goal(
        "the worst product, ours / torch's",
        lambda of: max(product["ours_us"] / product["torch_us"] for product in of["products"]),
        1.1,
        False,
    )
    yield Stage("products", (_KERNELS, "products", *_chosen(device)), 80.0, (products,))
    attention = Goal(
        "the worst attention, torch's / ours",
        lambda of: min(result["torch_us"] / result["ours_us"] for result in of["attention"]),
        0.95,
    )
    yield Stage("attention", (_KERNELS, "attention", *_chosen(device)), 60.0, (attention,))
    for title, flags, bound in (
        ("int4", ("--quantization", "int4"), 2.0),
        ("fp8", ("--quantization", "fp8"), 3.2),
        ("int8 KV", ("--kv-cache-dtype", "int8"), None),
        ("fp8 KV", ("--kv-cache-dtype", "fp8"), None),
    ):
        stage = _few_steps(device, large, title, flags)
        found = () if bound is None else (_milliseconds(f"{large}, {title}", bound),)
        yield replace(stage, goals=found)
    yield _served(device)
    sampling = ("benchmarks.bench_sampling", "--device", device, "--repeats", "5")
    if device == "cuda":
        yield Stage("sampling", (*sampling, "--rows", "1", "64"), 60.0)
    else:
        tiny = ("--triton", "--vocab-size", "500", "--repeats", "1", "--rows", "1")
        yield Stage("sampling", (*sampling, *tiny), 60.0)
    cold = Goal(
        "start to first token, the second time",
        lambda of: of["start to first token"][-1]["total_s"],
        5.0,
        False,
        "s",
    )
    cold_start = (_MEASURES, "cold-start", *_chosen(device), "--shape", small)
    yield Stage("start to first token", cold_start, 60.0, (cold,))
    if device == "cuda":
        yield _counters()
    for depth in ("1", "2"):
        flags = ("demo", "--max-len", "512", "--repeats", "3", *_chosen(device))
        argv = ("quickstep", "bench", "throughput", *flags, "--pipeline-depth", depth)
        yield Stage(f"64 requests at once, steps in flight: {depth}", argv, 40.0)
    if device == "cuda":
        copied = (*sampling, "--rows", "1", "64", "--copied")
        yield Stage("sampling of copied logits", copied, 40.0)


def _steps(device: str, shape: str, limit_s: float, *goals: Goal) -> Stage:
    """Decode and prefill in one engine, then profiles."""
    batches, prompts, profiled = _STEPS[device]
    argv = (_MEASURES, "steps", *_profiled(device), "--shape", shape)
    sizes = ("--batches", *batches, "--prompts", *prompts, "--profile", *profiled)
    is_small = shape == _SHAPES[device][-1]
    trace = ("--trace", "{out}/trace.json.gz") if is_small else ()
    return Stage(f"steps, {shape}", (*argv, *sizes, *trace), limit_s, goals)


def _few_steps(device: str, shape: str, title: str, flags: tuple[str, ...]) -> Stage:
    batches, prompts, profiled = _STEPS[device]
    argv = (_MEASURES, "steps", *_profiled(device), "--shape", shape, *flags)
    sizes = ("--batches", batches[0], batches[-2], "--prompts", prompts[-2])
    profile = ("--profile", profiled[0])
    return Stage(f"steps, {shape}, {title}", (*argv, *sizes, *profile), 90.0)


def _served(device: str) -> Stage:
    counts = _SERVED_REQUESTS[device]
    argv = (_MEASURES, "served", *_chosen(device), "--shape", _SHAPES[device][0])
    goal = Goal(
        "part of the roofline, most requests",
        lambda of: of[_SERVED][-1]["roofline_share"],
        0.5,
        True,
        "%",
    )
    return Stage(_SERVED, (*argv, "--requests", *counts), 90.0, (goal,))


def _counters() -> Stage:
    """NVIDIA's Nsight Compute, which may be missing."""
    metrics = (
        "gpu__time_duration.sum",
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "launch__registers_per_thread",
    )
    kernels = ("--kernel-name", "regex:linear|product|attention|combine", "--launch-count", "24")
    under = ("ncu", "--clock-control", "none", *kernels, "--metrics", ",".join(metrics), "--csv")
    argv = (_KERNELS, "once")
    return Stage("hardware counters", argv, 60.0, under=under)


def _compared(device: str) -> Iterator[Stage]:
    large = _SHAPES[device][0]
    requests = "64" if device == "cuda" else _SERVED_REQUESTS[device][-1]
    of_shape = ("--device", device, "--shape", large, "--requests", requests)
    yield _served(device)
    for title, measure in ((_GENERATE, "generate"), (_GENERATE_BATCH, "generate-batch")):
        yield Stage(title, (_MEASURES, measure, *of_shape), 150.0, (_speedup(title),))
    seconds = ("--seconds", "{seconds}")
    yield Stage("tiles of products", (_TILES, "--device", device, *seconds), 150.0)
    fresh = ("--requests", "2000" if device == "cuda" else "10", "--seed", str(int(time.time())))
    flags = (*fresh, "--kv-cache-dtype", "int8")
    yield _verify("exactness, another seed, int8 KV", device, flags, 530.0)


def _speedup(title: str) -> Goal:
    def ratio(of: Rows) -> float:
        ours = next(
            result for result in of[_SERVED] if result["requests"] == of[title][0]["requests"]
        )
        return float(ours["tokens_per_s"]) / max(
            float(result["tokens_per_s"]) for result in of[title]
        )

    return Goal(f"tokens/s, ours / {title}", ratio, 2.0)


def _tests(title: str, names: Sequence[str], limit_s: float, group: str = "") -> Stage:
    flags = ("-vv", "--tb=short", "-p", "no:cacheprovider", "--junitxml", "{junit}")
    timeout = ("--timeout", "{seconds}")
    return Stage(title, ("pytest", *flags, *timeout, *names), limit_s, group=group)


def _verify(
    title: str, device: str, flags: tuple[str, ...], limit_s: float, least: int = 1
) -> Stage:
    limits = ("--threads", "1", "--json-lines", "--seconds", "{seconds}")
    argv = ("quickstep", "verify", *_chosen(device), *limits, *flags)
    goals = (
        Goal("mismatches", lambda of: of[title][-1]["mismatches"], 0, False),
        Goal("comparisons", lambda of: of[title][-1]["comparisons"], least),
    )
    return Stage(title, argv, limit_s, goals)


def _chosen(device: str) -> tuple[str, ...]:
    return ("--device", device, "--kernels", "triton" if device == "cuda" else "auto")


def _rate(shape: str, batch: int, bound: float) -> Goal:
    def rate(of: Rows) -> float:
        return float(_step_of(of, shape, "batch", batch)["tokens_per_s"])

    return Goal(f"decode of {batch}", rate, bound, True, "tokens/s")


def _profiled(device: str) -> tuple[str, ...]:
    """A profile has the ops of torch on a CPU, and native kernels are none."""
    return _chosen(device) if device == "cuda" else ("--device", "cpu", "--kernels", "reference")


def _bandwidth(shape: str, batch: int, bound: float) -> Goal:
    def share(of: Rows) -> float:
        return float(_step_of(of, shape, "batch", batch)["bandwidth_share"])

    return Goal(f"decode of {batch}, share of the copy bandwidth", share, bound, True, "%")


def _milliseconds(shape: str, bound: float) -> Goal:
    def decode(of: Rows) -> float:
        return float(_step_of(of, shape, "batch", 1)["decode_ms"])

    return Goal("decode of 1", decode, bound, False, "ms")


def _peak(shape: str, bound: float) -> Goal:
    def share(of: Rows) -> float:
        return float(_step_of(of, shape, "prompt", 2048)["peak_share"])

    return Goal("prefill of 2,048 tokens, share of the peak", share, bound, True, "%")


def _step_of(of: Rows, shape: str, key: str, value: int) -> Mapping[str, Any]:
    return next(result for result in of[f"steps, {shape}"] if result.get(key) == value)


_RUNS: Mapping[str, Callable[[str], Iterator[Stage]]] = {
    "correct": _correct,
    "fast": _fast,
    "compared": _compared,
}
