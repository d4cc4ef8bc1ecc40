"""Attention of complete texts: that of the reference, and the same bits in any batch."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.reference.text_attention import text_attention
from quickstep.ops.table import OpTable

TABLES = [table for level in native_status().levels if (table := load_native(2, level)) is not None]
LENGTHS = (1, 63, 64, 65, 7, 200)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def heads_of(num_tokens: int, num_heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, 3, H, D], as a product of queries, keys and values is."""
    source = torch.Generator().manual_seed(num_heads * size)
    return torch.randn((num_tokens, 3, num_heads, size), generator=source).to(dtype)


def attention(
    table: OpTable, qkv: torch.Tensor, offsets: tuple[int, ...], window: int | None
) -> torch.Tensor:
    assert table.text_attention is not None
    q, k, v = (qkv[:, part] for part in range(3))
    return table.text_attention(q, k, v, offsets, qkv.shape[-1] ** -0.5, window)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_heads", "size"), [(3, 20), (2, 64), (1, 256)])
@pytest.mark.parametrize("window", [None, 0, 5, 64])
def test_texts_attend_as_in_the_reference_and_alone(
    dtype: torch.dtype, num_heads: int, size: int, window: int | None
) -> None:
    offsets = tuple(accumulate(LENGTHS, initial=0))
    qkv = heads_of(offsets[-1], num_heads, size, dtype)
    q, k, v = (qkv[:, part] for part in range(3))
    expected = text_attention(q, k, v, offsets, size**-0.5, window)
    for table in TABLES:
        found = attention(table, qkv, offsets, window)
        atol = TOLERANCES[dtype]
        torch.testing.assert_close(found.float(), expected.float(), atol=atol, rtol=atol)
        for start, end in pairwise(offsets):
            alone = attention(table, qkv[start:end], (0, end - start), window)
            assert torch.equal(alone, found[start:end])


@pytest.mark.parametrize("window", [None, 3])
def test_what_is_no_number_stays_in_its_text(window: int | None) -> None:
    qkv = heads_of(12, 2, 16, torch.float32)
    for part in range(3):
        spoiled = qkv.clone()
        spoiled[2, part, 0, 1] = torch.nan
        for table in TABLES:
            found = attention(table, spoiled, (0, 6, 12), window)
            assert found[2, 0].isnan().any() and found[6:].isfinite().all()
            assert torch.equal(found[:, 1], attention(table, qkv, (0, 6, 12), window)[:, 1])
