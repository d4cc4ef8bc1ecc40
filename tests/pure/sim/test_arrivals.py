"""What an arrival is: a refused one leaves no trace, a continuation is none."""

from __future__ import annotations

import pytest
from msgspec import structs
from scheduler_world import PROMPT, Setup, World, ask

from quickstep.config import PolicyName
from quickstep.errors import RequestError
from quickstep.types import Request

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
