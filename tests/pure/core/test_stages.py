"""The steps of a pipeline: each has a part of the sequences that decode, and knows their tokens."""

from __future__ import annotations

import pytest
from scheduler_world import Setup, World

from quickstep.types import Phase, Request, SamplingParams, StepPlan


def request(name: str, prompt_len: int, num_outputs: int) -> Request:
    sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
    return Request(name, tuple(range(2, 2 + prompt_len)), sampling)


def decoding(plan: StepPlan) -> list[int]:
    return [row.slot for row in plan.rows if row.phase is Phase.DECODE]


@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 5), (3, 7), (4, 2)])
def test_a_step_has_its_part_of_the_sequences(num_stages: int, num_requests: int) -> None:
    setup = Setup(num_blocks=64, max_num_seqs=8, pipeline_depth=num_stages, num_stages=num_stages)
    world = World(setup)
    for index in range(num_requests):
        world.add(request(f"r{index}", 2, 30))
    turns: list[list[int]] = []
    while world.live:
        while (plan := world.plan()) is not None:
            turns.append(decoding(plan))
        in_flight = [slot for plan in world.in_flight for slot in decoding(plan)]
        assert len(set(in_flight)) == len(in_flight), "a sequence is in two steps"
        world.commit()
    part = -(-num_requests // num_stages)
    middle = turns[12:-12]
    assert max(map(len, middle)) == part
    counts = [sum(slot in turn for turn in middle) for slot in range(num_requests)]
    assert max(counts) - min(counts) <= 1, "every sequence has its turn"


def test_a_sequence_that_cannot_grow_leaves_its_turn_to_another() -> None:
    setup = Setup(num_blocks=6, max_num_seqs=2, pipeline_depth=2, num_stages=2)
    world = World(setup)
    world.add(request("old", 4, 12))
    world.add(request("new", 8, 16))
    world.drain()
    world.verify()
    assert all(len(got.token_ids) in (12, 16) for got in world.received.values())


def test_chunks_of_a_prompt_follow_each_other() -> None:
    world = World(Setup(max_num_batched_tokens=4, pipeline_depth=3, num_stages=3))
    world.add(request("long", 12, 2))
    plans = [world.plan() for _ in range(3)]
    assert [row.num_tokens for plan in plans if plan for row in plan.rows] == [4, 4, 4]
    world.drain()
    world.verify()


@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_compute_parts_of_one_prompt_at_the_same_time(num_stages: int) -> None:
    sizes = {"num_blocks": 300, "max_num_batched_tokens": 1024, "max_model_len": 1030}
    undivided = World(Setup(**sizes))
    undivided.add(request("long", 1000, 2))
    one = undivided.plan()
    assert one is not None and [row.num_tokens for row in one.rows] == [1000]

    world = World(Setup(**sizes, pipeline_depth=num_stages, num_stages=num_stages))
    world.add(request("long", 1000, 2))
    parts = [row.num_tokens for _ in range(num_stages) for row in (world.plan() or one).rows]
    assert len(set(parts)) == 1 and parts[0] <= 1000 // num_stages
    world.drain()
    world.verify()
