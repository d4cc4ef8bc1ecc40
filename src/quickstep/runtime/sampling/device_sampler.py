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
from quickstep.runtime.sampling.device_records import DeviceRecords, copy_to_device
from quickstep.runtime.sampling.logit_changes import LogitChanges
from quickstep.runtime.sampling.logprobs import logprobs_of_scores, other_token_ids, token_logprobs
from quickstep.runtime.sampling.recorded_sampling import RecordedSampling
from quickstep.runtime.sampling.sampler import (
    NO_MAXIMUM,
    NOTHING_ALLOWED,
    Sample,
    SampleFailure,
    failure_of,
    sample,
)
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.steps.step_model import GraphBackend
from quickstep.types import TokenLogprobs

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
        pending = [result for result in started if isinstance(result, _Pending)]
        samples = iter(self._launch(matrix, pending, is_ahead=False).wait() if pending else ())
        return [next(samples) if isinstance(result, _Pending) else result for result in started]

    def launch(self, logits: AnyTensor, states: Sequence[SamplingState]) -> SamplesInFlight:
        """`sample` without waiting for the device: the tokens are the input of the next step before
        the host knows them.

        Each state is `ahead` by the tokens that are not recorded yet, and none `reads_tokens`. The
        device counts the sampled tokens for penalties, so the state of each row with penalties must
        have been launched for all of those tokens.
        """
        assert not any([state.reads_tokens for state in states])
        matrix = to_torch(logits)
        pending = [_pending(matrix, state, row) for row, state in enumerate(states)]
        return self._launch(matrix, pending, is_ahead=True)

    def compile_kernels(self) -> None:
        """Launch every kernel, so that none is compiled for the first request that needs it."""
        logits = torch.zeros(1, self._records.vocab_size, device=self._device)
        for num_top in (0, 1):
            records = self._records.of_everything()
            token_scores(logits, sample_on_device(logits, records), num_top)

    def of_argmax(self, token_ids: Tensor) -> SamplesInFlight:
        """Tokens [E] that a step has sampled by itself; -1 where a row has no finite maximum."""
        return SamplesInFlight(token_ids)

    def recorded(
        self, logits: Tensor, last_tokens: Tensor, buckets: Sequence[int], backend: GraphBackend
    ) -> RecordedSampling:
        """Sampling of recorded steps; see there. It counts tokens in the same table."""
        return RecordedSampling(
            self._records, self._group_rows, logits, last_tokens, buckets, backend
        )

    def of_recorded(
        self, token_ids: Tensor, logits: AnyTensor, states: Sequence[SamplingState]
    ) -> SamplesInFlight:
        """Tokens [E] that `RecordedSampling` has sampled for these states from logits [E, V]."""
        scored = [
            index for index, state in enumerate(states) if state.sampling.logprobs is not None
        ]
        if not scored:
            return SamplesInFlight(token_ids)
        matrix = to_torch(logits)
        pending = [
            _Pending(state, matrix, row, None, _num_top(state, matrix))
            for row, state in enumerate(states)
        ]
        return SamplesInFlight(token_ids, pending, [_scores(matrix, token_ids, pending, scored)])

    def _launch(
        self, logits: Tensor, pending: Sequence[_Pending], is_ahead: bool
    ) -> SamplesInFlight:
        """Sample group by group; `is_ahead`: count the tokens on the device."""
        token_ids: list[Tensor] = []
        scores: list[_ScoresOfGroup] = []
        for first in range(0, len(pending), self._group_rows):
            group = pending[first : first + self._group_rows]
            states = [row.state for row in group]
            records = self._records.build(
                states, [row.changes for row in group], [row.row for row in group]
            )
            sampled = sample_on_device(logits, records)
            if is_ahead and records.counts is not None:
                self._records.count_(records.rows, sampled)
                self._records.advance_counts(states)
            token_ids.append(sampled)
            scored = [index for index, one in enumerate(group) if one.num_top is not None]
            if scored:
                scores.append(_scores(logits, sampled, group, scored))
        joined = token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids)
        return SamplesInFlight(joined, pending, scores)


class SamplesInFlight:
    """Sampled rows on their way to the host, in one copy.

    `token_ids` [E] int64 are on the device; negative ones are those of
    `ops.triton.sampling.sample`. Without `pending`, nothing else of the rows is requested.
    """

    def __init__(
        self,
        token_ids: Tensor,
        pending: Sequence[_Pending] = (),
        scores: Sequence[_ScoresOfGroup] = (),
    ) -> None:
        self.token_ids = token_ids
        self._pending = pending
        self._scores = scores
        numbers = token_ids
        if scores:
            numbers = torch.cat((token_ids, *[score.numbers.flatten() for score in scores]))
        self._event: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers.device))
        else:
            self._numbers = numbers.clone()

    def wait(self) -> list[Sample | SampleFailure]:
        """The sample of each row, once they are there. Any thread may wait."""
        if self._event is not None:
            self._event.synchronize()
        numbers = self._numbers.numpy()
        first = self.token_ids.shape[0]
        token_ids = numbers[:first].tolist()
        if not self._pending:
            return [
                Sample(token_id) if token_id >= 0 else _failure(token_id) for token_id in token_ids
            ]
        for group in self._scores:
            end = first + group.numbers.numel()
            found = numbers[first:end].reshape(len(group.pending), -1)
            for one, row in zip(group.pending, found, strict=True):
                one.scores = _Scores(row, group.num_top)
            first = end
        return [
            _finish(one, token_id) for one, token_id in zip(self._pending, token_ids, strict=True)
        ]


class _ScoresOfGroup(msgspec.Struct, frozen=True):
    """What the log-probabilities of some rows are computed from: `numbers` [L, ...] int64 on the
    device, of each a row of `token_scores`, then the bits of the requested logits.
    """

    pending: Sequence[_Pending]
    numbers: Tensor
    num_top: int


def _scores(
    logits: Tensor, token_ids: Tensor, group: Sequence[_Pending], scored: Sequence[int]
) -> _ScoresOfGroup:
    """The scores of those of a group, which was sampled, at the places `scored`."""
    pending = [group[index] for index in scored]
    num_top = max(row.num_top or 0 for row in pending)
    requested = _requested_ids([row.state for row in pending])
    places = np.array([(group[index].row, index) for index in scored], dtype=np.int64)
    # one copy to the device for both: [L, 2 + requested ids]
    fixed = copy_to_device(np.concatenate((places, requested), axis=1), logits.device.type)
    chosen = logits[fixed[:, 0]]
    scores = token_scores(chosen, token_ids[fixed[:, 1]], num_top)
    bits = chosen.gather(1, fixed[:, 2:]).double().view(torch.int64)
    return _ScoresOfGroup(pending, torch.cat((scores, bits), dim=1), num_top)


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
    """A row of the logits to sample. `num_top` is None without log-probabilities."""

    state: SamplingState
    logits: Tensor
    row: int
    changes: LogitChanges | None
    num_top: int | None
    scores: _Scores | None = None


def _start(logits: Tensor, state: SamplingState, row: int) -> Sample | SampleFailure | _Pending:
    try:
        pending = _pending(logits, state, row)
    except BaseException as error:  # ends this row's sequence, not the step
        return failure_of(error)
    if state.failure:
        is_finite = bool(torch.isfinite(logits[row].max()))
        return SampleFailure(state.failure, is_refused=True) if is_finite else NO_MAXIMUM
    return pending


def _pending(logits: Tensor, state: SamplingState, row: int) -> _Pending:
    changes = state.changes(None) if state.adjusts_logits else None
    return _Pending(state, logits, row, changes, _num_top(state, logits))


def _num_top(state: SamplingState, logits: Tensor) -> int | None:
    """Most likely tokens whose log-probabilities are requested; None without any."""
    num_top = state.sampling.logprobs
    return None if num_top is None else min(num_top, logits.shape[1])


def _failure(token_id: int) -> SampleFailure:
    """What a negative token says."""
    return NO_MAXIMUM if token_id == NO_MAXIMUM_TOKEN else NOTHING_ALLOWED


def _finish(pending: _Pending, token_id: int) -> Sample | SampleFailure:
    state = pending.state
    if token_id < 0:
        return _failure(token_id)
    try:
        emitted = token_id if pending.changes is None else state.forced_token(token_id)
    except BaseException as error:  # ends this row's sequence, not the step
        return failure_of(error)
    if pending.num_top is None or pending.scores is None:
        return Sample(emitted)
    requested_ids = state.sampling.logprob_token_ids
    if emitted != token_id:  # by a grammar, so not ahead: the logits are still there
        row = to_numpy(pending.logits[pending.row].cpu())
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
    known = [score for score in scores if score is not None]
    return known if len(known) == len(scores) else None
