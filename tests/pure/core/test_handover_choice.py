"""Which engine computes the prompt of a request, and which one continues it."""

from __future__ import annotations

from msgspec.structs import replace

from quickstep.core.cost_model import Coefficients, LinearCostModel
from quickstep.core.handover import Assignment, Phases, assign, can_hand_over
from quickstep.core.router import FewestRequests, ReplicaState, ReplicaView, Router, RouteRequest
from quickstep.types import Request, Resumed, SamplingParams

COSTS = LinearCostModel(Coefficients(step_s=0.002, token_s=0.0001))
IDLE = ReplicaView(costs=COSTS)
BUSY = replace(IDLE, num_live=4)
DOWN = ReplicaView(state=ReplicaState.DOWN)
PHASES = Phases(num_prefill=2, block_size=16, block_bytes=100_000)
LONG = RouteRequest(num_prompt_tokens=1000, block_size=16)
SAME = ("a",) * 4


def assigned(
    *views: ReplicaView,
    request: RouteRequest = LONG,
    is_divided: bool = True,
    phases: Phases = PHASES,
    fingerprints: tuple[str, ...] = SAME,
    router: Router | None = None,
) -> Assignment:
    router = router or FewestRequests()
    return assign(request, is_divided, views, router, phases, fingerprints, 0.0)


def test_a_prompt_that_delays_no_stream_is_computed_where_it_is_decoded() -> None:
    assert assigned(IDLE, IDLE, BUSY, IDLE) == Assignment(3)


def test_a_prompt_next_to_streams_goes_to_the_prefill_engine_that_is_ready_first() -> None:
    # 4 streams would wait 0.1 s each
    assert assigned(BUSY, IDLE, BUSY, BUSY) == Assignment(0, 2)
    slow = replace(IDLE, costs=LinearCostModel(Coefficients(step_s=0.1, token_s=0.001)))
    assert assigned(slow, IDLE, BUSY, BUSY) == Assignment(1, 2)


def test_a_transfer_that_takes_longer_than_the_streams_wait_is_not_made() -> None:
    slow = replace(PHASES, bytes_per_s=1e7)  # 0.62 s, and the streams wait 0.4 s
    assert assigned(IDLE, IDLE, BUSY, BUSY, phases=slow) == Assignment(2)


def test_a_prompt_for_which_the_decode_engine_has_no_room_is_not_computed_twice() -> None:
    full, nearly = replace(BUSY, num_free_blocks=61), replace(BUSY, num_free_blocks=62)
    assert assigned(IDLE, IDLE, full, full) == Assignment(2)
    assert assigned(IDLE, IDLE, nearly, nearly) == Assignment(0, 2)


def test_only_engines_that_are_up_and_have_the_same_weights_share_a_request() -> None:
    assert assigned(DOWN, IDLE, DOWN, BUSY) == Assignment(1, 3)
    assert assigned(DOWN, DOWN, BUSY, BUSY) == Assignment(2)
    assert assigned(IDLE, BUSY, DOWN, DOWN) == Assignment(0)  # it serves complete requests
    assert assigned(IDLE, IDLE, BUSY, BUSY, fingerprints=("b", "a", "a", "a")) == Assignment(1, 2)
    assert assigned(IDLE, IDLE, BUSY, BUSY, is_divided=False) == Assignment(2)


def test_what_one_engine_has_to_compute_by_itself_is_not_divided() -> None:
    request = Request("r", (1, 2, 3), SamplingParams(max_tokens=5))
    assert can_hand_over(request)
    assert not can_hand_over(replace(request, sampling=SamplingParams(max_tokens=1)))
    assert not can_hand_over(replace(request, sampling=SamplingParams(prompt_logprobs=2)))
    assert not can_hand_over(replace(request, resumed=(Resumed(0, (7,)),)))
