"""A recorded run, replayed on a new scheduler, gives identical plans; without text and with it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import Any

import msgspec
import pytest
from random_runs import random_run
from scheduler_world import Setup, ask, open_scheduler, policy_of

from quickstep.config import EngineConfig, PolicyName
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.recordings.recording import (
    RecordedCall,
    RecordedRequest,
    Recorder,
    RecordingScheduler,
)
from quickstep.core.recordings.replay import SchedulerRecording, read_recording, replay
from quickstep.core.resources.block_pool import KVBlockPool, chain_digest
from quickstep.errors import ConfigError, RequestError
from quickstep.sampling_params import Grammar, RepetitionDetectionParams
from quickstep.types import (
    FinishReason,
    KVTarget,
    Pooling,
    Request,
    RequestClass,
    Resumed,
    RowOutput,
    SamplingParams,
    SequenceOutput,
    StepRecord,
    StepResult,
    TokenLogprobs,
)

RANDOM_RUNS = range(500, 540)


class Records:
    """Opens a recording scheduler for a world, and has its lines."""

    def __init__(self, is_full: bool) -> None:
        self.lines: list[bytes] = []
        self._text_of = (lambda ids: "".join(map(chr, ids))) if is_full else None
        self._engine = EngineConfig() if is_full else None
        self.setup = Setup()
        self.scheduler: RecordingScheduler

    def open(self, setup: Setup) -> RecordingScheduler:
        self.setup = setup
        pool = KVBlockPool(setup.num_blocks, setup.block_size, setup.prefix_caching, setup.digest)
        recorder = Recorder(self.lines.append, setup.block_size, b"key", self._text_of)
        self.scheduler = RecordingScheduler(
            setup.config, pool, policy_of(setup), LinearCostModel(), recorder, self._engine
        )
        return self.scheduler

    def recording(self) -> SchedulerRecording:
        self.scheduler.close()
        return read_recording(self.lines)


def recorded_life(seed: int, is_full: bool) -> tuple[SchedulerRecording, Setup]:
    records = Records(is_full)
    random_run(seed, records.open)
    return records.recording(), records.setup


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("seed", RANDOM_RUNS)
def test_replay_gives_the_identical_plans(seed: int, is_full: bool) -> None:
    recording, setup = recorded_life(seed, is_full)
    assert recording.is_full == is_full
    replayed = replay(recording, open_scheduler(setup))
    # with the weak digest, hits depend on collisions of real tokens
    if is_full or setup.digest is chain_digest:
        assert replayed.different_line is None
        plans = [call for _, call in recording.calls if call.name == "plan" and call.digest]
        assert replayed.num_plans == len(plans) > 0


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("seed", range(540, 560))
def test_replay_of_resumed_requests_gives_the_identical_plans(seed: int, is_full: bool) -> None:
    records = Records(is_full)
    random_run(seed, records.open, resumes=True)
    recording, setup = records.recording(), records.setup
    if is_full or setup.digest is chain_digest:
        assert replay(recording, open_scheduler(setup)).different_line is None


@pytest.mark.parametrize("seed", RANDOM_RUNS[:10])
def test_replay_has_the_records_and_the_ends_of_the_recorded_run(seed: int) -> None:
    recording, setup = recorded_life(seed, is_full=True)
    records: list[StepRecord] = []
    ends: list[tuple[str, int, FinishReason]] = []

    def watch(outputs: Sequence[SequenceOutput], record: StepRecord | None) -> None:
        records.extend([record] if record is not None else [])
        ends.extend(
            (output.request_id, output.index, output.finish_reason)
            for output in outputs
            if output.finish_reason is not None
        )

    replay(recording, open_scheduler(setup), watch=watch)
    commits = [call for _, call in recording.calls if call.name == "commit"]
    times = [(record.committed_at_s, record.seconds) for record in records]
    assert times == [(call.at_s, call.seconds) for call in commits]
    recorded = [
        (str(number), index, sequence.reason)
        for number, one in recording.requests.items()
        if not one.refused
        for index, sequence in zip(one.request.indices, one.sequences, strict=True)
    ]
    assert sorted(ends, key=str) == sorted(recorded, key=str)


@pytest.mark.parametrize("seed", RANDOM_RUNS)
def test_replay_of_a_full_recording_gives_the_identical_plans(seed: int) -> None:
    """With the real hash and with the tests' weak one: the tokens themselves are known."""
    recording, setup = recorded_life(seed, is_full=True)
    assert recording.is_full
    replayed = replay(recording, open_scheduler(setup))
    assert replayed.different_line is None
    plans = [call for _, call in recording.calls if call.name == "plan" and call.digest]
    assert replayed.num_plans == len(plans) > 0


@pytest.mark.parametrize("is_full", [False, True])
def test_a_recording_of_a_killed_server_is_replayed_to_its_last_line(is_full: bool) -> None:
    """Requests that had not ended have lines, so that their arrival does not end the replay."""
    num_running = num_lives = num_identical = 0
    for seed in RANDOM_RUNS:
        records = Records(is_full)
        random_run(seed, records.open)
        if records.setup.digest is not chain_digest:
            continue
        half = len(records.lines) // 2
        torn = records.lines[half][:-9]
        recording = read_recording([*records.lines[:half], torn])
        assert not recording.is_complete
        assert recording.torn_line == half + 1
        num_lives, num_running = num_lives + 1, num_running + len(recording.running)
        replayed = replay(recording, open_scheduler(records.setup))
        if replayed.different_line is not None:  # a hit on blocks that a running request generated
            assert recording.running
            continue
        num_identical += 1
        last = recording.calls[-1]
        assert replayed.cut_at_line == (last[0] if last[1].number in missing(recording) else None)
        plans = [call for _, call in recording.calls if call.name == "plan" and call.digest]
        assert replayed.num_plans == len(plans)
    assert num_running > 20
    assert num_identical >= 0.9 * num_lives


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_recordings_of_the_version_before_replay_and_others_are_refused(version: int) -> None:
    """Version 2 has no resumed requests and is otherwise the same."""
    records = Records(is_full=True)
    random_run(501, records.open)
    setup = records.setup
    assert records.recording().engine.version == 3
    lines = [line.replace(b'"version":3', b'"version":%d' % version) for line in records.lines]
    if version in (2, 3):
        assert replay(read_recording(lines), open_scheduler(setup)).different_line is None
        return
    with pytest.raises(
        ConfigError, match=f"its version is {version}, this Quickstep reads 2 and 3"
    ):
        read_recording(lines)


def missing(recording: SchedulerRecording) -> set[int]:
    added = {call.number for _, call in recording.calls if call.name == "add"}
    return added - recording.requests.keys()


def test_the_recorded_runs_hold_results_and_failures() -> None:
    calls = [
        call for seed in RANDOM_RUNS for _, call in recorded_life(seed, is_full=False)[0].calls
    ]
    names = {"add", "abort", "expire", "plan", "commit", "fail", "pause", "resume"}
    names |= {"register_adapter", "adapter_loaded", "adapter_failed"}
    assert {call.name for call in calls} == names
    rows = [row for call in calls for row in call.rows]
    assert any(row.failure for row in rows)
    assert any(row.num_tokens > 1 for row in rows)
    assert any(row.num_drafts for row in rows)


def turn(request_id: str, prompt: tuple[int, ...], **sampling: object) -> Request:
    return Request(request_id, prompt, SamplingParams(**sampling), eos_token_ids=frozenset({7}))


class Answers:
    """Runs a scheduler; each sequence generates a fixed output."""

    def __init__(self, records: Records, outputs: dict[str, tuple[int, ...]]) -> None:
        self.scheduler = records.open(Setup(num_blocks=64, max_model_len=64))
        self._outputs = outputs
        self._slots: dict[int, str] = {}
        self._now = 0.0

    def run(self, request: Request) -> None:
        self.scheduler.add(request, self._now)
        while plan := self.scheduler.plan(self._now):
            self._slots |= {one.slot: one.sequence_id for one in plan.admitted}
            rows = []
            for row in plan.rows:
                of_sequence = self._outputs[self._slots[row.slot]]
                place = row.output_position
                rows.append(RowOutput(of_sequence[place : place + 1] if row.emits else ()))
            self._now += 0.01
            self.scheduler.commit(plan, StepResult(plan.step_id, tuple(rows), 0.01), self._now)


# of each field, values that are not the default
_NUMBERS = {
    "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.5, "seed": 5, "max_tokens": 5,
    "min_tokens": 2, "include_stop_str_in_output": True, "ignore_eos": True,
    "skip_special_tokens": False, "logprobs": 2, "typical_p": 0.5, "dry_multiplier": 0.5,
    "dry_base": 2.0, "dry_allowed_length": 3, "dry_range": 5, "xtc_probability": 0.5,
    "xtc_threshold": 0.2, "thinking_budget": 4, "inside_reasoning": True, "prompt_logprobs": 1,
}  # fmt: skip
_SAMPLING: dict[str, object] = {
    **_NUMBERS,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": (1, 2, 7),
    "stop": ("bye",),
    "stop_token_ids": (9,),
    "shown_special_token_ids": (3,),
    "grammar": Grammar.of_json_object(),
    "dry_sequence_breakers": ("x",),
    "bad_words": ("y",),
    "reasoning_tags": ("<a>", "</a>"),
    "stop_after_reasoning": ("<a>", "</a>"),
    "reasoning_budget_message": "Enough.",
    "in_tokens": None,
    "logprob_token_ids": (3,),
    "repetition_detection": RepetitionDetectionParams(2, 1, 2),
    "structured_outputs": None,  # a grammar by the time a request exists
}
_REQUEST: dict[str, object] = {
    "request_id": "other",
    "prompt_token_ids": (3,) * 9,
    "sampling": SamplingParams(max_tokens=3),
    "seed": 4,
    "eos_token_ids": frozenset({8}),
    "priority": -3,
    "tenant": "acme/app",
    "adapter": "a",
    "cache_salt": "pepper",
    "timeout_s": 0.05,
    "pooling": Pooling.LAST,
    "request_class": RequestClass.BATCH,
    "ttft_deadline_s": 0.02,
    "tenant_weight": 2.0,
    "endpoint": "/v1/completions",
    "is_continuation": True,
    "is_in_search": True,
    "speculation": False,
    "adapter_id": "",
    "received_s": 0.001,
    "reports_progress": True,
    "resumed": (Resumed(0, (3, 4)),),
    "handover": KVTarget("127.0.0.1", 1, "secret"),
    "retain_s": 60.0,
    "num_following": 3,
    "has_place": True,
}


def test_every_field_of_a_request_is_tried() -> None:
    fields = msgspec.structs.fields
    assert {one.name for one in fields(SamplingParams)} == _SAMPLING.keys()
    assert {one.name for one in fields(Request)} == _REQUEST.keys()


@pytest.mark.parametrize("name", [*(f"sampling.{name}" for name in _SAMPLING), *_REQUEST])
def test_a_recording_has_what_plans_read_of_a_request(name: str) -> None:
    """The request runs between others, which it delays or not, with drafts, forced ones too."""
    records = Records(is_full=False)
    setup = Setup(
        num_blocks=24, max_num_seqs=3, max_drafts=3, max_model_len=40, policy=PolicyName.DEADLINE
    )
    scheduler = records.open(setup)
    one = turn("one", (1, 2, 3, 4, 5), max_tokens=8)
    field = name.removeprefix("sampling.")
    if field == name:
        one = msgspec.structs.replace(one, **{name: _REQUEST[name]})
    else:
        changed = {"logprobs": 0, field: _SAMPLING[field]}
        if field == "reasoning_budget_message":
            changed["thinking_budget"] = 4
        sampling = msgspec.structs.replace(one.sampling, **changed)
        one = msgspec.structs.replace(one, sampling=sampling)
    scheduler.add(turn("before", (6, 6), max_tokens=6), 0.0)
    scheduler.add(one, 0.002)
    for index in range(3):
        scheduler.add(turn(f"after{index}", (9, 9, index), max_tokens=4), 0.002)
    now = 0.002
    for _ in range(60):
        scheduler.expire(now)
        plan = scheduler.plan(now)
        if plan is None:
            break
        rows = tuple(
            RowOutput(
                (1,) * row.emits,
                draft_token_ids=(2,) * row.num_next_drafts,
                num_forced_drafts=min(1, row.num_next_forced),
                prompt_logprobs=(TokenLogprobs(0, 0.0, 1),) * row.num_scored,
                embedding=() if row.pools else None,
            )
            for row in plan.rows
        )
        now += 0.005
        scheduler.commit(plan, StepResult(plan.step_id, rows, 0.005), now)
    recording = records.recording()
    assert replay(recording, open_scheduler(setup)).different_line is None


def test_a_prompt_is_hashed_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_hashed
        num_hashed += 1
        return blake2b(*args, **kwargs)

    monkeypatch.setattr("quickstep.core.recordings.recording.blake2b", counted)
    records = Records(is_full=False)
    outputs = {f"a#{index}": (1, 2, 7) for index in range(4)}
    Answers(records, outputs).run(turn("a", (5,) * 40, n=4))
    num_blocks = 40 // Setup().block_size
    assert num_hashed <= num_blocks + 4 * 4


@pytest.mark.parametrize("seed", range(4))
def test_a_refused_request_leaves_no_trace(seed: int) -> None:
    """A scheduler that refuses requests plans as one that never saw them."""
    records = Records(is_full=False)
    setup = Setup(max_num_seqs=2, max_waiting=3)
    scheduler = records.open(setup)
    rng, num_refused, now = Random(seed), 0, 0.0
    for number in range(60):
        prompt = tuple(rng.randrange(5) for _ in range(rng.randint(1, 12)))
        request = turn(f"r{number}", prompt, max_tokens=rng.randint(1, 6))
        deadline_s = rng.choice((None, 1e-4, 0.05))
        try:
            scheduler.add(msgspec.structs.replace(request, ttft_deadline_s=deadline_s), now)
        except RequestError:
            num_refused += 1
        plan = scheduler.plan(now)
        now += 0.01
        if plan is not None:
            rows = tuple(RowOutput((1,)) if row.emits else RowOutput() for row in plan.rows)
            scheduler.commit(plan, StepResult(plan.step_id, rows, 0.01), now)
        scheduler.expire(now)
    assert num_refused > 10
    assert replay(records.recording(), open_scheduler(setup)).different_line is None


def test_a_second_turn_hits_the_blocks_of_a_choice_that_was_generated() -> None:
    """Without tokens, the hashes alone must say that a prompt continues the second choice."""
    records = Records(is_full=False)
    outputs = {"a#0": (1, 2, 3, 4, 5, 7), "a#1": (1, 2, 9, 9, 9, 9, 9), "b#0": (1, 7)}
    prompt = (5, 5, 5, 5, 6, 6)
    answers = Answers(records, outputs)
    answers.run(turn("a", prompt, n=2, max_tokens=7))
    answers.run(turn("b", (*prompt, *outputs["a#1"][:6], 3), max_tokens=5))
    recording = records.recording()
    assert replay(recording).different_line is None
    admitted = [call for _, call in recording.calls if call.name == "plan" and call.digest]
    assert len(admitted) == 7 + 2
    without_hits = msgspec.structs.replace(
        recording,
        requests={
            **recording.requests,
            1: msgspec.structs.replace(recording.requests[1], hash_ids=(1, 2, 3)),
        },
    )
    assert replay(without_hits).different_line is not None


def test_a_recording_has_no_text_and_no_names_unless_it_is_full() -> None:
    def lines(is_full: bool) -> bytes:
        records = Records(is_full)
        answers = Answers(records, {"secret#0": (90, 91, 92, 7)})
        request = turn("secret", tuple(map(ord, "password")), max_tokens=9, stop=("bye",))
        answers.run(msgspec.structs.replace(request, tenant="acme", cache_salt="pepper"))
        records.recording()
        return b"".join(records.lines)

    content = lines(is_full=False)
    for name in (b"password", b"secret", b"acme", b"pepper", b"bye", b"112,97", b"90,91"):
        assert name not in content
    assert b"password" in lines(is_full=True)
    assert b"90,91,92" in lines(is_full=True)


def test_a_line_of_a_request_has_the_fields_of_mooncake() -> None:
    records = Records(is_full=False)
    answers = Answers(records, {"a#0": (1, 7), "b#0": (2, 7)})
    answers.run(turn("a", (1,) * 9))
    answers.run(turn("b", (1,) * 9))
    lines = [line for line in records.lines if line.startswith(b'{"kind":"request"')]
    requests = [msgspec.json.decode(line) for line in lines]
    assert [request["input_length"] for request in requests] == [9, 9]
    assert [request["output_length"] for request in requests] == [2, 2]
    assert requests[0]["timestamp"] == 0.0 < requests[1]["timestamp"]
    assert len(requests[0]["hash_ids"]) == 2
    assert requests[0]["hash_ids"] == requests[1]["hash_ids"]


def test_another_order_of_arrival_gives_other_plans() -> None:
    """The comparison can fail: the plans depend on what is replayed."""
    records = Records(is_full=False)
    scheduler = records.open(Setup(max_num_seqs=1))
    scheduler.add(ask("a", [1, 2, 3]), 0.0)
    scheduler.add(ask("b", [1, 2]), 0.0)
    scheduler.plan(0.0)
    recording = records.recording()
    assert replay(recording).different_line is None
    (one, first), (two, second), (three, plan) = recording.calls
    swapped = msgspec.structs.replace(recording, calls=((one, second), (two, first), (three, plan)))
    assert replay(swapped).different_line == three


@pytest.mark.parametrize(
    ("place", "line", "sentence"),
    [
        (1, b"{", "line 2 of the recording is not valid: "),
        (0, b'{"kind":"call","name":"plan","at_s":0}', "line 1 .* no engine before it"),
        (1, b'{"kind":"call","name":"dance","at_s":0}', "line 2 .*there is no call 'dance'"),
        (1, b'{"kind":"call","name":"add","at_s":0,"number":4}', "request 4 has no line"),
        (1, b'{"kind":"call","name":"commit","at_s":0}', "line 2 .* does not follow"),
    ],
)
def test_a_bad_line_is_named(place: int, line: bytes, sentence: str) -> None:
    records = Records(is_full=False)
    records.open(Setup())
    lines = [*records.lines, b'{"kind":"end","num_calls":0}']
    lines.insert(place, line)
    with pytest.raises(ConfigError, match=sentence):
        replay(read_recording(lines))


def test_lines_that_contradict_themselves_are_refused() -> None:
    records = Records(is_full=False)
    answers = Answers(records, {"a#0": (1, 7)})
    answers.run(turn("a", (1,) * 9))
    recording = records.recording()
    assert isinstance(recording.requests[0], RecordedRequest)
    assert all(isinstance(call, RecordedCall) for _, call in recording.calls)
    wrong = [line.replace(b'"input_length":9', b'"input_length":99') for line in records.lines]
    with pytest.raises(ConfigError, match="99 tokens do not have 2 hash_ids"):
        read_recording(wrong)
