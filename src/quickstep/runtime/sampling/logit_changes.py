"""The changes of a row's logits before temperature, in the form that the native sampler takes
(`csrc/kernels/sampler_row.h`).

The order: replaced logits, added amounts, the mask of allowed tokens, two lists of bans. Made by
`SamplingState.changes`, read by `apply_changes_`, which is the definition, and by
`runtime.sampling.native_sampler` and `runtime.sampling.device_records`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]
Edit = tuple[Ids, Floats]


class Bans(msgspec.Struct, frozen=True):
    """Tokens that may not be sampled; with `yields`, only as long as another token is left."""

    token_ids: Ids
    yields: bool = False


NO_BANS = Bans(np.empty(0, dtype=np.int64))


class LogitChanges(msgspec.Struct, frozen=True):
    """All changes for the next token.

    Attributes:
        edit_ids: Tokens whose logit is changed.
        edit_values: For the first `num_set` the new logit, for the others the amount to add.
        num_set: How many logits are replaced.
        allowed: Bit i % 64 of element i / 64: token i may be sampled. None: all may.
        bans: Two lists; the first is applied before the second.
    """

    edit_ids: Ids
    edit_values: Floats
    num_set: int
    allowed: Bits | None
    bans: tuple[Bans, Bans]


def apply_changes_(logits: Floats, changes: LogitChanges) -> None:
    """Change the logits [V] of a row in place."""
    num_set = changes.num_set
    logits[changes.edit_ids[:num_set]] = changes.edit_values[:num_set]
    # one after another: a token may have several
    np.add.at(logits, changes.edit_ids[num_set:], changes.edit_values[num_set:])
    if changes.allowed is not None:
        flags = np.unpackbits(changes.allowed.view(np.uint8), bitorder="little")
        logits[flags[: logits.shape[0]] == 0] = -np.inf
    for bans in changes.bans:
        _ban_(logits, bans)


def _ban_(logits: Floats, bans: Bans) -> None:
    before = logits[bans.token_ids]
    logits[bans.token_ids] = -np.inf
    if bans.yields and not np.isfinite(logits.max()):
        logits[bans.token_ids] = before


def edits_of(replaced: Edit | None, added: Sequence[Edit]) -> tuple[Ids, Floats, int]:
    """Ids [n] and values [n] of all edits, those that replace first, and how many replace."""
    num_set = 0 if replaced is None else replaced[0].shape[0]
    edits = [*([] if replaced is None else [replaced]), *added]
    if not edits:
        return np.empty(0, dtype=np.int64), np.empty(0), 0
    if len(edits) == 1:
        return np.ascontiguousarray(edits[0][0]), np.ascontiguousarray(edits[0][1]), num_set
    ids, values = zip(*edits, strict=True)
    return np.concatenate(ids), np.concatenate(values), num_set


def bits_of_ids(token_ids: Ids, vocab_size: int) -> Bits:
    """A mask, as in `LogitChanges.allowed`, with the bits of these tokens."""
    flags = np.zeros(-(-vocab_size // 64) * 64, dtype=np.uint8)
    flags[token_ids] = 1
    return np.packbits(flags, bitorder="little").view(np.uint64)


def bits_of_bytes(mask: bytes, vocab_size: int) -> Bits:
    """The same from a bit mask in bytes, which may be shorter or longer than the vocabulary."""
    num_bytes = -(-vocab_size // 64) * 8
    padded = np.zeros(num_bytes, dtype=np.uint8)
    source = np.frombuffer(mask, dtype=np.uint8)[:num_bytes]
    padded[: source.shape[0]] = source
    return padded.view(np.uint64)
