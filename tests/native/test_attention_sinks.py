"""Attention with sinks: a logit in the denominator of a head's queries, without a value.

How near the results are to float64, and that their bits depend on nothing next to a query, is
checked with all other attention (`op_checks.cases`); here, that those checks would find a sink
that is left out, counted twice or in the wrong place, and what a sink means at its limits.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from op_checks.agreement import agreement
from op_checks.attention_cases import DTYPES, AttentionCase, attention_cases
from op_checks.invariance import mismatches, same_bits
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import OpTable, PagedLayout

LEVELS = native_status().levels
KERNELS = ("reference", *LEVELS)

Change = Callable[[Tensor, PagedLayout], Tensor | None]


def table(kernels: str) -> OpTable:
    ops = reference_ops() if kernels == "reference" else load_native(2, kernels)
    assert ops is not None
    return ops


def case_of(title: str, dtype: torch.dtype = torch.float32) -> AttentionCase:
    name = f"paged_attention-{str(dtype).removeprefix('torch.')}-{title}"
    return next(case for case in attention_cases(dtype) if case.name == name)


def with_sinks(case: AttentionCase, *values: float) -> AttentionCase:
    """The same sinks in turn for all heads."""
    heads = [values[head % len(values)] for head in range(case.q.shape[1])]
    return replace(case, sinks=torch.tensor(heads, dtype=torch.float32))


def attend(ops: OpTable, case: AttentionCase) -> Tensor:
    return ops.paged_attention(*case.arguments)


def planted(ops: OpTable, change: Change) -> OpTable:
    """Attention that takes other sinks than it is given."""

    def paged_attention(q, k_cache, v_cache, layout, params, sinks):
        sinks = None if sinks is None else change(sinks, layout)
        return ops.paged_attention(q, k_cache, v_cache, layout, params, sinks)

    return replace(ops, paged_attention=paged_attention)


WRONG: dict[str, Change] = {
    "left out": lambda sinks, _: None,
    "scaled like a score": lambda sinks, _: sinks * 0.125,
    "counted twice": lambda sinks, _: sinks + 0.6931,
    "another head's": lambda sinks, _: sinks.roll(1),
    "by kv head": lambda sinks, _: sinks.view(-1, 2)[:, 0].repeat_interleave(2),
    "a softmax that adds one": lambda sinks, _: torch.zeros_like(sinks),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("title", ["sinks", "sinks-one-key", "sinks-window-softcap", "sinks-long"])
def test_agreement_finds_a_wrong_sink(wrong: str, title: str) -> None:
    ops, case = table(LEVELS[0]), case_of(title)
    assert agreement(ops, case).ok
    assert not agreement(planted(ops, WRONG[wrong]), case).ok


def test_agreement_finds_a_sink_that_every_split_counts() -> None:
    def once_per_split(sinks: Tensor, layout: PagedLayout) -> Tensor:
        return sinks + torch.tensor(-(-max(layout.context_lens) // 512)).log()

    ops = planted(table(LEVELS[0]), once_per_split)
    assert agreement(ops, case_of("sinks")).ok, "contexts of one split"
    assert not agreement(ops, case_of("sinks-long")).ok


def test_invariance_finds_a_sink_that_decode_rows_lack() -> None:
    def of_prompts(sinks: Tensor, layout: PagedLayout) -> Tensor | None:
        return sinks if layout.row_offsets[-1] > len(layout.context_lens) else None

    found = mismatches(planted(table(LEVELS[0]), of_prompts), case_of("sinks"))
    assert any("alone" in name for name in found)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_sink_is_minus_infinity(kernels: str, dtype: torch.dtype) -> None:
    ops = table(kernels)
    for case in attention_cases(dtype):
        plain = attend(ops, replace(case, sinks=None))
        assert same_bits(attend(ops, with_sinks(case, -torch.inf)), plain), case.name


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("sink", [200.0, 3e38, torch.inf])
def test_a_sink_far_above_all_scores_leaves_nothing(kernels: str, sink: float) -> None:
    ops = table(kernels)
    for title in ("mixed", "window", "long"):
        assert not attend(ops, with_sinks(case_of(title), sink)).any()


@pytest.mark.parametrize("kernels", KERNELS)
def test_one_visible_key_shares_with_the_sink_as_a_sigmoid_says(kernels: str) -> None:
    case = with_sinks(case_of("sinks-one-key"), 0.5, -3.0, 4.0, 0.0)
    assert case.params.window == 1 and case.sinks is not None
    ops = table(kernels)
    values = attend(ops, replace(case, sinks=None)).double()
    blocks = case.layout.slot_mapping
    keys = case.k_cache.flatten(0, 1)[blocks].double()
    scores = (case.q.double() * keys).sum(-1) * case.params.scale
    share = torch.sigmoid(scores - case.sinks.double()).unsqueeze(-1)
    torch.testing.assert_close(attend(ops, case).double(), values * share, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_head_is_touched_by_its_own_sink_alone(kernels: str) -> None:
    ops, case = table(kernels), case_of("sinks-long", torch.bfloat16)
    assert case.sinks is not None
    before = attend(ops, case)
    sinks = case.sinks.clone()
    sinks[3] += 1.0
    after = attend(ops, replace(case, sinks=sinks))
    others = [head for head in range(case.q.shape[1]) if head != 3]
    assert same_bits(after[:, others], before[:, others])
    assert not same_bits(after[:, 3], before[:, 3])
