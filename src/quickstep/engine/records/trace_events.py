"""The step log as trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One track for the device, with the steps and in each the charge of its decode rows and of each
prefill; counters of running and waiting sequences and free blocks; one track per sequence with its
activities. The format: Google's "Trace Event Format"; times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quickstep.engine.records.step_log import LiveSequence, SequenceRecord
from quickstep.types import StepRecord

_DEVICE, _REQUESTS = 1, 2  # process ids
_COUNTERS = (
    ("running", "num_running"),
    ("waiting", "num_waiting"),
    ("free blocks", "num_free_blocks"),
)

Event = dict[str, Any]


def trace_events(
    steps: Sequence[StepRecord], sequences: Iterable[SequenceRecord | LiveSequence]
) -> dict[str, object]:
    """The JSON object of a trace file. Records are in the order of their ends."""
    tracks = sorted(sequences, key=lambda one: one.timings.arrival_s)
    begins = [step.committed_at_s - step.seconds for step in steps]
    begins += [sequence.timings.arrival_s for sequence in tracks]
    start_s = min(begins, default=0.0)
    events = [
        _named("process_name", _DEVICE, 0, "device"),
        _named("process_name", _REQUESTS, 0, "requests"),
        _named("thread_name", _DEVICE, 1, "steps"),
        *_step_events(steps, start_s),
    ]
    for track, one in enumerate(tracks, start=1):
        events += _sequence_events(one, track, start_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step_events(steps: Iterable[StepRecord], start_s: float) -> Iterator[Event]:
    known_until_s = start_s
    for step in steps:
        # a late commit makes a step begin before the end of the one before it
        begin_s = max(known_until_s, step.committed_at_s - step.seconds)
        end_s = known_until_s = max(begin_s, step.committed_at_s)
        facts: dict[str, float] = {
            "decode rows": step.num_decode_rows,
            "prefill tokens": step.num_prefill_tokens,
            "measured ms": 1e3 * step.seconds,
            "predicted ms": 1e3 * step.predicted_s,
            "preemptions": step.num_preemptions,
        }
        yield _span(f"step {step.step_id}", _DEVICE, 1, begin_s - start_s, end_s - start_s, facts)
        parts = [("decode", step.decode_s, step.num_decode_tokens)] * (step.decode_s > 0.0)
        prefills = [(f"prefill {prefill.request_id}", prefill) for prefill in step.prefills]
        parts += [(name, one.seconds, one.num_tokens) for name, one in prefills]
        for name, seconds, num_tokens in parts:
            part_end_s = min(end_s, begin_s + seconds)
            tokens = {"tokens": num_tokens}
            yield _span(name, _DEVICE, 1, begin_s - start_s, part_end_s - start_s, tokens)
            begin_s = part_end_s
        for name, field in _COUNTERS:
            yield {
                "ph": "C",
                "name": name,
                "pid": _DEVICE,
                "ts": _us(step.committed_at_s - start_s),
                "args": {name: getattr(step, field)},
            }


def _sequence_events(
    one: SequenceRecord | LiveSequence, track: int, start_s: float
) -> Iterator[Event]:
    timings = one.timings
    end = one.finish_reason.value if isinstance(one, SequenceRecord) else "not ended"
    yield _named("thread_name", _REQUESTS, track, f"{one.request_id}#{one.index}")
    facts = {
        "finish reason": end,
        "prompt tokens": timings.num_prompt_tokens,
        "cached tokens": timings.num_cached_tokens,
        "output tokens": timings.num_output_tokens,
        "device ms": 1e3 * timings.device_s,
    }
    ends = [since_s for _, since_s in timings.activities[1:]] + [timings.finished_s]
    for (activity, since_s), end_s in zip(timings.activities, ends, strict=False):
        yield _span(activity.value, _REQUESTS, track, since_s - start_s, end_s - start_s, facts)


def _span(
    name: str, process: int, track: int, begin_s: float, end_s: float, facts: dict[str, Any]
) -> Event:
    begin_us = _us(begin_s)
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": track,
        "ts": begin_us,
        "dur": round(_us(end_s) - begin_us, 3),
        "args": facts,
    }


def _named(kind: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
