"""Where the time between two chunks of a stream went, from the step log and the system's counters.

`benchmarks.storm` prints it for every gap that is longer than the goal.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from quickstep.engine.records.step_log import SequenceRecord
from quickstep.types import StepRecord

__all__ = ["Gap", "ProcessTimes", "explanation_of", "process_times"]

# A step is unpriced if it took this many times its prediction.
_UNPRICED = 1.5


class Gap(msgspec.Struct, frozen=True):
    """The time between two chunks of a stream, on the machine's monotonic clock; `index` is that of
    the first of the two tokens, from 1.
    """

    start_s: float
    end_s: float
    index: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


class ProcessTimes(msgspec.Struct, frozen=True):
    """What all threads of a process have used so far.

    Attributes:
        cpu_s: Processor time.
        waited_s: Time in which a thread could have run and no processor was free.
    """

    cpu_s: float
    waited_s: float

    def since(self, before: ProcessTimes) -> ProcessTimes:
        """The difference."""
        return ProcessTimes(self.cpu_s - before.cpu_s, self.waited_s - before.waited_s)


def process_times(process_id: int) -> ProcessTimes:
    """The times of a process, from `/proc/<id>/task/*/schedstat`; zeros where it has none."""
    counts = []
    for path in Path(f"/proc/{process_id}/task").glob("*/schedstat"):
        try:
            counts.append([int(count) for count in path.read_text().split()])
        except OSError:  # the thread has ended
            continue
    cpu_ns, waited_ns = sum(count[0] for count in counts), sum(count[1] for count in counts)
    return ProcessTimes(cpu_ns / 1e9, waited_ns / 1e9)


class _Part(msgspec.Struct, frozen=True):
    """A gap, the step of its second token, and the gap's three parts in seconds."""

    gap: Gap
    steps_s: float
    between_s: float
    delivery_s: float
    step: StepRecord


def explanation_of(
    gaps: Sequence[Gap], limit_s: float, records: Iterable[StepRecord | SequenceRecord]
) -> list[str]:
    """Lines about the gaps above `limit_s`: their causes, by the longest of a gap's three parts.

    The parts: the step that was computed, the time before it in the engine's process, and by how
    much later the gap's end was delivered than its start. A stream that had no row in some step, or
    whose steps are not all in the log, cannot be attributed.
    """
    records = list(records)
    steps = [record for record in records if isinstance(record, StepRecord)]
    sequences = [record for record in records if isinstance(record, SequenceRecord)]
    parts = [part for part in _parts(gaps, steps, sequences) if part.gap.seconds > limit_s]
    num_above = sum(gap.seconds > limit_s for gap in gaps)
    lines = [f"{num_above} gaps are longer than {limit_s * 1e3:.1f} ms, {len(parts)} attributed:"]
    lines += [
        f"  steps {sum(part.steps_s for part in parts) * 1e3:.0f} ms, "
        f"between steps {sum(part.between_s for part in parts) * 1e3:.0f} ms, "
        f"delivery {sum(part.delivery_s for part in parts) * 1e3:.0f} ms"
    ]
    by_cause: defaultdict[str, list[float]] = defaultdict(list)
    for part in parts:
        by_cause[_cause_of(part)].append(part.gap.seconds)
    for cause, found in sorted(by_cause.items(), key=lambda item: -sum(item[1])):
        lines.append(
            f"  {cause}: {len(found)} gaps, {sum(found) * 1e3:.0f} ms, "
            f"longest {max(found) * 1e3:.1f} ms"
        )
    parts.sort(key=lambda part: -part.gap.seconds)
    return lines + [_detail(part) for part in parts[:25]]


def _parts(
    gaps: Sequence[Gap], steps: Sequence[StepRecord], sequences: Sequence[SequenceRecord]
) -> Iterable[_Part]:
    by_commit = sorted(
        (step for step in steps if step.num_decode_rows), key=lambda one: one.committed_at_s
    )
    commits = [step.committed_at_s for step in by_commit]
    streams: list[list[Gap]] = []
    for gap in gaps:
        if gap.index == 1:
            streams.append([])
        if streams:
            streams[-1].append(gap)
    for stream in streams:
        ended = [
            sequence
            for sequence in sequences
            if sequence.tenant.startswith("healthy")
            and sequence.timings.first_token_s is not None
            and sequence.timings.arrival_s < stream[0].start_s
            and sequence.timings.finished_s < stream[-1].end_s
        ]
        if not ended:
            continue
        timings = max(ended, key=lambda one: one.timings.finished_s).timings
        assert timings.first_token_s is not None
        first = bisect.bisect_right(commits, timings.first_token_s)
        last = bisect.bisect_right(commits, timings.finished_s)
        mine = by_commit[first:last]
        if len(mine) != timings.num_output_tokens - 1:
            continue
        commits_s = [timings.first_token_s, *(step.committed_at_s for step in mine)]
        for gap in stream:
            step = mine[gap.index - 1]
            engine_s = step.committed_at_s - commits_s[gap.index - 1]
            steps_s = min(step.seconds, engine_s)
            yield _Part(gap, steps_s, engine_s - steps_s, gap.seconds - engine_s, step)


def _cause_of(part: _Part) -> str:
    if part.delivery_s > max(part.steps_s, part.between_s):
        return "delivery"
    if part.between_s > part.steps_s:
        return "between steps"
    step = part.step
    how = "unpriced" if step.seconds > _UNPRICED * step.predicted_s else "as predicted"
    what = "with prefill" if step.num_prefill_rows else "decode only"
    return f"a step {what}, {how}"


def _detail(part: _Part) -> str:
    step = part.step
    return (
        f"  {part.gap.seconds * 1e3:6.1f} ms = {part.steps_s * 1e3:.1f} step"
        f" + {part.between_s * 1e3:.1f} between + {part.delivery_s * 1e3:.1f} delivery;"
        f" token {part.gap.index}; predicted {step.predicted_s * 1e3:.1f}:"
        f" {step.num_decode_rows} decode, {step.num_prefill_rows} prefill rows with"
        f" {step.num_prefill_tokens} tokens, {step.num_pairs} pairs;"
        f" {step.num_running} run, {step.num_waiting} wait"
    )
