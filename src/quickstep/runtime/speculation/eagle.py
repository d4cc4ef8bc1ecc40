"""Drafts from an EAGLE layer, which reads the hidden states of all tokens of a sequence.

The layer's KV is another layer on the target's blocks: its cache has as many blocks and the same
block tables, so a prefix hit finds it, and a released sequence frees it. Drafts have their KV where
the next tokens will have theirs, or in scratch blocks where the sequence has no block yet; the
layer computes these positions again from the target's hidden states when the tokens are known.

Hidden states are kept until drafts are wanted, at most `_MAX_KEPT` tokens of a sequence: while
drafts do not pay, a step runs the layer only for prompts and once per so many tokens.

A position's KV may be missing: after a hit on tokens that were not computed yet when their
sequence ended, or where a cached block was followed by another token. That makes drafts worse and
changes no output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quickstep.config import MAX_SPECULATIVE_TOKENS
from quickstep.model.decoder import Decoder
from quickstep.model.eagle import EagleModel
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import (
    BFLOAT16,
    FLOAT32,
    AnyTensor,
    HostTensor,
    host_dtype,
    to_numpy,
)
from quickstep.runtime.capture import StepModel, open_steps
from quickstep.runtime.sampling.native_sampler import open_sampler
from quickstep.runtime.sampling.sampler import Sample
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot
from quickstep.runtime.speculation.draft_model import draft_admission
from quickstep.runtime.speculation.proposer import ComputedRow, DraftTask
from quickstep.types import Admission, Phase, StepRow

__all__ = ["EagleProposer", "num_scratch_blocks"]

_MAX_KEPT = 64


def num_scratch_blocks(max_num_seqs: int, block_size: int) -> int:
    """Blocks that the layer's cache has in addition to the target's."""
    return max_num_seqs * _scratch_per_sequence(block_size)


def _scratch_per_sequence(block_size: int) -> int:
    return -(-MAX_SPECULATIVE_TOKENS // block_size)


class EagleProposer:
    """Proposes with an EAGLE layer.

    Args:
        kv: The layer's cache: the blocks of `target`'s, then `num_scratch_blocks`.
        num_blocks: Blocks of the target's cache.
        enforce_eager: Run the layer op by op.
    """

    name = "eagle"
    needs_hidden = False

    def __init__(
        self,
        target: Decoder,
        model: EagleModel,
        kv: KVCache,
        num_blocks: int,
        block_size: int,
        enforce_eager: bool = False,
    ) -> None:
        of_target, of_itself = model.feature_sizes

        def steps(num_features: int) -> StepModel:
            return open_steps(model, kv, block_size, enforce_eager, num_features=num_features)

        self.aux_layers = model.spec.aux_layers
        self._first_steps = steps(of_target)
        self._next_steps = self._first_steps if of_itself == of_target else steps(of_itself)
        self._sample = open_sampler(target)
        self._target_ids = model.weights.target_ids
        self._vocab_size = target.vocab_size
        self._max_model_len = model.max_model_len
        self._block_size = block_size
        self._first_scratch = num_blocks
        self._slots: dict[int, _EagleSlot] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self._slots[slot] = _EagleSlot(admission, self._vocab_size)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].token_ids.extend(token_ids)

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)

    def compute(self, rows: Sequence[ComputedRow]) -> None:
        """`HiddenStateProposer.compute`."""
        full = []
        for row in rows:
            slot = self._slots[row.slot]
            slot.keep(row)
            if slot.num_kept >= _MAX_KEPT:
                first = slot.first_row(emits=False)
                if first is not None:
                    full.append((slot, *first))
        if full:
            self._run_first(full)

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """`Proposer.propose`."""
        drafts: list[list[int]] = [[] for _ in tasks]
        places: list[int] = []
        active: list[tuple[_EagleSlot, StepRow, HostTensor]] = []
        for place, task in enumerate(tasks):
            slot = self._slots[task.slot]
            slot.token_ids.extend(task.new_token_ids)
            if slot.has_all:
                first = slot.first_row(emits=True)
                if first is not None:
                    places.append(place)
                    active.append((slot, *first))
        if not active:
            return [()] * len(tasks)
        for index, (slot, _, _) in enumerate(active):
            slot.slot.append_blocks(self._scratch(index))
            slot.state.num_outputs = len(slot.token_ids) - slot.prompt_len
        hidden, logits = self._run_first(active)
        rows = [row for _, row, _ in active]
        slots = [slot for slot, _, _ in active]
        while True:
            samples = self._sample(
                self._logits_of_target(logits), [slot.state for slot in slots], None
            )
            kept = []
            for index, sampled in enumerate(samples):
                if not isinstance(sampled, Sample):
                    continue
                draft, wanted = drafts[places[index]], tasks[places[index]].num_drafts
                draft.append(sampled.token_id)
                if len(draft) < wanted and rows[index].end < self._max_model_len:
                    kept.append(index)
            if not kept:
                return [tuple(draft) for draft in drafts]
            places = [places[index] for index in kept]
            slots = [slots[index] for index in kept]
            starts = [rows[index].end for index in kept]
            rows = [
                _row(start, (drafts[place][-1],), emits=True)
                for start, place in zip(starts, places, strict=True)
            ]
            for slot in slots:
                slot.state.num_outputs += 1
            states = _host(hidden)
            features = HostTensor(states.numpy()[kept], states.dtype)
            self._next_steps.prepare(rows, [slot.slot for slot in slots])
            emitting = [(index, 0) for index in range(len(rows))]
            hidden, logits = self._next_steps.run(emitting, False, features)

    def _run_first(
        self, active: Sequence[tuple[_EagleSlot, StepRow, HostTensor]]
    ) -> tuple[AnyTensor, AnyTensor]:
        """Compute rows of known tokens from the target's hidden states."""
        rows = [row for _, row, _ in active]
        features = np.concatenate([kept.numpy() for _, _, kept in active])
        self._first_steps.prepare(rows, [slot.slot for slot, _, _ in active])
        emitting = [(index, 0) for index, row in enumerate(rows) if row.emits]
        return self._first_steps.run(emitting, False, HostTensor(features, active[0][2].dtype))

    def _scratch(self, index: int) -> range:
        count = _scratch_per_sequence(self._block_size)
        start = self._first_scratch + index * count
        return range(start, start + count)

    def _logits_of_target(self, logits: AnyTensor) -> AnyTensor:
        """Logits in the order of the target's ids; -inf where the layer lacks a token."""
        if self._target_ids is None:
            return logits
        narrow = to_numpy(logits)
        wide = np.full((narrow.shape[0], self._vocab_size), -np.inf, dtype=np.float32)
        wide[:, self._target_ids] = narrow
        return HostTensor(wide, FLOAT32)


class _EagleSlot:
    """A sequence: its tokens, and the target's hidden states that the layer has not read.

    `kept` are those of the positions from `start` on, one after another.
    """

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        self.slot = Slot(draft_admission(admission), vocab_size)
        state = self.slot.state
        assert state is not None, "nothing in these parameters can fail"
        self.state: SamplingState = state
        self.prompt_len = admission.prompt_len
        self.token_ids = list(admission.token_ids)
        self.start = 0
        self.num_kept = 0
        self._kept: list[HostTensor] = []

    @property
    def has_all(self) -> bool:
        """Whether every token but the newest has been computed by the target."""
        return self.num_kept > 0 and self.start + self.num_kept == len(self.token_ids) - 1

    def keep(self, row: ComputedRow) -> None:
        """Take in hidden states of the target, which are copied, and its block table."""
        if row.start != self.start + self.num_kept:  # after a prefix hit
            self._kept, self.num_kept, self.start = [], 0, row.start
        hidden = _host(row.hidden)
        self._kept.append(HostTensor(hidden.numpy().copy(), hidden.dtype))
        self.num_kept += hidden.shape[0]
        self.slot.set_blocks(row.block_ids)

    def first_row(self, emits: bool) -> tuple[StepRow, HostTensor] | None:
        """The row of the kept positions whose next token is known, and their hidden states; these
        are kept no longer.
        """
        count = min(self.num_kept, len(self.token_ids) - 1 - self.start)
        if count < 1:
            return None
        joined = np.concatenate([one.numpy() for one in self._kept])
        dtype = self._kept[0].dtype
        tokens = tuple(self.token_ids[self.start + 1 : self.start + 1 + count])
        row = _row(self.start, tokens, emits)
        self.start += count
        self.num_kept -= count
        self._kept = [HostTensor(joined[count:], dtype)] if self.num_kept else []
        return row, HostTensor(joined[:count], dtype)


def _row(start: int, token_ids: tuple[int, ...], emits: bool) -> StepRow:
    return StepRow(0, start, len(token_ids), token_ids, (), Phase.DECODE, emits, 0)


def _host(x: AnyTensor) -> HostTensor:
    """The same elements without torch's class."""
    if isinstance(x, HostTensor):
        return x
    dtype = host_dtype(x.dtype)
    assert dtype is not None
    array = x.detach().cpu()
    if dtype == BFLOAT16:  # NumPy has no such type: its bits
        import torch

        array = array.view(torch.int16)
    return HostTensor(array.numpy().view(dtype.storage), dtype)
