"""The trace file: spans that nest, counters, and one track per sequence."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from step_records import QUEUED, step

from quickstep.cli.trace import duration
from quickstep.engine.records.step_log import LiveSequence, SequenceRecord
from quickstep.engine.records.trace_events import trace_events
from quickstep.types import FinishReason


def events(kind: str) -> list[dict[str, Any]]:
    steps = [
        step(0, 0.0, 2.0, {"b": 1.5}),
        step(1, 1.9, 3.0, {"a": 0.4, "c": 0.2}),  # the first was committed late
        step(2, 4.0, 5.0),
    ]
    sequence = SequenceRecord("a", 1, "", 0, 5, FinishReason.EOS, QUEUED)
    document = trace_events(steps, [sequence])
    found = document["traceEvents"]
    assert isinstance(found, list)
    return [event for event in found if event["ph"] == kind]


def test_steps_are_in_order_and_have_their_parts_inside() -> None:
    spans = [event for event in events("X") if event["pid"] == 1]
    steps = [event for event in spans if event["name"].startswith("step")]
    assert [(one["ts"], one["dur"]) for one in steps] == [
        (0.0, 2e6),
        (2e6, 1e6),
        (4e6, 1e6),
    ]
    parts = [event for event in spans if not event["name"].startswith("step")]
    assert [(part["name"], part["ts"], part["dur"]) for part in parts] == [
        ("decode", 0.0, 0.5e6),
        ("prefill b", 0.5e6, 1.5e6),
        ("decode", 2e6, pytest.approx(0.5e6)),
        ("prefill a", pytest.approx(2.5e6), pytest.approx(0.4e6)),
        ("prefill c", pytest.approx(2.9e6), pytest.approx(0.1e6)),
        ("decode", 4e6, 1e6),
    ]


def test_a_sequence_has_a_track_with_its_activities() -> None:
    spans = [event for event in events("X") if event["pid"] == 2]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("queue", 1e6, 3e6),
        ("prefill", 4e6, 1e6),
        ("decode", 5e6, 2e6),
    ]
    names = {event["args"]["name"] for event in events("M")}
    assert {"device", "requests", "steps", "a#1"} == names


def test_counters_have_a_value_per_step() -> None:
    counters = events("C")
    assert {counter["name"] for counter in counters} == {"running", "waiting", "free blocks"}
    assert [counter["args"] for counter in counters if counter["name"] == "running"] == [
        {"running": 2}
    ] * 3


def test_a_live_sequence_has_a_track_until_now() -> None:
    document = trace_events([], [LiveSequence("a", 0, QUEUED)])
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {span["args"]["finish reason"] for span in spans} == {"not ended"}


def test_no_records_are_an_empty_trace() -> None:
    assert trace_events([], [])["displayTimeUnit"] == "ms"


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30.0), ("30", 30.0), ("1.5m", 90.0), ("250ms", 0.25)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-3s", "3d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a duration"):
        duration(text)
