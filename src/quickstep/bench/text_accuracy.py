"""The accuracy of a format of weights or of the KV cache on a text, compared with float32.

    kl          sum over v of p(v) ln(p(v) / q(v)), p of float32, q of the format: nats per token
    top1        fraction of tokens where both have the same most likely token
    perplexity  exp of the mean of -ln q(next token), as a change from that of float32

The text is cut into windows at even distances; each is one prefill with the model and kernels that
`serve` uses. The float32 model's hidden states are stored, not its logits, to save memory.

The default text is source code of the standard library that the bundled demo model was not trained
on (`tools/demo_model` takes the list of modules from here). It needs no download, but it differs
slightly between Python versions, so a report names the version.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from quickstep.errors import ConfigError
from quickstep.model.interface import ForwardBatch, Model
from quickstep.ops.table import KVCache, PagedLayout
from quickstep.ops.tensors import to_torch
from quickstep.runtime.cache.kv_probe import BLOCK_SIZE, kv_of_one_sequence

# They cover parsing, numerics, networking, text and file formats, and no other module contains a
# copy of one.
HELD_OUT_MODULES = (
    "cmd", "colorsys", "configparser", "difflib", "fileinput", "graphlib", "mailbox",
    "netrc", "quopri", "sched", "shelve", "statistics", "tomllib", "wave", "xmlrpc", "zipapp",
)  # fmt: skip

_POSITIONS = 64  # logits are computed for this many positions at a time


def held_out_text(library: Path | None = None) -> str:
    """Source code of the held-out modules; `library` is the folder of the standard library."""
    root = library or Path(sysconfig.get_path("stdlib"))
    texts = []
    for module in HELD_OUT_MODULES:
        file = root / f"{module}.py"
        paths = [file] if file.is_file() else sorted((root / module).rglob("*.py"))
        texts += [path.read_text(encoding="utf-8") for path in paths]
    return "".join(texts)


class TextAccuracy(msgspec.Struct, frozen=True):
    """The result of comparing a format with float32 on the same tokens.

    Attributes:
        kl_mean: Nats per token.
        kl_p99: Nats; the 99th percentile over tokens.
        top1_agreement: A fraction.
        perplexity: Of the format.
        perplexity_change: Divided by that of float32, minus 1.
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
        """Run all windows through the float32 model."""
        return cls(model, tuple(windows), tuple(_hidden(model, windows, "auto")))


def cut_windows(
    token_ids: Sequence[int], num_tokens: int, window: int
) -> tuple[tuple[int, ...], ...]:
    """Cut `num_tokens // window` windows at even distances. Raises ConfigError for a short text."""
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
    """Compare a model with some format of weights and KV cache with the reference."""
    divergences: list[Tensor] = []
    agreements = 0
    losses = reference_losses = 0.0
    hidden = _hidden(model, reference.windows, kv_dtype)
    for window, exact, other in zip(reference.windows, reference.hidden, hidden, strict=True):
        targets = torch.tensor(window[1:])
        for start in range(0, len(targets), _POSITIONS):
            part = slice(start, min(start + _POSITIONS, len(targets)))
            p = _log_probs(reference.model, exact[part])
            q = _log_probs(model, other[part])
            divergences.append((p.exp() * (p - q)).sum(-1))
            agreements += int((p.argmax(-1) == q.argmax(-1)).sum())
            reference_losses -= float(p.gather(1, targets[part, None]).sum())
            losses -= float(q.gather(1, targets[part, None]).sum())
    # rounding can give -1e-17 for equal distributions
    kl = torch.cat(divergences).clamp_(min=0.0).numpy()
    count = len(kl)
    return TextAccuracy(
        kl_mean=float(kl.mean()),
        kl_p99=float(np.quantile(kl, 0.99)),
        top1_agreement=agreements / count,
        perplexity=math.exp(losses / count),
        perplexity_change=math.expm1((losses - reference_losses) / count),
    )


def _log_probs(model: Model, hidden: Tensor) -> Tensor:
    """[E, hidden] -> [E, V] in float64, since differences in the last digits are measured."""
    return torch.log_softmax(to_torch(model.logits(hidden)).double(), dim=-1).cpu()


def _hidden(model: Model, windows: Sequence[tuple[int, ...]], kv_dtype: str) -> list[Tensor]:
    """Final hidden states [window, hidden] of each window, each a prefill from position 0."""
    kv = kv_of_one_sequence(model, len(windows[0]), kv_dtype)
    with torch.inference_mode():
        return [_hidden_of(model, window, kv) for window in windows]


def _hidden_of(model: Model, token_ids: Sequence[int], kv: KVCache) -> Tensor:
    """Final hidden states [T, hidden] of one prompt from position 0, its blocks in order.

    Attention reads all keys and values from the cache, each token's own included.
    """
    count = len(token_ids)
    positions = torch.arange(count)
    blocks = torch.arange(-(-count // BLOCK_SIZE), dtype=torch.int32)
    layout = PagedLayout(positions, positions, (0, count), (count,), blocks[None], BLOCK_SIZE)
    return model.forward(ForwardBatch(torch.tensor(token_ids), layout), kv)
