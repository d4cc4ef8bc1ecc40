"""The paged KV cache: causal attention over it, for prefill and decode rows together, and writes.

    scores = q k^T      exact per (query, key): both rounded as in `exact_math`
    m      = max        over the visible keys; exact
    p      = exp(s - m) rounded to multiples of 2**-40, 0 for keys that are not visible
    out    = sum over tiles of (sum of p v in the tile) / sum over tiles of (sum of p in it)
             (a head's sink adds exp(sink - m) to the latter sum, once, after all tiles)

Tiles of keys start at absolute positions 0, 256, 512, ...; a sum inside a tile is exact, tiles are
added in ascending order. So the bits of a query depend on its own visible keys only: a tile it
does not see adds zeros, and how queries are grouped into tensors is a matter of speed only.
Keys that are not visible (stale blocks, later tokens) may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import torch
from torch import Tensor

from quickstep.ops.kv_pairs import keys_at, set_keys, set_values, sizes_of_keys, values_at
from quickstep.ops.reference.exact_math import (
    exp_nonpositive,
    power_of_two,
    round_rows,
    round_to_multiple,
    sum_bits,
    tanh,
)
from quickstep.ops.table import AttentionParams, KVCache, PagedLayout
from quickstep.ops.tensors import AnyTensor, read_heads, store_heads, to_torch

_TILE = 256
_PROBABILITY_QUANTUM = 2.0**-40
_SCORE_ELEMENTS = 1 << 20  # fp64 scores held at a time: 8 MiB
_TILE_ELEMENTS = 1 << 17  # fp64 keys of a tile at a time: 1 MiB, stays in cache


class _Group(msgspec.Struct, frozen=True):
    """Queries handled in one go: G rows with Q queries each, over one span of key tiles.

    `tokens` [G, Q] indexes the step's tokens; rows' tables are `tables` [G, blocks]. `tails` are
    the first position of each row's tail, and its flat KV indices.
    """

    tokens: Tensor
    tables: Tensor
    tile_starts: range
    tails: tuple[tuple[int, tuple[int, ...]], ...]


def paged_attention(
    q: Tensor,
    k_cache: AnyTensor,
    v_cache: AnyTensor | None,
    layout: PagedLayout,
    params: AttentionParams,
    sinks: AnyTensor | None,
) -> Tensor:
    """Q [T, H, D], caches [B, S, K, W] or in pairs, sinks [H] -> [T, H, D], or as wide as values
    are.
    """
    out = q.new_empty(*q.shape[:2], params.value_size or q.shape[2])
    caches = (to_torch(k_cache), None if v_cache is None else to_torch(v_cache))
    sinks = None if sinks is None else to_torch(sinks)
    for group in _groups(q, caches[0], layout, params):
        attended = _attend(q[group.tokens], group, caches, layout, params, sinks)
        out[group.tokens] = attended.float().to(q.dtype)
    return out


def _groups(
    q: Tensor, k_cache: Tensor, layout: PagedLayout, params: AttentionParams
) -> Iterator[_Group]:
    """Rows of one token together, by context length; longer rows separately, in runs of queries."""
    (num_heads, head_size), num_kv_heads = q.shape[1:], sizes_of_keys(k_cache).num_kv_heads
    starts = layout.row_offsets
    lengths = [stop - start for start, stop in pairwise(starts)]
    single = sorted(
        (row for row, length in enumerate(lengths) if length == 1),
        key=lambda row: layout.context_lens[row],
    )
    limit = max(1, _TILE_ELEMENTS // (_TILE * num_kv_heads * head_size))
    for rows in _batches(single, layout.context_lens, limit, num_heads):
        spans = [(layout.context_lens[row] - 1, layout.context_lens[row]) for row in rows]
        tokens = [[starts[row]] for row in rows]
        yield _group(rows, tokens, spans, layout, params)
    for row, length in enumerate(lengths):
        context_len = layout.context_lens[row]
        step = max(1, _SCORE_ELEMENTS // (num_heads * max(1, context_len)))
        for first in range(0, length if length > 1 else 0, step):
            stop = min(length, first + step)
            before = context_len - length
            tokens = [list(range(starts[row] + first, starts[row] + stop))]
            yield _group([row], tokens, [(before + first, before + stop)], layout, params)


def _batches(
    rows: list[int], context_lens: tuple[int, ...], limit: int, num_heads: int
) -> Iterator[list[int]]:
    """Cut rows sorted by context length into runs whose scores and keys stay small."""
    batch: list[int] = []
    for row in rows:
        scores = (len(batch) + 1) * num_heads * context_lens[row]
        if batch and (len(batch) == limit or scores > _SCORE_ELEMENTS):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _group(
    rows: list[int],
    tokens: list[list[int]],
    spans: list[tuple[int, int]],
    layout: PagedLayout,
    params: AttentionParams,
) -> _Group:
    """`spans`: per row the positions [first, stop) of its queries."""
    device = layout.block_tables.device
    first = _first_visible(min(first for first, _ in spans), params)
    starts = range(first // _TILE * _TILE, max(stop for _, stop in spans), _TILE)
    row_index = torch.tensor(rows, device=device)
    tails = [(row, layout.tails[row]) for row in rows] if layout.tails else []
    return _Group(
        torch.tensor(tokens, device=device),
        layout.block_tables[row_index],
        starts,
        tuple((layout.context_lens[row] - len(tail), tail) for row, tail in tails),
    )


def _attend(
    q: Tensor,
    group: _Group,
    caches: tuple[Tensor, Tensor | None],
    layout: PagedLayout,
    params: AttentionParams,
    sinks: Tensor | None,
) -> Tensor:
    """Q [G, Q, H, D] -> [G, Q, H, D] in fp64. Heads are split as [K, H / K], last next to Q."""
    num_rows, num_queries, num_heads, head_size = q.shape
    num_kv_heads = sizes_of_keys(caches[0]).num_kv_heads
    per_kv_head = num_heads // num_kv_heads
    q = q.view(num_rows, num_queries, num_kv_heads, per_kv_head, head_size)
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3).double()  # [G, K, H / K * Q, D]
    q = round_rows(q, sum_bits(head_size))
    positions = layout.positions[group.tokens]

    slots = [_tile_slots(group, start, layout.block_size) for start in group.tile_starts]
    hidden = [
        _hidden(positions, start, params).repeat(1, per_kv_head, 1).unsqueeze(1)
        for start in group.tile_starts
    ]  # per tile [G, 1, H / K * Q, L]
    scores = [
        _scores(q, _heads(keys_at(caches[0], tile)), params).masked_fill_(mask, -torch.inf)
        for tile, mask in zip(slots, hidden, strict=True)
    ]
    peak = torch.stack([tile.amax(-1) for tile in scores]).amax(0).unsqueeze(-1)
    total = torch.zeros_like(peak)
    value_size = params.value_size or head_size
    out = q.new_zeros(*q.shape[:-1], value_size)
    for tile, mask, score in zip(slots, hidden, scores, strict=True):
        p = round_to_multiple(exp_nonpositive(score - peak), _PROBABILITY_QUANTUM)
        p.masked_fill_(mask, 0.0)
        total += p.sum(-1, keepdim=True)
        held = keys_at(caches[0], tile) if caches[1] is None else values_at(caches[1], tile)
        out += _weighted_values(p, mask, _heads(held)[..., :value_size])
    if sinks is None:
        out /= total
    else:
        per_query = sinks.double().view(num_kv_heads, per_kv_head, 1)
        per_query = per_query.expand(-1, -1, num_queries).reshape(1, num_kv_heads, -1, 1)
        out = _with_sinks(out, total, per_query - peak)
    out = out.view(num_rows, num_kv_heads, per_kv_head, num_queries, value_size)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _with_sinks(out: Tensor, total: Tensor, above: Tensor) -> Tensor:
    """Out / (total + exp(above)), `above` the sink's distance from the keys' maximum."""
    rescale = exp_nonpositive(-above.abs())
    # a sink above the keys' maximum replaces it: no exponential is above 1
    beyond = above > 0
    return (
        out
        * torch.where(beyond, rescale, 1.0)
        / torch.where(beyond, total * rescale + 1.0, total + rescale)
    )


def _tile_slots(group: _Group, start: int, block_size: int) -> Tensor:
    """[G, L] flat KV indices of the tile; beyond a row's table any slot, which is never visible."""
    keys = torch.arange(start, start + _TILE, device=group.tables.device)
    blocks = (keys // block_size).clamp(max=group.tables.shape[1] - 1)
    slots = group.tables[:, blocks].long() * block_size + keys % block_size
    for row, (begin, tail) in enumerate(group.tails):
        first, last = max(begin, start), min(begin + len(tail), start + _TILE)
        if first < last:
            in_tile = torch.tensor(tail[first - begin : last - begin], device=slots.device)
            slots[row, first - start : last - start] = in_tile
    return slots


def _first_visible(position: int, params: AttentionParams) -> int:
    """The first key that a query at a position sees."""
    if params.chunk is not None:
        return position // params.chunk * params.chunk
    return 0 if params.window is None else max(0, position - params.window + 1)


def _hidden(positions: Tensor, start: int, params: AttentionParams) -> Tensor:
    """[G, Q, L], true where the query must not see the key."""
    keys = torch.arange(start, start + _TILE, device=positions.device)
    distance = positions.unsqueeze(-1) - keys
    hidden = distance < 0
    if params.chunk is not None:
        return hidden | (distance > positions.unsqueeze(-1) % params.chunk)
    return hidden if params.window is None else hidden | (distance >= params.window)


def _heads(held: Tensor) -> Tensor:
    """What a cache holds of some slots, [G, L, K, W] -> [G, K, L, D] in fp64."""
    return read_heads(held).transpose(1, 2)


def _scores(q: Tensor, keys: Tensor, params: AttentionParams) -> Tensor:
    """Q [G, K, H / K * Q, D], keys [G, K, L, D] -> [G, K, H / K * Q, L]."""
    rounded = round_rows(keys, sum_bits(keys.shape[-1]))
    scores = (q @ rounded.transpose(-1, -2)) * params.scale
    if params.softcap is None:
        return scores
    return tanh(scores / params.softcap) * params.softcap


def _weighted_values(p: Tensor, mask: Tensor, values: Tensor) -> Tensor:
    """P [G, K, H / K * Q, L] times values [G, K, L, D], summed over the tile without rounding.

    A value's power of two moves to its p, so that rounding looks at visible keys only. A value
    that is not finite becomes 0 and makes its p infinite, hence the query NaN, where it is seen.
    """
    bits = sum_bits(_TILE)
    scale = power_of_two(values.abs().amax(-1, keepdim=True))
    digits = round_to_multiple(values / scale, 2.0 ** (1 - bits)).nan_to_num_(0.0, 0.0, 0.0)
    weights = (p * scale.transpose(-1, -2)).masked_fill_(mask, 0.0)
    return round_rows(weights, bits) @ digits


def move_kv(kv: KVCache, moves: Sequence[tuple[int, int]]) -> None:
    """Copy flat KV slots of all layers in order, each pair from its first to its second."""
    pairs = [torch.tensor(pair) for pair in moves]
    for keys, values in zip(kv.keys, kv.values, strict=True):
        for source, target in pairs:
            set_keys(to_torch(keys), target, keys_at(to_torch(keys), source))
            if values is not None:
                set_values(to_torch(values), target, values_at(to_torch(values), source))


def write_kv(
    k: Tensor,
    v: Tensor | None,
    k_cache: AnyTensor,
    v_cache: AnyTensor | None,
    slot_mapping: Tensor,
) -> None:
    """k, v [T, K, D] into k_cache, v_cache [B, S, K, W] or in pairs, at the flat slots
    slot_mapping [T].
    """
    keys = to_torch(k_cache)
    set_keys(keys, slot_mapping, store_heads(k, keys.dtype))
    if v is not None and v_cache is not None:
        values = to_torch(v_cache)
        set_values(values, slot_mapping, store_heads(v, values.dtype))
