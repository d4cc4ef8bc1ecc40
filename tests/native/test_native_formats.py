"""Quantized safetensors files loaded by the native kernels have the values that torch decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published_formats import EXACT, ROUNDED_AGAIN
from quantized_checkpoint import opened, write_quantized

from quickstep.errors import ConfigError
from quickstep.model.chosen_rows import stored_rows
from quickstep.ops.native.backend import load_native
from quickstep.ops.table import OpTable
from quickstep.ops.weights import LinearWeight, QuantizedWeight

STACKS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))


@pytest.fixture(scope="module")
def table() -> OpTable:
    found = load_native(2)
    assert found is not None
    return found


def names_of(stack: tuple[str, ...]) -> tuple[str, ...]:
    place = "mlp" if stack[0] in ("gate", "down") else "self_attn"
    return tuple(f"model.layers.1.{place}.{part}_proj.weight" for part in stack)


def rows_of(table: OpTable, weight: LinearWeight) -> torch.Tensor:
    """All weights, as the kernels have them."""
    return table.embedding(torch.arange(weight.num_outputs), weight, torch.float32)


@pytest.mark.parametrize("case", EXACT | ROUNDED_AGAIN)
def test_a_loaded_matrix_has_the_bits_of_the_decoded_one(
    table: OpTable, case: str, tmp_path: Path
) -> None:
    assert table.load_linear is not None
    write_quantized(tmp_path, *(EXACT | ROUNDED_AGAIN)[case])
    source = opened(tmp_path)[1]
    for stack in STACKS:
        names = names_of(stack)
        decoded, stored = source.linear(names), source.stored(names)
        assert isinstance(decoded, QuantizedWeight) and stored is not None
        loaded = table.load_linear(stored, None)
        if decoded.is_float8:
            assert torch.equal(rows_of(table, loaded), decoded.dequantized())
            continue
        packed = table.pack_quantized(decoded, None)
        assert loaded.nbytes == packed.nbytes
        assert torch.equal(rows_of(table, loaded), rows_of(table, packed))
        x = torch.randn(3, loaded.num_inputs, generator=torch.Generator().manual_seed(1))
        assert torch.equal(table.linear(x, loaded), table.linear(x, packed))


@pytest.mark.parametrize("case", ["awq-g32", "gptq4-g32", "gptq-act-order", "nf4", "fp8-block"])
def test_some_rows_of_a_matrix_are_those_of_all_of_it(
    table: OpTable, case: str, tmp_path: Path
) -> None:
    assert table.load_linear is not None
    write_quantized(tmp_path, *(EXACT | ROUNDED_AGAIN)[case])
    stored = opened(tmp_path)[1].stored(names_of(("q", "k", "v")))
    assert stored is not None
    expected = rows_of(table, table.load_linear(stored, None))
    rows = (range(3, 17), range(64, 72), range(120, 200))  # across words, and parts of the stack
    found = rows_of(table, table.load_linear(stored_rows(stored, rows), None))
    assert torch.equal(found, torch.cat([expected[part.start : part.stop] for part in rows]))


@pytest.mark.parametrize("case", ["awq-g32", "gptq8-g64", "packed4-asymmetric", "nf4-nested"])
def test_a_quantized_matrix_can_be_loaded_in_floating_point(
    table: OpTable, case: str, tmp_path: Path
) -> None:
    """As routers are, and what is stacked with matrices that are not quantized."""
    assert table.load_linear is not None
    write_quantized(tmp_path, *(EXACT | ROUNDED_AGAIN)[case])
    source = opened(tmp_path)[1]
    names = names_of(("down",))
    stored = source.stored(names, floating=True)
    assert stored is not None and not stored.is_quantized
    found = rows_of(table, table.load_linear(stored, None))
    assert torch.equal(found, source.tensor(names[0]))


def test_a_file_that_ends_within_words_is_an_error(table: OpTable, tmp_path: Path) -> None:
    assert table.load_linear is not None
    write_quantized(tmp_path, *EXACT["gptq4-g32"])
    stored = opened(tmp_path)[1].stored(names_of(("down",)))
    assert stored is not None
    with (tmp_path / "a.safetensors").open("rb+") as file:
        file.truncate(stored.parts[0].offset + 10)
    with pytest.raises(ConfigError, match="ended within a tensor"):
        table.load_linear(stored, None)
