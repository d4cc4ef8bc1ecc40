"""Routing of a mixture of experts: the experts of each token, and the rows of each expert.

`route` has the bits of `ops.reference.experts.route`: IEEE operations in fp64, and a sum of numbers
of which no addition rounds, so that it may run in any order. A plan sorts the rows of a step by
expert without atomics: a row's place is the number of rows before it. A step with few tokens is
routed and planned by one program, in one launch.
"""

from __future__ import annotations

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.reference.experts import SUM_BITS
from quickstep.ops.reference.experts import route as reference_route
from quickstep.ops.table import Routing, RoutingRule
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.triton.rounding import rounded
from quickstep.ops.triton.sampling.exact_math import exp_nonpositive

# Elements of the router's outputs in a program: of one that has a complete step, and of others.
_MOST_PLANNED = 2048
_TILE = 1024
_FEW_TOKENS = 8  # a smaller tile for them
_PLAN_BLOCK = 1024  # rows
# The largest exponential of a token is 1: a sum with this has no digits below 2**(1 - SUM_BITS).
_SUM_SHIFT = tl.constexpr(2.0 ** (1 - SUM_BITS) * 1.5 * 2**52)


class RoutingPlan(msgspec.Struct, frozen=True):
    """The rows of each expert, on the device. Row t * A + a is choice a of token t.

    Attributes:
        rows: [T * A] int32, those of the first expert, then those of the next, each ascending.
        starts: [E + 1] int32, where each expert's are in `rows`, and the end.
    """

    rows: Tensor
    starts: Tensor

    @staticmethod
    def empty(num_rows: int, num_experts: int, device: torch.device) -> RoutingPlan:
        """For a kernel to fill."""
        numbers = torch.empty(num_rows + num_experts + 1, dtype=torch.int32, device=device)
        return RoutingPlan(numbers[num_experts + 1 :], numbers[: num_experts + 1])


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    scores,
    chosen,
    weights,
    rows,
    starts,
    num_tokens,
    num_experts,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    PLAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A block of tokens. PLAN: it is all of them, and their plan is made as well."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    is_expert = (experts < num_experts)[None, :]
    is_token = (tokens < num_tokens)[:, None]
    source = scores + tokens[:, None].to(tl.int64) * num_experts + experts[None, :]
    x = tl.load(source, mask=is_token & is_expert, other=0.0).to(tl.float32).to(tl.float64)
    most = tl.max(tl.where(is_expert, x, -float("inf")), 1)[:, None]
    # inf - inf and NaN: all weights of the token are NaN, and its first experts are chosen
    below = tl.where(is_expert, x - most, 0.0)
    is_bad = tl.max((below != below).to(tl.int32), 1)[:, None] > 0
    exponentials = exp_nonpositive(tl.where(is_bad, 0.0, below))
    exponentials = tl.where(is_expert, exponentials, 0.0)
    total = tl.sum((exponentials + _SUM_SHIFT) - _SUM_SHIFT, 1)[:, None]
    shares = tl.where(is_bad, 1.0, exponentials / total)

    remaining = tl.where(is_expert, shares, -1.0)
    choices = tl.full((BLOCK_T, BLOCK_E), -1, tl.int32)
    sum_chosen = tl.zeros((BLOCK_T, 1), tl.float64)  # a sum with 0 does not round
    for choice in range(PER_TOKEN):
        best = tl.max(remaining, 1)[:, None]
        is_best = remaining == best
        lowest = tl.min(tl.where(is_best, experts[None, :], BLOCK_E), 1)[:, None]
        is_chosen = experts[None, :] == lowest
        remaining = tl.where(is_chosen, -1.0, remaining)
        choices = tl.where(is_chosen, choice, choices)
        sum_chosen += best
    if NORMALISE:
        shares = shares / sum_chosen
    shares = tl.where(is_bad, float("nan"), shares)
    of_token = rounded(shares.to(tl.float32), scores.dtype.element_ty).to(tl.float32)
    is_row = (choices >= 0) & is_token
    row = tokens[:, None] * PER_TOKEN + choices
    every = tl.zeros((BLOCK_T, BLOCK_E), tl.int64) + experts[None, :]
    tl.store(chosen + row, every, mask=is_row)
    tl.store(weights + row, of_token, mask=is_row)
    if PLAN:
        counted = is_row.to(tl.int32)
        counts = tl.sum(counted, 0)
        ends = tl.cumsum(counts, 0)
        place = (ends - counts)[None, :] + tl.cumsum(counted, 0) - counted
        tl.store(rows + place, row, mask=is_row)
        tl.store(starts, 0)
        tl.store(starts + 1 + experts, ends, mask=experts < num_experts)


def route(
    scores: Tensor,
    rule: RoutingRule,
    selection_bias: AnyTensor | None = None,
    factors: AnyTensor | None = None,
) -> Routing:
    """`OpTable.route`. Only a plain softmax has a kernel; ops of torch compute the others."""
    if not rule.is_plain or selection_bias is not None:
        return reference_route(scores, rule, selection_bias, factors)
    per_token = rule.per_token
    num_tokens, num_experts = scores.shape
    device = scores.device
    chosen = torch.empty((num_tokens, per_token), dtype=torch.int64, device=device)
    weights = torch.empty((num_tokens, per_token), dtype=torch.float32, device=device)
    if num_tokens == 0:
        return Routing(chosen, weights)
    block_e = triton.next_power_of_2(num_experts)
    has_plan = num_tokens <= _MOST_PLANNED // block_e
    block_t = max(1, _TILE // block_e)
    plan = None
    if has_plan:
        plan = RoutingPlan.empty(num_tokens * per_token, num_experts, device)
        block_t = _FEW_TOKENS if num_tokens <= _FEW_TOKENS else _MOST_PLANNED // block_e
    _route_kernel[(triton.cdiv(num_tokens, block_t),)](
        scores.contiguous(),
        chosen,
        weights,
        chosen if plan is None else plan.rows,
        chosen if plan is None else plan.starts,
        num_tokens,
        num_experts,
        PER_TOKEN=per_token,
        NORMALISE=rule.normalise,
        PLAN=has_plan,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        enable_fp_fusion=False,
    )
    if factors is not None:
        weights = weights * to_torch(factors)[chosen]
    return Routing(chosen, weights, plan)


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(chosen, rows, starts, num_rows, num_experts, BLOCK: tl.constexpr):
    """The rows of one expert: counts those of lower experts, then places its own."""
    expert = tl.program_id(0)
    numbers = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_rows, BLOCK):
        row = first + numbers
        found = tl.load(chosen + row, mask=row < num_rows, other=num_experts)
        lower += (found < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(starts + expert, place)
    for first in range(0, num_rows, BLOCK):
        row = first + numbers
        found = tl.load(chosen + row, mask=row < num_rows, other=num_experts)
        is_mine = found == expert
        counted = is_mine.to(tl.int32)
        tl.store(rows + place + tl.cumsum(counted, 0) - 1, row, mask=is_mine)
        place += tl.sum(counted, 0)
    if expert == num_experts - 1:
        tl.store(starts + num_experts, place)


def plan_of(chosen: Tensor, num_experts: int) -> RoutingPlan:
    """The plan of experts [T, A] int64 of each token, T above 0."""
    num_rows = chosen.numel()
    plan = RoutingPlan.empty(num_rows, num_experts, chosen.device)
    _plan_kernel[(num_experts,)](
        chosen.contiguous(), plan.rows, plan.starts, num_rows, num_experts, BLOCK=_PLAN_BLOCK
    )
    return plan
