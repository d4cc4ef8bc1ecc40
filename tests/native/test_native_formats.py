"""Quantized safetensors files loaded by the native kernels have the values that torch decodes."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from published_formats import EXACT, ROUNDED_AGAIN
from quantized_checkpoint import opened, write_quantized

from quickstep.errors import ConfigError, EngineError
from quickstep.model.chosen_rows import stored_rows
from quickstep.model.formats.storage import E2M1_LEVELS
from quickstep.model.formats.stored_values import decode_rows
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import FLOAT32, UINT8, HostTensor
from quickstep.ops.weights import LinearWeight, QuantizedWeight, StoredMatrix, StoredRows

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
        has_levels = stored.parts[0].levels is not None
        assert loaded.nbytes < packed.nbytes if has_levels else loaded.nbytes == packed.nbytes
        assert torch.equal(rows_of(table, loaded), rows_of(table, packed))
        x = torch.randn(3, loaded.num_inputs, generator=torch.Generator().manual_seed(1))
        assert torch.equal(table.linear(x, loaded), table.linear(x, packed))


@pytest.mark.parametrize(
    "case", ["awq-g32", "gptq4-g32", "gptq-act-order", "nf4", "fp8-block", "modelopt-nvfp4"]
)
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


@pytest.mark.parametrize(
    "case", ["awq-g32", "gptq8-g64", "packed4-asymmetric", "nf4-nested", "packed-nvfp4"]
)
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


@pytest.mark.parametrize("level", native_status().levels)
@pytest.mark.parametrize("group", [16, 32])
@given(
    num_tokens=st.sampled_from([1, 2, 7, 64, *range(3, 15), 24, 33, 97]),
    inputs=st.sampled_from([64, 96, 288, 1280]),
    outputs=st.sampled_from([1, 64, 65, 200]),
    has_powers=st.booleans(),
)
def test_products_of_e2m1_have_the_bits_of_8_bit_values(
    group: int, level: str, num_tokens: int, inputs: int, outputs: int, has_powers: bool
) -> None:
    """NVFP4 has groups of 16 and scales in float32, MXFP4 groups of 32 and powers of two."""
    generator = torch.Generator().manual_seed(num_tokens + inputs + outputs)
    halves = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.rand((outputs, inputs // group), generator=generator) + 0.1
    if has_powers:
        scales = torch.exp2(torch.floor(4 * torch.log2(scales)))
    table = load_native(2, level)
    assert table is not None and table.load_linear is not None
    with NamedTemporaryFile() as file:
        file.write(halves.numpy().tobytes())
        file.flush()
        held = HostTensor(scales.numpy(), FLOAT32), HostTensor(E2M1_LEVELS, UINT8)
        part = StoredRows(Path(file.name), 0, outputs, "LEVELS", scales=held[0], levels=held[1])
        weight = decode_rows(part, inputs, torch.device("cpu"))
        loaded = table.load_linear(StoredMatrix("LEVELS", (part,), inputs), None)
    assert isinstance(weight, QuantizedWeight) and weight.bits == 6
    values = torch.tensor([0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    stored = torch.stack((halves & 15, halves >> 4), -1).flatten(-2).int()
    expected = values[stored] * scales.repeat_interleave(group, 1)
    assert torch.equal(rows_of(table, loaded), expected)
    panels = -(-outputs // 64) * 64
    assert loaded.nbytes == panels * (inputs // 2 + inputs // group * (2 if has_powers else 4))
    eight = table.pack_quantized(replace(weight, quants=weight.quants + (128 - 32), bits=8), None)
    x = torch.randn((num_tokens, inputs), generator=generator)
    for given_x in (x, x.bfloat16()):
        assert torch.equal(table.linear(given_x, loaded), table.linear(given_x, eight))


def test_levels_of_more_than_6_bits_are_refused(table: OpTable, tmp_path: Path) -> None:
    assert table.load_linear is not None
    write_quantized(tmp_path, *EXACT["modelopt-nvfp4"])
    stored = opened(tmp_path)[1].stored(names_of(("down",)))
    assert stored is not None
    levels = HostTensor(E2M1_LEVELS + np.uint8(96), UINT8)
    wrong = replace(stored, parts=(replace(stored.parts[0], levels=levels),))
    with pytest.raises(EngineError, match="invalid arguments"):
        table.load_linear(wrong, None)


def test_a_file_that_ends_within_words_is_an_error(table: OpTable, tmp_path: Path) -> None:
    assert table.load_linear is not None
    write_quantized(tmp_path, *EXACT["gptq4-g32"])
    stored = opened(tmp_path)[1].stored(names_of(("down",)))
    assert stored is not None
    with (tmp_path / "a.safetensors").open("rb+") as file:
        file.truncate(stored.parts[0].offset + 10)
    with pytest.raises(ConfigError, match="ended within a tensor"):
        table.load_linear(stored, None)
