"""`DecodeRows`: the rows of steps that only decode, for drivers that compute nothing.

Between two arrivals or ends, a step differs from the one before it in numbers only. The simulator
has `Scheduler.decode_stretch` advance such steps without rows, plans and results. Everything that
a later decision or a report reads is equal to the last bit: sums are in the same order as in
`accounting.charge`, and blocks are allocated and registered in the same order as in `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import msgspec

from quickstep.core.accounting import StepCharges
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.queues import RunningBatch
from quickstep.core.sequence import Sequence
from quickstep.types import SequenceOutput, StepRecord

__all__ = ["DecodeRows", "DecodeSteps", "decode_record", "only_decodes"]


class DecodeSteps(msgspec.Struct, frozen=True):
    """Steps that were planned and committed: their records, and the sequences that the last of them
    ended.
    """

    records: tuple[StepRecord, ...] = ()
    outputs: tuple[SequenceOutput, ...] = ()


def only_decodes(sequence: Sequence, token_id: int) -> bool:
    """Whether each next step of a sequence is a plain row that generates `token_id`, until its last
    output token.
    """
    residency, request = sequence.resident, sequence.request
    sampling = request.sampling
    is_plain = not (
        sequence.is_paused
        or sequence.drafts
        or residency.awaits_drafts
        or residency.pending
        or request.adapter_id
        or request.pooling is not None
        or sampling.grammar is not None
        or sampling.logprobs is not None
    )
    may_stop = not sampling.ignore_eos and token_id in request.eos_token_ids
    planned = residency.planned
    return (
        is_plain
        and not may_stop
        and token_id not in sampling.stop_token_ids
        and planned == len(sequence.token_ids) - 1
        and planned >= max(residency.prefill_end, residency.recompute_end, residency.drafted_end)
    )


class DecodeRows:
    """The batch of a stretch. Owned by `Scheduler.decode_stretch` during one call.

    The sequences are up to date where a block begins or is full, and after `store`.
    """

    def __init__(self, sequences: SequenceOf[Sequence], block_size: int, token_id: int) -> None:
        self._sequences = sequences
        self._token_id = token_id
        self._block_size = block_size
        self._num_steps = 0
        self._starts = [one.resident.planned for one in sequences]
        self._device_s = [one.device_s for one in sequences]
        self._contexts = [start + 1 for start in self._starts]
        self._num_kv_tokens = sum(self._contexts)
        self._num_left = min([one.output_limit - one.num_outputs for one in sequences])
        # by step, modulo the block size: places of rows that begin or fill a block; how many begin
        self._changing: list[list[int]] = [[] for _ in range(block_size)]
        self._num_growing = [0] * block_size
        for place, start in enumerate(self._starts):
            begins_at = -start % block_size
            self._num_growing[begins_at] += 1
            self._changing[begins_at].append(place)
            if block_size > 1:
                self._changing[(begins_at - 1) % block_size].append(place)

    @property
    def is_over(self) -> bool:
        """Whether the last step has ended a sequence."""
        return self._num_steps == self._num_left

    @property
    def load(self) -> StepLoad:
        """The next step's."""
        num, num_kv_tokens = len(self._sequences), self._num_kv_tokens
        return StepLoad(num, num, num_kv_tokens, num_kv_tokens, num_logits_rows=num)

    @property
    def num_new_blocks(self) -> int:
        """How many blocks the next step needs."""
        return self._num_growing[self._num_steps % self._block_size]

    def plan(self, batch: RunningBatch) -> None:
        """Allocate and register the blocks of the next step, in the order of its rows."""
        for place in self._changing[self._num_steps % self._block_size]:
            sequence = self._sequences[place]
            start = self._starts[place] + self._num_steps
            self._set_length(sequence, start)
            batch.grow(sequence)
            sequence.resident.planned += 1
            batch.register(sequence)

    def commit(self, seconds: float, cost_model: CostModel) -> StepCharges:
        """Charge the step that was planned. As `accounting.charge`, to the last bit."""
        if len(self._sequences) == 1:
            charged = [seconds]
        else:
            weights = cost_model.decode_row_seconds(self._contexts)
            total = sum(weights)
            if not total > 0.0:
                weights = [1.0] * len(weights)
                total = sum(weights)
            charged = [seconds * (weight / total) for weight in weights]
        self._device_s = [
            sum_s + row_s for sum_s, row_s in zip(self._device_s, charged, strict=True)
        ]
        self._contexts = [context + 1 for context in self._contexts]
        self._num_kv_tokens += len(self._sequences)
        self._num_steps += 1
        return StepCharges(tuple(charged), 0.0, 0.0, 0.0)

    def store(self, last_step_id: int) -> list[Sequence]:
        """Bring the sequences up to date; returns those that the last step has ended."""
        for sequence, start, device_s in zip(
            self._sequences, self._starts, self._device_s, strict=True
        ):
            self._set_length(sequence, start + self._num_steps)
            sequence.device_s = device_s
            sequence.last_step_id = last_step_id
        return [one for one in self._sequences if one.num_outputs >= one.output_limit]

    def _set_length(self, sequence: Sequence, num_computed: int) -> None:
        """The sequence after so many positions: one more token is known."""
        tokens = sequence.token_ids
        tokens += [self._token_id] * (num_computed + 1 - len(tokens))
        sequence.resident.planned = num_computed


def decode_record(
    step_id: int,
    planned_at_s: float,
    committed_at_s: float,
    seconds: float,
    predicted_s: float,
    load: StepLoad,
    charges: StepCharges,
    *,
    num_free_blocks: int,
    num_running: int,
) -> StepRecord:
    """The line of the step log, as `accounting.step_record`."""
    return StepRecord(
        step_id,
        planned_at_s,
        committed_at_s,
        seconds,
        predicted_s,
        num_prefill_rows=0,
        num_decode_rows=load.num_rows,
        num_prefill_tokens=0,
        num_decode_tokens=load.num_tokens,
        num_kv_tokens=load.num_kv_tokens,
        num_pairs=load.num_pairs,
        num_scored=0,
        num_free_blocks=num_free_blocks,
        num_waiting=0,
        num_running=num_running,
        num_preemptions=0,
        decode_s=sum(charges.seconds),
        prefill_s=0,
    )
