"""Step records and timings of a request, written by hand, for tests of what reads the step log."""

from __future__ import annotations

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


QUEUED = timings((Activity.QUEUE, 1.0), (Activity.PREFILL, 4.0), (Activity.DECODE, 5.0), end_s=7.0)
