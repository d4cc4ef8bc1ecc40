"""ggml's blocks loaded natively are what torch decodes, also stacks of types and paired heads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import NamedTemporaryFile

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import OTHER_SCALES, SCALES_AT, meaning, paired, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from quickstep.errors import EngineError
from quickstep.model.chosen_rows import stored_rows
from quickstep.model.formats.gguf_blocks import decode_blocks
from quickstep.model.formats.gguf_kinds import BLOCK_KINDS
from quickstep.model.formats.quantized_reader import stack_matrices
from quickstep.model.quantization import MatrixFormat
from quickstep.ops.native.backend import load_native, native_status
from quickstep.ops.table import ExpertWeights, OpTable, Routing
from quickstep.ops.weights import LinearWeight, QuantizedWeight, StoredMatrix, StoredRows

OUTPUTS, INPUTS, HEAD = 96, 512, 16
PLAIN = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# as files mix them in queries, keys and values
STACKS = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q4_0", "Q5_0", "Q8_0"),
    ("Q4_0", "Q4_K"),
    ("Q4_1", "Q8_0"),
    ("Q5_1", "Q6_K"),
    ("Q5_K", "Q4_K", "Q5_0"),
    ("IQ3_S", "IQ4_XS", "Q8_0"),
    ("IQ2_XXS", "IQ2_XS", "Q4_K"),
    ("IQ1_M", "IQ1_S", "IQ3_XXS"),
    ("NVFP4", "IQ2_S"),
    ("Q5_K", "Q4_K"),
    ("Q3_K", "Q6_K"),
    ("Q5_0", "Q4_0", "Q5_0"),
    ("IQ3_S", "Q6_K"),
    ("Q4_1", "Q5_0"),
    ("Q5_1", "IQ1_S"),
]
K_TYPES = {"Q4_K": 148, "Q5_K": 212, "Q6_K": 210, "Q2_K": 164, "Q3_K": 146, "IQ4_XS": 138}
# of 5 and 6 bits: bytes for 256 weights
SIX_BITS = {"Q5_K": 212, "Q6_K": 210, "Q5_0": 208, "Q5_1": 224}
# of 16 values in uneven steps, held in 4 bits: the same
OF_LEVELS = {"IQ4_NL": 144, "IQ4_XS": 138, "MXFP4": 160, "NVFP4": 160}
OF_LEVELS |= {"IQ2_XXS": 160, "IQ2_XS": 192, "IQ2_S": 192, "IQ3_XXS": 160}
LEVELS = native_status().levels


KINDS_CONVERTED = [("Q4_K", "F16"), ("F32", "Q8_0", "BF16"), ("F32",), ("F16",)]
KINDS_CONVERTED += [("IQ3_S", "F32", "IQ1_M"), ("NVFP4", "IQ2_XXS", "F16")]


@cache
def native(level: str | None = None) -> OpTable:
    found = load_native(2, level)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def table() -> OpTable:
    return native()


def a_part(
    path: Path, kind: str, seed: int, head_size: int = 0
) -> tuple[StoredRows, QuantizedWeight | torch.Tensor]:
    """Rows in a file at an odd offset, and the same rows in order, as torch reads them."""
    weight: QuantizedWeight | torch.Tensor
    if kind in PLAIN:
        drawn = torch.randn((OUTPUTS, INPUTS), generator=torch.Generator().manual_seed(seed))
        weight = drawn.to(PLAIN[kind])
        rows = weight.view(torch.uint8).numpy()
    else:
        rows = random_blocks(Kind[kind], OUTPUTS, INPUTS, seed=seed).copy()
        at = SCALES_AT.get(Kind[kind], (0,))[0]
        if Kind[kind] in SCALES_AT:
            rows[::7, at : at + 2] = 0  # groups without a scale hold their minimum
        size = rows.shape[1] // (INPUTS // gguf.GGML_QUANT_SIZES[Kind[kind]][0])
        blocks = torch.from_numpy(rows).reshape(-1, size)
        weight = decode_blocks(kind, blocks, (OUTPUTS, INPUTS))
    written = rows if head_size == 0 else paired(rows, OUTPUTS // head_size)
    path.write_bytes(b"\x7f" * 13 + np.ascontiguousarray(written).tobytes() + b"more")
    return StoredRows(path, 13, OUTPUTS, kind, head_size), weight


def outputs(table: OpTable, weight: object) -> torch.Tensor:
    x = torch.randn((5, INPUTS), generator=torch.Generator().manual_seed(9)).bfloat16()
    return table.linear(x, weight)


@pytest.mark.parametrize("head_size", [0, HEAD])
@pytest.mark.parametrize("kind", [*SCALES_AT, *OTHER_SCALES], ids=lambda kind: kind.name)
def test_blocks_of_every_type_are_loaded_as_torch_decodes_them(
    table: OpTable, tmp_path: Path, kind: Kind, head_size: int
) -> None:
    part, weight = a_part(tmp_path / "f", kind.name, 3, head_size)
    assert isinstance(weight, QuantizedWeight) and table.load_linear is not None
    loaded = table.load_linear(StoredMatrix(kind.name, (part,), INPUTS), None)
    expected = table.pack_quantized(weight, None)
    assert torch.equal(outputs(table, loaded), outputs(table, expected))


@pytest.mark.parametrize("kind", [*SCALES_AT, *OTHER_SCALES], ids=lambda kind: kind.name)
def test_blocks_become_the_floats_that_ggml_makes_of_them(
    table: OpTable, tmp_path: Path, kind: Kind
) -> None:
    rows = random_blocks(kind, OUTPUTS, INPUTS, seed=7)
    (tmp_path / "f").write_bytes(rows.tobytes())
    assert table.load_linear is not None
    part = StoredRows(tmp_path / "f", 0, OUTPUTS, kind.name)
    loaded = table.load_linear(StoredMatrix("F32", (part,), INPUTS), None)
    found = table.linear(torch.eye(INPUTS), loaded).T
    assert torch.equal(found, meaning(kind, rows))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_blocks_of_float16_scales_and_minimums_take_the_bytes_of_the_file(
    table: OpTable, tmp_path: Path, kind: Kind
) -> None:
    outputs = 128  # complete panels
    rows = random_blocks(kind, outputs, INPUTS, seed=5)
    (tmp_path / "f").write_bytes(rows.tobytes())
    assert table.load_linear is not None
    part = StoredRows(tmp_path / "f", 0, outputs, kind.name)
    loaded = table.load_linear(StoredMatrix(kind.name, (part,), INPUTS), None)
    assert loaded.nbytes == rows.nbytes
    held = table.embedding(torch.arange(outputs), loaded, torch.float32)
    assert torch.equal(held, meaning(kind, rows))


@pytest.mark.parametrize("kind", K_TYPES)
def test_scales_of_k_types_take_a_byte_and_an_f16_of_256_inputs(
    table: OpTable, tmp_path: Path, kind: str
) -> None:
    outputs = 128  # complete panels
    (tmp_path / "f").write_bytes(random_blocks(Kind[kind], outputs, INPUTS, seed=5).tobytes())
    assert table.load_linear is not None
    part = StoredRows(tmp_path / "f", 0, outputs, kind)
    loaded = table.load_linear(StoredMatrix(kind, (part,), INPUTS), None)
    assert loaded.nbytes == outputs * INPUTS // 256 * K_TYPES[kind]
    assert planned(kind).num_bytes((outputs, INPUTS)) == loaded.nbytes
    # a factor of the scales has no place there
    scaled = StoredMatrix(kind, (replace(part, factor=0.75),), INPUTS)
    assert table.load_linear(scaled, None).nbytes > loaded.nbytes


def planned(kind: str) -> MatrixFormat:
    held = BLOCK_KINDS[kind]
    return MatrixFormat(
        held.bits,
        held.group_size,
        held.has_zeros,
        held.wide_scales,
        has_minimums=held.has_minimums,
        has_super_scales=held.has_super_scales,
        has_levels=held.has_levels,
    )


@given(
    st.sampled_from([*K_TYPES]),
    st.sampled_from([*range(1, 15), 24, 33, 97, 131]),
    st.sampled_from([256, 512, 1280, 2304]),
    st.sampled_from([1, 64, 65, 200, 321]),
)
def test_products_of_k_types_have_the_bits_of_scales_in_float32(
    kind: str, num_tokens: int, inputs: int, outputs: int
) -> None:
    rows = random_blocks(Kind[kind], outputs, inputs, seed=num_tokens)
    blocks = torch.from_numpy(rows).reshape(outputs * inputs // 256, -1)
    x = torch.randn((num_tokens, inputs), generator=torch.Generator().manual_seed(outputs))
    with NamedTemporaryFile() as file:
        file.write(rows.tobytes())
        file.flush()
        part = StoredRows(Path(file.name), 0, outputs, kind)
        for ops in map(native, LEVELS):
            assert ops.load_linear is not None
            loaded = ops.load_linear(StoredMatrix(kind, (part,), inputs), None)
            wide = ops.pack_quantized(decode_blocks(kind, blocks, (outputs, inputs)), None)
            assert loaded.nbytes < wide.nbytes
            assert torch.equal(ops.linear(x, loaded), ops.linear(x, wide))


def in_8_bits(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weights, of 6 bits, with quantized values of 8 bits."""
    more = 0 if weight.has_minimums else 128 - 32
    return replace(weight, quants=weight.quants + more, bits=8)


@given(
    st.sampled_from([*SIX_BITS]),
    st.sampled_from([1, 2, 7, 64, *range(3, 15), 24, 33, 97, 131]),
    st.sampled_from([64, 192, 256, 1280, 2304]),
    st.sampled_from([1, 64, 65, 200, 321]),
)
def test_products_of_6_bits_have_the_bits_of_8(
    kind: str, num_tokens: int, inputs: int, outputs: int
) -> None:
    inputs = -(-inputs // 256) * 256 if kind in K_TYPES else inputs
    rows = random_blocks(Kind[kind], outputs, inputs, seed=num_tokens)
    blocks = torch.from_numpy(rows)
    blocks = blocks.reshape(outputs * inputs // gguf.GGML_QUANT_SIZES[Kind[kind]][0], -1)
    weight = decode_blocks(kind, blocks, (outputs, inputs))
    assert weight.bits == 6
    x = torch.randn((num_tokens, inputs), generator=torch.Generator().manual_seed(outputs))
    with NamedTemporaryFile() as file:
        file.write(rows.tobytes())
        file.flush()
        part = StoredRows(Path(file.name), 0, outputs, kind)
        for ops in map(native, LEVELS):
            assert ops.load_linear is not None
            loaded = ops.load_linear(StoredMatrix(kind, (part,), inputs), None)
            assert loaded.nbytes == -(-outputs // 64) * 64 * inputs * SIX_BITS[kind] // 256
            eight = ops.pack_quantized(in_8_bits(weight), None)
            assert torch.equal(ops.linear(x, loaded), ops.linear(x, eight))


@given(
    st.sampled_from([*OF_LEVELS]),
    st.sampled_from([1, 2, 7, 64, *range(3, 15), 24, 33, 97, 131]),
    st.sampled_from([32, 64, 192, 256, 1280, 2304]),
    st.sampled_from([1, 64, 65, 200, 321]),
    st.booleans(),
)
def test_products_of_levels_have_the_bits_of_a_byte_for_each_value(
    kind: str, num_tokens: int, inputs: int, outputs: int, has_factor: bool
) -> None:
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    inputs = -(-inputs // block_inputs) * block_inputs
    rows = random_blocks(Kind[kind], outputs, inputs, seed=num_tokens)
    blocks = torch.from_numpy(rows).reshape(-1, block_bytes)
    weight = decode_blocks(kind, blocks, (outputs, inputs))
    factor = 1.0
    if has_factor:
        factor = 0.7  # in place of factors of scales: float32
        weight = replace(weight, scales=weight.scales * factor)
    x = torch.randn((num_tokens, inputs), generator=torch.Generator().manual_seed(outputs))
    with NamedTemporaryFile() as file:
        file.write(rows.tobytes())
        file.flush()
        part = StoredRows(Path(file.name), 0, outputs, kind, factor=factor)
        for ops in map(native, LEVELS):
            assert ops.load_linear is not None
            loaded = ops.load_linear(StoredMatrix(kind, (part,), inputs), None)
            if not has_factor and inputs > BLOCK_KINDS[kind].group_size:
                held = -(-outputs // 64) * 64 * inputs * OF_LEVELS[kind] // 256
                assert loaded.nbytes == held == planned(kind).num_bytes((outputs, inputs))
            packed = ops.pack_quantized(weight, None)
            eight = ops.pack_quantized(weight if weight.bits == 8 else in_8_bits(weight), None)
            assert loaded.nbytes < packed.nbytes <= eight.nbytes
            found = ops.linear(x, loaded)
            assert torch.equal(found, ops.linear(x, packed))
            assert torch.equal(found, ops.linear(x, eight))
            ids = torch.arange(outputs)
            held_rows = ops.embedding(ids, loaded, torch.float32)
            assert torch.equal(held_rows, ops.embedding(ids, packed, torch.float32))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inputs", [16, 40, 1100])
def test_6_bits_with_one_scale_for_an_output_are_padded_and_have_the_bits_of_8(
    inputs: int, level: str
) -> None:
    generator, ops = torch.Generator().manual_seed(inputs), native(level)
    quants = torch.randint(0, 64, (70, inputs), generator=generator).to(torch.uint8)
    scales = torch.rand((70, 1), generator=generator)
    for zeros in (None, torch.rand((70, 1), generator=generator)):
        has_minimums = zeros is not None
        weight = QuantizedWeight(quants, scales, zeros, 6, inputs, has_minimums=has_minimums)
        packed = ops.pack_quantized(weight, None)
        assert MatrixFormat(6, None, has_minimums).num_bytes((70, inputs)) <= packed.nbytes
        eight = ops.pack_quantized(in_8_bits(weight), None)
        for num_tokens in (1, 2, 7, 64):
            x = torch.randn((num_tokens, inputs), generator=generator)
            assert torch.equal(ops.linear(x, packed), ops.linear(x, eight))
        rows = ops.embedding(torch.arange(70), packed, torch.float32)
        assert torch.equal(rows, weight.dequantized())


def test_zeros_of_6_bits_are_refused(table: OpTable) -> None:
    quants = torch.zeros((8, 64), dtype=torch.uint8)
    weight = QuantizedWeight(quants, torch.ones(8, 2), torch.ones(8, 2), 6, 32)
    with pytest.raises(EngineError, match="weight of 6 bits"):
        table.pack_quantized(weight, None)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_1", "IQ4_XS", "MXFP4"])
def test_packed_blocks_are_mapped_from_a_file(table: OpTable, tmp_path: Path, kind: str) -> None:
    (tmp_path / "f").write_bytes(random_blocks(Kind[kind], OUTPUTS, INPUTS, seed=6).tobytes())
    part = StoredRows(tmp_path / "f", 0, OUTPUTS, kind)
    assert table.load_linear is not None and table.packed_files is not None
    loaded = table.load_linear(StoredMatrix(kind, (part,), INPUTS), None)
    form = table.packed_files.form(loaded)
    assert bool(form.has_levels) == BLOCK_KINDS[kind].has_levels == any(form.levels)
    (weights,) = table.packed_files.parts(loaded)
    (tmp_path / "packed").write_bytes(weights)
    with (tmp_path / "packed").open("rb") as file:
        mapped = table.packed_files.map(form, file.fileno(), 0)
    assert mapped is not None and mapped.nbytes == loaded.nbytes
    assert torch.equal(outputs(table, mapped), outputs(table, loaded))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "kinds", [("Q4_K", "Q4_K"), ("Q6_K", "Q6_K"), ("Q4_K", "Q6_K"), ("IQ4_XS", "IQ4_XS")]
)
def test_gates_and_ups_of_blocks_have_the_bits_of_their_products(
    tmp_path: Path, kinds: tuple[str, str], level: str
) -> None:
    width, ops = 256, native(level)
    shapes = [(width, INPUTS), (width, INPUTS), (INPUTS, width)]
    parts = []
    for seed, (kind, shape) in enumerate(zip([*kinds, kinds[1]], shapes, strict=True)):
        path = tmp_path / str(seed)
        path.write_bytes(random_blocks(Kind[kind], *shape, seed=seed).tobytes())
        parts.append(StoredRows(path, 0, shape[0], kind))
    assert ops.load_linear is not None
    matrices = [
        ops.load_linear(StoredMatrix(kinds[0], tuple(parts[:2]), INPUTS), None),
        ops.load_linear(StoredMatrix(kinds[1], (parts[2],), width), None),
    ]
    assert ops.pack_experts is not None and ops.experts is not None
    gate_up, down_proj = ((matrix,) for matrix in matrices)
    weights = ExpertWeights(gate_up, down_proj, ops.pack_experts(gate_up, down_proj))
    x = torch.randn((40, INPUTS), generator=torch.Generator().manual_seed(9)).bfloat16()
    routing = Routing(torch.zeros(40, 1, dtype=torch.int64), torch.ones(40, 1))
    gated = ops.gated_activation(ops.linear(x, matrices[0]), "silu")
    expected = ops.linear(gated, matrices[1])
    assert torch.equal(ops.experts(x, routing, weights, "silu", None, None), expected)


@pytest.mark.parametrize("kind", [*SCALES_AT, *OTHER_SCALES], ids=lambda kind: kind.name)
def test_rows_of_packed_blocks_are_the_floats_that_ggml_makes_of_them(
    table: OpTable, tmp_path: Path, kind: Kind
) -> None:
    rows = random_blocks(kind, OUTPUTS, INPUTS, seed=11)
    (tmp_path / "f").write_bytes(rows.tobytes())
    assert table.load_linear is not None
    part = StoredRows(tmp_path / "f", 0, OUTPUTS, kind.name)
    loaded = table.load_linear(StoredMatrix(kind.name, (part,), INPUTS), None)
    held = table.embedding(torch.arange(OUTPUTS), loaded, torch.float32)
    assert torch.equal(held, meaning(kind, rows))


def loaded_alone(table: OpTable, stored: StoredMatrix, bias: torch.Tensor) -> list[LinearWeight]:
    """Each part of a matrix as a weight of its own."""
    assert table.load_linear is not None
    ends = [*accumulate(part.num_rows for part in stored.parts)]
    return [
        table.load_linear(replace(stored, kind=part.kind, parts=(part,)), bias[start:end])
        for part, start, end in zip(stored.parts, [0, *ends], ends, strict=False)
    ]


def side_by_side(table: OpTable, x: torch.Tensor, weights: Sequence[LinearWeight]) -> torch.Tensor:
    return torch.cat([table.linear(x, weight) for weight in weights], 1)


@pytest.mark.parametrize("kinds", STACKS, ids="+".join)
def test_the_matrices_of_a_stack_have_forms_of_their_own(
    table: OpTable, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    found = [
        a_part(tmp_path / str(seed), kind, seed, HEAD if seed == 0 else 0)
        for seed, kind in enumerate(kinds)
    ]
    stored = StoredMatrix(kinds[0], tuple(part for part, _ in found), INPUTS)
    bias = torch.randn(len(kinds) * OUTPUTS, generator=torch.Generator().manual_seed(8))
    assert table.load_linear is not None
    loaded = table.load_linear(stored, bias)
    alone = loaded_alone(table, stored, bias)
    for num_tokens in (*range(1, 21), 24, 33, 64, 97, 200):
        x = torch.randn((num_tokens, INPUTS), generator=torch.Generator().manual_seed(num_tokens))
        assert torch.equal(table.linear(x, loaded), side_by_side(table, x, alone))
    runs = [(kind, len([*run])) for kind, run in groupby(kinds)]
    sizes = [planned(kind).num_bytes((count * OUTPUTS, INPUTS)) for kind, count in runs]
    biases = sum(4 * -(-count * OUTPUTS // 64) * 64 for _, count in runs)
    assert loaded.nbytes == sum(sizes) + biases
    # torch's ops hold the same weights, in one form
    stacked = stack_matrices([weight for _, weight in found], torch.float32)
    assert isinstance(stacked, QuantizedWeight)
    rows = table.embedding(torch.arange(loaded.num_outputs), loaded, torch.float32)
    torch.testing.assert_close(rows, stacked.dequantized(), rtol=2e-6, atol=1e-6)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Types, and as many numbers of outputs."""
    kinds = draw(st.lists(st.sampled_from([*BLOCK_KINDS]), min_size=2, max_size=3))
    outputs = [draw(st.sampled_from([1, 48, 64, 65, 128, 200])) for _ in kinds]
    return tuple(kinds), tuple(outputs)


@given(
    stacks(),
    st.sampled_from([*range(1, 21), 24, 33, 64, 97, 131]),
    st.sampled_from([256, 512, 1280]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(deadline=None)
def test_products_of_a_stack_have_the_bits_of_those_of_its_matrices(
    stack: tuple[tuple[str, ...], tuple[int, ...]],
    num_tokens: int,
    inputs: int,
    dtype: torch.dtype,
) -> None:
    """On all levels, in any batch, and of some rows of each matrix, as ranks have them."""
    kinds, outputs = stack
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn((num_tokens, inputs), generator=generator).to(dtype)
    bias = torch.randn(sum(outputs), generator=generator)
    with ExitStack() as files:
        parts = []
        for seed, (kind, count) in enumerate(zip(kinds, outputs, strict=True)):
            file = files.enter_context(NamedTemporaryFile())
            file.write(random_blocks(Kind[kind], count, inputs, seed=seed).tobytes())
            file.flush()
            parts.append(StoredRows(Path(file.name), 0, count, kind))
        stored = StoredMatrix(kinds[0], tuple(parts), inputs)
        starts = [0, *accumulate(outputs)]
        halves = [
            range(start, start + -(-count // 2))
            for start, count in zip(starts, outputs, strict=False)
        ]
        of_rank = torch.cat([torch.arange(half.start, half.stop) for half in halves])
        for ops in map(native, LEVELS):
            assert ops.load_linear is not None
            loaded = ops.load_linear(stored, bias)
            found = ops.linear(x, loaded)
            assert torch.equal(found, side_by_side(ops, x, loaded_alone(ops, stored, bias)))
            for token in {0, num_tokens // 2, num_tokens - 1}:
                alone = ops.linear(x[token : token + 1], loaded)
                assert torch.equal(alone, found[token : token + 1])
            own = ops.load_linear(stored_rows(stored, halves), bias[of_rank])
            assert torch.equal(ops.linear(x, own), found[:, of_rank])


def test_a_stack_is_mapped_from_a_file_matrix_by_matrix(table: OpTable, tmp_path: Path) -> None:
    kinds = ("Q4_K", "Q6_K")
    parts = tuple(a_part(tmp_path / kind, kind, 6)[0] for kind in kinds)
    assert table.load_linear is not None and table.packed_files is not None
    files = table.packed_files
    bias = torch.randn(2 * OUTPUTS, generator=torch.Generator().manual_seed(8))
    loaded = table.load_linear(StoredMatrix(kinds[0], parts, INPUTS), bias)
    form = files.form(loaded)
    assert (form.n, form.k) == (2 * OUTPUTS, INPUTS)
    assert [matrix.bits for matrix in form.stacked] == [4, 6]
    pieces = files.parts(loaded)
    assert form.part_bytes == tuple(len(piece) for piece in pieces) and len(pieces) == 4
    path = tmp_path / "packed"
    content = b"".join(bytes(piece) + bytes(-len(piece) % files.page_bytes) for piece in pieces)
    path.write_bytes(content)
    with path.open("rb") as file:
        mapped = files.map(form, file.fileno(), 0)
    assert mapped is not None and mapped.nbytes == loaded.nbytes
    assert torch.equal(outputs(table, mapped), outputs(table, loaded))
    changed = bytearray(content)
    changed[-files.page_bytes] ^= 1  # of the last matrix
    path.write_bytes(changed)
    with path.open("rb") as file:
        assert files.map(form, file.fileno(), 0) is None


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("kinds", KINDS_CONVERTED)
def test_parts_become_the_models_dtype_as_they_do_in_torch(
    table: OpTable, tmp_path: Path, kinds: tuple[str, ...], dtype: str
) -> None:
    found = [a_part(tmp_path / str(seed), kind, seed) for seed, kind in enumerate(kinds)]
    wide = [
        weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
        for _, weight in found
    ]
    weight = torch.cat([part.to(PLAIN[dtype]) for part in wide])
    assert table.load_linear is not None
    stored = StoredMatrix(dtype, tuple(part for part, _ in found), INPUTS)
    loaded = table.load_linear(stored, None)
    x = torch.eye(INPUTS, dtype=PLAIN[dtype])[:64]
    expected = table.linear(x, table.pack_linear(weight, None))
    assert torch.equal(table.linear(x, loaded), expected)


def test_conversions_keep_the_largest_and_the_smallest_numbers(
    table: OpTable, tmp_path: Path
) -> None:
    ends = [65504.0, 65519.0, 65520.0, 1e9, 6e-8, 2.9e-8, 3e-8, 6.1e-5, 1e-38, 0.0, 3.39e38]
    row = torch.tensor([sign * value for value in ends for sign in (1.0, -1.0)]).repeat(2, 1)
    (tmp_path / "f").write_bytes(row.numpy().tobytes())
    part = StoredRows(tmp_path / "f", 0, 2, "F32")
    for name in ("F16", "BF16"):
        assert table.load_linear is not None
        loaded = table.load_linear(StoredMatrix(name, (part,), row.shape[1]), None)
        expected = table.pack_linear(row.to(PLAIN[name]), None)
        for index in range(row.shape[1]):
            x = torch.zeros((1, row.shape[1]), dtype=PLAIN[name])
            x[0, index] = 1
            found, wanted = table.linear(x, loaded), table.linear(x, expected)
            assert torch.equal(found.isfinite(), wanted.isfinite())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
