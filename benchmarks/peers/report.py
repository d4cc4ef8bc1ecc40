"""From replies to the figures of a round, and from rounds to tables: losses first.

Every figure is one where lower is better. A ratio is Quickstep's figure over a peer's, taken round
by round, since the two were measured within the same minutes: above 1 Quickstep loses.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.client import Reply
from quickstep.bench.serve import percentile

__all__ = ["HEADLINES", "LEGEND", "Measured", "figures", "ratio_table", "value_table"]

LEGEND = """\
int8 and int4 are each engine's own: W8A8 with the output projection in bf16 (vLLM), weights of 8
or 4 bits (OpenVINO), Q8_0 and Q4_0 (llama.cpp), `--quantization` (Quickstep). OpenVINO's bf16 has
its weights in fp16; f16 is compared with Quickstep's bf16. A ratio is Quickstep's figure over the
peer's in the same round. `rss_gb` adds the peaks of all processes, mapped files included;
`anonymous_gb` is what no file backs."""

# The figures that a workload is judged by, lower is better.
HEADLINES: Mapping[str, tuple[str, ...]] = {
    "w1": ("ttft_s", "tpot_ms"),
    "w2": ("wall_s",),
    "w3": ("wall_s",),
    "w4": ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms"),
    "footprint": ("cold_start_s", "rss_gb", "anonymous_gb"),
    "proof": ("wall_s",),
}

_ENOUGH_ROUNDS = 3

# The precision of Quickstep that a peer's is compared with.
_OURS = {"f16": "bf16"}


@dataclass(slots=True)
class Measured:
    """A contestant's rounds of one workload, by round. An invalid one has faults and no figures."""

    engine: str
    precision: str
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)


def figures(replies: Sequence[Reply]) -> dict[str, float]:
    """One valid round's figures, over all its requests."""
    firsts = [reply.marks[0] - reply.due_s for reply in replies]
    gaps = [
        later - earlier
        for reply in replies
        for earlier, later in zip(reply.marks, reply.marks[1:], strict=False)
    ]
    tpots = [
        (reply.marks[-1] - reply.marks[0]) / (len(reply.marks) - 1)
        for reply in replies
        if len(reply.marks) > 1
    ]
    start_s = min(reply.due_s for reply in replies)
    return {
        "wall_s": max(reply.marks[-1] for reply in replies) - start_s,
        "ttft_s": statistics.median(firsts),
        "tpot_ms": 1e3 * statistics.median(tpots) if tpots else 0.0,
        "ttft_p50_ms": 1e3 * percentile(firsts, 0.5),
        "ttft_p99_ms": 1e3 * percentile(firsts, 0.99),
        "itl_p50_ms": 1e3 * percentile(gaps, 0.5),
        "itl_p99_ms": 1e3 * percentile(gaps, 0.99),
        "itl_max_ms": 1e3 * max(gaps, default=0.0),
    }


def ratio_table(results: Mapping[str, Mapping[str, Measured]]) -> str:
    """Markdown: Quickstep over each peer at its precision, for every workload; losses first.

    A row is unclear where the ratios of its rounds lie on both sides of 1, or are fewer than 3.
    """
    rows = []
    for workload, contestants in results.items():
        for name, peer in contestants.items():
            ours = contestants.get(f"quickstep {_OURS.get(peer.precision, peer.precision)}")
            if ours is not None and ours is not peer:
                rows += [_ratio_row(workload, name, ours, peer, key) for key in HEADLINES[workload]]
    found = sorted((row for row in rows if row is not None), key=lambda row: -row[0])
    head = "| | workload | peer | figure | ratio (min - max) | Quickstep | peer | rounds |"
    return "\n".join([head, "|---" * 8 + "|", *(row for _, row in found)])


def _ratio_row(
    workload: str, name: str, ours: Measured, peer: Measured, key: str
) -> tuple[float, str] | None:
    """The median ratio and its line; None without a round that is valid for both."""
    both = sorted(ours.rounds.keys() & peer.rounds.keys())
    ratios = [
        ours.rounds[number][key] / peer.rounds[number][key]
        for number in both
        if peer.rounds[number][key]
    ]
    if not ratios:
        return None
    ratio, least, greatest = statistics.median(ratios), min(ratios), max(ratios)
    if len(ratios) < _ENOUGH_ROUNDS or least <= 1 <= greatest:
        verdict = "unclear"
    else:
        verdict = "behind" if least > 1 else "ahead"
    values = [
        statistics.median(result.rounds[each][key] for each in both) for result in (ours, peer)
    ]
    cells = [verdict, workload, name, key, f"{ratio:.2f} ({least:.2f} - {greatest:.2f})"]
    cells += [f"{value:.4g}" for value in values] + [str(len(ratios))]
    return ratio, f"| {' | '.join(cells)} |"


def value_table(workload: str, contestants: Mapping[str, Measured]) -> str:
    """Markdown: medians with least and greatest of every contestant, and its valid rounds."""
    names = HEADLINES[workload]
    lines = [
        f"| {workload} | " + " | ".join(f"{name} (min - max)" for name in names) + " | valid |",
        "|---" * (len(names) + 2) + "|",
    ]
    for contestant, measured in contestants.items():
        cells = [_cell([run[name] for run in measured.rounds.values()]) for name in names]
        num_rounds = len(measured.rounds) + len(measured.faults)
        valid = f"{len(measured.rounds)} of {num_rounds}"
        lines.append(f"| {contestant} | {' | '.join(cells)} | {valid} |")
    for contestant, measured in contestants.items():
        for one, fault in measured.faults.items():
            lines.append(f"\n{contestant}, round {one + 1} is invalid: {fault}")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.4g} ({min(values):.4g} - {max(values):.4g})"
