"""Drafts from a smaller model with the tokenizer of the target.

The draft model has its own KV cache and captured steps. It computes what it has not seen of a
sequence in one row, then one token per draft, batched over all sequences. The KV of drafts that
were accepted stays; that of rejected ones is overwritten.

At each output position the draft model samples with the same noise as the target
(`runtime.sampling.noise`) and with the same temperature and filters, so that both choose the same
token more often than by chance (coupled sampling). Penalties and masks are not applied to drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from quickstep.model.interface import Model
from quickstep.ops.table import KVCache
from quickstep.runtime.sampling.native_sampler import open_sampler
from quickstep.runtime.sampling.sampler import Sample
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.slots import Slot
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.runtime.speculation.vocabulary import DraftVocabulary
from quickstep.runtime.steps.opening import open_steps
from quickstep.types import Admission, Phase, SamplingParams, StepRow

MAX_NEW_TOKENS = 128  # of a draft a tenth of the target's size: the time of 13 in the target


class DraftModelProposer:
    """Proposes with a draft model; the owner of its KV cache.

    Args:
        model, kv: The draft model and its cache. Sequences take blocks as they grow; one that gets
            none has no drafts.
        vocabulary: How the target's token ids become the model's; None where they are the same.
        target_vocab_size: V of the target.
        max_new_tokens: Tokens of sequences, not drafts, that one `propose` computes at most: a
            prompt must not delay the next tokens of others. Those that are least behind come first;
            one that is further behind has its first drafts some calls later.
        enforce_eager: Run the model op by op.
    """

    name = "draft"
    needs_hidden = False

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        block_size: int,
        target_vocab_size: int,
        vocabulary: DraftVocabulary | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        enforce_eager: bool = False,
    ) -> None:
        self._steps = open_steps(model, kv, block_size, enforce_eager)
        self._sample = open_sampler(model, target_vocab_size if vocabulary else model.vocab_size)
        self._vocabulary = vocabulary
        # Token ids from here on are no input of the model, or no output of the target.
        self._end_token_id = (
            target_vocab_size if vocabulary else min(model.vocab_size, target_vocab_size)
        )
        self._max_model_len = model.max_model_len
        self._max_new_tokens = max_new_tokens
        self._block_size = block_size
        self._free_blocks = list(range(kv.keys[0].shape[0]))
        self._slots: dict[int, _DraftSlot] = {}

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no sequence holds."""
        return len(self._free_blocks)

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        self.release(slot)
        self._slots[slot] = _DraftSlot(admission, self._end_token_id)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].extend(token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """`Proposer.propose`."""
        current = []
        budget = self._max_new_tokens
        drafting = [_Drafting(self._slots[task.slot]) for task in tasks]
        for task, one in zip(tasks, drafting, strict=True):
            one.slot.extend(task.new_token_ids)
            one.num_drafts = self._reserve(one.slot, task.num_drafts)
        for drafted in sorted(drafting, key=_num_behind):
            if drafted.num_drafts and budget:
                drafted.row = drafted.slot.first_row(budget)
                budget -= drafted.row.num_tokens
                current.append(drafted)
        while current:
            self._run(current)
            current = [sequence for sequence in current if sequence.advance()]
        return [tuple(sequence.drafts) for sequence in drafting]

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        left = self._slots.pop(slot, None)
        if left is not None:
            self._free_blocks.extend(left.slot.block_ids.tolist())

    def _reserve(self, slot: _DraftSlot, num_drafts: int) -> int:
        """Take free blocks for up to `num_drafts` drafts; returns how many fit, also into the
        positions of the model.
        """
        if not slot.is_known:
            return 0
        num_tokens, size = len(slot.token_ids), self._block_size
        # The last draft is no input, so it needs no position.
        end = min(num_tokens + num_drafts - 1, self._max_model_len)
        held = slot.slot.num_blocks
        num_taken = min(max(-(-end // size) - held, 0), len(self._free_blocks))
        if num_taken:
            slot.slot.append_blocks([self._free_blocks.pop() for _ in range(num_taken)])
        end = min(end, (held + num_taken) * size)
        return max(0, end - num_tokens + 1)

    def _run(self, current: Sequence[_Drafting]) -> None:
        """Compute a row of each, and append a token to the drafts of those whose row emits."""
        vocabulary = self._vocabulary
        rows = [sequence.row for sequence in current]
        if vocabulary is not None:
            rows = [replace(row, token_ids=vocabulary.of_draft(row.token_ids)) for row in rows]
        self._steps.prepare(rows, [sequence.slot.slot for sequence in current])
        emitting = [index for index, row in enumerate(rows) if row.emits]
        _, logits = self._steps.run([(index, 0) for index in emitting], every_token=False)
        if not emitting:
            return
        if vocabulary is not None:
            logits = vocabulary.logits_of_target(logits)
        states = [current[index].slot.state for index in emitting]
        for index, sampled in zip(emitting, self._sample(logits, states, None), strict=True):
            if isinstance(sampled, Sample) and sampled.token_id < self._end_token_id:
                current[index].drafts.append(sampled.token_id)


def draft_admission(admission: Admission) -> Admission:
    """An admission to sample drafts with: the noise, temperature and filters of the sequence, and
    nothing that depends on its tokens.
    """
    sampling = admission.sampling
    return replace(
        admission,
        token_ids=(),
        prompt_len=0,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            xtc_probability=sampling.xtc_probability,
            xtc_threshold=sampling.xtc_threshold,
        ),
        eos_token_ids=frozenset(),
        pooling=None,
    )


class _DraftSlot:
    """A sequence as the draft model has it.

    `num_computed` tokens of the sequence have their KV in the cache, and after all of them the
    `draft_inputs`: drafts that were inputs, as long as they may turn out to be the next tokens.
    """

    def __init__(self, admission: Admission, end_token_id: int) -> None:
        self.slot = Slot(draft_admission(admission), end_token_id)
        state = self.slot.state
        assert state is not None, "nothing in these parameters can fail"
        self.state: SamplingState = state
        self._end_token_id = end_token_id
        self._prompt_len = admission.prompt_len
        self.is_known = True  # whether the model has all of its tokens
        self.num_computed = 0
        self.token_ids: list[int] = []
        self.draft_inputs: list[int] = []
        self.extend(admission.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the sequence; of those that were drafts, the KV is there."""
        if token_ids and max(token_ids) >= self._end_token_id:
            self.is_known = False
        for token_id in token_ids:
            if self.draft_inputs and self.draft_inputs[0] == token_id:
                del self.draft_inputs[0]
                self.num_computed += 1
            else:
                self.draft_inputs.clear()
            self.token_ids.append(token_id)

    def first_row(self, max_tokens: int) -> StepRow:
        """The row of up to `max_tokens` tokens that are not computed, at least of the last one; it
        emits if it has that one.
        """
        self.draft_inputs.clear()
        num_tokens = len(self.token_ids)
        start = min(self.num_computed, num_tokens - 1)
        end = min(num_tokens, start + max_tokens)
        self.num_computed = end
        self.state.num_outputs = num_tokens - self._prompt_len
        return _row(start, tuple(self.token_ids[start:end]), emits=end == num_tokens)

    def draft_row(self, token_id: int) -> StepRow:
        """The row of the newest draft."""
        start = len(self.token_ids) + len(self.draft_inputs)
        self.draft_inputs.append(token_id)
        self.state.num_outputs += 1
        return _row(start, (token_id,), emits=True)


class _Drafting:
    """A task of one `propose`: the drafts so far, and the row of the current step."""

    def __init__(self, slot: _DraftSlot) -> None:
        self.slot = slot
        self.num_drafts = 0
        self.drafts: list[int] = []
        self.row = _row(0, (), emits=False)

    def advance(self) -> bool:
        """Set the row of the next step; False if there is none."""
        num_rows = len(self.slot.draft_inputs) + 1
        if len(self.drafts) < num_rows or len(self.drafts) >= self.num_drafts:
            return False
        self.row = self.slot.draft_row(self.drafts[-1])
        return True


def _num_behind(one: _Drafting) -> int:
    return len(one.slot.token_ids) - one.slot.num_computed


def _row(start: int, token_ids: tuple[int, ...], emits: bool) -> StepRow:
    return StepRow(0, start, len(token_ids), token_ids, (), Phase.DECODE, emits, 0)
