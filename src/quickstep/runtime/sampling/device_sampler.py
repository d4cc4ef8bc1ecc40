"""Sampling where the logits are, on an accelerator, with the tokens and log-probabilities of
`runtime.sampling.sampler`: only token ids and requested log-probabilities come to the host, in one
copy for a step.

`DeviceRecords` makes what the kernels read (`sample` and `token_scores` in
`ops.triton.sampling`).
Opened by `runtime.sampling.native_sampler.open_sampler` where the model's kernels are Triton's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quickstep.ops.tensors import AnyTensor, to_numpy, to_torch
from quickstep.ops.triton.sampling.sample import NO_MAXIMUM as NO_MAXIMUM_TOKEN
from quickstep.ops.triton.sampling.sample import sample as sample_on_device
from quickstep.ops.triton.sampling.token_scores import NUM_SCORES, token_scores
from quickstep.runtime.sampling.device_records import DeviceRecords
from quickstep.runtime.sampling.logit_changes import LogitChanges
from quickstep.runtime.sampling.logprobs import (
    logprobs_of_scores,
    other_token_ids,
    token_logprobs,
)
from quickstep.runtime.sampling.sampler import (
    NO_MAXIMUM,
    NOTHING_ALLOWED,
    Sample,
    SampleFailure,
    failure_of,
    sample,
)
from quickstep.runtime.sampling.state import SamplingState
from quickstep.types import TokenLogprobs

__all__ = ["DeviceSampler", "score_on_device"]

_GROUP_BYTES = 256 << 20  # of temporary tensors
_BYTES_PER_LOGIT = 25  # of a row that has everything


class DeviceSampler:
    """Samples logits [E, V] on one device. For one thread at a time."""

    def __init__(self, vocab_size: int, device: str) -> None:
        self._device = device
        self._records = DeviceRecords(vocab_size, device)
        self._group_rows = max(1, _GROUP_BYTES // (_BYTES_PER_LOGIT * vocab_size))

    def sample(
        self,
        logits: AnyTensor,
        states: Sequence[SamplingState],
        rows: Sequence[int] | None = None,
    ) -> list[Sample | SampleFailure]:
        """`runtime.sampling.sampler.sample`; logits of drafts in another vocabulary are on the host
        and are copied.
        """
        matrix = to_torch(logits).to(self._device)
        if all([state.is_plain_argmax for state in states]):
            return sample(matrix, states, rows)
        places = range(len(states)) if rows is None else rows
        started = [_start(matrix, state, row) for row, state in zip(places, states, strict=True)]
        pending = [one for one in started if isinstance(one, _Pending)]
        for first in range(0, len(pending), self._group_rows):
            self._run(matrix, pending[first : first + self._group_rows])
        return [_finish(matrix, one) if isinstance(one, _Pending) else one for one in started]

    def launch(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        """Token ids [E] int64 of logits [E, V], on the device, which is not waited for; negative
        ones are those of `ops.triton.sampling.sample`.

        The input of the next step, before the host knows the tokens. Each state is one for which
        `is_function_of_position`, `ahead` by the tokens that are not recorded yet. There are no
        log-probabilities. The temporary tensors are those of all rows at once.
        """
        assert all([state.is_function_of_position for state in states])
        changes = [state.changes(None) if state.adjusts_logits else None for state in states]
        return sample_on_device(logits, self._records.build(states, changes, range(len(states))))

    def _run(self, logits: Tensor, group: list[_Pending]) -> None:
        """Fill in the results of a group of rows; the only copy to the host is here."""
        records = self._records.build(
            [one.state for one in group],
            [one.changes for one in group],
            [one.row for one in group],
        )
        token_ids = sample_on_device(logits, records)
        scored = [index for index, one in enumerate(group) if one.num_top is not None]
        if not scored:
            for one, token_id in zip(group, token_ids.tolist(), strict=True):
                one.token_id = token_id
            return
        num_top = max(group[index].num_top or 0 for index in scored)
        requested = _requested_ids([group[index].state for index in scored])
        places = np.array([(group[index].row, index) for index in scored], dtype=np.int64)
        # one copy to the device for both: [L, 2 + requested ids]
        fixed = torch.from_numpy(np.concatenate((places, requested), axis=1)).to(logits.device)
        chosen = logits[fixed[:, 0]]
        scores = token_scores(chosen, token_ids[fixed[:, 1]], num_top)
        bits = chosen.gather(1, fixed[:, 2:]).double().view(torch.int64)
        found = torch.cat((token_ids, torch.cat((scores, bits), dim=1).flatten())).cpu().numpy()
        for one, token_id in zip(group, found[: len(group)].tolist(), strict=True):
            one.token_id = token_id
        numbers = found[len(group) :].reshape(len(scored), -1)
        for index, row in zip(scored, numbers, strict=True):
            group[index].scores = _Scores(row, num_top)


class _Scores(msgspec.Struct, frozen=True):
    """A row of `token_scores` with `num_top` most likely tokens, then the requested logits."""

    numbers: npt.NDArray[np.int64]
    num_top: int

    def logprobs(
        self, token_id: int, num_top: int, requested_ids: Sequence[int] = ()
    ) -> TokenLogprobs | None:
        """As `runtime.sampling.logprobs.token_logprobs`; None without a finite maximum."""
        floats = self.numbers.view(np.float64)
        rank, total = self.numbers[:2].tolist()
        if rank < 0:
            return None
        peak, chosen = floats[2:NUM_SCORES].tolist()
        end = NUM_SCORES + self.num_top
        top_ids = self.numbers[NUM_SCORES : NUM_SCORES + num_top].tolist()
        top_logits = floats[end : end + num_top].tolist()
        requested = floats[end + self.num_top :][: len(requested_ids)]
        logit_of = dict(zip(requested_ids, requested.tolist(), strict=True))
        others = other_token_ids(logit_of.__getitem__, requested_ids, top_ids)
        ids = [*top_ids, *others]
        values = [*top_logits, *[logit_of[other] for other in others]]
        return logprobs_of_scores(token_id, rank, total, peak, chosen, ids, values)


class _Pending(msgspec.Struct):
    """A row to sample. `num_top` is None without log-probabilities."""

    state: SamplingState
    row: int
    changes: LogitChanges | None
    num_top: int | None
    token_id: int = 0
    scores: _Scores | None = None


def _start(logits: Tensor, state: SamplingState, row: int) -> Sample | SampleFailure | _Pending:
    try:
        changes = state.changes(None) if state.adjusts_logits else None
    except BaseException as error:  # ends this row's sequence, not the step
        return failure_of(error)
    if state.failure:
        is_finite = bool(torch.isfinite(logits[row].max()))
        return SampleFailure(state.failure, is_refused=True) if is_finite else NO_MAXIMUM
    num_top = state.sampling.logprobs
    if num_top is not None:
        num_top = min(num_top, logits.shape[1])
    return _Pending(state, row, changes, num_top)


def _finish(logits: Tensor, pending: _Pending) -> Sample | SampleFailure:
    token_id, state = pending.token_id, pending.state
    if token_id < 0:
        return NO_MAXIMUM if token_id == NO_MAXIMUM_TOKEN else NOTHING_ALLOWED
    try:
        emitted = token_id if pending.changes is None else state.forced_token(token_id)
    except BaseException as error:  # ends this row's sequence, not the step
        return failure_of(error)
    if pending.num_top is None or pending.scores is None:
        return Sample(emitted)
    requested_ids = state.sampling.logprob_token_ids
    if emitted != token_id:
        row = to_numpy(logits[pending.row].cpu())
        return Sample(emitted, token_logprobs(row, emitted, pending.num_top, requested_ids))
    return Sample(emitted, pending.scores.logprobs(emitted, pending.num_top, requested_ids))


def _requested_ids(states: Sequence[SamplingState]) -> npt.NDArray[np.int64]:
    """The tokens whose logits are requested too, [L, most of a row], padded with token 0."""
    requested = [state.sampling.logprob_token_ids for state in states]
    padded = np.zeros((len(states), max(map(len, requested))), dtype=np.int64)
    for row, ids in zip(padded, requested, strict=True):
        row[: len(ids)] = ids
    return padded


def score_on_device(
    logits: AnyTensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs] | None:
    """`runtime.sampling.logprobs.score_tokens` of logits [T, V] on a device."""
    matrix = to_torch(logits)
    ids = torch.tensor(token_ids, dtype=torch.int64).to(matrix.device)
    found = token_scores(matrix, ids, num_top).cpu().numpy()
    scores = [
        _Scores(row, num_top).logprobs(token_id, num_top)
        for row, token_id in zip(found, token_ids, strict=True)
    ]
    known = [one for one in scores if one is not None]
    return known if len(known) == len(scores) else None
