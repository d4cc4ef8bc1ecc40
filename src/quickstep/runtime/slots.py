"""The runner's slots: block table, sampling state and last token of each resident sequence.

Owned by `runtime.runner`, changed only by the plans that it runs. A slot is set up by an
`Admission` and dropped by a release; it keeps nothing of an earlier sequence.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quickstep.errors import EngineError, RequestError
from quickstep.runtime.pooling import Pool
from quickstep.runtime.sampling.grammar import NewMatcher
from quickstep.runtime.sampling.state import SamplingState
from quickstep.types import Admission, StepRow

_LOGGER = logging.getLogger(__name__)

# Input of a row that has failed already: it keeps its place in the step, its output is discarded.
_PADDING_TOKEN = 0


class Slot:
    """One resident sequence.

    `token_ids` are those known at its admission. `last_token` is the newest sampled token, None
    before the first; `num_pending` newer ones are still on the device. `end_token_ids` may end the
    sequence. `pool` gets the hidden states of a prompt to embed. `failure` is why the sequence
    cannot continue; its rows then fail, other sequences are not affected. `is_refused`: the cause
    is its own request. `block_table_address` is the address of the `num_blocks` int32 ids of the
    block table, until it grows.
    """

    def __init__(
        self,
        admission: Admission,
        vocab_size: int,
        new_matcher: NewMatcher | None = None,
        kept_state: SamplingState | None = None,
    ) -> None:
        self.sequence_id = admission.sequence_id
        self.token_ids = admission.token_ids
        self.num_prompt_logprobs = admission.sampling.prompt_logprobs or 0
        self.pool = None if admission.pooling is None else Pool(admission.pooling)
        self.last_token: int | None = None
        self.num_pending = 0
        self.end_token_ids = admission.eos_token_ids | frozenset(admission.sampling.stop_token_ids)
        self.failure = ""
        self.is_refused = False
        self.state = kept_state
        if kept_state is None:
            self._open_state(admission, vocab_size, new_matcher)
        self._block_ids = np.zeros(8, dtype=np.int32)
        self.block_table_address: int = self._block_ids.ctypes.data
        self.num_blocks = 0

    def _open_state(
        self, admission: Admission, vocab_size: int, new_matcher: NewMatcher | None
    ) -> None:
        """An exception here ends this sequence only."""
        token_ids = admission.token_ids
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            self.failure = f"the prompt has token ids outside the model's {vocab_size}"
            return
        try:
            self.state = SamplingState(admission, vocab_size, new_matcher)
        except RequestError as error:
            self.failure, self.is_refused = str(error), True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            _LOGGER.exception("sampling of %s could not be set up", self.sequence_id)
            self.failure = f"sampling could not be set up: {error}"

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The block table, [num_blocks] int32, in order."""
        return self._block_ids[: self.num_blocks]

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the token after the pending ones is the argmax of the raw logits."""
        state = self.state
        return state is not None and state.is_plain_argmax_after(self.num_pending)

    @property
    def can_sample_ahead(self) -> bool:
        """Whether the token after the pending ones can be sampled before the host knows them."""
        return self.state is not None and not self.state.reads_tokens

    @property
    def state_ahead(self) -> SamplingState:
        """The state after the pending tokens."""
        assert self.state is not None, "a slot without sampling state emits nothing"
        return self.state.ahead(self.num_pending) if self.num_pending else self.state

    def input_tokens(self, row: StepRow) -> tuple[int, ...]:
        """The input tokens of a row; a pending one is the token that was sampled last.

        A row without one sets `failure`. Raises EngineError when row and tokens disagree.
        """
        if self.failure:
            return (_PADDING_TOKEN,) * row.num_tokens
        if row.token_ids:
            if len(row.token_ids) != row.num_tokens:
                raise EngineError(
                    f"a row has {len(row.token_ids)} tokens, it says {row.num_tokens}"
                )
            return row.token_ids
        if row.num_tokens != 1:
            raise EngineError(f"a row has no tokens, it says {row.num_tokens}; one can be pending")
        if self.num_pending:
            return (_PADDING_TOKEN,)  # the device replaces it
        if self.last_token is not None:
            return (self.last_token,)
        self.failure = "its input token was never sampled"
        return (_PADDING_TOKEN,)

    def append_blocks(self, block_ids: Sequence[int]) -> None:
        """Extend the block table."""
        if not block_ids:
            return
        end = self.num_blocks + len(block_ids)
        if end > self._block_ids.shape[0]:
            grown = np.zeros(max(end, 2 * self._block_ids.shape[0]), dtype=np.int32)
            grown[: self.num_blocks] = self.block_ids
            self._block_ids = grown
            self.block_table_address = grown.ctypes.data
        self._block_ids[self.num_blocks : end] = block_ids
        self.num_blocks = end

    def flat_index(self, position: int, block_size: int) -> int:
        """Where the cache has a KV slot of the sequence."""
        return int(self._block_ids[position // block_size]) * block_size + position % block_size

    def set_blocks(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Make the block table a copy of another one."""
        self.num_blocks = 0
        self.append_blocks(block_ids.tolist())


class KeptStates:
    """A cache of sampling states of sequences that have left their slots: the newest `max_kept`, by
    sequence id.

    Rebuilding a state replays every output: a grammar near its limit searches an ending for each of
    them, DRY compares the complete text with itself. With its state kept, the return of a preempted
    sequence costs a step nothing. A plan does not say which released sequences return, so the last
    ones are kept, as many as there are slots; a state that is missing is rebuilt and is the same.
    """

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._states: OrderedDict[str, SamplingState] = OrderedDict()

    def put(self, sequence_id: str, state: SamplingState) -> None:
        """Keep the state of a sequence that leaves, if rebuilding it is expensive."""
        if not state.is_expensive or state.failure:
            return
        self._states[sequence_id] = state
        self._states.move_to_end(sequence_id)
        while len(self._states) > self._max_kept:
            self._states.popitem(last=False)

    def take(self, admission: Admission) -> SamplingState | None:
        """The state that this admission continues; None if it has to be built."""
        state = self._states.pop(admission.sequence_id, None)
        return state if state is not None and state.continues_with(admission) else None


class SlotTable:
    """All slots by index. Raises EngineError when a plan does not fit what is resident.

    `new_matcher` compiles the grammars of requests; None where no request has one.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, new_matcher: NewMatcher | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._new_matcher = new_matcher
        self._slots: list[Slot | None] = [None] * num_slots
        self._kept = KeptStates(num_slots)

    def __getitem__(self, index: int) -> Slot:
        slot = self._slots[self._checked(index)]
        if slot is None:
            raise EngineError(f"slot {index} holds no sequence, the plan has a row for it")
        return slot

    def of_rows(self, rows: Sequence[StepRow]) -> list[Slot]:
        """The slot of each row."""
        slots, found = self._slots, []
        for row in rows:
            slot = slots[row.slot] if 0 <= row.slot < len(slots) else None
            found.append(self[row.slot] if slot is None else slot)  # which raises
        return found

    def holds(self, row: StepRow, slot: Slot) -> bool:
        """Whether the row's slot is still this one."""
        return self._slots[row.slot] is slot

    def move(self, released: Sequence[int], admitted: Sequence[Admission]) -> None:
        """Drop sequences, then set others up. Raises EngineError before anything has changed.

        A released slot may be empty. Each admission sets up a slot, even a failed one, because the
        scheduler assumes it from now on.
        """
        if not released and not admitted:
            return
        free = {self._checked(index) for index in released}
        for admission in admitted:
            resident = self._slots[self._checked(admission.slot)]
            if resident is not None and admission.slot not in free:
                raise EngineError(
                    f"slot {admission.slot} holds {resident.sequence_id}, "
                    f"{admission.sequence_id} needs it free"
                )
        for index in released:
            self._release(index)
        for admission in admitted:
            kept_state = self._kept.take(admission)
            slot = Slot(admission, self._vocab_size, self._new_matcher, kept_state)
            self._slots[admission.slot] = slot

    def _release(self, index: int) -> None:
        slot = self._slots[index]
        self._slots[index] = None
        if slot is not None and slot.state is not None and not slot.failure:
            self._kept.put(slot.sequence_id, slot.state)

    def fail(self, rows: Iterable[StepRow], reason: str) -> None:
        """Mark the slots of rows that did not run: their sequences cannot continue."""
        for row in rows:
            slot = self._slots[row.slot] if 0 <= row.slot < len(self._slots) else None
            if slot is not None:
                slot.failure = slot.failure or reason

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self._slots):
            raise EngineError(f"slot {index} does not exist, the runner has {len(self._slots)}")
        return index
