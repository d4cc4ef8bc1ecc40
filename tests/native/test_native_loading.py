"""Matrices packed straight from files are those packed from tensors, and bad files are refused."""

from __future__ import annotations

import pytest
import torch

from quickstep.errors import ConfigError
from quickstep.model.quantize import rounding_error
from quickstep.ops.native.backend import load_native
from quickstep.ops.weights import Rounding, StoredMatrix, StoredRows

KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
NUM_INPUTS = 192


@pytest.fixture(scope="module")
def table():
    found = load_native(2)
    assert found is not None
    return found


def random_tensor(shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_in_file(path, rows, before=b"\x7f" * 13):
    """The rows of a tensor in a file of their own, at an odd offset, before other bytes."""
    path.write_bytes(before + rows.contiguous().view(torch.uint8).numpy().tobytes() + b"more")
    return StoredRows(path, len(before), rows.shape[0])


def stored(directory, weight, cut, rounding=None):
    parts = tuple(
        rows_in_file(directory / f"part{index}", rows)
        for index, rows in enumerate((weight[:cut], weight[cut:]))
        if len(rows)
    )
    return StoredMatrix(KINDS[weight.dtype], parts, weight.shape[1], rounding)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("num_outputs", "cut"), [(1, 0), (77, 30), (1000, 999)])
def test_a_matrix_from_files_is_the_packed_tensor(table, tmp_path, dtype, num_outputs, cut):
    weight, bias = (
        random_tensor((num_outputs, NUM_INPUTS), dtype),
        random_tensor((num_outputs,), dtype, 1),
    )
    x = random_tensor((5, NUM_INPUTS), dtype, 2)
    loaded = table.load_linear(stored(tmp_path, weight, cut), bias)
    assert torch.equal(table.linear(x, loaded), table.linear(x, table.pack_linear(weight, bias)))


@pytest.mark.parametrize(
    "form", [(8, None, False, False), (4, 32, True, False), (4, 64, False, True)]
)
def test_a_matrix_rounded_from_files_is_the_rounded_tensor(table, tmp_path, form):
    weight, x = random_tensor((150, NUM_INPUTS)), random_tensor((5, NUM_INPUTS), seed=2)
    errors = []
    rounding = Rounding(*form, 1, errors.append)
    loaded = table.load_linear(stored(tmp_path, weight, 70, rounding), None)
    quantized = table.quantize(weight, *form)
    assert torch.equal(
        table.linear(x, loaded), table.linear(x, table.pack_quantized(quantized, None))
    )
    [error] = errors
    assert error == pytest.approx(rounding_error(weight, quantized), rel=0.1)


def test_a_file_that_ends_within_the_matrix_is_refused_by_name(table, tmp_path):
    whole = stored(tmp_path, random_tensor((1000, NUM_INPUTS)), 500)
    file = whole.parts[1].file
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"part1 ended within a tensor"):
        table.load_linear(whole, None)


def test_a_file_that_is_gone_is_refused_by_name(table, tmp_path):
    whole = stored(tmp_path, random_tensor((8, NUM_INPUTS)), 4)
    whole.parts[0].file.unlink()
    with pytest.raises(ConfigError, match=r"part0 cannot be read"):
        table.load_linear(whole, None)
