"""Low-rank adapters next to a linear layer, for tokens of any number of adapters in two launches.

As BGMV of Punica (Chen et al. 2023, arXiv:2310.18547): one program computes a block of one token's
A x, or of its B (A x), from addresses in a table, so that adapters of all ranks share a launch.
Sums run over fixed blocks in ascending order: the bits of a token depend on it and its adapter
only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import triton
import triton.language as tl
from torch import Tensor

from quickstep.ops.table import LoRAAdapter, LoRAMapping, LoRAPart
from quickstep.ops.tensors import to_torch
from quickstep.ops.triton.rounding import rounded

__all__ = ["TritonLoRA"]

_BLOCK_INPUTS = 128
_BLOCK_RANK = 16
_BLOCK_OUTPUTS = 64
# Of a part in the table: addresses of a and b, rank, outputs, first output, bits of the scale.
_NUM_FIELDS = 6
_FIELDS = tl.constexpr(_NUM_FIELDS)


@triton.jit
def _part_row(tables, groups, module, num_modules, num_parts):
    """The part of this program's adapter in the table; program ids are (item, part, block)."""
    group = tl.load(groups + tl.program_id(0))
    return tables + ((group * num_modules + module) * num_parts + tl.program_id(1)) * _FIELDS


@triton.jit
def _shrink_kernel(
    x,
    low,
    tables,
    tokens,
    groups,
    module,
    num_modules,
    num_parts,
    num_inputs,
    most_rank,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """low[item, part, r] = scale * sum of a[r, c] * x[token, c], in fp32."""
    row = _part_row(tables, groups, module, num_modules, num_parts)
    a = tl.load(row).to(tl.pointer_type(x.dtype.element_ty))
    rank = tl.load(row + 2)
    scale = tl.load(row + 5).to(tl.int32).to(tl.float32, bitcast=True)
    x += tl.load(tokens + tl.program_id(0)) * num_inputs
    ranks = tl.program_id(2) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    is_rank = ranks < rank
    total = tl.zeros([BLOCK_RANK], dtype=tl.float32)
    # a part that is not there has the rank 0, and no address
    end = tl.where(rank > 0, num_inputs, 0)
    for start in range(0, end, BLOCK_INPUTS):
        inputs = start + tl.arange(0, BLOCK_INPUTS)
        is_input = inputs < num_inputs
        values = tl.load(x + inputs, mask=is_input, other=0.0).to(tl.float32)
        mask = is_rank[:, None] & is_input[None, :]
        weights = tl.load(
            a + ranks[:, None].to(tl.int64) * num_inputs + inputs[None, :], mask=mask, other=0.0
        )
        total += tl.sum(weights.to(tl.float32) * values[None, :], 1)
    out = low + (tl.program_id(0) * num_parts + tl.program_id(1)) * most_rank + ranks
    tl.store(out, total * scale, mask=is_rank)


@triton.jit
def _look_up_kernel(
    token_ids,
    low,
    tables,
    tokens,
    groups,
    module,
    num_modules,
    num_parts,
    most_rank,
    DTYPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """low[item, part, r] = scale * a[token id, r], in fp32: the shrink of an embedding."""
    row = _part_row(tables, groups, module, num_modules, num_parts)
    a = tl.load(row).to(tl.pointer_type(DTYPE))
    rank = tl.load(row + 2)
    scale = tl.load(row + 5).to(tl.int32).to(tl.float32, bitcast=True)
    token_id = tl.load(token_ids + tl.load(tokens + tl.program_id(0)))
    ranks = tl.program_id(2) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    is_rank = ranks < rank
    weights = tl.load(a + token_id * rank + ranks, mask=is_rank, other=0.0).to(tl.float32)
    out = low + (tl.program_id(0) * num_parts + tl.program_id(1)) * most_rank + ranks
    tl.store(out, weights * scale, mask=is_rank)


@triton.jit
def _expand_kernel(
    y,
    low,
    tables,
    tokens,
    groups,
    module,
    num_modules,
    num_parts,
    num_columns,
    most_rank,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """y[token, first + n] += sum of b[n, r] * low[item, part, r], rounded once."""
    row = _part_row(tables, groups, module, num_modules, num_parts)
    b = tl.load(row + 1).to(tl.pointer_type(y.dtype.element_ty))
    rank = tl.load(row + 2)
    num_outputs = tl.load(row + 3)
    low += (tl.program_id(0) * num_parts + tl.program_id(1)) * most_rank
    outputs = tl.program_id(2) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < num_outputs
    total = tl.zeros([BLOCK_OUTPUTS], dtype=tl.float32)
    for start in range(0, rank, BLOCK_RANK):
        ranks = start + tl.arange(0, BLOCK_RANK)
        is_rank = ranks < rank
        values = tl.load(low + ranks, mask=is_rank, other=0.0)
        mask = is_output[:, None] & is_rank[None, :]
        weights = tl.load(
            b + outputs[:, None].to(tl.int64) * rank + ranks[None, :], mask=mask, other=0.0
        )
        total += tl.sum(weights.to(tl.float32) * values[None, :], 1)
    y += tl.load(tokens + tl.program_id(0)) * num_columns + tl.load(row + 4) + outputs
    before = tl.load(y, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y, rounded(before + total, y.dtype.element_ty), mask=is_output)


class _Packed(msgspec.Struct, frozen=True):
    """An adapter: `table` [modules, parts, 6] int64 on the device, and what it points to."""

    table: Tensor
    tensors: tuple[Tensor, ...]
    most_rank: int


class _Items(msgspec.Struct, frozen=True):
    """The tokens of a mapping that have an adapter, [I], and the number of its table, [I]."""

    tables: Tensor  # [groups, modules, parts, 6]
    tokens: Tensor
    groups: Tensor
    most_rank: int


class TritonLoRA:
    """`OpTable.pack_lora` and `OpTable.add_lora_`. Keeps what it has read of the last mapping,
    which all layers of a step share.
    """

    def __init__(self) -> None:
        self._mapping: LoRAMapping | None = None
        self._items: _Items | None = None

    def pack_lora(self, modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
        """A table of the parts, on their device."""
        num_parts = max(map(len, modules), default=0)
        rows: list[list[int]] = []
        tensors: list[Tensor] = []
        device = torch.device("cpu")
        for parts in modules:
            for part in parts:
                a, b = to_torch(part.a).contiguous(), to_torch(part.b).contiguous()
                tensors += (a, b)
                device = a.device
                scale = int(torch.tensor([part.scale], dtype=torch.float32).view(torch.int32))
                addresses = a.data_ptr(), b.data_ptr()
                rows.append([*addresses, part.rank, b.shape[0], part.first_output, scale])
            rows += [[0] * _NUM_FIELDS] * (num_parts - len(parts))
        table = torch.tensor(rows, dtype=torch.int64).view(len(modules), num_parts, _NUM_FIELDS)
        most_rank = max((part.rank for parts in modules for part in parts), default=0)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return LoRAAdapter(_Packed(table.to(device), tuple(tensors), most_rank), nbytes)

    def add_lora_(self, y: Tensor, x: Tensor, module: int, mapping: LoRAMapping) -> None:
        """Y [T, N] += scale * B (A x), x [T, C] or token ids [T]; y is contiguous."""
        items = self._items_of(mapping)
        if items is None:
            return
        assert y.is_contiguous(), "rows of y are addressed by its width"
        x = x.contiguous()
        num_modules, num_parts = items.tables.shape[1:3]
        num_items, most_rank = items.tokens.shape[0], items.most_rank
        low = torch.empty(
            (num_items, num_parts, most_rank), dtype=torch.float32, device=items.tokens.device
        )
        where = items.tables, items.tokens, items.groups, module, num_modules, num_parts
        grid = (num_items, num_parts, triton.cdiv(most_rank, _BLOCK_RANK))
        if x.dim() == 1:
            dtype = getattr(tl, str(y.dtype).removeprefix("torch."))
            _look_up_kernel[grid](x, low, *where, most_rank, DTYPE=dtype, BLOCK_RANK=_BLOCK_RANK)
        else:
            _shrink_kernel[grid](
                x,
                low,
                *where,
                x.shape[1],
                most_rank,
                BLOCK_INPUTS=_BLOCK_INPUTS,
                BLOCK_RANK=_BLOCK_RANK,
            )
        _expand_kernel[(num_items, num_parts, triton.cdiv(y.shape[1], _BLOCK_OUTPUTS))](
            y,
            low,
            *where,
            y.shape[1],
            most_rank,
            BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
            BLOCK_RANK=_BLOCK_RANK,
        )

    def _items_of(self, mapping: LoRAMapping) -> _Items | None:
        if mapping is not self._mapping:
            self._mapping, self._items = mapping, _items_of(mapping)
        return self._items


def _items_of(mapping: LoRAMapping) -> _Items | None:
    """None if no token has an adapter with a part."""
    groups = [
        (_packed(adapter), to_torch(tokens))
        for adapter, tokens in mapping.groups
        if tokens.shape[0]
    ]
    groups = [(packed, tokens) for packed, tokens in groups if packed.most_rank]
    if not groups:
        return None
    num_parts = max(packed.table.shape[1] for packed, _ in groups)
    tables = [
        torch.nn.functional.pad(packed.table, (0, 0, 0, num_parts - packed.table.shape[1]))
        for packed, _ in groups
    ]
    tokens = [tokens for _, tokens in groups]
    return _Items(
        torch.stack(tables),
        torch.cat(tokens),
        torch.cat([torch.full_like(one, index) for index, one in enumerate(tokens)]),
        max(packed.most_rank for packed, _ in groups),
    )


def _packed(adapter: LoRAAdapter) -> _Packed:
    assert isinstance(adapter.data, _Packed), "another implementation packed the adapter"
    return adapter.data
