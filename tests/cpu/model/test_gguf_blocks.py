"""ggml's block types as quantized values: the same weights as ggml's own package dequantizes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import OTHER_SCALES, SCALES_AT, meaning, random_blocks

from quickstep.model.formats.gguf_blocks import decode_blocks
from quickstep.model.formats.gguf_kinds import BLOCK_KINDS
from quickstep.ops.block_grids import block_grid
from quickstep.ops.weights import QuantizedWeight

OUTPUTS, INPUTS = 24, 512
GRIDS = [kind for kind in Kind if kind.name.startswith(("IQ1", "IQ2", "IQ3"))]


def decoded(kind: Kind, rows: np.ndarray, inputs: int = INPUTS) -> QuantizedWeight:
    blocks = torch.from_numpy(rows).reshape(-1, rows.size * _elements(kind) // (len(rows) * inputs))
    return decode_blocks(kind.name, blocks, (len(rows), inputs))


def _elements(kind: Kind) -> int:
    return gguf.GGML_QUANT_SIZES[kind][0]


@pytest.mark.parametrize("kind", [*SCALES_AT, *OTHER_SCALES], ids=lambda kind: kind.name)
def test_quantized_values_are_those_of_ggml(kind: Kind) -> None:
    rows = random_blocks(kind, OUTPUTS, INPUTS)
    weight = decoded(kind, rows)
    assert int(weight.quants.max()) < 2**weight.bits
    assert (weight.zeros is not None) == BLOCK_KINDS[kind.name].has_zeros
    expected = meaning(kind, rows)
    assert torch.equal(weight.dequantized(), expected)
    torch.testing.assert_close(weight.with_zeros().dequantized(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [*SCALES_AT, *OTHER_SCALES], ids=lambda kind: kind.name)
def test_a_matrix_of_one_block_is_decoded(kind: Kind) -> None:
    rows = random_blocks(kind, 1, _elements(kind))
    assert torch.equal(decoded(kind, rows, _elements(kind)).dequantized(), meaning(kind, rows))


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_grids_are_those_of_ggml(kind: Kind) -> None:
    theirs = getattr(gguf.quants, kind.name)
    theirs.init_grid()
    ours = block_grid(kind.name)
    assert ours is not None
    values = ours.numpy().astype(np.float32) - (kind in (Kind.IQ1_S, Kind.IQ1_M))
    assert np.array_equal(values, theirs.grid.reshape(theirs.grid_shape))


def test_every_scale_of_nvfp4_is_that_of_ggml() -> None:
    rows = random_blocks(Kind.NVFP4, 64, 64).copy()
    rows[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    assert torch.equal(decoded(Kind.NVFP4, rows, 64).dequantized(), meaning(Kind.NVFP4, rows))


@pytest.mark.parametrize("kind", SCALES_AT, ids=lambda kind: kind.name)
def test_a_group_without_a_scale_holds_its_minimum(kind: Kind) -> None:
    rows = random_blocks(kind, OUTPUTS, INPUTS).copy()
    blocks = rows.reshape(OUTPUTS * INPUTS // _elements(kind), -1)
    at = SCALES_AT[kind][0]
    blocks[::2, at : at + 2] = 0
    found = decoded(kind, rows).dequantized()
    assert torch.equal(found, meaning(kind, rows))
    zeros = decoded(kind, rows).with_zeros().dequantized()
    assert bool(zeros.isfinite().all())
    torch.testing.assert_close(zeros, meaning(kind, rows), rtol=2e-6, atol=1e-6)
