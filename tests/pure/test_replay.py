"""A recorded life, replayed on a new scheduler, gives identical plans."""

from __future__ import annotations

import pytest
from random_lives import random_life
from recorded_calls import (
    Added,
    Committed,
    Entry,
    Failed,
    Planned,
    RecordingScheduler,
    replay,
)
from scheduler_world import Setup, ask, open_scheduler, policy_of

from quickstep.core.block_pool import KVBlockPool
from quickstep.core.cost_model import LinearCostModel

LIVES = range(500, 540)


def record_life(seed: int) -> tuple[list[Entry], Setup]:
    entries: list[Entry] = []
    setups: list[Setup] = []

    def open_recording(setup: Setup) -> RecordingScheduler:
        setups.append(setup)
        pool = KVBlockPool(setup.num_blocks, setup.block_size, setup.prefix_caching, setup.digest)
        return RecordingScheduler(
            setup.config, pool, policy_of(setup), LinearCostModel(), entries.append
        )

    random_life(seed, open_recording)
    return entries, setups[0]


@pytest.mark.parametrize("seed", LIVES)
def test_replay_gives_the_identical_plans(seed: int) -> None:
    entries, setup = record_life(seed)
    recorded = [entry.plan for entry in entries if isinstance(entry, Planned)]
    assert any(recorded)
    assert replay(entries, open_scheduler(setup)) == recorded


def test_the_recorded_lives_hold_results_and_failures() -> None:
    kinds = {type(entry) for seed in LIVES for entry in record_life(seed)[0]}
    assert {Committed, Failed} <= kinds


def test_another_order_of_arrival_gives_other_plans() -> None:
    """The comparison can fail: the plans depend on what is replayed."""
    first, second = Added(ask("a"), 0.0), Added(ask("b"), 0.0)
    plans = [
        replay([*order, Planned(0.0, None)], open_scheduler(Setup()))
        for order in ((first, second), (second, first))
    ]
    assert plans[0] != plans[1]
