"""Where a request's time went, from hand-made records and from a simulation."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from simulated_runs import ask, run
from step_records import QUEUED, step, timings

from quickstep.cli.why import explanation_rows
from quickstep.core.explanation import ActivityPart, Explanation, explain
from quickstep.sim.outcome import Arrival
from quickstep.types import Activity, StepRecord


def part(explanation: Explanation, activity: Activity) -> ActivityPart:
    (found,) = [one for one in explanation.parts if one.activity is activity]
    return found


def test_waiting_names_the_prefills_that_ran_meanwhile_largest_first() -> None:
    steps = [
        step(0, 0.0, 2.0, {"b": 2.0}),  # half of it before the arrival
        step(1, 2.0, 4.0, {"c": 0.5, "d": 1.2}),
        step(2, 4.0, 5.0, {"a": 1.0}),
        step(3, 5.0, 7.0),
    ]
    explanation = explain("a", QUEUED, steps)
    queue = part(explanation, Activity.QUEUE)
    assert [name for name, _ in queue.prefills] == ["d", "b", "c"]
    assert dict(queue.prefills) == pytest.approx({"b": 1.0, "c": 0.5, "d": 1.2})
    assert queue.decode_s == pytest.approx(0.3)
    assert part(explanation, Activity.PREFILL).own_prefill_s == pytest.approx(1.0)
    assert explanation.missing_s == 0.0
    assert explanation.sentence == (
        "a took 6.00 s, 4.0 times the 1.50 s it would have taken without other requests: 3.00 s in "
        "the queue behind the prefill of d (1.20 s), b (1.00 s) and c (0.50 s) and 0.30 s of "
        "decoding for up to 2 running sequences; 1.00 s in its own prefill of 80 tokens; 2.00 s in "
        "decoding 4 more tokens in steps of up to 2 sequences."
    )


def test_the_time_on_other_engines_is_not_explained_by_the_steps_of_the_last() -> None:
    steps = [
        step(0, 0.0, 2.0, {"b": 2.0}),
        step(1, 2.0, 4.0, {"c": 0.5, "d": 1.2}),
        step(2, 4.0, 5.0, {"a": 1.0}),
        step(3, 5.0, 7.0),
    ]
    moved = replace(QUEUED, replica=2, num_moves=1, elsewhere_s=2.0)
    explanation = explain("a", moved, steps)
    queue = part(explanation, Activity.QUEUE)
    assert queue.seconds == pytest.approx(1.0)
    assert "b" not in dict(queue.prefills)
    parts_s = sum(one.seconds for one in explanation.parts)
    assert parts_s + explanation.elsewhere_s == pytest.approx(explanation.total_s)
    assert (
        ": 2.00 s on other engines or until one took it: it has moved once, to replica 2 in the "
        "end; 1.00 s in the queue behind"
    ) in explanation.sentence
    assert explanation_rows(explanation)[0][:2] == ("on other engines", "2000.0")


def test_decode_steps_that_others_prefills_stretch() -> None:
    steps = [
        step(0, 4.0, 5.0, {"a": 1.0}),
        step(1, 5.0, 6.5, {"e": 0.8}),
        step(2, 6.5, 7.0),
    ]
    explanation = explain("a", QUEUED, steps)
    decode = part(explanation, Activity.DECODE)
    assert decode.others_prefill_s == pytest.approx(0.8)
    assert decode.decode_s == pytest.approx(1.2)
    assert part(explanation, Activity.QUEUE).no_step_s == pytest.approx(3.0)
    assert (
        "2.00 s in decoding 4 more tokens, stretched by the prefill of e (0.80 s)."
    ) in explanation.sentence


def test_time_between_steps_is_reported() -> None:
    steps = [step(0, 4.0, 5.0, {"a": 1.0}), step(1, 6.0, 7.0, num_running=1)]
    assert (
        "in decoding 4 more tokens, 1.00 s of it between steps."
        in explain("a", QUEUED, steps).sentence
    )


def test_preemption_and_slow_readers_are_reported() -> None:
    life = timings(
        (Activity.QUEUE, 0.0),
        (Activity.PREFILL, 0.0),
        (Activity.DECODE, 1.0),
        (Activity.PREEMPTED, 2.0),
        (Activity.PREFILL, 5.0),
        (Activity.PAUSED, 6.0),
        end_s=9.0,
        recomputed_s=0.9,
    )
    sentence = explain("a", life, [step(0, 2.0, 5.0, {"b": 3.0})]).sentence
    assert "3.00 s preempted (once) and 0.90 s of computing again" in sentence
    assert "behind the prefill of b (3.00 s)" in sentence
    assert "3.00 s paused because its client read too slowly" in sentence


def test_a_request_that_met_no_other_took_about_what_was_predicted() -> None:
    life = timings((Activity.PREFILL, 0.0), (Activity.DECODE, 0.5), end_s=1.6)
    sentence = explain("a", life, []).sentence
    assert sentence.startswith("a took 1.60 s, about what it would have taken without other")


def test_a_running_request_is_explained_so_far() -> None:
    life = timings((Activity.QUEUE, 0.0), end_s=0.05)
    explanation = explain("a", life, [], index=2, is_finished=False)
    assert (explanation.index, explanation.is_finished) == (2, False)
    assert explanation.sentence == "a has taken 50.0 ms: 50.0 ms in the queue."


def test_steps_that_the_log_has_lost_are_reported() -> None:
    explanation = explain("a", QUEUED, [step(812, 6.0, 7.0)])
    assert explanation.missing_s == pytest.approx(2.0)
    assert "the log has no steps of its first 2.00 s any more" in explanation.sentence


def test_many_others_are_summed_up() -> None:
    prefills = {f"r{number}": 0.05 for number in range(40)}
    explanation = explain("a", QUEUED, [step(0, 1.0, 4.0, prefills)])
    queue = part(explanation, Activity.QUEUE)
    assert len(queue.prefills) == 16
    assert queue.others_prefill_s == pytest.approx(2.0)
    assert "and others (1.85 s)" in explanation.sentence


@pytest.mark.parametrize("depth", [1, 2])
def test_a_simulated_request_is_explained_to_the_last_second(depth: int) -> None:
    arrivals = [Arrival(0.01 * number, ask(f"r{number}", 200, 6)) for number in range(20)]
    outcome = run(arrivals, depth=depth)
    for ending in outcome.endings:
        explanation = explain(ending.request_id, ending.timings, outcome.records)
        assert math.isclose(
            math.fsum(one.seconds for one in explanation.parts), explanation.total_s, rel_tol=1e-9
        )
        for one in explanation.parts:
            prefill_s = one.own_prefill_s + one.others_prefill_s
            known_s = prefill_s + one.decode_s + one.unclaimed_s + one.no_step_s
            assert math.isclose(known_s, one.seconds, rel_tol=1e-9, abs_tol=1e-9)
    waited = explain("r19", outcome.endings[-1].timings, outcome.records)
    assert part(waited, Activity.QUEUE).others_prefill_s > 0.0


def test_a_comparison_outside_of_what_was_measured_is_marked() -> None:
    known = explain("a", QUEUED, [])
    marked = explain("a", replace(QUEUED, is_extrapolated=True), [])
    text = "it would have taken without other requests"
    assert f"{text} (extrapolated):" in marked.sentence
    assert f"{text}:" in known.sentence
    assert ("without other requests (extrapolated)", "1500.0") in {
        row[:2] for row in explanation_rows(marked)
    }


class Counted(tuple[StepRecord, ...]):
    """Counts what is read of a log."""

    num_read = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        Counted.num_read += 1
        return super().__getitem__(place)


def test_only_the_steps_of_a_sequences_time_are_read() -> None:
    """So that a long log costs a sequence no more than a short one."""
    steps = Counted(step(number, number * 0.1, number * 0.1 + 0.1) for number in range(20_000))
    explanation = explain("a", QUEUED, steps)
    assert explanation == explain("a", QUEUED, steps[:200])
    assert Counted.num_read < 1000
