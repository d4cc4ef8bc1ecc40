"""How policies split a step: on views alone, without a scheduler."""

from __future__ import annotations

import pytest

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.policies import MixedPolicy, PrefillFirstPolicy, StepView, make_policy
from quickstep.types import Phase

COSTS = LinearCostModel(Coefficients(0.010, token_s=0.001, row_s=0.0, kv_token_s=0.0, pair_s=0.0))


def view(num_decodes: int = 0, num_prefill_tokens: int = 0, room: int = 1000) -> StepView:
    return StepView(
        now=0.0,
        decode=StepLoad(num_decodes, num_decodes, 10 * num_decodes),
        prefill=StepLoad(num_prefill_tokens, min(1, num_prefill_tokens), num_prefill_tokens),
        room=room,
        prefill_start=0,
        num_running=num_decodes,
        num_waiting=1,
        oldest_arrival_s=0.0,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [(PolicyName.MIXED, MixedPolicy), (PolicyName.PREFILL_FIRST, PrefillFirstPolicy)],
)
def test_each_name_has_its_policy(name: PolicyName, kind: type) -> None:
    assert isinstance(make_policy(SchedulerConfig(policy=name)), kind)


def test_mixed_fills_the_step_up_to_the_inter_token_target() -> None:
    policy = MixedPolicy(inter_token_target_s=0.100)
    assert policy.tokens(Phase.PREFILL, view(num_decodes=20), COSTS) == 70


def test_mixed_takes_all_the_room_when_nobody_decodes() -> None:
    policy = MixedPolicy(inter_token_target_s=0.100)
    assert policy.tokens(Phase.PREFILL, view(), COSTS) == 1000


def test_mixed_never_starves_prefill() -> None:
    policy = MixedPolicy(inter_token_target_s=0.001, min_prefill_tokens=16, least_stretch=1.0)
    assert policy.tokens(Phase.PREFILL, view(num_decodes=20), COSTS) == 16
    assert policy.tokens(Phase.PREFILL, view(num_decodes=20, room=3), COSTS) == 3


@pytest.mark.parametrize("num_decodes", [1, 20, 70, 200])
def test_mixed_lets_a_step_take_twice_what_its_decode_rows_take(num_decodes: int) -> None:
    policy = MixedPolicy(inter_token_target_s=0.100)
    seen = view(num_decodes=num_decodes)
    chunk = policy.tokens(Phase.PREFILL, seen, COSTS)
    bound_s = max(0.100, 2 * COSTS.seconds(seen.decode))
    assert COSTS.seconds(seen.decode + StepLoad.of_span(0, chunk)) <= bound_s
    assert COSTS.seconds(seen.decode + StepLoad.of_span(0, chunk + 1)) > bound_s


def test_mixed_gives_decode_all_the_room() -> None:
    policy = MixedPolicy(inter_token_target_s=0.001)
    assert policy.phases == (Phase.DECODE, Phase.PREFILL)
    assert policy.tokens(Phase.DECODE, view(room=7), COSTS) == 7


def test_prefill_first_decodes_only_without_prompts() -> None:
    policy = PrefillFirstPolicy()
    assert policy.phases == (Phase.PREFILL, Phase.DECODE)
    assert policy.tokens(Phase.PREFILL, view(), COSTS) == 1000
    assert policy.tokens(Phase.DECODE, view(num_prefill_tokens=5), COSTS) == 0
    assert policy.tokens(Phase.DECODE, view(), COSTS) == 1000
