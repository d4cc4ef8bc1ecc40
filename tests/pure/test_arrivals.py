"""What an arrival is: a refused one leaves no trace, a continuation is none, a recording has all
that plans depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from msgspec import structs
from scheduler_world import PROMPT, Setup, World, ask, open_scheduler
from test_replay import Records

from quickstep.config import PolicyName
from quickstep.core.replay import replay
from quickstep.errors import RequestError
from quickstep.sampling_params import SamplingParams
from quickstep.types import Grammar, Pooling, Request, RequestClass

LATE = structs.replace(ask("late"), ttft_deadline_s=1e-9)
REFUSED = (
    ask("empty", prompt=()),
    ask("long", prompt=PROMPT * 20),
    ask("many", n=99),
    ask("known"),
    LATE,
    structs.replace(LATE, request_id="late-rare", adapter_id="rare"),
    structs.replace(ask("large"), adapter_id="too-large-for-it"),
)


def plans_of(setup: Setup, refused: tuple[Request, ...]) -> list[object]:
    """The plans of a busy scheduler that refuses some requests in between."""
    world, plans = World(setup), list[object]()
    world.add(ask("known", max_tokens=30))
    for number in range(24):
        if number in (2, 5, 6):
            adapter_id = ("", "busy", "rare")[number % 3]
            world.add(structs.replace(ask(f"r{number}"), adapter_id=adapter_id))
        for request in refused:
            if request.adapter_id:
                world.scheduler.register_adapter(request.adapter_id, len(request.adapter_id))
            with pytest.raises(RequestError):
                world.scheduler.add(request, world.now)
            world.scheduler.check()
        plan = world.plan()
        plans.append(plan and [(row.slot, row.num_tokens, row.adapter) for row in plan.rows])
        world.finish_load()
        if world.in_flight:
            world.commit()
    world.drain()
    return [*plans, world.scheduler.stats().totals]


@pytest.mark.parametrize("policy", list(PolicyName))
def test_a_refused_request_leaves_no_trace(policy: PolicyName) -> None:
    setup = Setup(policy=policy, num_blocks=40, max_waiting=2, max_loras=1, lora_bytes=8)
    assert plans_of(setup, REFUSED) == plans_of(setup, ())


def test_a_continuation_has_the_place_and_the_limits_of_what_it_continues() -> None:
    setup = Setup(max_num_seqs=1, max_waiting=1, num_blocks=64)
    world = World(setup)
    world.add(ask("running", max_tokens=20))
    world.plan()
    world.advance(1.0)
    world.add(ask("waiting"))
    late = structs.replace(ask("late"), is_continuation=True, received_s=0.5, ttft_deadline_s=0.1)
    assert world.add(structs.replace(late, request_id="other")), "the queue is full"
    world.abort("running")
    world.commit()
    plan = world.plan()
    assert plan is not None and [one.sequence_id for one in plan.admitted] == ["other#0"]
    world.drain()
    timings = world.received["other#0"].timings
    assert timings is not None and timings.arrival_s == 1.0, "its wait began when it was added"


OTHER_VALUES: Mapping[type, Mapping[str, object]] = {
    SamplingParams: {
        "n": 2,
        "max_tokens": 3,
        "min_tokens": 1,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "thinking_budget": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "dry_multiplier": 0.8,
        "temperature": 0.0,
        "ignore_eos": False,
        "grammar": Grammar.of_json_object(),
        "stop": ("x",),
        "logit_bias": {1: 1.0},
        "bad_words": ("x",),
    },
    Request: {
        "priority": 5,
        "tenant": "b/c",
        "tenant_weight": 3.0,
        "request_class": RequestClass.BATCH,
        "timeout_s": 0.02,
        "ttft_deadline_s": 5.0,
        "cache_salt": "s",
        "pooling": Pooling.MEAN,
        "speculation": False,
        "is_continuation": True,
        "received_s": -0.5,
        "endpoint": "/v1",
        "seed": 1,
    },
}
CASES = [(kind, name) for kind, values in OTHER_VALUES.items() for name in values]


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[name for _, name in CASES])
def test_a_recording_has_what_plans_depend_on(kind: type, name: str, is_full: bool) -> None:
    setup = Setup(max_num_seqs=2, num_blocks=24, max_drafts=3, policy=PolicyName.FAIR)
    records = Records(is_full)
    world = World(setup, records.open)
    change: Callable[[Request], Request]
    value = {name: OTHER_VALUES[kind][name]}
    if kind is Request:
        change = lambda one: structs.replace(one, **value)  # noqa: E731
    else:
        change = lambda one: structs.replace(one, sampling=structs.replace(one.sampling, **value))  # noqa: E731
    for number in range(6):
        request = ask(f"r{number}", max_tokens=6)
        if name in ("pooling", "grammar"):
            request = structs.replace(request, sampling=SamplingParams(max_tokens=6))
        world.add(change(request) if number % 2 else request)
        world.plan()
        if world.in_flight:
            world.commit()
        world.expire()
    world.drain()
    replayed = replay(records.recording(), open_scheduler(setup))
    assert replayed.different_line is None and replayed.num_plans


def test_the_prompt_of_many_sequences_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from quickstep.core import recording

    num_hashed, real = [0], recording.blake2b

    def counting(*args: object, **values: object) -> object:
        num_hashed[0] += 1
        return real(*args, **values)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "blake2b", counting)
    setup = Setup(max_num_seqs=8, num_blocks=400, max_model_len=400)
    records = Records(False)
    world = World(setup, records.open)
    world.add(ask("many", prompt=(0, 1) * 150, n=8))
    world.drain()
    assert num_hashed[0] < 2 * 300 // setup.block_size
