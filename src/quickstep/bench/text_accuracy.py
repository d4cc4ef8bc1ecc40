"""How far a format of weights or of the KV cache is from float32 on a text: per token,
over a model's own vocabulary.

    kl          sum over v of p(v) ln(p(v) / q(v)), p of float32, q of the format: nats per token
    top1        how often both have the same likeliest token
    perplexity  exp of the mean of -ln q(next token), as a change from that of float32

The text is cut into windows that stand at even distances in it; each runs as one prefill through
the model and kernels that serve. The float32 model's hidden states are kept, not its logits, so
memory does not grow with the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.model.interface import ForwardBatch, Model
from quickstep.ops.table import KVCache, PagedLayout
from quickstep.runtime.kv_probe import BLOCK_SIZE, kv_of_one_sequence

__all__ = ["Reference", "TextAccuracy", "compare", "cut_windows"]

_POSITIONS = 64  # whose logits are held at a time


class TextAccuracy(msgspec.Struct, frozen=True):
    """A format beside float32 on the same tokens.

    Attributes:
        kl_mean: Nats per token.
        kl_p99: Nats; one token in a hundred is further off.
        top1_agreement: A share.
        perplexity: Of the format.
        perplexity_change: Over that of float32, less 1.
    """

    kl_mean: float
    kl_p99: float
    top1_agreement: float
    perplexity: float
    perplexity_change: float


class Reference(msgspec.Struct, frozen=True):
    """The float32 model, and its final hidden states of each window."""

    model: Model
    windows: tuple[tuple[int, ...], ...]
    hidden: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: Model, windows: Sequence[tuple[int, ...]]) -> Reference:
        """Run the windows."""
        return cls(model, tuple(windows), tuple(_hidden(model, windows, "auto")))


def cut_windows(
    token_ids: Sequence[int], num_tokens: int, window: int
) -> tuple[tuple[int, ...], ...]:
    """`num_tokens // window` windows, evenly over the text. Raises ConfigError: it is too short."""
    count = num_tokens // window
    if count < 1 or len(token_ids) < count * window:
        raise ConfigError(
            f"--tokens is {num_tokens} in windows of {window}, and the text has {len(token_ids)} "
            "tokens; lower --tokens or --window"
        )
    stride = (len(token_ids) - window) // max(1, count - 1)
    return tuple(
        tuple(token_ids[place * stride : place * stride + window]) for place in range(count)
    )


def compare(reference: Reference, model: Model, kv_dtype: str = "auto") -> TextAccuracy:
    """The model, its weights and KV cache in some format, beside float32."""
    divergences: list[Tensor] = []
    agreements = 0
    losses = own_losses = 0.0
    hidden = _hidden(model, reference.windows, kv_dtype)
    for window, exact, other in zip(reference.windows, reference.hidden, hidden, strict=True):
        targets = torch.tensor(window[1:])
        for start in range(0, len(targets), _POSITIONS):
            part = slice(start, min(start + _POSITIONS, len(targets)))
            p = _log_probs(reference.model, exact[part])
            q = _log_probs(model, other[part])
            divergences.append((p.exp() * (p - q)).sum(-1))
            agreements += int((p.argmax(-1) == q.argmax(-1)).sum())
            own_losses -= float(p.gather(1, targets[part, None]).sum())
            losses -= float(q.gather(1, targets[part, None]).sum())
    # rounding of the logarithms can leave -1e-17 where nothing differs
    found = torch.cat(divergences).clamp_(min=0.0).numpy()
    count = len(found)
    return TextAccuracy(
        kl_mean=float(found.mean()),
        kl_p99=float(np.quantile(found, 0.99)),
        top1_agreement=agreements / count,
        perplexity=math.exp(losses / count),
        perplexity_change=math.expm1((losses - own_losses) / count),
    )


def _log_probs(model: Model, hidden: Tensor) -> Tensor:
    """[E, hidden] -> [E, V] in float64: differences of the last digits are what is measured."""
    return torch.log_softmax(model.logits(hidden).double(), dim=-1).cpu()


def _hidden(model: Model, windows: Sequence[tuple[int, ...]], kv_dtype: str) -> list[Tensor]:
    """Final hidden states [window, hidden] of each window, each a prefill from position 0."""
    kv = kv_of_one_sequence(model, len(windows[0]), kv_dtype)
    with torch.inference_mode():
        return [_hidden_alone(model, window, kv) for window in windows]


def _hidden_alone(model: Model, token_ids: Sequence[int], kv: KVCache) -> Tensor:
    """Final hidden states [T, hidden] of one prompt from position 0, its blocks in order.

    Attention reads every key and value, a token's own included, out of the cache.
    """
    count = len(token_ids)
    positions = torch.arange(count)
    blocks = torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32)
    layout = PagedLayout(positions, positions, (0, count), (count,), blocks[None], BLOCK_SIZE)
    return model.forward(ForwardBatch(torch.tensor(token_ids), layout), kv)
