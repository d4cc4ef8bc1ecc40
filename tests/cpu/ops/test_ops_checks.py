"""The checks themselves: an implementation that breaks its promise is found out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch._subclasses.fake_tensor import FakeTensorMode

from op_checks.agreement import agreement
from op_checks.cases import OPS, cases
from op_checks.invariance import arrangements, mismatches, same_bits
from op_checks.placement import moved
from quickstep.errors import ConfigError
from quickstep.ops.reference import reference_ops
from quickstep.ops.resolve import resolve_ops

CPU = torch.device("cpu")


def named(op: str, part: str):
    return next(case for case in cases([op]) if part in case.name)


def noisy(function, scale):
    """Each output off by a relative error that the reference does not have."""
    return lambda *args: function(*args) * (1.0 + scale)


@pytest.mark.parametrize("op", ["rms_norm", "gated_activation", "paged_attention"])
def test_agreement_finds_a_relative_error_above_the_dtypes(op):
    table = reference_ops()
    wrong = replace(table, **{op: noisy(getattr(table, op), 1e-4)})
    name = {"rms_norm": "19-77", "gated_activation": "19-77", "paged_attention": "mixed"}[op]
    case = named(op, f"float32{'' if op != 'gated_activation' else '-silu'}-{name}")
    assert not agreement(wrong, case).ok
    assert agreement(table, case).ok


def test_agreement_finds_nan_and_a_wrong_dtype():
    table, case = reference_ops(), named("rms_norm", "float32-19-77")
    assert not agreement(replace(table, rms_norm=noisy(table.rms_norm, torch.nan)), case).ok
    wide = replace(table, rms_norm=lambda *args: table.rms_norm(*args).double())
    assert not agreement(wide, case).ok


def test_agreement_finds_sums_rounded_to_sixteen_bits():
    table, case = reference_ops(), named("linear", "bfloat16-18-8192-48")

    def sum_in_bf16(x, weight):
        parts = [a @ b.t() for a, b in zip(x.split(64, -1), weight.data.split(64, -1), strict=True)]
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = total + part
        return total

    assert not agreement(replace(table, linear=sum_in_bf16), case).ok


def test_invariance_finds_a_value_that_leaks_between_tokens():
    table, case = reference_ops(), named("linear", "float32-37-896")

    def leaky(x, weight):
        y = table.linear(x, weight)
        return y + y[0] * 0.0  # NaN in token 0 spreads

    found = mismatches(replace(table, linear=leaky), case)
    assert any("next to nan" in name for name in found)


def test_invariance_finds_a_result_that_depends_on_the_number_of_tokens():
    table, case = reference_ops(), named("rms_norm", "float32-37-896")

    def by_count(x, weight, eps, offset):
        y = table.rms_norm(x, weight, eps, offset)
        return y if x.shape[0] % 4 else y.nextafter(torch.tensor(torch.inf))

    assert any("first 4" in name for name in mismatches(replace(table, rms_norm=by_count), case))


def test_invariance_finds_attention_that_reads_beyond_the_context():
    table, case = reference_ops(), named("paged_attention", "float32-mixed")

    def reads_all(q, k_cache, v_cache, layout, params, sinks):
        out = table.paged_attention(q, k_cache, v_cache, layout, params, sinks)
        return out + v_cache[layout.block_tables[0].long()].sum() * 0.0

    found = mismatches(replace(table, paged_attention=reads_all), case)
    assert any("stale" in name for name in found)


def test_invariance_finds_attention_that_reads_later_tokens_of_its_row():
    table, case = reference_ops(), named("paged_attention", "float32-mixed")

    def reads_later(q, k_cache, v_cache, layout, params, sinks):
        out = table.paged_attention(q, k_cache, v_cache, layout, params, sinks)
        last = v_cache.view(-1, *v_cache.shape[2:])[layout.slot_mapping[-1]]
        return out + last.sum() * 0.0

    found = mismatches(replace(table, paged_attention=reads_later), case)
    assert any("before NaN" in name for name in found)


def test_same_bits_tells_signed_zeros_apart_but_not_nan_payloads():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([torch.nan]), -torch.tensor([torch.nan]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))


def test_the_reference_is_chosen_when_requested():
    assert resolve_ops(CPU, "reference").name == "reference"


def test_auto_gives_a_complete_table_on_the_cpu():
    table = resolve_ops(CPU)
    x = torch.ones(2, 8)
    assert torch.equal(table.linear(x, table.pack_linear(torch.eye(8), None)), x)


def test_native_kernels_are_refused_where_they_cannot_run():
    with pytest.raises(ConfigError, match="native"):
        resolve_ops(torch.device("meta"), "native")


def test_an_unknown_kernel_set_is_refused_by_name():
    with pytest.raises(ConfigError, match="fastest"):
        resolve_ops(CPU, "fastest")


@pytest.mark.parametrize("op", OPS)
def test_every_tensor_of_a_case_and_of_its_arrangements_goes_to_a_gpu(op: str) -> None:
    """With tensors without memory, as no GPU is needed to see that none is left on the host."""
    gpu = torch.device("cuda", 0)
    of_op = list(cases([op], (torch.bfloat16,)))
    for case in of_op if op == "lora" else of_op[:2]:
        arranged = (case, *arrangements(case))
        with FakeTensorMode(allow_non_fake_inputs=True):
            there = list(tensors_of(moved(arranged, gpu)))
        assert len(there) == len(list(tensors_of(arranged)))
        assert all(one.device == gpu for one in there)


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_of(one)
    elif isinstance(value, msgspec.Struct):
        yield from tensors_of([getattr(value, name) for name in value.__struct_fields__])
