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

_BLOCK_INPUTS = 128
_BLOCK_RANK = 16
_BLOCK_OUTPUTS = 64
# Of a part in the table: addresses of a and b, rank, outputs, first output, bits of the scale,
# addresses of the ranks' scales and of the bias. An address is 0 for a tensor that is not there.
_NUM_FIELDS = 8
_FIELDS = tl.constexpr(_NUM_FIELDS)
# arguments that differ between layers and between batches: one variant of a kernel serves them all
_BY_BATCH = ("module", "num_modules", "num_parts", "most_rank")
_NUM_B_COLUMNS = 8  # the columns of b are padded to a multiple of this
_B_COLUMNS = tl.constexpr(_NUM_B_COLUMNS)
_ALIGNMENT = 16  # bytes, of every tensor of a part


@triton.jit
def _part_row(tables, groups, chosen, module, num_modules, num_parts, PER_TOKEN: tl.constexpr):
    """The part of this program's adapter in the table, and whether there is an adapter; program ids
    are (item, part, block). PER_TOKEN: so many items of a token, each with the matrix of the expert
    that `chosen` has for it, two matrices to an expert; 0 for one item with the matrix `module`.
    """
    item = tl.program_id(0)
    if PER_TOKEN > 0:
        group = tl.load(groups + item // PER_TOKEN)
        module = module + 2 * tl.load(chosen + item)
    else:
        group = tl.load(groups + item)
    place = (tl.maximum(group, 0) * num_modules + module) * num_parts + tl.program_id(1)
    return tables + place * _FIELDS, group >= 0


@triton.jit
def _token(tokens, HAS_TOKENS: tl.constexpr):
    """The row of this program's item."""
    token = tl.program_id(0).to(tl.int64)
    if HAS_TOKENS:
        token = tl.load(tokens + token)
    return token


@triton.jit
def _scales(row, ranks, is_rank):
    """What each rank is multiplied with."""
    scale = tl.load(row + 5).to(tl.int32).to(tl.float32, bitcast=True)
    address = tl.load(row + 6)
    mask = is_rank & (address != 0)
    of_ranks = address.to(tl.pointer_type(tl.float32)) + ranks
    return tl.where(address != 0, tl.load(of_ranks, mask=mask, other=0.0) * scale, scale)


@triton.jit(do_not_specialize=_BY_BATCH)
def _shrink_kernel(
    x,
    low,
    tables,
    tokens,
    groups,
    chosen,
    module,
    num_modules,
    num_parts,
    num_inputs,
    most_rank,
    PER_TOKEN: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    ROWS_OF_X: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """low[item, part, r] = scale * sum of a[r, c] * x[token, c], in fp32. ROWS_OF_X: so many items
    one after another have the same row of x.
    """
    row, has_adapter = _part_row(tables, groups, chosen, module, num_modules, num_parts, PER_TOKEN)
    a = tl.multiple_of(tl.load(row).to(tl.pointer_type(DTYPE)), 16)
    rank = tl.where(has_adapter, tl.load(row + 2), 0)
    x += _token(tokens, HAS_TOKENS) // ROWS_OF_X * num_inputs
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
            a + ranks[:, None].to(tl.int64) * num_inputs + inputs[None, :], mask=mask, other=0
        )
        total += tl.sum(weights.to(tl.float32) * values[None, :], 1)
    out = low + (tl.program_id(0) * num_parts + tl.program_id(1)) * most_rank + ranks
    tl.store(out, total * _scales(row, ranks, is_rank), mask=is_rank)


@triton.jit(do_not_specialize=_BY_BATCH)
def _look_up_kernel(
    token_ids,
    low,
    tables,
    tokens,
    groups,
    chosen,
    module,
    num_modules,
    num_parts,
    most_rank,
    PER_TOKEN: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """low[item, part, r] = scale * a[token id, r], in fp32: the shrink of an embedding."""
    row, has_adapter = _part_row(tables, groups, chosen, module, num_modules, num_parts, PER_TOKEN)
    a = tl.load(row).to(tl.pointer_type(DTYPE))
    rank = tl.where(has_adapter, tl.load(row + 2), 0)
    token_id = tl.load(token_ids + _token(tokens, HAS_TOKENS))
    ranks = tl.program_id(2) * BLOCK_RANK + tl.arange(0, BLOCK_RANK)
    is_rank = ranks < rank
    weights = tl.load(a + token_id * rank + ranks, mask=is_rank, other=0).to(tl.float32)
    out = low + (tl.program_id(0) * num_parts + tl.program_id(1)) * most_rank + ranks
    tl.store(out, weights * _scales(row, ranks, is_rank), mask=is_rank)


@triton.jit(do_not_specialize=_BY_BATCH)
def _expand_kernel(
    y,
    low,
    tables,
    tokens,
    groups,
    chosen,
    module,
    num_modules,
    num_parts,
    num_columns,
    most_rank,
    PER_TOKEN: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """y[token, first + n] += bias[n] + sum of b[n, r] * low[item, part, r], rounded once;
    y[token, first + n] = bias[n] + low[item, part, n] without b.
    """
    row, has_adapter = _part_row(tables, groups, chosen, module, num_modules, num_parts, PER_TOKEN)
    b_address, bias_address = tl.load(row + 1), tl.load(row + 7)
    b = tl.multiple_of(b_address.to(tl.pointer_type(DTYPE)), 16)
    rank = tl.where(has_adapter, tl.load(row + 2), 0)
    is_complete = (b_address == 0) & (rank > 0)
    rank = tl.where(is_complete, 0, rank)
    num_outputs = tl.where(has_adapter, tl.load(row + 3), 0)
    low += (tl.program_id(0) * num_parts + tl.program_id(1)) * most_rank
    outputs = tl.program_id(2) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_output = outputs < num_outputs
    total = tl.load(low + outputs, mask=is_output & is_complete, other=0.0)
    bias = bias_address.to(tl.pointer_type(tl.float32)) + outputs
    total += tl.load(bias, mask=is_output & (bias_address != 0), other=0.0)
    # b has columns of zeros up to a multiple, so that a load is several elements wide
    stride = (rank + (_B_COLUMNS - 1)) // _B_COLUMNS * _B_COLUMNS
    for start in range(0, rank, BLOCK_RANK):
        ranks = start + tl.arange(0, BLOCK_RANK)
        values = tl.load(low + ranks, mask=ranks < rank, other=0.0)
        mask = is_output[:, None] & (ranks < stride)[None, :]
        weights = tl.load(
            b + outputs[:, None].to(tl.int64) * stride + ranks[None, :], mask=mask, other=0
        )
        total += tl.sum(weights.to(tl.float32) * values[None, :], 1)
    y += _token(tokens, HAS_TOKENS) * num_columns + tl.load(row + 4) + outputs
    before = tl.load(y, mask=is_output & ~is_complete, other=0.0).to(tl.float32)
    tl.store(y, rounded(before + total, y.dtype.element_ty), mask=is_output)


class _Packed(msgspec.Struct, frozen=True):
    """An adapter: `table` [modules, parts, 8] int64 on the device, and what it points to. The
    largest rank of each module, -1 without a part, and the dtype of its weights.
    """

    table: Tensor
    tensors: tuple[Tensor, ...]
    most_ranks: tuple[int, ...]
    dtype: torch.dtype


class _Items(msgspec.Struct, frozen=True):
    """The tokens of a mapping that have an adapter, [I], and the number of its table, [I]; -1 for
    no adapter. Without `tokens`, every token is an item.
    """

    tables: Tensor  # [groups, modules, parts, 8]
    tokens: Tensor | None
    groups: Tensor
    most_ranks: tuple[int, ...]  # by module, -1 where no adapter has a part
    dtype: torch.dtype

    def of_every_token(self, num_tokens: int) -> _Items:
        """The same with an item for each token of a step."""
        if self.tokens is None:
            return self
        groups = torch.full((num_tokens,), -1, dtype=torch.int64, device=self.groups.device)
        groups[self.tokens] = self.groups
        return _Items(self.tables, None, groups, self.most_ranks, self.dtype)


class _ExpertRows(msgspec.Struct, frozen=True):
    """Rows [T * A] of experts `chosen` [T, A]; `rows_of_x` of them have the same row of x."""

    chosen: Tensor
    rows_of_x: int
    most_rank: int


class TritonLoRA:
    """`OpTable.pack_lora` and `OpTable.add_lora_`. Keeps what it has read of the last mapping,
    which all layers of a step share.
    """

    def __init__(self) -> None:
        self._mapping: LoRAMapping | None = None
        self._items: _Items | None = None
        self._of_every_token: _Items | None = None

    def pack_lora(self, modules: Sequence[Sequence[LoRAPart]]) -> LoRAAdapter:
        """A table of the parts, on their device."""
        num_parts = max(map(len, modules), default=0)
        rows: list[list[int]] = []
        tensors: list[Tensor] = []
        for parts in modules:
            for part in parts:
                found = [part.a, part.b, part.rank_scales, part.bias]
                of_part = [None if tensor is None else to_torch(tensor) for tensor in found]
                if of_part[1] is not None:
                    padding = -of_part[1].shape[1] % _NUM_B_COLUMNS
                    of_part[1] = torch.nn.functional.pad(of_part[1], (0, padding))
                of_part = [None if tensor is None else _aligned(tensor) for tensor in of_part]
                a, b, rank_scales, bias = map(_address, of_part)
                tensors += [tensor for tensor in of_part if tensor is not None]
                scale = int(torch.tensor([part.scale], dtype=torch.float32).view(torch.int32))
                sizes = part.rank, part.num_outputs, part.first_output
                rows.append([a, b, *sizes, scale, rank_scales, bias])
            rows += [[0] * _NUM_FIELDS] * (num_parts - len(parts))
        table = torch.tensor(rows, dtype=torch.int64).view(len(modules), num_parts, _NUM_FIELDS)
        most_ranks = tuple(max((part.rank for part in parts), default=-1) for parts in modules)
        device, dtype = torch.device("cpu"), torch.float32
        if tensors:
            device, dtype = tensors[0].device, tensors[0].dtype
        assert all([tensor.device == device for tensor in tensors]), "kernels read all of them"
        nbytes = sum(tensor.nbytes for tensor in tensors)
        packed = _Packed(table.to(device), tuple(tensors), most_ranks, dtype)
        return LoRAAdapter(packed, nbytes)

    def add_lora_(self, y: Tensor, x: Tensor, module: int, mapping: LoRAMapping) -> None:
        """Y [T, N] += scale * B (A x) + bias, x [T, C] or token ids [T]; y is contiguous."""
        items = self._items_of(mapping)
        if items is not None:
            _add(y, x, module, items)

    def changes_experts(self, first_module: int, num_experts: int, mapping: LoRAMapping) -> bool:
        """Whether an adapter may have a part of one of the matrices `first_module + 2 e`."""
        items = self._items_of(mapping)
        return items is not None and _most_rank(items, first_module, num_experts) >= 0

    def add_expert_lora_(
        self,
        y: Tensor,
        x: Tensor,
        chosen: Tensor,
        first_module: int,
        num_experts: int,
        mapping: LoRAMapping,
    ) -> None:
        """Y [T * A, N] += scale * B (A x) + bias with the adapter of each row's token, at the
        matrix `first_module + 2 e` of each row's expert e, `chosen` [T, A]. x [T, C] or [T * A, C].
        Reads nothing back from the device.
        """
        items = self._items_of(mapping)
        if items is None:
            return
        num_tokens = chosen.shape[0]
        if self._of_every_token is None or self._of_every_token.groups.shape[0] != num_tokens:
            self._of_every_token = items.of_every_token(num_tokens)
        most_rank = _most_rank(items, first_module, num_experts)
        rows = _ExpertRows(chosen, y.shape[0] // x.shape[0], most_rank)
        _add(y, x, first_module, self._of_every_token, rows)

    def _items_of(self, mapping: LoRAMapping) -> _Items | None:
        if mapping is not self._mapping:
            self._mapping, self._items = mapping, _items_of(mapping)
            self._of_every_token = None
        return self._items


def _add(
    y: Tensor, x: Tensor, module: int, items: _Items, experts: _ExpertRows | None = None
) -> None:
    """Shrink and expand for all items, at the matrix `module`; of experts, from that one on."""
    assert y.is_contiguous(), "rows of y are addressed by its width"
    x = x.contiguous()
    num_modules, num_parts = items.tables.shape[1:3]
    if experts is None:
        num_items, per_token, most_rank = items.groups.shape[0], 0, items.most_ranks[module]
    else:
        num_items, per_token = experts.chosen.numel(), experts.chosen.shape[1]
        most_rank = experts.most_rank
    if most_rank < 0:
        return
    most_rank = max(1, most_rank)
    low = torch.empty((num_items, num_parts, most_rank), dtype=torch.float32, device=y.device)
    where = (
        items.tables,
        items.tokens,
        items.groups,
        None if experts is None else experts.chosen,
        module,
        num_modules,
        num_parts,
    )
    form = {
        "PER_TOKEN": per_token,
        "HAS_TOKENS": items.tokens is not None,
        "DTYPE": getattr(tl, str(items.dtype).removeprefix("torch.")),
        "BLOCK_RANK": _BLOCK_RANK,
        "enable_fp_fusion": False,
    }
    grid = (num_items, num_parts, triton.cdiv(most_rank, _BLOCK_RANK))
    if x.dim() == 1:
        _look_up_kernel[grid](x, low, *where, most_rank, **form)
    else:
        _shrink_kernel[grid](
            x,
            low,
            *where,
            x.shape[1],
            most_rank,
            ROWS_OF_X=1 if experts is None else experts.rows_of_x,
            BLOCK_INPUTS=_BLOCK_INPUTS,
            **form,
        )
    _expand_kernel[(num_items, num_parts, triton.cdiv(y.shape[1], _BLOCK_OUTPUTS))](
        y, low, *where, y.shape[1], most_rank, BLOCK_OUTPUTS=_BLOCK_OUTPUTS, **form
    )


def _most_rank(items: _Items, first_module: int, num_experts: int) -> int:
    """Of the matrices `first_module + 2 e`; -1 where no adapter has a part."""
    end = first_module + 2 * num_experts
    return max(items.most_ranks[first_module:end:2], default=-1)


class TritonAdapterTable:
    """`AdapterTable`: the tables of all places in one tensor, [places, modules, parts, 8]."""

    def __init__(self, adapters: Sequence[LoRAAdapter], num_places: int) -> None:
        """Raises ValueError without adapters: they tell how many modules a model has."""
        packed = [_packed(adapter) for adapter in adapters]
        num_parts = max(adapter.table.shape[1] for adapter in packed)
        self._most_ranks = _largest_ranks(packed)
        self._dtype = next((adapter.dtype for adapter in packed if adapter.tensors), torch.float32)
        first = packed[0].table
        self._tables = first.new_zeros(num_places, first.shape[0], num_parts, _NUM_FIELDS)

    def fits(self, adapter: LoRAAdapter) -> bool:
        """`AdapterTable.fits`."""
        packed = _packed(adapter)
        return (
            packed.table.shape[1] <= self._tables.shape[2]
            and all(a <= b for a, b in zip(packed.most_ranks, self._most_ranks, strict=True))
            and (packed.dtype == self._dtype or not packed.tensors)
        )

    def set_(self, place: int, adapter: LoRAAdapter) -> None:
        """`AdapterTable.set_`."""
        table = _packed(adapter).table
        self._tables[place].zero_()
        self._tables[place, :, : table.shape[1]].copy_(table)

    def mapping(self, places: Tensor) -> LoRAMapping:
        """`AdapterTable.mapping`."""
        items = _Items(self._tables, None, places, self._most_ranks, self._dtype)
        return LoRAMapping((), items)


def _items_of(mapping: LoRAMapping) -> _Items | None:
    """None if no token has an adapter with a part."""
    if isinstance(mapping.items, _Items):
        return mapping.items
    groups = [
        (_packed(adapter), to_torch(tokens))
        for adapter, tokens in mapping.groups
        if tokens.shape[0]
    ]
    groups = [(packed, tokens) for packed, tokens in groups if packed.tensors]
    if not groups:
        return None
    [dtype] = {packed.dtype for packed, _ in groups}  # of one engine
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
        _largest_ranks([packed for packed, _ in groups]),
        dtype,
    )


def _largest_ranks(adapters: Sequence[_Packed]) -> tuple[int, ...]:
    """Of several adapters, by module."""
    return tuple(map(max, zip(*(adapter.most_ranks for adapter in adapters), strict=True)))


def _packed(adapter: LoRAAdapter) -> _Packed:
    assert isinstance(adapter.data, _Packed), "another implementation packed the adapter"
    return adapter.data


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, from an address on that kernels may read several elements from at once."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _address(tensor: Tensor | None) -> int:
    """Of its first element; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()
