"""The parts that the fallback puts into a transformers model: attention, linear, the body's place.

The attention function is registered once with transformers by name; it holds no state. A step's
layout and cache reach it as the keyword `paged_step`, which transformers hands through the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from quickstep.errors import ConfigError
from quickstep.ops.table import AttentionParams, KVCache, LinearWeight, OpTable, PagedLayout
from quickstep.ops.tensors import head_size_of

__all__ = [
    "ATTENTION_NAME",
    "FixedRows",
    "HiddenStates",
    "PackedLinear",
    "PagedStep",
    "paged_attention_forward",
]

ATTENTION_NAME = "quickstep_paged"
_TILE_ROWS = 16
_LANES = 64  # twice the widest vector: torch's loops take two at a time
_SPLIT_ELEMENTS = 32_768  # at::internal::GRAIN_SIZE: smaller tensors stay on one thread
# What attention is handed besides q, k and v: what it honours, and what changes nothing here.
_HONOURED = frozenset(("paged_step", "scaling", "sliding_window", "softcap", "s_aux"))
_HARMLESS = frozenset(
    (
        "cache_position",
        "deterministic",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)


class PagedStep(msgspec.Struct, frozen=True):
    """What one forward pass hands to every attention layer. `windows` collects what they ask."""

    layout: PagedLayout
    kv: KVCache
    ops: OpTable
    windows: set[int | None]


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention signature: query [1, H, T, D] -> [1, T, H, D], KV written."""
    step: PagedStep | None = options.get("paged_step")
    if step is None:
        raise ConfigError(f"{type(module).__name__} does not hand options to its attention")
    refused = _refused(attention_mask, options)
    if refused is not None:
        raise ConfigError(f"{type(module).__name__} needs {refused}, which cannot be paged")
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    index = module.layer_idx
    assert isinstance(index, int)
    keys, values = step.kv.keys[index], step.kv.values[index]
    sized_for = (keys.shape[2], head_size_of(keys))
    if k.shape[1:] != sized_for or v.shape[1:] != sized_for:
        raise ConfigError(
            f"{type(module).__name__} has keys {list(k.shape[1:])} and values "
            f"{list(v.shape[1:])}, the cache was sized for {list(sized_for)}"
        )
    scale, window = options.get("scaling"), options.get("sliding_window")
    step.windows.add(window)
    step.ops.write_kv(k, v, keys, values, step.layout.slot_mapping)
    params = AttentionParams(
        float(q.shape[-1] ** -0.5 if scale is None else scale), window, options.get("softcap")
    )
    sinks = _sinks(module, options.get("s_aux"), q.shape[1])
    out = step.ops.paged_attention(q, keys, values, step.layout, params, sinks)
    return out.unsqueeze(0), None


def _refused(attention_mask: Tensor | None, options: Mapping[str, Any]) -> str | None:
    """What attention is asked for that it would leave out; None if there is nothing."""
    if attention_mask is not None or options.get("is_causal") is False:
        return "a mask of its own"
    for name, value in options.items():
        if name in _HONOURED or name in _HARMLESS or value is None or name == "is_causal":
            continue
        # switched off: dropout 0.0 above all
        if isinstance(value, (bool, int, float)) and not value:
            continue
        return name
    return None


def _sinks(module: nn.Module, given: object, num_heads: int) -> Tensor | None:
    """[H] float32: a logit of each head's softmax without a value."""
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.numel() != num_heads:
        raise ConfigError(
            f"{type(module).__name__} passes s_aux that is no number per query head, which cannot "
            "be paged"
        )
    return given.detach().reshape(-1).float().contiguous()


class PackedLinear(nn.Module):
    """`nn.Linear` over the op table: the same bits for every number of rows."""

    def __init__(self, weight: LinearWeight, linear: Callable[[Tensor, LinearWeight], Tensor]):
        super().__init__()
        self._weight = weight
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., N]."""
        rows = self._linear(x.reshape(-1, x.shape[-1]), self._weight)
        return rows.reshape(*x.shape[:-1], self._weight.num_outputs)


class FixedRows(nn.Module):
    """Runs a row-wise module (a norm, an activation) on tiles of one shape, the last one padded.

    What torch computes for an element can depend on the shape around it and on where threads split
    a tensor; a tile always has the same shape and is too small to be split.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in; the last dimension is a row."""
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        # rows of other widths would not start at the same lane of a vector
        per_tile = min(_TILE_ROWS, max(1, _SPLIT_ELEMENTS // width)) if width % _LANES == 0 else 1
        padding = -rows.shape[0] % per_tile
        padded = nn.functional.pad(rows, (0, 0, 0, padding), value=1.0)
        tiles = [self._inner(tile.contiguous()) for tile in torch.split(padded, per_tile)]
        return torch.cat(tiles)[: rows.shape[0]].reshape(x.shape)


class BodyOutput(msgspec.Struct, frozen=True):
    """What the heads of transformers read from a body's output."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        return self.last_hidden_state


class HiddenStates(nn.Module):
    """Stands where the body was, so that the head can run alone on hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BodyOutput:
        """Give the hidden states back as the body's output."""
        return BodyOutput(last_hidden_state=inputs_embeds)
