"""Which outputs, rows of files and parts of adapters each rank has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from adapter_files import SMALL_LLAMA
from quickstep.errors import ConfigError
from quickstep.model.adapters.lora_modules import (
    Projection,
    embedding_number,
    lm_head_number,
    module_number,
    num_modules,
)
from quickstep.model.chosen_rows import stored_rows
from quickstep.model.sharding import Shard, check_ranks, shard_adapter, shard_spec
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import FLOAT32, HostTensor
from quickstep.ops.weights import StoredMatrix, StoredRows


def host(array: np.ndarray) -> HostTensor:
    return HostTensor(np.ascontiguousarray(array, dtype=np.float32), FLOAT32)


@pytest.mark.parametrize("size", range(1, 9))
def test_ranks_divide_outputs_without_gaps(size: int) -> None:
    for num_outputs in (size, size + 1, 31, 64, 96, 896, 1000, 4864, 151_936):
        if num_outputs < size:
            continue
        parts = [Shard(rank, size).outputs(num_outputs) for rank in range(size)]
        assert [output for part in parts for output in part] == list(range(num_outputs))
        assert all(parts)


def test_large_parts_are_complete_tiles() -> None:
    assert [len(Shard(rank, 4).outputs(1000)) for rank in range(4)] == [256, 256, 256, 232]


def test_more_ranks_than_kv_heads_share_them() -> None:
    assert [list(Shard(rank, 4).heads(2)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(Shard(rank, 2).heads(6)) for rank in range(2)] == [[0, 1, 2], [3, 4, 5]]
    part = shard_spec(SMALL_LLAMA, Shard(3, 4))
    assert (part.num_heads, part.num_kv_heads) == (1, 1)


def test_sizes_that_do_not_divide_the_heads_name_those_that_do() -> None:
    wide = replace(SMALL_LLAMA, num_heads=12, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"12 query heads and 4 KV heads; possible are 1, 2, 4, "):
        check_ranks(wide, 5)
    for size in (1, 2, 4, 12):
        check_ranks(wide, size)


def test_rows_of_a_matrix_in_files_are_where_they_were(tmp_path: Path) -> None:
    content = np.arange(10 * 6, dtype=np.float32).reshape(10, 6)
    content[:4].tofile(tmp_path / "a")
    content[4:].tofile(tmp_path / "b")
    parts = (StoredRows(tmp_path / "a", 0, 4), StoredRows(tmp_path / "b", 0, 6))
    found = stored_rows(StoredMatrix("F32", parts, 6), (range(2, 6), range(9, 10)))
    rows = [
        np.fromfile(part.file, np.float32).reshape(-1, 6)[part.first_row :][: part.num_rows].ravel()
        for part in found.parts
    ]
    assert np.array_equal(np.concatenate(rows), content[[2, 3, 4, 5, 9]].ravel())


def test_blocks_of_a_row_stay_together() -> None:
    matrix = StoredMatrix("Q4_K", (StoredRows(Path("f"), 100, 8),), 512)
    (part,) = stored_rows(matrix, (range(3, 5),)).parts
    assert part == StoredRows(Path("f"), 100, 2, first_row=3)


def changed(parts: list[LoRAPart], num_outputs: int, x: np.ndarray) -> np.ndarray:
    """What the parts of a matrix make of y = 0."""
    y = np.zeros(num_outputs)
    for part in parts:
        last = part.first_output + part.num_outputs
        product = part.a.numpy().astype(float) @ x
        if part.b is not None:
            product = part.scale * (part.b.numpy().astype(float) @ product)
        y[part.first_output : last] = product + (0 if part.bias is None else part.bias.numpy())
    return y


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_an_adapter_change_each_ranks_outputs(size: int) -> None:
    spec = SMALL_LLAMA
    generator = np.random.default_rng(0)
    hidden, queries, keys = spec.hidden_size, 4 * spec.head_size, 2 * spec.head_size

    def part(first: int, count: int, is_complete: bool = False) -> LoRAPart:
        a = host(generator.normal(size=(count if is_complete else 3, hidden)))
        b = None if is_complete else host(generator.normal(size=(count, 3)))
        return LoRAPart(a, b, first, 0.5, bias=host(generator.normal(size=count)))

    modules: list[list[LoRAPart]] = [[] for _ in range(num_modules(spec))]
    qkv, gate_up = module_number(1, Projection.QKV), module_number(2, Projection.GATE_UP)
    modules[qkv] = [part(0, queries), part(queries + keys, keys)]
    modules[gate_up] = [part(spec.intermediate_size, spec.intermediate_size)]
    modules[lm_head_number(spec)] = [part(0, spec.vocab_size, is_complete=True)]
    modules[embedding_number(spec)] = [part(0, hidden)]
    x = generator.normal(size=hidden)
    for number, num_outputs, local in (
        (qkv, queries + 2 * keys, lambda part: (part.num_heads + 2 * part.num_kv_heads) * 8),
        (gate_up, 2 * spec.intermediate_size, lambda part: 2 * part.intermediate_size),
        (lm_head_number(spec), spec.vocab_size, lambda part: part.vocab_size),
    ):
        complete = changed(modules[number], num_outputs, x)
        covered = np.zeros(num_outputs, bool)
        for rank in range(size):
            shard = Shard(rank, size)
            own = shard_adapter(modules, spec, shard)
            found = changed(own[number], local(shard_spec(spec, shard)), x)
            outputs = own_outputs(number, shard)
            assert np.array_equal(found, complete[outputs])
            covered[outputs] = True
            assert own[embedding_number(spec)] == modules[embedding_number(spec)]
        assert covered.all()


def own_outputs(number: int, shard: Shard) -> list[int]:
    """The complete matrix's outputs that are the rank's, in order."""
    spec = SMALL_LLAMA
    if number == lm_head_number(spec):
        return list(shard.outputs(spec.vocab_size))
    if number == module_number(2, Projection.GATE_UP):
        columns = shard.outputs(spec.intermediate_size)
        return [*columns, *(column + spec.intermediate_size for column in columns)]
    heads = [*shard.heads(4), *(4 + head for head in shard.heads(2))]
    heads += [6 + head for head in shard.heads(2)]
    return [head * 8 + place for head in heads for place in range(8)]
