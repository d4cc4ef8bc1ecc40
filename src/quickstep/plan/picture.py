"""A plan as the data of a page: its options, the memory of a device as a bar, and its roofline.

The roofline (Williams, Waterman and Patterson, 2009) shows why prefill and decode differ: a step
with few tokens does few operations for each byte of weights that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quickstep.core.cost_model import StepLoad
from quickstep.errors import size_text
from quickstep.plan.candidates import Candidate
from quickstep.plan.planner import Plan, PlanQuery
from quickstep.sim.report import Chart, Line, MemoryPart, Report

_TERA = 1e12
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PREFILL_TOKENS = (16, 64, 256, 1024, 4096)
_INTENSITIES = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)


def report_of_plan(
    query: PlanQuery, plan: Plan, header: Sequence[str], rows: Sequence[Sequence[str]]
) -> Report:
    """The report of a plan, with the table that the command prints of its options."""
    best = plan.options[0]
    memory = tuple(
        MemoryPart(row.label, row.num_bytes, f"{size_text(row.num_bytes)}: {row.detail}")
        for row in plan.memory
    )
    return Report(
        f"{plan.model} on {plan.hardware}",
        plan.verdict,
        tuple(header),
        tuple(map(tuple, rows)),
        (roofline(query, query.fit(best.split)),),
        memory=memory,
    )


def roofline(query: PlanQuery, candidate: Candidate) -> Chart:
    """Operations per second of steps over their operations per byte, on the roof of a device.

    The roof is what a device achieves by the hardware table; a step is below it by its overhead,
    by transfers, and where products and attention have different limits.
    """
    hardware = query.hardware
    flops_per_s = hardware.flops_per_s(query.elements.quantization)
    balance = flops_per_s / hardware.bytes_per_s
    intensities = sorted({*_INTENSITIES, balance})
    roof = [(x, min(flops_per_s, x * hardware.bytes_per_s) / _TERA) for x in intensities]
    return Chart(
        "Roofline of a device: steps of decode by rows, of prefill by tokens",
        "operations per byte",
        "Tera-operations/s",
        (
            Line("roof", roof),
            Line("decode", list(_points(candidate, _decodes(query, candidate))), True),
            Line("prefill", list(_points(candidate, _prefills(query))), True),
        ),
        is_logarithmic=True,
    )


def _decodes(query: PlanQuery, candidate: Candidate) -> Iterator[StepLoad]:
    """Steps of sequences in the middle of their outputs, as many as the KV cache holds."""
    context = query.load.num_inputs + query.load.num_outputs // 2
    most = max(1, candidate.concurrency)
    for rows in sorted({*(rows for rows in _DECODE_ROWS if rows < most), most}):
        yield StepLoad(rows, rows, rows * context, rows * context)


def _prefills(query: PlanQuery) -> Iterator[StepLoad]:
    """Chunks of prompts, up to the tokens of a step."""
    most = query.limits.max_num_batched_tokens
    for tokens in sorted({*(count for count in _PREFILL_TOKENS if count < most), most}):
        yield StepLoad.of_span(0, tokens)


def _points(candidate: Candidate, loads: Iterator[StepLoad]) -> Iterator[tuple[float, float]]:
    for load in loads:
        work, seconds = candidate.costs.work(load), candidate.costs.seconds(load)
        flops = work.matrix_flops + work.attention_flops
        yield flops / (work.weight_bytes + work.kv_bytes), flops / seconds / _TERA
