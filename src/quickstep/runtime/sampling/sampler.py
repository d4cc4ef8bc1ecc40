"""From logits to tokens, row by row.

The order is fixed and defined in `SamplingParams`: `SamplingState.adjust_` does what comes before
temperature, `kept_token_ids` the filters after it. Sampling is an argmax over scaled logits plus
counter-based noise (`runtime.sampling.noise`), so there is no generator state. Each row is one
contiguous NumPy vector in float64 on one thread: other rows and the thread count change no bit. A
row fails without affecting others if its logits have no finite maximum or its grammar cannot be
followed.

Called by `runtime.runner`. Logits on an accelerator are copied to the host, unless every row is a
plain argmax.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.ops.tensors import AnyTensor, HostTensor, to_numpy
from quickstep.runtime.sampling.filters import kept_token_ids
from quickstep.runtime.sampling.logprobs import token_logprobs
from quickstep.runtime.sampling.noise import chance, gumbel_argmax, noise_bits
from quickstep.runtime.sampling.state import SamplingState
from quickstep.types import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

_LOGGER = logging.getLogger(__name__)

# Rejection sampling has noise of its own: a draft model samples with that of the sequence.
_REJECTION_SEED = 0x5851F42D4C957F2D


class Sample(msgspec.Struct, frozen=True):
    """One emitted token."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class SampleFailure(msgspec.Struct, frozen=True):
    """Why a row emits no token. `is_refused`: the cause is its own request."""

    reason: str
    is_refused: bool = False


def sample(
    logits: AnyTensor, states: Sequence[SamplingState], rows: Sequence[int] | None = None
) -> list[Sample | SampleFailure]:
    """One token for each sequence state, from the row of `logits` [E, V] fp32 with the same index,
    or the one that `rows` has there.

    States are read only; the caller records the tokens.
    """
    if not isinstance(logits, HostTensor) and all(state.is_plain_argmax for state in states):
        return _argmax(logits if rows is None else logits[list(rows)])
    matrix = to_numpy(logits)
    places = range(len(states)) if rows is None else rows
    return [sample_row(matrix[one], state) for one, state in zip(places, states, strict=True)]


def failure_of(
    error: BaseException, what: str = "the next token could not be sampled"
) -> SampleFailure:
    """The failure of a row for which `error` was raised; other rows continue.

    A panic in Rust (of a grammar's matcher, say) is no Exception. What ends the program is raised.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
    _LOGGER.error("a row failed: %s", what, exc_info=error)
    return SampleFailure(f"{what}: {error}")


def sample_row(
    row: npt.NDArray[np.float32], state: SamplingState, draft: int | None = None
) -> Sample | SampleFailure:
    """The token of one row of raw logits [V].

    With a `draft`, by rejection sampling (Leviathan et al. 2023, arXiv:2211.17192): the draft with
    the probability that it has, otherwise another token. The law is the same, the token is not.
    """
    try:
        return _sample_row(row, state, draft)
    except BaseException as error:  # ends this row's sequence, not the step
        return failure_of(error)


def _sample_row(
    row: npt.NDArray[np.float32], state: SamplingState, draft: int | None
) -> Sample | SampleFailure:
    if state.adjusts_logits:
        logits = adjusted_logits(row, state)
        if isinstance(logits, SampleFailure):
            return logits
        token_id = state.forced_token(_sample_token(logits, state, draft))
    elif np.isfinite(row.max()):
        token_id = _sample_token(row, state, draft)
    else:
        return NO_MAXIMUM
    num_top = state.sampling.logprobs
    if num_top is None:
        return Sample(token_id)
    requested_ids = state.sampling.logprob_token_ids
    return Sample(token_id, token_logprobs(row, token_id, num_top, requested_ids))


def adjusted_logits(
    row: npt.NDArray[np.float32], state: SamplingState
) -> npt.NDArray[np.float64] | SampleFailure:
    """The logits [V] of a row before temperature, all changes applied; their maximum is finite."""
    if not np.isfinite(row.max()):
        return NO_MAXIMUM
    logits = row.astype(np.float64)
    state.adjust_(logits)
    if state.failure:
        return SampleFailure(state.failure, is_refused=True)
    return logits if np.isfinite(logits.max()) else NOTHING_ALLOWED


NO_MAXIMUM = SampleFailure("the logits hold NaN or infinity")
NOTHING_ALLOWED = SampleFailure(
    "no token is left after logit_bias, allowed_token_ids, bad_words, grammar and min_tokens",
    is_refused=True,
)


def _argmax(logits: Tensor) -> list[Sample | SampleFailure]:
    """Ties go to the lowest id. NaN counts as the largest value, so that it is noticed here."""
    import torch

    token_ids = torch.argmax(logits, dim=1, keepdim=True)
    is_finite = torch.isfinite(logits.gather(1, token_ids))
    return [
        Sample(token_id) if finite else NO_MAXIMUM
        for token_id, finite in zip(
            token_ids.flatten().tolist(), is_finite.flatten().tolist(), strict=True
        )
    ]


def _sample_token(logits: npt.NDArray[np.floating], state: SamplingState, draft: int | None) -> int:
    sampling, seed, position = state.sampling, state.seed, state.num_outputs
    temperature = sampling.temperature
    if temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # a tiny temperature sends the tail to -inf: it is dropped
        scaled /= temperature
    ids = kept_token_ids(scaled, sampling, state.applies_xtc)
    if draft is not None:
        return _accepted_or_other(ids, scaled[ids], draft, seed ^ _REJECTION_SEED, position)
    return int(ids[gumbel_argmax(scaled[ids], noise_bits(seed, position, ids))])


def _accepted_or_other(
    ids: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    draft: int,
    seed: int,
    position: int,
) -> int:
    """The draft with its probability p among token ids [n], otherwise one of the others, each with
    its probability divided by 1 - p. `values` [n] are scaled logits.

    It does not matter how the draft was found, as long as that is independent of the noise of
    `seed`.
    """
    is_other = ids != draft
    if is_other.all():
        probability = 0.0
    else:
        weights = np.exp(values - values.max())
        probability = float(weights[~is_other][0] / weights.sum())
    if chance(seed, position) < probability or not is_other.any():
        return draft
    others = ids[is_other]
    return int(others[gumbel_argmax(values[is_other], noise_bits(seed, position, others))])
