"""Slots of states: what a scheduler does with saved states when steps fail."""

from __future__ import annotations

from scheduler_world import Setup, World
from shadow_executor import Trouble

from quickstep.types import Request, SamplingParams

SETUP = Setup(block_size=1, max_num_batched_tokens=3, state_slots=8)


def test_a_state_of_a_failed_step_is_not_begun_with() -> None:
    """The KV of a prefix is cached without a state. Of two sequences that begin with it, the second
    looks for a state while the step in which the first one saves it is planned.
    """
    world = World(SETUP)
    world.add(Request("longer", (0, 0, 0, 0), SamplingParams(max_tokens=1), seed=0))
    world.drain()
    world.add(Request("pair", (0, 0), SamplingParams(n=2, max_tokens=2), seed=0))
    world.plan()
    [row] = world.in_flight[0].rows
    assert row.start == 0 and row.state is not None and row.state.saves
    world.commit(Trouble.EARLY, frozenset({0}))
    world.drain()
    world.verify()
