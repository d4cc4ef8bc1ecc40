"""Batch invariance of an op table: a token's bits never depend on the tokens around it.

`mismatches` runs a case in many arrangements (one token, permuted, in chunks, next to NaN, with
other physical blocks, with 1 and 2 threads) and names those whose bits differ from the plain run;
`mismatches_of_each` does so for several implementations, and arranges the case once for all.
Used by the tests of every implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from op_checks.cases import AttentionCase, Case, bind
from op_checks.placement import moved
from quickstep.ops.table import OpTable
from quickstep.ops.tensors import head_size_of, store_heads

__all__ = [
    "arrangements",
    "mismatches",
    "mismatches_of_each",
    "same_bits",
    "same_without_adapters",
    "torch_threads",
    "with_tails",
]

_PREFIXES = (1, 2, 3, 4, 8, 15, 16, 17, 32, 33, 65)
_SUFFIXES = (1, 3, 16)
_CHUNKS = (1, 3, 16)
_ROWS_ALONE = 8  # of a case with more rows, this many are looked at one by one
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# A name, what the op is called with, and which tokens of the result are which of the whole case.
Arrangement = tuple[str, tuple[Any, ...], Tensor, Tensor]
Piece = tuple[int, int, int]  # (row, first query of the row, number of queries)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run with `count` threads of torch, then with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits; the payload of a NaN does not count, the sign of zero does."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    integer = _INTEGERS[a.element_size()]
    same = a.contiguous().view(integer) == b.contiguous().view(integer)
    return bool((same | (a.isnan() & b.isnan())).all())


def mismatches(
    ops: OpTable, case: Case | AttentionCase, device: torch.device | None = None
) -> list[str]:
    """The arrangements whose bits differ from the whole case at 1 thread: all with 1 thread, and
    every fifth with 2. Arranged where the case is, and computed on `device` if given.
    """
    return mismatches_of_each([ops], case, device)[0]


def mismatches_of_each(
    tables: Sequence[OpTable], case: Case | AttentionCase, device: torch.device | None = None
) -> list[list[str]]:
    """The `mismatches` of each table."""
    arranged = [moved(one, device) for one in arrangements(case)]
    there = moved(case, device)
    return [_mismatches(ops, there, arranged) for ops in tables]


def arrangements(case: Case | AttentionCase) -> Iterator[Arrangement]:
    """All of a case, the whole case first."""
    is_attention = isinstance(case, AttentionCase)
    return _attention_arrangements(case) if is_attention else _token_arrangements(case)


def same_without_adapters(ops: OpTable, case: Case) -> bool:
    """Whether the tokens of a case of `experts_lora` that have no adapter have the bits of a step
    without adapters, which has other launches.
    """
    *tokens, ids = case.tokens
    [mixed] = bind(ops, case)(*case.tokens)
    [plain] = bind(ops, replace(case, op="experts", fixed=case.fixed[:2]))(*tokens)
    return same_bits(mixed[ids < 0], plain[ids < 0])


def _mismatches(
    ops: OpTable, case: Case | AttentionCase, arranged: Sequence[Arrangement]
) -> list[str]:
    def same(arguments: tuple[Any, ...], rows: Tensor, source: Tensor) -> bool:
        pairs = zip(call(*arguments), expected, strict=True)
        return all(same_bits(got[rows], whole[source]) for got, whole in pairs)

    with torch_threads(1):
        call = _attend(ops) if isinstance(case, AttentionCase) else bind(ops, case)
        expected = call(*(case.arguments if isinstance(case, AttentionCase) else case.tokens))
        found = [f"{name}, 1 thread" for name, *how in arranged if not same(*how)]
    with torch_threads(2):
        return found + [f"{name}, 2 threads" for name, *how in arranged[::5] if not same(*how)]


def _token_arrangements(case: Case) -> Iterator[Arrangement]:
    num_tokens = case.tokens[0].shape[0]
    for name, index in _token_orders(num_tokens, repeats="write_kv" not in case.op):
        chosen = tuple(x[index] for x in case.tokens)
        yield name, chosen, torch.arange(len(index)), index
    for token in sorted({0, num_tokens // 2, num_tokens - 1}) if num_tokens else ():
        for value in (torch.nan, torch.inf):
            poisoned = tuple(_poisoned(x, token, value) for x in case.tokens)
            at = torch.tensor([token])
            yield f"token {token} next to {value}", poisoned, at, at


def _poisoned(x: Tensor, token: int, value: float) -> Tensor:
    """X with everything but one token's entries set to `value`."""
    if not x.is_floating_point():
        return x
    poisoned = torch.full_like(x, value)
    poisoned[token] = x[token]
    return poisoned


def _token_orders(num_tokens: int, repeats: bool) -> Iterator[tuple[str, Tensor]]:
    yield "whole", torch.arange(num_tokens)
    for token in sorted({0, 1, num_tokens // 2, num_tokens - 2, num_tokens - 1}):
        if 0 <= token < num_tokens:
            yield f"token {token} alone", torch.tensor([token])
    for prefix in _PREFIXES:
        if prefix < num_tokens:
            yield f"the first {prefix}", torch.arange(prefix)
    for skipped in _SUFFIXES:
        if skipped < num_tokens:
            yield f"all but the first {skipped}", torch.arange(skipped, num_tokens)
    yield "reversed", torch.arange(num_tokens).flip(0)
    yield "shuffled", torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0))
    if repeats and num_tokens:
        yield "repeated", torch.arange(3 * num_tokens + 1) % num_tokens


def _attend(ops: OpTable) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *arguments: (ops.paged_attention(*arguments),)


def _attention_arrangements(case: AttentionCase) -> Iterator[Arrangement]:
    def of(name: str, arranged: AttentionCase, index: Tensor) -> Arrangement:
        return name, arranged.arguments, torch.arange(len(index)), index

    everything = torch.arange(case.q.shape[0])
    yield of("whole", case, everything)
    yield of("other blocks", _renumbered(case), everything)
    yield of("stale NaN", _stale(case), everything)
    yield of("tails", with_tails(case), everything)
    ends, others = _last_tokens(case)
    yield "before NaN", _with_nan_at(case, ends).arguments, others, others
    whole = [(row, 0, count) for row, (_, count) in enumerate(case.rows)]
    for name, pieces in _orders_of_rows(whole):
        yield of(name, *_select(case, pieces))
    for row, _, count in _spread(whole):
        part, index = _select(case, [(row, 0, (count + 1) // 2)])
        yield of(f"row {row} cut in half before stale NaN", _stale(part), index)


def _orders_of_rows(whole: list[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    for piece in _spread(whole):
        yield f"row {piece[0]} alone", [piece]
    yield "rows reversed", whole[::-1]
    for size in _CHUNKS:
        chunks = [
            (row, first, min(size, count - first))
            for row, _, count in whole
            for first in range(0, count, size)
        ]
        yield f"chunks of {size}", chunks
        yield f"every third chunk of {size}", chunks[::3]


def _spread(pieces: list[Piece]) -> list[Piece]:
    return pieces[:: max(1, len(pieces) // _ROWS_ALONE)]


def _select(case: AttentionCase, pieces: list[Piece]) -> tuple[AttentionCase, Tensor]:
    """The case of these pieces of rows, and which of the whole case's tokens they are."""
    offsets = case.layout.row_offsets
    index = torch.cat(
        [torch.arange(offsets[row] + first, offsets[row] + first + n) for row, first, n in pieces]
    )
    rows = tuple((case.rows[row][0] + first, count) for row, first, count in pieces)
    tables = case.block_tables[torch.tensor([row for row, _, _ in pieces])]
    return replace(case, q=case.q[index], rows=rows, block_tables=tables), index


def _renumbered(case: AttentionCase) -> AttentionCase:
    """The same keys and values in other physical blocks, in a larger cache."""
    num_blocks = case.k_cache.shape[0]
    order = torch.randperm(num_blocks + 7, generator=torch.Generator().manual_seed(1))[:num_blocks]
    caches = []
    for cache in _caches(case):
        moved = cache.new_full((num_blocks + 7, *cache.shape[1:]), 3.0)
        moved[order] = cache
        caches.append(moved)
    tables = order.to(torch.int32)[case.block_tables.long()]
    return replace(_with_caches(case, caches), block_tables=tables)


def _caches(case: AttentionCase) -> list[Tensor]:
    """The caches that there are."""
    return [case.k_cache] if case.v_cache is None else [case.k_cache, case.v_cache]


def _with_caches(case: AttentionCase, caches: Sequence[Tensor]) -> AttentionCase:
    """The case with others in their places."""
    values = caches[1] if len(caches) > 1 else None
    return replace(case, k_cache=caches[0], v_cache=values)


def _stale(case: AttentionCase) -> AttentionCase:
    """Every slot that no row has reached holds NaN, as a failed request may leave it."""
    block_size = case.k_cache.shape[1]
    reached = torch.zeros(case.k_cache.shape[:2], dtype=torch.bool).flatten()
    for table, (start, count) in zip(case.block_tables.long(), case.rows, strict=True):
        keys = torch.arange(start + count)
        reached[table[keys // block_size] * block_size + keys % block_size] = True
    shape = (*case.k_cache.shape[:2], 1, 1)
    caches = [torch.where(reached.view(shape), cache, _nan_like(cache)) for cache in _caches(case)]
    return _with_caches(case, caches)


def _last_tokens(case: AttentionCase) -> tuple[Tensor, Tensor]:
    """The cache slots of the last token of each row, and the tokens that are not the last one."""
    block_size = case.k_cache.shape[1]
    last = torch.tensor([start + count - 1 for start, count in case.rows])
    blocks = case.block_tables.long()[torch.arange(len(last)), last // block_size]
    ends = torch.tensor(case.layout.row_offsets[1:]) - 1
    tokens = torch.arange(case.q.shape[0])
    return blocks * block_size + last % block_size, tokens[~torch.isin(tokens, ends)]


def _with_nan_at(case: AttentionCase, slots: Tensor) -> AttentionCase:
    """The case with NaN in some slots of its caches."""
    caches = [cache.clone() for cache in _caches(case)]
    for cache in caches:
        cache.view(-1, *cache.shape[2:])[slots] = _nan_like(cache[:1, :1]).view(1, *cache.shape[2:])
    return _with_caches(case, caches)


def with_tails(case: AttentionCase) -> AttentionCase:
    """The last keys and values of every second row are in other slots, in another order; their
    blocks hold NaN instead.
    """
    block_size, num_slots = case.k_cache.shape[1], case.k_cache.shape[:2].numel()
    lengths = [
        min(start + count, (1, 5, 70)[row % 3]) if row % 2 == 0 else 0
        for row, (start, count) in enumerate(case.rows)
    ]
    num_new_blocks = -(-sum(lengths) // block_size)
    free = list(range(num_slots, num_slots + sum(lengths)))
    tails, taken = [], []
    for table, (start, count), length in zip(
        case.block_tables.long(), case.rows, lengths, strict=True
    ):
        tails.append(tuple(free.pop() for _ in range(length)))
        keys = torch.arange(start + count - length, start + count)
        taken.append(table[keys // block_size] * block_size + keys % block_size)
    old, new = torch.cat(taken), torch.tensor([slot for tail in tails for slot in tail])
    caches = []
    for cache in _caches(case):
        grown = torch.cat((cache, cache.new_zeros(num_new_blocks, *cache.shape[1:])))
        slots = grown.view(-1, *cache.shape[2:])
        slots[new] = slots[old]
        slots[old] = _nan_like(cache[:1, :1]).view(1, *cache.shape[2:])
        caches.append(grown)
    return replace(_with_caches(case, caches), tails=tuple(tails))


def _nan_like(cache: Tensor) -> Tensor:
    """A cache of that shape and dtype in which every head is NaN."""
    heads = torch.full((*cache.shape[:3], head_size_of(cache)), torch.nan)
    return store_heads(heads, cache.dtype)
