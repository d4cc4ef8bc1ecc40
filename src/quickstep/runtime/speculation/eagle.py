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
from itertools import islice

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quickstep.config import MAX_SPECULATIVE_TOKENS
from quickstep.model.decoder import Decoder
from quickstep.model.interface import FeatureModel
from quickstep.ops.table import KVCache
from quickstep.ops.tensors import (
    BFLOAT16,
    FLOAT32,
    AnyTensor,
    Array,
    DType,
    HostTensor,
    host_dtype,
    to_numpy,
)
from quickstep.runtime.sampling.native_sampler import open_sampler
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot
from quickstep.runtime.speculation.proposer import ComputedRow, ComputedStep, Drafts, DraftTask
from quickstep.runtime.speculation.trees import TreeGrowth, candidates_of, tree_admission
from quickstep.runtime.steps.opening import open_steps
from quickstep.runtime.steps.step_model import StepModel
from quickstep.types import Admission, Phase, StepRow

_MAX_KEPT = 64
_MOST_KEPT_TOGETHER = 4  # tokens a row, on average
# Drafts that the layer computes for a sequence: of a tree more than are left in the end.
_MAX_COMPUTED = 2 * MAX_SPECULATIVE_TOKENS


def num_scratch_blocks(max_num_seqs: int, block_size: int) -> int:
    """Blocks that the layer's cache has in addition to the target's."""
    return max_num_seqs * _scratch_per_sequence(block_size)


def _scratch_per_sequence(block_size: int) -> int:
    return -(-_MAX_COMPUTED // block_size)


class EagleProposer:
    """Proposes with an EAGLE layer.

    Args:
        kv: The layer's cache: the blocks of `target`'s, then `num_scratch_blocks`.
        num_blocks: Blocks of the target's cache.
        enforce_eager: Run the layer op by op.
        tree_width: Most drafts that follow the same token; 1 for chains.
    """

    needs_hidden = False

    def __init__(
        self,
        target: Decoder,
        model: FeatureModel,
        kv: KVCache,
        num_blocks: int,
        block_size: int,
        enforce_eager: bool = False,
        tree_width: int = 1,
    ) -> None:
        of_target, of_itself = model.feature_sizes

        def steps(num_features: int) -> StepModel:
            return open_steps(model, kv, block_size, enforce_eager, num_features=num_features)

        self.name = model.name
        self.aux_layers = tuple(sorted(set(model.aux_layers)))
        self.reads_final = not self.aux_layers
        self._features = [self.aux_layers.index(aux_layer) for aux_layer in model.aux_layers]
        self._first_steps = steps(of_target)
        self._next_steps = self._first_steps if of_itself == of_target else steps(of_itself)
        self._sample = open_sampler(target)
        self._target_ids = model.target_ids
        self._vocab_size = target.vocab_size
        self._max_model_len = model.max_model_len
        self._block_size = block_size
        self._tree_width = tree_width
        self._first_scratch = num_blocks
        self._slots: dict[int, _EagleSlot] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self._slots[slot] = _EagleSlot(admission, self._vocab_size, self._tree_width)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].token_ids.extend(token_ids)

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)

    def compute(self, step: ComputedStep) -> None:
        """`HiddenStateProposer.compute`."""
        full = []
        features = _host(self._features_of(step))
        array = features.numpy().copy()
        # Of a step with long rows, the short ones would keep all.
        is_kept_apart = len(array) > _MOST_KEPT_TOGETHER * len(step.rows)
        start = 0
        for row in step.rows:
            slot = self._slots[row.slot]
            of_row = array[start : start + row.num_tokens]
            slot.keep(row, of_row.copy() if is_kept_apart else of_row, features.dtype)
            start += row.num_tokens
            if slot.num_kept >= _MAX_KEPT:
                first = slot.first_row(emits=False)
                if first is not None:
                    full.append((slot, *first))
        if full:
            self._run_first(full)

    def _features_of(self, step: ComputedStep) -> AnyTensor:
        """What the layer reads of the tokens of a step [n, N]."""
        if self.reads_final:
            assert step.hidden is not None, "`reads_final` needs them"
            return step.hidden
        return _side_by_side([step.aux_hidden[index] for index in self._features])

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """`Proposer.propose`."""
        drafting: list[_EagleDrafting | None] = [None] * len(tasks)
        first: list[tuple[_EagleSlot, StepRow, HostTensor]] = []
        for place, task in enumerate(tasks):
            slot = self._slots[task.slot]
            slot.token_ids.extend(task.new_token_ids)
            row = slot.first_row(emits=True) if slot.has_all else None
            if row is not None:
                slot.slot.append_blocks(self._scratch(len(first)))
                first.append((slot, *row))
                max_depth = self._max_model_len - row[0].end + 1
                growth = TreeGrowth(task.num_drafts, max_depth, _MAX_COMPUTED, self._tree_width)
                drafting[place] = _EagleDrafting(slot, row[0].end, growth)
        active = [sequence for sequence in drafting if sequence is not None]
        if active:
            hidden, logits = self._run_first(first)
            self._add_candidates(logits, [(sequence, None) for sequence in active])
            for one, of_root in zip(active, _host(hidden).numpy().copy(), strict=True):
                one.hidden.append(of_root)
            while active := [sequence for sequence in active if sequence.take_next()]:
                self._run_next(active, _host(hidden).dtype)
        return [() if sequence is None else sequence.growth.drafts() for sequence in drafting]

    def _add_candidates(
        self, logits: AnyTensor, parents: Sequence[tuple[_EagleDrafting, int | None]]
    ) -> None:
        """Sample after drafts, None for the newest token, from their logits [n, V]."""
        states = [one.state_after(parent) for one, parent in parents]
        samples = self._sample(self._logits_of_target(logits), states, None)
        for (one, parent), sampled, state in zip(parents, samples, states, strict=True):
            one.growth.add(parent, candidates_of(sampled, state, self._tree_width))

    def _run_next(self, active: Sequence[_EagleDrafting], dtype: DType) -> None:
        """Compute the drafts that were taken, and what may follow them."""
        rows = [sequence.next_row(with_parents=self._tree_width > 1) for sequence in active]
        features = np.stack([row for sequence in active for row in sequence.next_features()])
        self._next_steps.prepare(rows, [sequence.slot.slot for sequence in active])
        emitting = [
            (index, num_after)
            for index, row in enumerate(rows)
            for num_after in range(row.num_tokens - 1, -1, -1)
        ]
        hidden, logits = self._next_steps.run(emitting, False, HostTensor(features, dtype))
        of_drafts = iter(_host(hidden).numpy().copy())
        for one, row in zip(active, rows, strict=True):
            one.hidden.extend(islice(of_drafts, row.num_tokens))
        self._add_candidates(
            logits, [(sequence, node) for sequence in active for node in sequence.taken]
        )

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

    def __init__(self, admission: Admission, vocab_size: int, tree_width: int) -> None:
        self._admission = tree_admission(admission, tree_width)
        self._vocab_size = vocab_size
        self.slot = Slot(self._admission, vocab_size)
        self._states: list[SamplingState] = []  # by the depth of the drafts that they are after
        self.prompt_len = admission.prompt_len
        self.token_ids = list(admission.token_ids)
        self.start = 0
        self.num_kept = 0
        self._kept: list[Array] = []
        self._dtype = FLOAT32  # of those

    @property
    def has_all(self) -> bool:
        """Whether every token but the newest has been computed by the target."""
        return self.num_kept > 0 and self.start + self.num_kept == len(self.token_ids) - 1

    def state_at(self, depth: int) -> SamplingState:
        """With which the token after `depth` drafts is sampled."""
        while len(self._states) <= depth:
            self._states.append(SamplingState(self._admission, self._vocab_size))
        state = self._states[depth]
        state.num_outputs = len(self.token_ids) - self.prompt_len + depth
        return state

    def keep(self, row: ComputedRow, features: Array, dtype: DType) -> None:
        """Take in hidden states of the target [n, N], and its block table."""
        if row.start != self.start + self.num_kept:  # after a prefix hit
            self._kept, self.num_kept, self.start = [], 0, row.start
        self._kept.append(features)
        self._dtype = dtype
        self.num_kept += row.num_tokens
        self.slot.set_blocks(row.block_ids)

    def first_row(self, emits: bool) -> tuple[StepRow, HostTensor] | None:
        """The row of the kept positions whose next token is known, and their hidden states; these
        are kept no longer.
        """
        count = min(self.num_kept, len(self.token_ids) - 1 - self.start)
        if count < 1:
            return None
        joined, dtype = np.concatenate(self._kept), self._dtype
        tokens = tuple(self.token_ids[self.start + 1 : self.start + 1 + count])
        row = _row(self.start, tokens, emits)
        self.start += count
        self.num_kept -= count
        self._kept = [joined[count:]] if self.num_kept else []
        return row, HostTensor(joined[:count], dtype)


class _EagleDrafting:
    """The tree of one task as it grows. The layer has its own numbers for the drafts that it has
    computed: 0 is the newest token, at position `end` - 1, the others follow in any order. `hidden`
    are their hidden states.
    """

    def __init__(self, slot: _EagleSlot, end: int, growth: TreeGrowth) -> None:
        self.slot = slot
        self.growth = growth
        self.taken: list[int] = []
        self.hidden: list[npt.NDArray[np.generic]] = []
        self._end = end
        self._numbers: dict[int | None, int] = {None: 0}  # of drafts that are computed
        self._parents: list[int] = []

    def state_after(self, node: int | None) -> SamplingState:
        """With which the token after a draft is sampled."""
        return self.slot.state_at(0 if node is None else self.growth.nodes[node].depth)

    def take_next(self) -> bool:
        """Take the drafts that are computed next; whether there are any."""
        self.taken = self.growth.take_next()
        for node in self.taken:
            self._parents.append(self._numbers[self.growth.nodes[node].parent])
            self._numbers[node] = len(self._parents)
        return bool(self.taken)

    def next_row(self, with_parents: bool) -> StepRow:
        """The row of the drafts that were taken."""
        num_before = len(self._parents) - len(self.taken)
        token_ids = tuple(self.growth.nodes[node].token_id for node in self.taken)
        row = _row(self._end + num_before, token_ids, emits=True)
        return replace(row, parents=tuple(self._parents)) if with_parents else row

    def next_features(self) -> list[npt.NDArray[np.generic]]:
        """Hidden states of the drafts before them."""
        return [self.hidden[parent] for parent in self._parents[len(self.hidden) - 1 :]]


def _row(start: int, token_ids: tuple[int, ...], emits: bool) -> StepRow:
    return StepRow(0, start, len(token_ids), token_ids, (), Phase.DECODE, emits, 0)


def _side_by_side(parts: Sequence[AnyTensor]) -> AnyTensor:
    """Tensors [n, C] of one class as one [n, C of all]."""
    hosts = [part for part in parts if isinstance(part, HostTensor)]
    if len(hosts) == len(parts):
        return HostTensor(np.concatenate([host.numpy() for host in hosts], axis=1), hosts[0].dtype)
    import torch

    return torch.cat([part for part in parts if isinstance(part, torch.Tensor)], dim=1)


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
