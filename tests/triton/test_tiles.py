"""Tiles of products: found by GPU, shape and tokens, tuned without a change of bits."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from msgspec.structs import replace

from benchmarks.tune_gpu import main
from op_checks.invariance import same_bits
from quickstep.model.quantization import SCHEMES
from quickstep.model.quantize import quantize_matrix
from quickstep.ops.reference import reference_ops
from quickstep.ops.triton.linear import pack_linear, tiled_linear
from quickstep.ops.triton.quantized_linear import pack_quantized
from quickstep.ops.triton.tiles import DEFAULTS, TUNED, ShapeTiles, Tile, tiles_of


def test_a_shape_without_a_row_has_the_default_of_its_kind() -> None:
    for kind, tiles in DEFAULTS.items():
        for gpu in ("", *TUNED):
            assert tiles_of(gpu, kind, 1234, 64) is tiles


def test_the_last_tile_is_for_all_other_tokens() -> None:
    every = [*DEFAULTS.values(), *(row for rows in TUNED.values() for row in rows.values())]
    for tiles in every:
        limits = [most for most, _ in tiles.by_tokens]
        assert limits[-1] is None and None not in limits[:-1]


def test_a_tile_is_found_by_the_number_of_tokens() -> None:
    small, large = Tile(16, 64), Tile(64, 128)
    tiles = ShapeTiles(64, ((16, small), (None, large)))
    assert [tiles.tile(tokens) for tokens in (1, 16, 17, 4096)] == [small, small, large, large]


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("kind", [None, "int8", "int4", "fp8"])
def test_another_tile_has_the_same_bits_interpreted(kind: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, 64, generator=generator)
    packed = pack_linear(values.bfloat16(), None)
    if kind is not None:
        form = SCHEMES[kind].format_of(64, outer=False)
        packed = pack_quantized(quantize_matrix(reference_ops(), values, form), None)
    x = torch.randn(9, 64, generator=generator).bfloat16()
    assert same_bits(tiled_linear(x, packed, Tile(16, 32)), tiled_linear(x, packed))


@pytest.mark.usefixtures("products_in_order")
def test_the_tuner_prints_a_row_for_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(rows) == 4
    read = [eval(f"{{{row}}}", {"ShapeTiles": ShapeTiles, "Tile": Tile}) for row in rows]
    assert [next(iter(one)) for one in read] == [
        (kind, 48, 64) for kind in ("float", "int8", "int4", "float8")
    ]


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("num_inputs", [960, 1900])
def test_slices_have_the_same_bits_in_one_program_and_in_several(num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    packed = pack_linear(torch.randn(40, num_inputs, generator=generator).bfloat16(), None)
    x = torch.randn(3, num_inputs, generator=generator).bfloat16()
    assert packed.data.slice_len < num_inputs
    for _ in range(2):  # the second time as well
        several = tiled_linear(x, packed, Tile(16, 64))
        assert not packed.data.arrived.any()
        one = replace(packed, data=replace(packed.data, arrived=None))
        assert same_bits(tiled_linear(x, one, Tile(16, 64)), several)
