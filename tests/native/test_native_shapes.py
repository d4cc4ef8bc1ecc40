"""Shapes and arguments at the edges: panel, pair and block borders, views, refusals."""

from __future__ import annotations

import pytest
import torch

from quickstep.errors import ConfigError, EngineError
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.native.library import library_path, open_library
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import AttentionParams, OpTable, PagedLayout

LEVELS = native_status().levels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Panels are 16 outputs, bf16 pairs 2 inputs, accumulator chains 256 inputs.
WIDTHS = (1, 2, 3, 31, 255, 256, 257, 513)
OUTPUTS = (1, 15, 16, 17, 64, 130)


def native(level: str | None = None, num_threads: int = 2) -> OpTable:
    ops = load_native(num_threads, level)
    assert ops is not None
    return ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_linear_is_right_at_every_border(level: str, dtype: torch.dtype) -> None:
    ops = native(level)
    generator = torch.Generator().manual_seed(3)
    for width in WIDTHS:
        for outputs in OUTPUTS:
            # Small integers: every product and sum is exact, so any order gives these bits.
            x = torch.randint(-4, 5, (13, width), generator=generator).to(dtype)
            weight = torch.randint(-2, 3, (outputs, width), generator=generator).to(dtype)
            bias = torch.randint(-9, 10, (outputs,), generator=generator).to(dtype)
            want = (x.double() @ weight.double().T + bias.double()).to(dtype)
            got = ops.linear(x, ops.pack_linear(weight, bias))
            assert torch.equal(got, want), (width, outputs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 12, 95, 96, 97, 200])
def test_every_row_tile_gives_the_bits_of_a_single_row(level: str, num_rows: int) -> None:
    ops = native(level)
    generator = torch.Generator().manual_seed(num_rows)
    packed = ops.pack_linear(torch.randn(70, 515, generator=generator).bfloat16(), None)
    x = torch.randn(num_rows, 515, generator=generator).bfloat16()
    alone = torch.cat([ops.linear(row[None], packed) for row in x])
    assert torch.equal(ops.linear(x, packed), alone)


def test_views_with_strides_are_read_in_place() -> None:
    ops = native()
    wide = torch.randn(9, 200).bfloat16()
    heads = wide[:, 40:168].view(9, 2, 64)
    weight = torch.randn(64).bfloat16()
    assert torch.equal(
        ops.rms_norm(heads, weight, 1e-6, 0.0),
        ops.rms_norm(heads.contiguous(), weight, 1e-6, 0.0),
    )
    cos, sin = torch.rand(9, 32), torch.rand(9, 32)
    assert torch.equal(
        ops.rotary(heads, cos, sin, False), ops.rotary(heads.contiguous(), cos, sin, False)
    )
    packed = ops.pack_linear(torch.randn(20, 128).bfloat16(), None)
    assert torch.equal(
        ops.linear(wide[:, 40:168], packed), ops.linear(wide[:, 40:168].contiguous(), packed)
    )


def test_a_packed_weight_is_a_copy() -> None:
    ops = native()
    weight = torch.randn(32, 64)
    x = torch.randn(3, 64)
    packed = ops.pack_linear(weight, None)
    before = ops.linear(x, packed)
    weight.zero_()
    assert torch.equal(ops.linear(x, packed), before)
    assert packed.nbytes == 32 * 64 * 4


def test_types_without_a_kernel_take_the_reference() -> None:
    ops, reference = native(), reference_ops()
    gate_up = torch.randn(5, 64, dtype=torch.float64)
    assert torch.equal(
        ops.gated_activation(gate_up, "silu"), reference.gated_activation(gate_up, "silu")
    )
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(16)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6, 0.0), reference.rms_norm(x, weight, 1e-6, 0.0))


def test_an_unknown_token_is_refused() -> None:
    ops = native()
    with pytest.raises(EngineError):
        ops.embedding(torch.tensor([3, 10]), torch.randn(10, 8), torch.float32)


def test_a_slot_or_block_outside_the_cache_is_refused() -> None:
    ops = native()
    cache = torch.zeros(2, 4, 1, 8)
    kv = torch.ones(1, 1, 8)
    with pytest.raises(EngineError):
        ops.write_kv(kv, kv, cache, cache, torch.tensor([8]))
    layout = PagedLayout(
        positions=torch.zeros(1, dtype=torch.int64),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        row_offsets=(0, 1),
        context_lens=(1,),
        block_tables=torch.tensor([[2]], dtype=torch.int32),
        block_size=4,
    )
    with pytest.raises(EngineError):
        ops.paged_attention(kv, cache, cache, layout, AttentionParams(1.0), None)


def test_an_unknown_level_names_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="portable"):
        load_native(1, "avx1024")


def test_an_absent_library_is_an_os_error() -> None:
    with pytest.raises(OSError):
        open_library(library_path().with_name("absent.so"))
