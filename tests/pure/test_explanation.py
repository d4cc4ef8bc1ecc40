"""Where a request's time went, from hand-made records and from a simulation."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from test_sim import ask, run

from quickstep.cli.why import explanation_rows
from quickstep.core.explanation import ActivityPart, Explanation, explain
from quickstep.sim.outcome import Arrival
from quickstep.types import Activity, PrefillCharge, SequenceTimings, StepRecord


def timings(
    *activities: tuple[Activity, float],
    end_s: float,
    num_outputs: int = 5,
    unloaded: tuple[float, float] = (0.5, 1.0),
    recomputed_s: float = 0.0,
) -> SequenceTimings:
    """Of a sequence whose activities begin at these times."""
    ends = [since_s for _, since_s in activities[1:]] + [end_s]
    spent = dict.fromkeys(Activity, 0.0)
    for (activity, since_s), next_s in zip(activities, ends, strict=True):
        spent[activity] += next_s - since_s
    first_s = next((since for one, since in activities if one is Activity.PREFILL), None)
    preemptions = [one for one, _ in activities if one is Activity.PREEMPTED]
    return SequenceTimings(
        arrival_s=activities[0][1],
        first_scheduled_s=first_s,
        first_token_s=None,
        finished_s=end_s,
        **{f"{one.value}_s": seconds for one, seconds in spent.items()},
        device_s=0.25,
        num_preemptions=len(preemptions),
        num_prompt_tokens=100,
        num_cached_tokens=20,
        num_output_tokens=num_outputs,
        num_blocks=8,
        recomputed_s=recomputed_s,
        unloaded_prefill_s=unloaded[0],
        unloaded_decode_s=unloaded[1],
        activities=activities,
    )


def step(
    step_id: int,
    begin_s: float,
    end_s: float,
    prefills: dict[str, float] | None = None,
    decode_s: float | None = None,
    num_running: int = 2,
) -> StepRecord:
    """A step that ran from `begin_s` to `end_s`; its decode rows take what prefills leave."""
    charges = tuple(PrefillCharge(name, 10, s) for name, s in (prefills or {}).items())
    prefill_s = sum(charge.seconds for charge in charges)
    seconds = end_s - begin_s
    return StepRecord(
        step_id=step_id,
        planned_at_s=begin_s,
        committed_at_s=end_s,
        seconds=seconds,
        predicted_s=seconds,
        num_prefill_rows=len(charges),
        num_decode_rows=1,
        num_prefill_tokens=10 * len(charges),
        num_decode_tokens=1,
        num_kv_tokens=0,
        num_pairs=0,
        num_scored=0,
        num_free_blocks=0,
        num_waiting=0,
        num_running=num_running,
        num_preemptions=0,
        decode_s=seconds - prefill_s if decode_s is None else decode_s,
        prefill_s=prefill_s,
        prefills=charges,
    )


def part(explanation: Explanation, activity: Activity) -> ActivityPart:
    (found,) = [one for one in explanation.parts if one.activity is activity]
    return found


QUEUED = timings((Activity.QUEUE, 1.0), (Activity.PREFILL, 4.0), (Activity.DECODE, 5.0), end_s=7.0)


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


def test_time_between_steps_is_said() -> None:
    steps = [step(0, 4.0, 5.0, {"a": 1.0}), step(1, 6.0, 7.0, num_running=1)]
    assert (
        "in decoding 4 more tokens, 1.00 s of it between steps."
        in explain("a", QUEUED, steps).sentence
    )


def test_preemption_and_slow_readers_are_said() -> None:
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


def test_steps_that_the_log_has_lost_are_said() -> None:
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
