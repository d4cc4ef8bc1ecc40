"""`--explain` and `--compare-parallelism`: the formulas with the numbers of a query in them.

Every line is computed from the same functions as the plan. Rows are (what, formula, result).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quickstep.core.cost_model import StepLoad
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import num_parameters
from quickstep.model.sizing import kv_bytes_per_token, kv_head_bytes, weights_of
from quickstep.plan.candidates import BLOCK_SIZE, Candidate, PlannedDraft
from quickstep.plan.formulas import (
    Split,
    accepted_tokens,
    active_parameters,
    attention_flops,
    attention_pairs,
    balance_tokens,
    flops_per_token,
    rank_spec,
    whole_blocks,
)
from quickstep.plan.planner import PlanQuery
from quickstep.plan.roofline import RooflineCostModel

_GB = 1e9


class ExplainedLine(msgspec.Struct, frozen=True):
    """A formula with its numbers, and the result with its unit."""

    what: str
    formula: str
    result: str


class ParallelRow(msgspec.Struct, frozen=True):
    """One way to use all devices, for one phase at a time, in seconds and tokens per second.

    Attributes:
        prefill_s: The prompt of one request; with a pipeline, chunks follow each other through it.
        decode_s: A step of `batch` sequences on one replica, so the time per token of each.
        decode_tokens_per_s: Of all devices.
        reason: Why the split is impossible; "" if it is possible.
    """

    strategy: str
    split: Split
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    reason: str = ""


def explain(query: PlanQuery, candidate: Candidate) -> Iterator[ExplainedLine]:
    """Memory, operations and rooflines of a candidate."""
    yield from _memory(query, candidate)
    yield from _time(query, candidate)


def _memory(query: PlanQuery, candidate: Candidate) -> Iterator[ExplainedLine]:
    spec, elements, load = query.spec, query.elements, query.load
    rank = rank_spec(spec, candidate.split)
    held = {row.label: row.num_bytes for row in candidate.memory.rows}
    weights = weights_of(spec, elements)
    bits = 8 * weights / num_parameters(spec)
    yield ExplainedLine(
        "weights",
        f"{num_parameters(spec) / 1e9:.2f} G parameters x {bits:.2f} bits / 8",
        f"{weights / _GB:.2f} GB",
    )
    yield ExplainedLine(
        "weights of a device",
        f"its part of {candidate.split}; norms are on every device",
        f"{held['weights'] / _GB:.2f} GB",
    )
    if spec.moe is not None and candidate.split.experts > 1:
        yield from _experts(query, candidate)
    loras = candidate.loras
    if loras is not None:
        bytes_each = loras.bytes_each(rank, elements.dtype)
        yield ExplainedLine(
            "adapters of a device",
            f"{loras.max_loras} adapters x rank {loras.rank} x {elements.dtype} bytes x "
            f"{bytes_each // (loras.rank * elements.dtype):,} inputs and outputs of linear layers",
            f"{held['adapters'] / _GB:.3f} GB",
        )
    if candidate.drafts:
        weights, kv_bytes = held["draft weights"], held.get("draft KV cache", 0)
        kv = ", KV as many blocks as the target's" if kv_bytes else ""
        yield ExplainedLine(
            f"draft model{'s' if len(candidate.drafts) > 1 else ''} of a device",
            f"weights {weights / _GB:.2f} GB{kv}",
            f"{(weights + kv_bytes) / _GB:.2f} GB",
        )
    per_token = kv_bytes_per_token(spec, elements.dtype, elements.kv_dtype)
    size = spec.kv_size
    head = kv_head_bytes(size.head_size, elements.dtype, elements.kv_dtype)
    kept = f"2 x {spec.num_layers} layers x {size.num_kv_heads} kv heads x {head} bytes"
    if not size.has_values:
        kept = f"{spec.num_layers} layers x a latent of {head} bytes"
    yield ExplainedLine(
        "KV of a token",
        kept,
        f"{per_token:,} bytes",
    )
    tokens = whole_blocks(load.num_tokens, BLOCK_SIZE)
    yield ExplainedLine(
        "KV of a request",
        f"{load.num_tokens} tokens in blocks of {BLOCK_SIZE} = {tokens} x {per_token:,} bytes",
        f"{tokens * per_token / _GB:.3f} GB",
    )
    yield ExplainedLine(
        "requests that fit",
        f"{candidate.num_blocks} blocks / {tokens // BLOCK_SIZE} a request, at most "
        f"{candidate.limits.max_num_seqs} (--max-num-seqs)",
        f"{candidate.concurrency} an engine",
    )


def _experts(query: PlanQuery, candidate: Candidate) -> Iterator[ExplainedLine]:
    spec, split, moe = query.spec, candidate.split, query.spec.moe
    assert moe is not None, "experts are divided"
    yield ExplainedLine(
        "experts of a device",
        f"{moe.num_experts} experts / EP {split.experts}, each complete; the router on all devices",
        f"{moe.num_experts // split.experts} experts a layer",
    )
    if split.experts == split.tensor:
        yield ExplainedLine(
            "how tokens reach experts",
            "all devices of the group have all tokens: the sum after a layer is an all-reduce",
            "no all-to-all",
        )
        return
    num_sparse = sum(layer.sparse for layer in spec.layers)
    away = (split.experts - 1) / split.experts
    sent = 2 * num_sparse * moe.experts_per_token * spec.hidden_size * query.elements.dtype * away
    yield ExplainedLine(
        "all-to-all of a token",
        f"2 ways x {num_sparse} layers x {moe.experts_per_token} experts x {spec.hidden_size} wide "
        f"x {query.elements.dtype} bytes x {away:.3f} on other devices",
        f"{sent / 1e6:.3f} MB",
    )


def _drafts(candidate: Candidate, draft: PlannedDraft, context: int) -> Iterator[ExplainedLine]:
    num_tokens, acceptance = draft.num_tokens(candidate.limits), draft.model.acceptance
    what = "drafts" if len(candidate.drafts) == 1 else f"drafts of {draft.model.method.value}"
    width = 1 + num_tokens
    for rows in (1, 8, 64):
        if rows > candidate.concurrency:
            return
        plain = StepLoad(rows, rows, rows * context, rows * context)
        wide = StepLoad(rows * width, rows, rows * (context + width - 1), rows * width * context)
        own_s = draft.call_s(wide, StepLoad(), num_tokens)
        step_s, plain_s = candidate.costs.seconds(wide), candidate.costs.seconds(plain)
        tokens = accepted_tokens(num_tokens, acceptance)
        per_token_s = (step_s + own_s) / tokens
        yield ExplainedLine(
            f"{what}, batch {rows}",
            f"({1e3 * step_s:.2f} ms for {width} positions + {num_tokens} draft steps "
            f"{1e3 * own_s:.2f} ms) / {tokens:.2f} tokens (1 + p + ... + p^{num_tokens}, "
            f"p = {acceptance:g})",
            f"{1e3 * per_token_s:.2f} ms a token, {plain_s / per_token_s:.2f} x as fast",
        )


def _time(query: PlanQuery, candidate: Candidate) -> Iterator[ExplainedLine]:
    spec, load, hardware = query.spec, query.load, query.hardware
    peak, part = hardware.peak_and_part(query.elements.quantization)
    flops_per_s = peak * part
    yield ExplainedLine(
        "operations of a token",
        f"2 x {active_parameters(spec) / 1e9:.2f} G active parameters",
        f"{flops_per_token(spec) / 1e9:.1f} GFLOP",
    )
    pairs = attention_pairs(load.num_inputs)
    width = f"4 x {spec.num_layers} layers x {spec.num_heads * spec.head_size} wide"
    if spec.latent is not None:
        width = f"2 x {spec.num_layers} layers x {spec.num_heads * spec.pair_size} wide"
    yield ExplainedLine(
        "attention of the prompt",
        f"{width} x {pairs:,} pairs",
        f"{attention_flops(spec, pairs) / 1e12:.2f} TFLOP",
    )
    yield ExplainedLine(
        "achieved by a device",
        f"{part:.0%} of the peak, {hardware.achieved.memory:.0%} of "
        f"{hardware.device.memory_gb_per_s:g} GB/s",
        f"{flops_per_s / 1e12:.0f} TFLOP/s, {hardware.bytes_per_s / _GB:.0f} GB/s",
    )
    weights = weights_of(spec, query.elements)
    bytes_per_parameter = weights / num_parameters(spec)
    balance = balance_tokens(flops_per_s, hardware.bytes_per_s, bytes_per_parameter)
    yield ExplainedLine(
        "why decode waits for memory",
        f"{flops_per_s / 1e12:.0f} T / {hardware.bytes_per_s / 1e12:.2f} T x "
        f"{bytes_per_parameter:.2f} bytes / 2: below it a step reads longer than it computes",
        f"{balance:.0f} tokens a step",
    )
    costs, context = candidate.costs, load.num_inputs + load.num_outputs // 2
    for rows in (1, 8, 64, candidate.concurrency):
        parts = costs.parts(StepLoad(rows, rows, rows * context, rows * context))
        yield ExplainedLine(
            f"decode step, batch {rows}",
            f"weights {1e3 * max(parts.weights_read_s, parts.matrix_compute_s):.2f} + attention "
            f"{1e3 * max(parts.kv_read_s, parts.attention_compute_s):.2f} + transfers "
            f"{1e3 * parts.transfer_s:.2f} + overhead {1e3 * parts.overhead_s:.2f} ms",
            f"{1e3 * parts.seconds:.2f} ms, {rows / parts.seconds:.0f} tokens/s",
        )
    for draft in candidate.drafts:
        yield from _drafts(candidate, draft, context)
    parts = costs.parts(StepLoad.of_span(0, load.num_inputs))
    yield ExplainedLine(
        "prefill of a prompt",
        f"compute {1e3 * parts.matrix_compute_s:.1f}, or weights "
        f"{1e3 * parts.weights_read_s:.1f}; attention {1e3 * parts.attention_compute_s:.1f}; "
        f"transfers {1e3 * parts.transfer_s:.1f} ms",
        f"{1e3 * parts.seconds:.1f} ms: {parts.binding}",
    )


def compare_parallelism(query: PlanQuery, batch: int = 32) -> list[ParallelRow]:
    """All devices as one tensor-parallel group, one pipeline, or replicas, phase by phase.

    `batch` sequences decode on all devices together. Splits that do not fit have the reason.
    """
    count = query.hardware.count
    rows = []
    strategies = [
        ("one device", Split()),
        ("tensor", Split(count)),
        ("pipeline", Split(1, count)),
        ("data (replicas)", Split(1, 1, count)),
    ]
    if query.spec.moe is not None:
        strategies += [
            ("tensor, experts apart", Split(count, experts=count)),
            ("data, experts apart", Split(1, 1, count, count)),
        ]
    for strategy, split in strategies:
        try:
            candidate = query.fit(split)
        except ConfigError as error:
            rows.append(ParallelRow(strategy, split, reason=str(error)))
            continue
        rows.append(_row(query, candidate, strategy, batch))
    return rows


def _row(query: PlanQuery, candidate: Candidate, strategy: str, batch: int) -> ParallelRow:
    costs, split, load = candidate.costs, candidate.split, query.load
    rows = max(1, batch // candidate.num_parallel_steps)
    context = load.num_inputs + load.num_outputs // 2
    step_s = costs.seconds(StepLoad(rows, rows, rows * context, rows * context))
    return ParallelRow(
        strategy,
        split,
        prefill_s=_prefill_s(costs, split, load.num_inputs),
        decode_s=step_s,
        decode_tokens_per_s=rows * candidate.num_parallel_steps / step_s,
    )


def _prefill_s(costs: RooflineCostModel, split: Split, num_inputs: int) -> float:
    """Of one prompt. A pipeline of p stages works on p chunks at a time: the first passes all
    stages, each of the others follows one stage later. More, shorter chunks read the weights more
    often, so the best number of chunks counts.
    """
    best = costs.seconds(StepLoad.of_span(0, num_inputs))
    for num_chunks in range(2, 4 * split.pipeline if split.pipeline > 1 else 2):
        size = -(-num_inputs // num_chunks)
        last = costs.seconds(StepLoad.of_span(max(0, num_inputs - size), size))
        best = min(best, last * (1 + (num_chunks - 1) / split.pipeline))
    return best
