"""What holding keys and values in another format does to a model, measured on a few tokens.

Called when an engine opens with a KV format narrower than the model's, and by `bench accuracy` on
text. Weights show when they are rounded what they lose (`model.quantize`); keys and values do only
while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quickstep.model.interface import ForwardBatch, Model
from quickstep.ops.table import KVCache, PagedLayout
from quickstep.runtime.kv import allocate_kv

__all__ = ["KV_BOUND", "hidden_alone", "kv_change", "kv_for_alone"]

# Nats; a perplexity grows by about exp of it. On the bundled model's text int8 keys and values
# change 0.0002 in the mean, four-bit weights 0.03 (`quickstep bench accuracy`).
KV_BOUND = 0.1

_BLOCK_SIZE = 16
_PROBE_TOKENS = 32
_STRIDE = 7919  # a prime, so that the tokens are spread over any vocabulary


def kv_change(model: Model, kv_dtype: str) -> float:
    """Kullback-Leibler divergence of the next token over this KV from that over the model's own.

    The largest over the positions of a probe, in nats; 0 where both are the same.
    """
    token_ids = [place * _STRIDE % model.vocab_size for place in range(_PROBE_TOKENS)]
    own, other = (_log_probs(model, token_ids, dtype) for dtype in ("auto", kv_dtype))
    return float((own.exp() * (own - other)).sum(-1).max().clamp(min=0.0))


def _log_probs(model: Model, token_ids: Sequence[int], kv_dtype: str) -> Tensor:
    kv = kv_for_alone(model, len(token_ids), kv_dtype)
    with torch.inference_mode():
        logits = model.logits(hidden_alone(model, token_ids, kv))
    return torch.log_softmax(logits.double(), dim=-1).cpu()


def kv_for_alone(model: Model, num_tokens: int, kv_dtype: str) -> KVCache:
    """A cache for one sequence, in `CacheConfig.kv_dtype`."""
    shape = model.kv_shape.stored_as(kv_dtype)
    return allocate_kv(shape, -(-num_tokens // _BLOCK_SIZE), _BLOCK_SIZE, model.device)


def hidden_alone(model: Model, token_ids: Sequence[int], kv: KVCache) -> Tensor:
    """Final hidden states [T, hidden] of one prompt from position 0, its blocks in order.

    Attention reads every key and value, a token's own included, out of the cache.
    """
    count = len(token_ids)
    positions = torch.arange(count, device=model.device)
    blocks = torch.arange(-(-count // _BLOCK_SIZE), dtype=torch.int32, device=model.device)
    layout = PagedLayout(positions, positions, (0, count), (count,), blocks[None], _BLOCK_SIZE)
    tokens = torch.tensor(token_ids, device=model.device)
    return model.forward(ForwardBatch(tokens, layout), kv)
