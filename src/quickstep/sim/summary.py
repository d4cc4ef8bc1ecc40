"""What a simulation's requests experienced: percentiles, goodput, and how busy the device was.

TTFT is from arrival to the first token, TPOT is (last - first) / (outputs - 1), E2E is from arrival
to the end. Pure functions of a `Simulation`; the planner and `quickstep simulate` print them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quickstep.sim.outcome import Ending, Simulation
from quickstep.types import FinishReason

_COMPLETE = (
    FinishReason.EOS,
    FinishReason.STOP_TOKEN,
    FinishReason.STOP_STRING,
    FinishReason.MAX_TOKENS,
    FinishReason.CONTEXT_LIMIT,
    FinishReason.REPETITION,
)


class Targets(msgspec.Struct, frozen=True):
    """Limits in seconds that a request must keep; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class Percentiles(msgspec.Struct, frozen=True):
    """Of one figure over all requests, in its unit."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Percentiles:
        """Those of some values; all 0 without any."""
        if not values:
            return Percentiles(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, part) for part in (0.5, 0.9, 0.99))
        return Percentiles(math.fsum(ordered) / len(ordered), p50, p90, p99)


class Summary(msgspec.Struct, frozen=True):
    """Figures of a simulation.

    Attributes:
        num_requests: Sequences that ended, and requests that were refused.
        num_refused: Requests that were refused.
        num_incomplete: Sequences that ended before their last token (deadlines, aborts).
        duration_s: From the first counted arrival to the last; to the end if all arrive at once.
        requests_per_s, output_tokens_per_s, input_tokens_per_s: Of sequences that were completed in
            this time.
        adapter_s: What requests waited for their LoRA adapters.
        attainment: The part of all requests, except cancelled ones, that is complete and met the
            targets.
        goodput_per_s: Those per second, if all requests of the duration are like them.
        busy: The part of the time in which a step ran; of several replicas, the mean.
        mean_decode_rows: Decode rows of a step, weighted with its seconds.
        prefill: The part of the step time that prefill rows were charged.
        kv_used: The largest part of the KV blocks in use after a step.
        num_preemptions: Sequences that lost their blocks and were computed again.
        bubble: Of a pipeline, the part of the time in which its stages had steps and did not
            compute, as `StepRecord.bubble_s`; of several replicas, the mean.
    """

    num_requests: int
    num_refused: int
    num_incomplete: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    ttft_s: Percentiles
    tpot_s: Percentiles
    e2e_s: Percentiles
    queue_s: Percentiles
    adapter_s: Percentiles
    attainment: float
    goodput_per_s: float
    busy: float
    mean_decode_rows: float
    prefill: float
    kv_used: float
    num_preemptions: int
    bubble: float


def percentile(ordered: Sequence[float], part: float) -> float:
    """Of ascending values, with linear interpolation between them (as NumPy's default)."""
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def ending_times(ending: Ending) -> tuple[float, float, float] | None:
    """(TTFT, TPOT, E2E) in seconds of a complete sequence; None for another one."""
    timings = ending.timings
    if ending.reason not in _COMPLETE or timings.first_token_s is None:
        return None
    gaps = timings.num_output_tokens - 1
    decode_s = timings.finished_s - timings.first_token_s
    return (
        timings.first_token_s - timings.arrival_s,
        decode_s / gaps if gaps > 0 else 0.0,
        timings.finished_s - timings.arrival_s,
    )


def summarize(
    outcome: Simulation, num_blocks: int, targets: Targets | None = None, warmup_s: float = 0.0
) -> Summary:
    """The figures of requests that arrive at `warmup_s` or later; of a pool of so many blocks."""
    targets = targets or Targets()
    endings = [ending for ending in outcome.endings if ending.timings.arrival_s >= warmup_s]
    times = [found for found in map(ending_times, endings) if found is not None]
    num_requests = len(endings) + len(outcome.refused)
    num_met = sum(in_time(ending, targets) is True for ending in endings)
    num_cancelled = sum(ending.reason is FinishReason.ABORTED for ending in endings)
    num_wanted = num_requests - num_cancelled
    end_s = max((ending.timings.arrival_s for ending in endings), default=0.0)
    start_s = min((ending.timings.arrival_s for ending in endings), default=0.0)
    if end_s <= start_s:  # all at once: until the last has ended
        end_s = outcome.finished_s
    duration_s = max(end_s - start_s, 1e-9)
    inside = [
        ending.timings
        for ending in outcome.endings
        if start_s <= ending.timings.finished_s <= end_s and ending_times(ending) is not None
    ]
    records = [record for record in outcome.records if start_s <= record.committed_at_s <= end_s]
    busy_s = math.fsum(record.seconds for record in records)
    row_s = math.fsum(record.num_decode_rows * record.seconds for record in records)
    free = min((record.num_free_blocks for record in records), default=num_blocks)
    attainment = num_met / num_wanted if num_wanted else 1.0
    requests_per_s = len(inside) / duration_s
    return Summary(
        num_requests=num_requests,
        num_refused=len(outcome.refused),
        num_incomplete=len(endings) - len(times),
        duration_s=duration_s,
        requests_per_s=requests_per_s,
        output_tokens_per_s=sum(timings.num_output_tokens for timings in inside) / duration_s,
        input_tokens_per_s=sum(timings.num_prompt_tokens for timings in inside) / duration_s,
        ttft_s=Percentiles.of([of_ending[0] for of_ending in times]),
        tpot_s=Percentiles.of([of_ending[1] for of_ending in times]),
        e2e_s=Percentiles.of([of_ending[2] for of_ending in times]),
        queue_s=Percentiles.of([ending.timings.queue_s for ending in endings]),
        adapter_s=Percentiles.of([ending.timings.adapter_s for ending in endings]),
        attainment=attainment,
        goodput_per_s=requests_per_s * attainment,
        busy=min(1.0, busy_s / duration_s / outcome.num_replicas),
        mean_decode_rows=row_s / busy_s if busy_s else 0.0,
        prefill=math.fsum(record.prefill_s for record in records) / busy_s if busy_s else 0.0,
        kv_used=1.0 - free / num_blocks,
        num_preemptions=sum(record.num_preemptions for record in records),
        bubble=math.fsum(record.bubble_s for record in records) / duration_s / outcome.num_replicas,
    )


def by_tenant(outcome: Simulation) -> dict[str, Simulation]:
    """The simulation with the endings of one tenant each, by name, if there are several. Requests
    that were refused are in none of them.
    """
    endings: dict[str, list[Ending]] = {}
    for ending in outcome.endings:
        endings.setdefault(ending.tenant, []).append(ending)
    if len(endings) < 2:
        return {}
    return {
        tenant: replace(outcome, endings=endings[tenant], refused=[]) for tenant in sorted(endings)
    }


def in_time(ending: Ending, targets: Targets) -> bool | None:
    """Whether a sequence is complete and met the targets; None for one that its client cancelled,
    which does not count.
    """
    if ending.reason is FinishReason.ABORTED:
        return None
    times = ending_times(ending)
    if times is None:
        return False
    ttft_s, tpot_s, _ = times
    meets = targets.ttft_s is None or ttft_s <= targets.ttft_s
    return meets and (targets.tpot_s is None or tpot_s <= targets.tpot_s)
