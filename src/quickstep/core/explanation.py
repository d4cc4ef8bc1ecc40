"""Where the time of one sequence went, from its timings and the records of the steps meanwhile.

The server (`/debug/requests`), `quickstep why` and the simulator call `explain`. A pure function: a
step belongs to an activity of the sequence as far as it ran during it, and its seconds are divided
as they were charged. So every second of the sequence is explained once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from quickstep.types import Activity, CacheMiss, SequenceTimings, StepRecord

_MAX_PREFILLS = 16  # other requests that are named, per activity
_NAMED = 3  # in the sentence
_LEAST_PART = 0.01  # of the total time, for an activity to be in the sentence
_MUCH = 0.1  # of an activity's time, for others' prefills to be in the sentence
_LEAST_S = 5e-4
_MAX_IN_FLIGHT = 8  # steps


class ActivityPart(msgspec.Struct, frozen=True):
    """What happened during one activity of a sequence.

    `seconds` = `own_prefill_s` + `others_prefill_s` + `decode_s` + `unclaimed_s` + `no_step_s`, up
    to the delay between the end of a step and its commit.

    Attributes:
        seconds: Its wall time.
        num_steps: Steps that ran meanwhile, at least in part.
        own_prefill_s: Charged to the prefill of the same request.
        others_prefill_s: Charged to the prefills of other requests.
        prefills: The other requests with their seconds of prefill, largest first; at most 16.
        decode_s: Charged to decode rows, those of the sequence included.
        unclaimed_s: Of steps whose sequences had ended.
        no_step_s: No step ran.
        max_running: Most sequences in the batch meanwhile.
    """

    activity: Activity
    seconds: float
    num_steps: int = 0
    own_prefill_s: float = 0.0
    others_prefill_s: float = 0.0
    prefills: tuple[tuple[str, float], ...] = ()
    decode_s: float = 0.0
    unclaimed_s: float = 0.0
    no_step_s: float = 0.0
    max_running: int = 0


class Explanation(msgspec.Struct, frozen=True):
    """Where the time of one sequence went.

    Attributes:
        index: Of the sequence in its request.
        is_finished: False for a sequence that still runs; then the seconds are those so far.
        total_s: From arrival to the end.
        unloaded_s: Predicted for the same tokens without other requests.
        is_extrapolated: That prediction is for steps outside of what was measured so far.
        device_s: The sequence's part of the measured step times.
        recomputed_s: The part for what was computed again after a preemption.
        cache_miss: Why no more of its prompt was cached.
        replica: The number of the engine that ended it, or has it.
        num_moves: How often it has moved to another engine, or to a new process.
        elsewhere_s: From its arrival until it came to this one.
        num_restored_tokens: Tokens of which KV was read from `--kv-cache-dir`.
        missing_s: Seconds at its beginning for which the log has no steps any more.
        parts: The activities, in the order of `Activity`, those without time left out.
        sentence: All of it in one sentence.
    """

    request_id: str
    index: int
    is_finished: bool
    total_s: float
    unloaded_s: float
    is_extrapolated: bool
    device_s: float
    recomputed_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    cache_miss: CacheMiss | None
    num_output_tokens: int
    num_drafts: int
    num_accepted: int
    num_preemptions: int
    missing_s: float
    parts: tuple[ActivityPart, ...]
    sentence: str
    replica: int = 0
    num_moves: int = 0
    elsewhere_s: float = 0.0
    num_restored_tokens: int = 0


class FallbackAttempt(msgspec.Struct, frozen=True):
    """A step of a fallback chain that a request entered, such as `model=small`; the `cause` why,
    and the error of the attempt before.
    """

    step: str
    cause: str
    error: str

    @property
    def sentence(self) -> str:
        """For people."""
        return f"{self.step} was tried after {self.cause}: {self.error}"


class ExplainedRequest(msgspec.Struct, frozen=True):
    """Where the time of a request's sequences went; `num_more` others took less time. `fallbacks`
    are the steps of its chain, in order; one that an upstream served has no sequences.
    """

    request_id: str
    sequences: tuple[Explanation, ...]
    num_more: int = 0
    fallbacks: tuple[FallbackAttempt, ...] = ()


def explain(
    request_id: str,
    timings: SequenceTimings,
    steps: Sequence[StepRecord],
    *,
    index: int = 0,
    is_finished: bool = True,
) -> Explanation:
    """Explain a sequence; `steps` are in order, those outside its time are not read."""
    places = _places(steps, timings.arrival_s, timings.finished_s)
    during = [steps[place] for place in places if _begin_s(steps[place]) < timings.finished_s]
    spans = list(_spans(timings))
    found = (_part(activity, spans, during, request_id) for activity in Activity)
    parts = tuple([part for part in found if part is not None])
    explanation = Explanation(
        request_id=request_id,
        index=index,
        is_finished=is_finished,
        total_s=timings.finished_s - timings.arrival_s,
        unloaded_s=timings.unloaded_prefill_s + timings.unloaded_decode_s,
        is_extrapolated=timings.is_extrapolated,
        device_s=timings.device_s,
        recomputed_s=timings.recomputed_s,
        num_prompt_tokens=timings.num_prompt_tokens,
        num_cached_tokens=timings.num_cached_tokens,
        cache_miss=timings.cache_miss,
        num_output_tokens=timings.num_output_tokens,
        num_drafts=timings.num_drafts,
        num_accepted=timings.num_accepted,
        num_preemptions=timings.num_preemptions,
        missing_s=_missing_s(timings, during),
        parts=parts,
        sentence="",
        replica=timings.replica,
        num_moves=timings.num_moves,
        elsewhere_s=timings.elsewhere_s,
        num_restored_tokens=timings.num_restored_tokens,
    )
    return msgspec.structs.replace(explanation, sentence=_sentence(explanation))


def _places(steps: Sequence[StepRecord], since_s: float, end_s: float) -> range:
    """The places of the steps that may have run between two times. They are sorted by their ends;
    of those that end later, only some that were in flight together may have begun before.
    """
    first = bisect_right(steps, since_s, key=_end_s)
    last = bisect_left(steps, end_s, lo=first, key=_end_s) + _MAX_IN_FLIGHT
    return range(first, min(last, len(steps)))


def _begin_s(step: StepRecord) -> float:
    return step.committed_at_s - step.seconds


def _end_s(step: StepRecord) -> float:
    return step.committed_at_s


def _spans(timings: SequenceTimings) -> Iterator[tuple[Activity, float, float]]:
    """(activity, begin, end), in order, from when the sequence came to this engine."""
    came_s = timings.arrival_s + timings.elsewhere_s
    ends = [since_s for _, since_s in timings.activities[1:]] + [timings.finished_s]
    for (activity, since_s), end_s in zip(timings.activities, ends, strict=True):
        yield activity, max(since_s, came_s), max(end_s, came_s)


def _part(
    activity: Activity,
    spans: Sequence[tuple[Activity, float, float]],
    steps: Sequence[StepRecord],
    request_id: str,
) -> ActivityPart | None:
    """The part of an activity; None if the sequence spent no time on it."""
    own = [(since_s, end_s) for one, since_s, end_s in spans if one is activity]
    seconds = sum(end_s - since_s for since_s, end_s in own)
    if not seconds > 0.0:
        return None
    prefills: defaultdict[str, float] = defaultdict(float)
    num_steps, max_running = 0, 0
    ran_s = decode_s = unclaimed_s = 0.0
    overlaps_s: defaultdict[int, float] = defaultdict(float)  # by place in the steps
    for since_s, end_s in own:
        for place in _places(steps, since_s, end_s):
            overlaps_s[place] += _overlap_s(steps[place], since_s, end_s)
    for place, during in sorted(overlaps_s.items()):
        if not during > 0.0:
            continue
        step = steps[place]
        fraction = during / step.seconds
        num_steps += 1
        max_running = max(max_running, step.num_running)
        ran_s += during
        decode_s += fraction * step.decode_s
        unclaimed_s += fraction * max(0.0, step.seconds - step.decode_s - step.prefill_s)
        for prefill in step.prefills:
            prefills[prefill.request_id] += fraction * prefill.seconds
    own_prefill_s = prefills.pop(request_id, 0.0)
    largest = sorted(prefills.items(), key=lambda item: (-item[1], item[0]))
    return ActivityPart(
        activity,
        seconds,
        num_steps=num_steps,
        own_prefill_s=own_prefill_s,
        others_prefill_s=sum(prefills.values()),
        prefills=tuple(largest[:_MAX_PREFILLS]),
        decode_s=decode_s,
        unclaimed_s=unclaimed_s,
        no_step_s=max(0.0, seconds - ran_s),
        max_running=max_running,
    )


def _overlap_s(step: StepRecord, since_s: float, end_s: float) -> float:
    return max(0.0, min(step.committed_at_s, end_s) - max(_begin_s(step), since_s))


def _missing_s(timings: SequenceTimings, steps: Sequence[StepRecord]) -> float:
    """How long before the first known step the sequence had begun to compute."""
    first_s = timings.first_scheduled_s
    if first_s is None or (steps and steps[0].step_id == 0):
        return 0.0
    known_s = steps[0].planned_at_s if steps else timings.finished_s
    return max(0.0, known_s - first_s)


# -- the sentence -------------------------------------------------------------------------------


def _sentence(one: Explanation) -> str:
    verb = "took" if one.is_finished else "has taken"
    head = f"{one.request_id} {verb} {_seconds(one.total_s)}"
    if one.unloaded_s > 0.0 and one.is_finished:
        ratio = one.total_s / one.unloaded_s
        times = "about what" if ratio < 1.15 else f"{ratio:.1f} times the"
        predicted = "" if ratio < 1.15 else f" {_seconds(one.unloaded_s)}"
        head += f", {times}{predicted} it would have taken without other requests"
        head += " (extrapolated)" if one.is_extrapolated else ""
    least_s = max(_LEAST_S, _LEAST_PART * one.total_s)
    texts = [_moved_text(one)] if one.num_moves else []
    texts += [_TEXTS[part.activity](one, part) for part in one.parts if part.seconds >= least_s]
    sentence = f"{head}: {'; '.join(texts)}" if texts else head
    if one.missing_s > least_s:
        sentence += f" (the log has no steps of its first {_seconds(one.missing_s)} any more)"
    return sentence + "."


def _moved_text(one: Explanation) -> str:
    moves = "once" if one.num_moves == 1 else f"{one.num_moves} times"
    return (
        f"{_seconds(one.elsewhere_s)} on other engines or until one took it: it has moved {moves}, "
        f"to replica {one.replica} in the end"
    )


def _queue_text(_: Explanation, part: ActivityPart) -> str:
    return f"{_seconds(part.seconds)} in the queue{_behind(part)}"


def _prefill_text(one: Explanation, part: ActivityPart) -> str:
    num_tokens = one.num_prompt_tokens - one.num_cached_tokens
    text = f"{_seconds(part.seconds)} in its own prefill of {_count(num_tokens)}"
    if one.cache_miss is CacheMiss.EVICTED:
        text += f" (the cache had lost the prompt from token {one.num_cached_tokens} on)"
    return text + _stretched(part) + _between_steps(part)


def _decode_text(one: Explanation, part: ActivityPart) -> str:
    num_tokens = max(0, one.num_output_tokens - 1)
    text = f"{_seconds(part.seconds)} in decoding {_count(num_tokens, ' more')}"
    if one.num_drafts:
        text += f" ({one.num_accepted} of {one.num_drafts} drafts accepted)"
    return text + (_stretched(part) or _batched(part)) + _between_steps(part)


def _preempted_text(one: Explanation, part: ActivityPart) -> str:
    times = "once" if one.num_preemptions == 1 else f"{one.num_preemptions} times"
    again = f" and {_seconds(one.recomputed_s)} of computing again" * (one.recomputed_s > _LEAST_S)
    return f"{_seconds(part.seconds)} preempted ({times}){again}{_behind(part)}"


def _paused_text(_: Explanation, part: ActivityPart) -> str:
    return f"{_seconds(part.seconds)} paused because its client read too slowly"


def _adapter_text(_: Explanation, part: ActivityPart) -> str:
    return f"{_seconds(part.seconds)} until its adapter was in memory"


def _restore_text(one: Explanation, part: ActivityPart) -> str:
    of_tokens = f" of {_count(one.num_restored_tokens)}" if one.num_restored_tokens else ""
    return f"{_seconds(part.seconds)} until the KV{of_tokens} was in memory again"


_TEXTS = {
    Activity.QUEUE: _queue_text,
    Activity.PREFILL: _prefill_text,
    Activity.DECODE: _decode_text,
    Activity.PREEMPTED: _preempted_text,
    Activity.PAUSED: _paused_text,
    Activity.ADAPTER: _adapter_text,
    Activity.RESTORE: _restore_text,
}


def _behind(part: ActivityPart) -> str:
    """What ran while the sequence waited, largest first."""
    ran = []
    if part.others_prefill_s >= _MUCH * part.seconds:
        ran.append((part.others_prefill_s, f"the prefill of {_requests(part)}"))
    if part.decode_s >= _MUCH * part.seconds:
        running = f"up to {part.max_running} running sequences"
        ran.append((part.decode_s, f"{_seconds(part.decode_s)} of decoding for {running}"))
    return f" behind {_listed([text for _, text in sorted(ran, reverse=True)])}" if ran else ""


def _stretched(part: ActivityPart) -> str:
    if part.others_prefill_s < _MUCH * part.seconds:
        return ""
    return f", stretched by the prefill of {_requests(part)}"


def _batched(part: ActivityPart) -> str:
    return f" in steps of up to {part.max_running} sequences" if part.max_running > 1 else ""


def _between_steps(part: ActivityPart) -> str:
    if part.no_step_s < _MUCH * part.seconds:
        return ""
    return f", {_seconds(part.no_step_s)} of it between steps"


def _requests(part: ActivityPart) -> str:
    """`a (1.20 s), b (0.30 s) and 4 others (0.10 s)`."""
    named = part.prefills[:_NAMED]
    texts = [f"{name} ({_seconds(seconds)})" for name, seconds in named]
    rest_s = part.others_prefill_s - sum(seconds for _, seconds in named)
    if len(part.prefills) > _NAMED:
        texts.append(f"others ({_seconds(rest_s)})")
    return _listed(texts)


def _listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"


def _count(num_tokens: int, more: str = "") -> str:
    return f"{num_tokens}{more} token" + "s" * (num_tokens != 1)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"
