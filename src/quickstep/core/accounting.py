"""Accounting of a step's seconds: per sequence, in the step log, and in the counts of `stats`.

Every measured second is counted once: fsum of `device_s` over all sequences + `unclaimed_s` =
`busy_s`, up to float rounding. Pure functions and plain data; `core.scheduler` owns the totals.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quickstep.core.block_pool import PoolStats
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.sequence import Sequence, SequenceState
from quickstep.core.step import FlightRow, InFlightStep
from quickstep.types import StepRecord

__all__ = ["SchedulerStats", "Totals", "charge", "step_record"]


class Totals(msgspec.Struct):
    """Counts since the start. The scheduler owns them and returns copies.

    Attributes:
        num_prompt_tokens: Of added requests, counted once per request.
        prefix_query_tokens: Prompt tokens of sequences when first admitted.
        prefix_hit_tokens: Those of them found in the prefix cache.
        num_pauses: Pauses of live requests.
        busy_s: Measured seconds of all committed steps.
        unclaimed_s: Seconds of steps in which no row's sequence was alive any more (the last
            overlapped step, an abort in flight); the part of `busy_s` that no sequence is charged.
    """

    num_steps: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    busy_s: float = 0.0
    unclaimed_s: float = 0.0


class SchedulerStats(msgspec.Struct, frozen=True):
    """The scheduler's state. A sequence is counted once, a paused one only in `num_paused`.

    Attributes:
        num_waiting: Sequences never admitted yet.
        num_preempted: Sequences that wait to be admitted again.
        num_in_flight: Steps planned and not committed.
        num_paused: Sequences whose client reads too slowly; resident or not.
    """

    num_waiting: int
    num_running: int
    num_preempted: int
    num_in_flight: int
    blocks: PoolStats
    totals: Totals
    num_paused: int = 0


def charge(
    rows: tuple[FlightRow, ...],
    seconds: float,
    cost_model: CostModel,
    charged: Callable[[Sequence, float], None],
) -> float:
    """Divide a step's seconds among its sequences; returns the seconds that none was charged.
    `charged` is called for each sequence with its part.

    In proportion to the predicted marginal cost of each row: what the step would save without it.
    A row whose sequence ended while it ran is charged to the others.
    """
    alive = [entry for entry in rows if entry.sequence.state is not SequenceState.FINISHED]
    if len(alive) == 1:
        alive[0].sequence.device_s += seconds
        charged(alive[0].sequence, seconds)
        return 0.0
    idle_s = cost_model.seconds(StepLoad())
    weights = [cost_model.seconds(StepLoad.of_row(entry.row)) - idle_s for entry in alive]
    if not sum(weights) > 0.0:
        weights = [float(entry.row.num_tokens) for entry in alive]
    total = sum(weights)
    for entry, weight in zip(alive, weights, strict=True):
        part_s = seconds * (weight / total)
        entry.sequence.device_s += part_s
        charged(entry.sequence, part_s)
    return 0.0 if alive else seconds


def step_record(
    step: InFlightStep,
    seconds: float,
    now: float,
    *,
    num_free_blocks: int,
    num_waiting: int,
    num_running: int,
) -> StepRecord:
    """The line of the step log; the keyword arguments are the state after the commit."""
    decode, prefill = step.decode_load, step.prefill_load
    return StepRecord(
        step.plan.step_id,
        step.planned_at_s,
        now,
        seconds,
        step.predicted_s,
        num_prefill_rows=prefill.num_rows,
        num_decode_rows=decode.num_rows,
        num_prefill_tokens=prefill.num_tokens,
        num_decode_tokens=decode.num_tokens,
        num_kv_tokens=decode.num_kv_tokens + prefill.num_kv_tokens,
        num_pairs=decode.num_pairs + prefill.num_pairs,
        num_scored=prefill.num_scored,
        num_free_blocks=num_free_blocks,
        num_waiting=num_waiting,
        num_running=num_running,
        num_preemptions=step.num_preemptions,
    )
