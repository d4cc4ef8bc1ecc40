"""Sampling of a step's rows in one native call, with the same tokens and bits as
`runtime.sampling.sampler`.

`SamplingState.changes` computes the changes of a row's logits (penalties, masks, grammars) for the
tokens concerned; the native call applies them. Called by `runtime.runner` where the kernels are
native, and for logits of an accelerator without a sampler of its own, which are copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.model.interface import Model
from quickstep.ops.native.backend import load_native
from quickstep.ops.native.library import SampleCall
from quickstep.ops.native.steps import RowSampler
from quickstep.ops.tensors import AnyTensor, HostTensor, to_numpy, to_torch
from quickstep.runtime.sampling.logit_changes import LogitChanges
from quickstep.runtime.sampling.logprobs import logprobs_of_scores, other_token_ids, token_logprobs
from quickstep.runtime.sampling.noise import row_keys
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

if TYPE_CHECKING:
    from quickstep.runtime.sampling.device_sampler import DeviceSampler

_NO_MAXIMUM = -1  # `qs_no_token`

# (logits [E, V] fp32, states, the row of the logits for each state or None for all) -> tokens
Sampler = Callable[
    [AnyTensor, Sequence[SamplingState], Sequence[int] | None], list[Sample | SampleFailure]
]


def open_device_sampler(model: Model, vocab_size: int | None = None) -> DeviceSampler | None:
    """Triton's sampler where the model's kernels are Triton's.

    `vocab_size`: V of the logits, if it is not that of the model.
    """
    if not model.ops.samples_on_device:
        return None
    # Imported here: it computes with torch.
    from quickstep.runtime.sampling.device_sampler import DeviceSampler

    return DeviceSampler(vocab_size or model.vocab_size, model.device.type)


def open_sampler(model: Model, vocab_size: int | None = None) -> Sampler:
    """The native sampler where the model's kernels are native or it is on an accelerator, Triton's
    where they are Triton's, otherwise the one in NumPy. `vocab_size` as in `open_device_sampler`.
    """
    if (on_device := open_device_sampler(model, vocab_size)) is not None:
        return on_device.sample
    on_host = model.device.type == "cpu"
    ops = model.ops if on_host else load_native()
    if ops is None or ops.steps is None:
        return sample
    native = NativeSampler(ops.steps.sampler(vocab_size or model.vocab_size)).sample
    return native if on_host else partial(_sample_copy, native)


def _sample_copy(
    native: Sampler,
    logits: AnyTensor,
    states: Sequence[SamplingState],
    rows: Sequence[int] | None = None,
) -> list[Sample | SampleFailure]:
    """Sample logits of an accelerator; where each row is a plain argmax, they stay there."""
    if all([state.is_plain_argmax for state in states]):
        return sample(logits, states, rows)
    return native(to_torch(logits).to("cpu"), states, rows)


class NativeSampler:
    """Fills the calls, runs them and reads their results. For one thread at a time."""

    def __init__(self, rows: RowSampler) -> None:
        self._rows = rows
        # the logits for which the calls are filled with an argmax: (address, bytes per row, rows)
        self._argmax_of: tuple[int, int, int] | None = None

    def sample(
        self,
        logits: AnyTensor,
        states: Sequence[SamplingState],
        rows: Sequence[int] | None = None,
    ) -> list[Sample | SampleFailure]:
        """`runtime.sampling.sampler.sample`, for contiguous rows on a CPU."""
        if rows is None:
            for state in states:
                if not (state.may_be_argmax and state.is_plain_argmax):
                    break
            else:
                return self._argmax(logits)
        self._argmax_of = None
        calls = self._rows.calls(len(states))
        matrix = logits.numpy() if isinstance(logits, HostTensor) else to_numpy(logits)
        started: list[Sample | SampleFailure | _PendingCall] = []
        num_calls = 0
        for index, state in zip(rows or range(len(states)), states, strict=True):
            started.append(_start(calls[num_calls], matrix[index], state))
            num_calls += isinstance(started[-1], _PendingCall)
        if num_calls:
            self._rows.run(num_calls)
        samples: list[Sample | SampleFailure] = []
        for one, state in zip(started, states, strict=True):
            samples.append(_finish(one, state) if isinstance(one, _PendingCall) else one)
        return samples

    def _argmax(self, logits: AnyTensor) -> list[Sample | SampleFailure]:
        num_rows = logits.shape[0]
        calls = self._rows.calls(num_rows)
        rows = logits.data_ptr(), logits.stride(0) * logits.element_size(), num_rows
        if rows != self._argmax_of:
            self._argmax_of = rows
            address, row_bytes, _ = rows
            for index in range(num_rows):
                call = calls[index]
                call.logits = address + index * row_bytes
                call.num_top, call.temperature = -1, 0.0
                _fill_changes(call, None)
        self._rows.run(num_rows)
        token_ids = [calls[index].token_id for index in range(num_rows)]
        return [Sample(token_id) if token_id >= 0 else NO_MAXIMUM for token_id in token_ids]


class _PendingCall(msgspec.Struct):
    """A filled call and the arrays that it points to."""

    call: SampleCall
    row: npt.NDArray[np.float32]
    changes: LogitChanges | None
    top_ids: npt.NDArray[np.int64] | None = None
    top_logits: npt.NDArray[np.float32] | None = None


def _start(
    call: SampleCall, row: npt.NDArray[np.float32], state: SamplingState
) -> Sample | SampleFailure | _PendingCall:
    sampling, vocab_size = state.sampling, row.shape[0]
    changes: LogitChanges | None = None
    if state.adjusts_logits:
        try:
            changes = state.changes(row)
        except BaseException as error:  # ends this row's sequence, not the step
            return failure_of(error)
        if state.failure:
            is_finite = np.isfinite(row.max())
            return SampleFailure(state.failure, is_refused=True) if is_finite else NO_MAXIMUM
    pending = _PendingCall(call, row, changes)
    call.logits = row.ctypes.data
    _fill_changes(call, changes)
    call.temperature = sampling.temperature
    call.num_top = -1
    call.top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
    call.top_p, call.typical_p = sampling.top_p, sampling.typical_p
    call.log_min_p = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    call.applies_xtc = sampling.xtc_probability > 0.0 and state.applies_xtc
    call.xtc_threshold = sampling.xtc_threshold
    call.key_b, call.key_c = row_keys(state.seed, state.num_outputs)
    if sampling.logprobs is not None:
        call.num_top = min(sampling.logprobs, vocab_size)
        top_ids = pending.top_ids = np.empty(call.num_top, dtype=np.int64)
        top_logits = pending.top_logits = np.empty(call.num_top, dtype=np.float32)
        call.top_ids, call.top_logits = top_ids.ctypes.data, top_logits.ctypes.data
    return pending


def _fill_changes(call: SampleCall, changes: LogitChanges | None) -> None:
    if changes is None:
        call.num_edits = call.num_set = call.num_first_bans = call.num_second_bans = 0
        call.allowed = None
        return
    call.num_edits, call.num_set = changes.edit_ids.shape[0], changes.num_set
    call.edit_ids, call.edit_values = changes.edit_ids.ctypes.data, changes.edit_values.ctypes.data
    call.allowed = None if changes.allowed is None else changes.allowed.ctypes.data
    first, second = changes.bans
    call.num_first_bans, call.first_yields = first.token_ids.shape[0], first.yields
    call.num_second_bans, call.second_yields = second.token_ids.shape[0], second.yields
    call.first_bans, call.second_bans = first.token_ids.ctypes.data, second.token_ids.ctypes.data


def _finish(pending: _PendingCall, state: SamplingState) -> Sample | SampleFailure:
    call = pending.call
    token_id: int = call.token_id
    if token_id < 0:
        return NO_MAXIMUM if token_id == _NO_MAXIMUM else NOTHING_ALLOWED
    has_logprobs = call.num_top >= 0
    requested_ids = state.sampling.logprob_token_ids
    try:
        emitted = token_id if pending.changes is None else state.forced_token(token_id)
    except BaseException as error:  # ends this row's sequence, not the step
        return failure_of(error)
    if emitted != token_id and has_logprobs:
        return Sample(emitted, token_logprobs(pending.row, emitted, call.num_top, requested_ids))
    return Sample(emitted, _logprobs(pending, requested_ids) if has_logprobs else None)


def _logprobs(pending: _PendingCall, requested_ids: Sequence[int]) -> TokenLogprobs:
    """As `runtime.sampling.logprobs.token_logprobs`."""
    call, ids, logits = pending.call, pending.top_ids, pending.top_logits
    assert ids is not None and logits is not None
    others: list[int] = []
    if requested_ids:
        others = other_token_ids(pending.row.__getitem__, requested_ids, ids.tolist())
    return logprobs_of_scores(
        call.token_id,
        call.rank,
        call.total_probability,
        call.peak,
        call.chosen,
        [*ids.tolist(), *others],
        [*logits.tolist(), *pending.row[others].tolist()],
    )
