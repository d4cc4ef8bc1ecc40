"""How policies split a step: on views only, without a scheduler."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from quickstep.config import PolicyName, SchedulerConfig
from quickstep.core.cost_model import Coefficients, LinearCostModel, StepLoad
from quickstep.core.policies import MixedPolicy, PrefillFirstPolicy, StepView, make_policy
from quickstep.core.service_order import ServiceOrder
from quickstep.types import Phase

ORDER = ServiceOrder()
COSTS = LinearCostModel(Coefficients(0.010, token_s=0.001, row_s=0.0, kv_token_s=0.0, pair_s=0.0))


def view(
    num_decodes: int = 0, num_prefill_tokens: int = 0, num_tokens_left: int = 1000
) -> StepView:
    return StepView(
        now=0.0,
        decode=StepLoad(num_decodes, num_decodes, 10 * num_decodes),
        prefill=StepLoad(num_prefill_tokens, min(1, num_prefill_tokens), num_prefill_tokens),
        num_tokens_left=num_tokens_left,
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
    policy = MixedPolicy(ORDER, inter_token_target_s=0.100)
    assert policy.tokens(Phase.PREFILL, view(num_decodes=20), COSTS) == 70


def test_mixed_takes_fewer_tokens_of_a_prompt_that_is_scored() -> None:
    policy = MixedPolicy(ORDER, inter_token_target_s=0.100)
    costs = LinearCostModel(Coefficients(0.010, 0.001, 0.0, 0.0, 0.0, score_s=0.002))
    seen = view(num_decodes=20)
    assert policy.tokens(Phase.PREFILL, seen, costs) == 70
    scored = replace(seen, scored=range(0, 500))
    assert policy.tokens(Phase.PREFILL, scored, costs) == 70 // 3
    assert policy.tokens(Phase.PREFILL, replace(scored, prefill_start=500), costs) == 70
    # ten positions cost as much as 20 tokens
    assert policy.tokens(Phase.PREFILL, replace(seen, scored=range(20, 30)), costs) == 50


def test_mixed_counts_the_prompts_that_are_placed() -> None:
    policy = MixedPolicy(ORDER, inter_token_target_s=0.100, min_prefill_tokens=16)
    seen = view(num_decodes=20)
    placed = replace(seen, prefill=StepLoad.of_span(0, 50), num_tokens_left=930)
    assert policy.tokens(Phase.PREFILL, placed, COSTS) == 20
    full = replace(seen, prefill=StepLoad.of_span(0, 70), num_tokens_left=910)
    assert policy.tokens(Phase.PREFILL, full, COSTS) == 0


def test_mixed_takes_all_tokens_when_no_row_decodes() -> None:
    policy = MixedPolicy(ORDER, inter_token_target_s=0.100)
    assert policy.tokens(Phase.PREFILL, view(), COSTS) == 1000


def test_mixed_never_starves_prefill() -> None:
    policy = MixedPolicy(
        ORDER, inter_token_target_s=0.001, min_prefill_tokens=16, least_stretch=1.0
    )
    assert policy.tokens(Phase.PREFILL, view(num_decodes=20), COSTS) == 16
    assert policy.tokens(Phase.PREFILL, view(num_decodes=20, num_tokens_left=3), COSTS) == 3


@pytest.mark.parametrize("num_decodes", [1, 20, 70, 200])
def test_mixed_lets_a_step_take_twice_what_its_decode_rows_take(num_decodes: int) -> None:
    policy = MixedPolicy(ORDER, inter_token_target_s=0.100)
    seen = view(num_decodes=num_decodes)
    chunk = policy.tokens(Phase.PREFILL, seen, COSTS)
    bound_s = max(0.100, 2 * COSTS.seconds(seen.decode))
    assert COSTS.seconds(seen.decode + StepLoad.of_span(0, chunk)) <= bound_s
    assert COSTS.seconds(seen.decode + StepLoad.of_span(0, chunk + 1)) > bound_s


def test_mixed_gives_decode_all_tokens() -> None:
    policy = MixedPolicy(ORDER, inter_token_target_s=0.001)
    assert policy.phases == (Phase.DECODE, Phase.PREFILL)
    assert policy.tokens(Phase.DECODE, view(num_tokens_left=7), COSTS) == 7


def test_prefill_first_decodes_only_without_prompts() -> None:
    policy = PrefillFirstPolicy(ORDER)
    assert policy.phases == (Phase.PREFILL, Phase.DECODE)
    assert policy.tokens(Phase.PREFILL, view(), COSTS) == 1000
    assert policy.tokens(Phase.DECODE, view(num_prefill_tokens=5), COSTS) == 0
    assert policy.tokens(Phase.DECODE, view(), COSTS) == 1000
