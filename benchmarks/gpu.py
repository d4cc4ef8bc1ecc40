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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.machine import describe_machine

if TYPE_CHECKING:
    import torch

    from quickstep.ops.table import OpTable

_RESULTS = Path(__file__).parent / "results"
_TOTAL_S = 530.0
_SHAPES = {"cuda": ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-7b"), "cpu": ("tiny2",)}
_KERNELS = {"cuda": ("triton", "reference"), "cpu": ("native",)}
_GOALS = (
    "Goals: decode of the 7B shape at least 85 % of the bandwidth, of the 1B shape 60 %, of the "
    "0.5B shape at most 0.5 ms; prefill of the 7B shape at least 70 % of the peak; attention at "
    "least 0.95 times torch's."
)
# query heads, KV heads, head size, context, query rows of the one sequence
_ATTENTION = {
    "cuda": ((32, 8, 128, 8192, 1), (32, 8, 128, 8192, 512)),
    "cpu": ((4, 2, 32, 128, 1), (4, 2, 32, 128, 16)),
}


class Stage(msgspec.Struct, frozen=True):
    """One process: its arguments after `python -m`, and how long it may take."""

    title: str
    argv: tuple[str, ...]
    limit_s: float


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
    parser.add_argument("--attention", metavar="KERNELS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attention is not None:
        print(json.dumps(list(_measure_attention(args.device, args.attention))))
        return 0
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU that torch can use; --device cpu tries the stages", file=sys.stderr)
        return 1
    end_s = time.monotonic() + args.seconds
    finished = []
    for stage in _stages(args.device):
        left_s = end_s - time.monotonic()
        if left_s < 5.0:
            print(f"{stage.title}: no time left", flush=True)
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
    tests = "tests/cuda" if device == "cuda" else "tests/triton"
    command = "quickstep"
    yield Stage("tests of kernels and engine", ("pytest", "-q", tests), 180.0)
    for kernels in _KERNELS[device]:
        chosen = ("--device", device, "--kernels", kernels)
        counts = ("--requests", "600" if device == "cuda" else "20", "--threads", "1")
        yield Stage(f"exactness, {kernels}", (command, "verify", *chosen, *counts), 120.0)
    for kernels in _KERNELS[device]:
        module = ("benchmarks.gpu", "--device", device, "--attention", kernels)
        yield Stage(f"attention, {kernels}", module, 60.0)
    for kernels in _KERNELS[device]:
        chosen = ("--device", device, "--kernels", kernels)
        for shape in _SHAPES[device]:
            for batch in ("1", "8"):
                step = ("bench", "step", "--shape", shape, "--batch", batch, "--prefill", "2048")
                flags = ("--repeats", "3", "--json", *chosen, "--max-model-len", "4096")
                yield Stage(
                    f"step, {kernels}, {shape}, batch {batch}", (command, *step, *flags), 60.0
                )
    best = ("--device", device, "--kernels", _KERNELS[device][0])
    largest = _SHAPES[device][-1]
    for quantization in ("fp8", "int4"):
        step = ("bench", "step", "--shape", largest, "--batch", "1", "--prefill", "2048")
        flags = ("--repeats", "3", "--json", *best, "--max-model-len", "4096")
        title = f"step, {_KERNELS[device][0]}, {largest} {quantization}, batch 1"
        yield Stage(title, (command, *step, *flags, "--quantization", quantization), 60.0)
    latency = ("bench", "latency", "demo", "--output-len", "64", "--repeats", "3")
    yield Stage("one stream", (command, *latency, *best), 60.0)
    throughput = ("bench", "throughput", "demo", "--max-len", "512", "--repeats", "3")
    for depth in ("1", "2"):  # decides the default of --pipeline-depth on this device
        flags = (*throughput, "--pipeline-depth", depth)
        title = f"64 requests at once, steps in flight: {depth}"
        yield Stage(title, (command, *flags, *best), 30.0)
    tuning = ("benchmarks.tune_gpu", "--device", device, "--seconds", "100")
    yield Stage("tiles of products", tuning, 120.0)


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


def _measure_attention(device: str, kernels: str) -> Iterator[dict[str, object]]:
    """The paged attention of one sequence, next to torch's on contiguous keys and values."""
    import torch

    from quickstep.ops.resolve import resolve_ops

    ops = resolve_ops(torch.device(device), kernels)
    for sizes in _ATTENTION[device]:
        heads, kv_heads, size, context, num_rows = sizes
        ours_s, theirs_s = _alternating_s(device, *_attention_calls(ops, device, *sizes))
        yield {
            "case": f"{num_rows} rows, context {context}, {heads}/{kv_heads} heads of {size}",
            "ours_us": 1e6 * ours_s,
            "torch_us": 1e6 * theirs_s,
        }


def _attention_calls(
    ops: OpTable, device: str, heads: int, kv_heads: int, size: int, context: int, num_rows: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Ours and torch's, on the same values."""
    import torch

    from quickstep.ops.table import AttentionParams, PagedLayout

    make = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, device=device).to(torch.bfloat16)

    q = random(num_rows, heads, size)
    keys, values = (random(context // 16, 16, kv_heads, size) for _ in range(2))
    first = context - num_rows
    layout = PagedLayout(
        positions=torch.arange(first, context, device=device),
        slot_mapping=torch.arange(first, context, device=device),
        row_offsets=(0, num_rows),
        context_lens=(context,),
        block_tables=torch.arange(context // 16, dtype=torch.int32, device=device)[None],
        block_size=16,
    )
    params = AttentionParams(size**-0.5)
    k, v = (
        one.view(context, kv_heads, size).transpose(0, 1)[None].contiguous()
        for one in (keys, values)
    )
    mask = None
    if num_rows > 1:
        mask = torch.ones(num_rows, context, dtype=torch.bool, device=device).tril(first)

    def paged() -> object:
        return ops.paged_attention(q, keys, values, layout, params, None)

    def contiguous() -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
        )

    return paged, contiguous


def _alternating_s(device: str, *calls: Callable[[], object]) -> Sequence[float]:
    """Median seconds of each call, taking turns."""
    import torch

    times: list[list[float]] = [[] for _ in calls]
    for round_number in range(23):
        for call, spent in zip(calls, times, strict=True):
            started_s = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if round_number >= 3:
                spent.append(time.perf_counter() - started_s)
    return [statistics.median(spent) for spent in times]


def _report(finished: Sequence[Done]) -> Iterator[str]:
    yield "# On a GPU\n"
    yield f"`python -m benchmarks.gpu`, {datetime.date.today()}:\n"
    yield f"```\n{describe_machine()}\n{_versions()}\n```\n"
    yield f"{_GOALS}\n"
    yield "| stage | result | s |\n|---|---|---|"
    for done in finished:
        yield f"| {done.stage.title} | {_status(done)} | {done.seconds:.0f} |"
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
    compared = [one for one in finished if one.stage.title.startswith("attention") and not one.code]
    if compared:
        yield "\n| attention | us | torch's us | torch's / ours |\n|---|---|---|---|"
    for done in compared:
        for row in json.loads(done.output or "[]"):
            ours, theirs = row["ours_us"], row["torch_us"]
            name = f"{done.stage.title.removeprefix('attention, ')}, {row['case']}"
            yield f"| {name} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.2f} |"
    for done in finished:
        yield f"\n## {done.stage.title}\n\n`python -m {' '.join(done.stage.argv)}`\n"
        yield f"```\n{done.output[-4000:].strip()}\n```"


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
