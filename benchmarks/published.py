"""`python -m benchmarks.published`: the planner against published figures of LLM serving.

The figures are all those of LLaMA 7B and 70B in NVIDIA's table for TensorRT-LLM 0.6.1 (its L40S and
first-token rows are of 0.5; `docs/source/performance.md` in NVIDIA/TensorRT-LLM): a batch of
requests of equal lengths, which starts at once and runs to its end. The simulator gets the same
batch on the same hardware. Nothing is fitted to these figures, and no row is left out.

FP8 is planned as int8 for weights and KV: the same bytes, and the same peak in operations.
"""

from __future__ import annotations

import math
from statistics import median

import msgspec

from quickstep.config import PolicyName
from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import EngineLimits, Load, fit
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.traffic import simulate_arrivals
from quickstep.sim.outcome import Arrival
from quickstep.types import Request, SamplingParams

_SCRATCH_BYTES = 4


class Published(msgspec.Struct, frozen=True):
    """A measured batch.

    `result`: Output tokens per second and device; with `num_outputs` 1 the time of the batch in ms.
    """

    device: str
    is_fp8: bool
    model: str
    batch: int
    tensor: int
    num_inputs: int
    num_outputs: int
    result: float


def _rows(device: str, is_fp8: bool, model: str, *rows: tuple[int, ...]) -> list[Published]:
    return [Published(device, is_fp8, model, *row) for row in rows]


_7B, _70B = "llama-2-7b", "llama-2-70b"
FIGURES = [
    *_rows("a100-80", False, _7B, (384, 1, 128, 128, 5586), (60, 1, 128, 2048, 1928)),
    *_rows("a100-80", False, _7B, (52, 1, 2048, 128, 591), (64, 2, 2048, 2048, 782)),
    *_rows("a100-80", False, _70B, (1280, 4, 128, 128, 670), (240, 4, 128, 2048, 525)),
    *_rows("a100-80", False, _70B, (120, 4, 2048, 128, 79)),
    *_rows("h100", True, _7B, (768, 1, 128, 128, 19694), (112, 1, 128, 2048, 6818)),
    *_rows("h100", True, _7B, (80, 1, 2048, 128, 2244), (48, 1, 2048, 2048, 2740)),
    *_rows("h100", True, _70B, (1024, 2, 128, 128, 2657), (480, 4, 128, 2048, 1486)),
    *_rows("h100", True, _70B, (96, 2, 2048, 128, 306), (64, 2, 2048, 2048, 547)),
    *_rows("l40s", True, _7B, (64, 1, 128, 128, 3240), (64, 1, 128, 2048, 1622)),
    *_rows("l40s", True, _7B, (32, 1, 2048, 128, 581), (16, 1, 2048, 2048, 531)),
    *_rows("a100-80", False, _7B, (1, 1, 128, 1, 16), (1, 1, 2048, 1, 133)),
    *_rows("a100-80", False, _70B, (1, 4, 128, 1, 47), (1, 4, 2048, 1, 377)),
    *_rows("h100", True, _7B, (1, 1, 128, 1, 7), (1, 1, 2048, 1, 36)),
    *_rows("h100", True, _70B, (1, 4, 128, 1, 26), (1, 4, 2048, 1, 109)),
    *_rows("l40s", True, _7B, (1, 1, 128, 1, 14), (1, 1, 2048, 1, 73)),
]


def predicted(figure: Published) -> float:
    """What the simulator says, in the unit of `Published.result`."""
    spec = find_model(figure.model)
    spec = msgspec.structs.replace(spec, max_model_len=max(spec.max_model_len, 8192))
    quantization, kv_dtype = ("int8", "int8") if figure.is_fp8 else (None, "auto")
    elements = ElementBytes(2, _SCRATCH_BYTES, quantization, kv_dtype)
    num_tokens = figure.num_inputs + figure.num_outputs
    candidate = fit(
        spec,
        find_hardware(f"{figure.device}x{figure.tensor}", read_hardware()),
        Split(figure.tensor),
        elements,
        Load(1.0, figure.num_inputs, figure.num_outputs),
        EngineLimits(figure.batch, 8192),
    )
    sampling = SamplingParams(max_tokens=figure.num_outputs)
    arrivals = [
        Arrival(0.0, Request(str(n), (n % 30000,) * figure.num_inputs, sampling, n))
        for n in range(figure.batch)
    ]
    done = simulate_arrivals(candidate, arrivals, num_tokens, PolicyName.PREFILL_FIRST)
    assert len(done.endings) == figure.batch, (figure, done.refused[:1])
    if figure.num_outputs == 1:
        return done.finished_s * 1e3
    return figure.batch * figure.num_outputs / done.finished_s / figure.tensor


def main() -> None:
    """Print the table in Markdown, and a summary."""
    print("| device | model | batch | TP | in | out | published | predicted | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {}
    for figure in FIGURES:
        value = predicted(figure)
        error = value / figure.result - 1.0
        kind = "first token" if figure.num_outputs == 1 else "throughput"
        errors.setdefault(kind, []).append(abs(math.log(value / figure.result)))
        unit = "ms" if figure.num_outputs == 1 else "tok/s"
        dtype = "FP8" if figure.is_fp8 else "FP16"
        sizes = f"{figure.batch} | {figure.tensor} | {figure.num_inputs} | {figure.num_outputs}"
        print(
            f"| {figure.device} {dtype} | {figure.model} | {sizes} "
            f"| {figure.result:,g} {unit} | {value:,.0f} {unit} | {error:+.0%} |",
            flush=True,
        )
    print()
    for kind, found in errors.items():
        factor = math.exp(median(found))
        print(f"- {kind}: median factor {factor:.2f}, worst {math.exp(max(found)):.2f}")


if __name__ == "__main__":
    main()
