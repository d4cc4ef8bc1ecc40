"""Inputs of paged_attention: rows of every kind over caches of every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from op_checks.case_inputs import CaseInputs, label
from quickstep.ops.table import AttentionParams, PagedLayout
from quickstep.ops.tensors import store_heads

__all__ = [
    "DTYPES",
    "AttentionCase",
    "attention_cases",
    "latent_attention_cases",
    "make_layout",
    "stored_heads",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Rows = tuple[tuple[int, int], ...]  # per row: (position of the first token, number of tokens)


class AttentionCase(msgspec.Struct, frozen=True):
    """Inputs of paged_attention: the KV of every row up to its end stands in the caches.

    `rows` say which positions are queried; block tables hold all blocks of the row's sequence.
    `tails` are those of the layout.
    """

    name: str
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor | None
    rows: Rows
    block_tables: Tensor
    params: AttentionParams
    sinks: Tensor | None
    tails: tuple[tuple[int, ...], ...] = ()
    op: str = "paged_attention"

    @property
    def layout(self) -> PagedLayout:
        """The rows as the op receives them."""
        layout = make_layout(self.rows, self.block_tables, self.k_cache.shape[1])
        return replace(layout, tails=self.tails)

    @property
    def arguments(
        self,
    ) -> tuple[Tensor, Tensor, Tensor | None, PagedLayout, AttentionParams, Tensor | None]:
        """What the op is called with."""
        return (self.q, self.k_cache, self.v_cache, self.layout, self.params, self.sinks)


def make_layout(rows: Rows, block_tables: Tensor, block_size: int) -> PagedLayout:
    """The layout of a step that computes `rows`; `block_tables` [R, max blocks] int32."""
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    owner = torch.repeat_interleave(torch.tensor([count for _, count in rows]))
    device = block_tables.device
    positions, owner = positions.to(device), owner.to(device)
    blocks = block_tables[owner, positions // block_size].long()
    return PagedLayout(
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        row_offsets=tuple(accumulate((count for _, count in rows), initial=0)),
        context_lens=tuple(start + count for start, count in rows),
        block_tables=block_tables,
        block_size=block_size,
    )


# name, rows, (H, K, D), block size, window (below 0: a chunk), soft-cap
_MIXED: Rows = ((0, 1), (36, 1), (0, 37), (300, 1), (250, 13), (255, 1), (256, 1), (200, 2))
_ATTENTION: tuple[tuple[str, Rows, tuple[int, int, int], int, int | None, float | None], ...] = (
    ("one-key", ((0, 1),), (1, 1, 32), 16, None, None),
    ("mixed", _MIXED, (4, 2, 64), 16, None, None),
    ("large-scores", _MIXED, (4, 4, 32), 16, None, None),
    ("window", _MIXED, (4, 2, 64), 16, 21, None),
    ("window-below-tile", ((600, 1), (520, 9), (0, 40)), (2, 1, 32), 8, 70, None),
    ("chunk", _MIXED, (4, 2, 64), 16, -21, None),
    ("softcap", _MIXED, (6, 2, 80), 32, None, 5.0),
    ("long", ((1023, 1), (1024, 2), (0, 70)), (3, 3, 128), 64, None, None),
    ("head-256", ((40, 1), (20, 5)), (2, 1, 256), 4, 16, 30.0),
    ("decode", tuple((17 * row, 1) for row in range(40)), (7, 1, 64), 16, None, None),
    ("sinks", _MIXED, (6, 2, 64), 16, None, None),
    ("sinks-one-key", ((0, 1), (0, 9), (40, 3)), (4, 4, 32), 16, 1, None),
    ("sinks-window-softcap", _MIXED, (6, 2, 80), 8, 21, 5.0),
    ("sinks-long", ((1023, 1), (1024, 4), (0, 70), (600, 1)), (6, 3, 64), 64, None, None),
)


# What a cache of another dtype is looked at with.
_OTHER_KV = frozenset(("mixed", "head-256", "sinks-window-softcap"))
_CODES = _OTHER_KV | {"window", "softcap", "long", "decode", "sinks-long"}


def attention_cases(dtype: torch.dtype) -> Iterator[AttentionCase]:
    """All of them, for activations of a dtype; always the same values."""
    yield from _attention_over(dtype, dtype, None)
    yield from _attention_over(dtype, torch.int8, _CODES)
    for kv_dtype in (*DTYPES, torch.uint8, torch.float8_e4m3fn):
        if kv_dtype != dtype:
            yield from _attention_over(dtype, kv_dtype, _OTHER_KV)


# name, rows, (H, D, elements of a value), block size
_LATENTS: tuple[tuple[str, Rows, tuple[int, int, int], int], ...] = (
    ("released-sizes", ((70, 1), (0, 5), (600, 2)), (16, 576, 512), 16),
    ("many-heads", ((530, 1), (30, 2)), (70, 300, 256), 16),
    ("mixed", _MIXED, (4, 64, 48), 16),
    ("odd-sizes", _MIXED, (3, 54, 37), 8),
)


def latent_attention_cases(dtype: torch.dtype) -> Iterator[AttentionCase]:
    """Values that are the beginning of keys, for activations of a dtype."""
    for kv_dtype in dict.fromkeys((dtype, torch.int8, torch.uint8, *DTYPES)):
        for title, rows, (num_heads, size, value_size), block_size in _LATENTS:
            if kv_dtype != dtype and title == "many-heads":
                continue
            name = label("latent_attention", dtype, title, kv_dtype)
            source = CaseInputs(name, dtype)
            shape, tables = _placed(source, rows, block_size)
            yield AttentionCase(
                name=name,
                q=source.normal(sum(count for _, count in rows), num_heads, size),
                k_cache=stored_heads(source.normal(*shape, 1, size), kv_dtype),
                v_cache=None,
                rows=rows,
                block_tables=tables,
                params=AttentionParams(size**-0.5, value_size=value_size),
                sinks=None,
                op="latent_attention",
            )


def _attention_over(
    dtype: torch.dtype, kv_dtype: torch.dtype, titles: frozenset[str] | None
) -> Iterator[AttentionCase]:
    """Cases of those titles (None: all) with keys and values held in `kv_dtype`."""
    for title, rows, heads, block_size, window, softcap in _ATTENTION:
        if titles is not None and title not in titles:
            continue
        # large scores: one key takes all the weight, exp underflows for the others
        scale = 40.0 if title == "large-scores" else 1.0
        held = () if kv_dtype == dtype else (kv_dtype,)
        name = label("paged_attention", dtype, title, *held)
        source = CaseInputs(name, dtype)
        (num_blocks, _), tables = _placed(source, rows, block_size)
        num_heads, num_kv_heads, size = heads
        shape = (num_blocks, block_size, num_kv_heads, size)
        yield AttentionCase(
            name=name,
            q=source.normal(sum(count for _, count in rows), num_heads, size, scale=scale),
            k_cache=stored_heads(source.normal(*shape), kv_dtype),
            v_cache=stored_heads(source.normal(*shape), kv_dtype),
            rows=rows,
            block_tables=tables,
            params=_params(size**-0.5, window, softcap),
            sinks=_sinks(source, num_heads) if title.startswith("sinks") else None,
        )


def _params(scale: float, window: int | None, softcap: float | None) -> AttentionParams:
    if window is not None and window < 0:
        return AttentionParams(scale, softcap=softcap, chunk=-window)
    return AttentionParams(scale, window, softcap)


def _placed(source: CaseInputs, rows: Rows, block_size: int) -> tuple[tuple[int, int], Tensor]:
    """[B, S] of a cache for these rows, and their block tables."""
    lengths = [-(-(start + count) // block_size) for start, count in rows]
    num_blocks = sum(lengths) + 2
    order = (source.permutation(num_blocks - 1) + 1).to(torch.int32)
    tables = torch.zeros(len(rows), max(lengths), dtype=torch.int32)
    for row, blocks in enumerate(torch.split(order[: sum(lengths)], lengths)):
        tables[row, : len(blocks)] = blocks
    return (num_blocks, block_size), tables


def _sinks(source: CaseInputs, num_heads: int) -> Tensor:
    """[H], among them one that is none, and one that leaves the keys next to nothing."""
    sinks = source.normal(num_heads, scale=2.0).float()
    sinks[0], sinks[1] = -torch.inf, 30.0
    return sinks


def stored_heads(heads: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """[..., D] as a cache of that dtype holds it."""
    return store_heads(heads, kv_dtype)
