"""The runner's slots: block table, sampling state and last token of each resident sequence.

Owned by `runtime.runner`, changed only by the plans that it runs. A slot is set up by an
`Admission` and dropped by a release; nothing of the earlier sequence survives in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quickstep.errors import EngineError, RequestError
from quickstep.runtime.sampling_state import SamplingState
from quickstep.types import Admission

__all__ = ["Slot", "SlotTable"]


class Slot:
    """One resident sequence.

    `last_token` is the newest sampled token, None before the first. `failure` says why the
    sequence cannot go on; its rows then fail, and the sequences beside it do not notice.
    """

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        self.sequence_id = admission.sequence_id
        self.last_token: int | None = None
        self.failure = ""
        self.state: SamplingState | None = None
        try:
            self.state = SamplingState(admission, vocab_size)
        except RequestError as error:
            self.failure = str(error)
        self._block_ids = np.zeros(8, dtype=np.int32)
        self._num_blocks = 0

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The block table, in order."""
        return self._block_ids[: self._num_blocks]

    def append_blocks(self, block_ids: Sequence[int]) -> None:
        """Extend the block table."""
        end = self._num_blocks + len(block_ids)
        if end > self._block_ids.shape[0]:
            grown = np.zeros(max(end, 2 * self._block_ids.shape[0]), dtype=np.int32)
            grown[: self._num_blocks] = self.block_ids
            self._block_ids = grown
        self._block_ids[self._num_blocks : end] = block_ids
        self._num_blocks = end

    def record(self, token_id: int) -> None:
        """Remember a sampled token: it is the input of the next decode row."""
        self.last_token = token_id
        assert self.state is not None, "a slot without sampling state emits nothing"
        self.state.record(token_id)


class SlotTable:
    """All slots by index. Raises EngineError when a plan does not fit what is resident."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._slots: list[Slot | None] = [None] * num_slots

    def __getitem__(self, index: int) -> Slot:
        slot = self._slots[self._checked(index)]
        if slot is None:
            raise EngineError(f"slot {index} holds no sequence, the plan has a row for it")
        return slot

    @property
    def num_resident(self) -> int:
        """Slots that hold a sequence."""
        return sum(slot is not None for slot in self._slots)

    def admit(self, admission: Admission) -> None:
        """Set a free slot up."""
        index = self._checked(admission.slot)
        resident = self._slots[index]
        if resident is not None:
            raise EngineError(
                f"slot {index} holds {resident.sequence_id}, {admission.sequence_id} needs it free"
            )
        token_ids = admission.token_ids
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise EngineError(
                f"{admission.sequence_id} has token ids outside the model's {self._vocab_size}"
            )
        self._slots[index] = Slot(admission, self._vocab_size)

    def release(self, index: int) -> None:
        """Drop a sequence."""
        if self._slots[self._checked(index)] is None:
            raise EngineError(f"slot {index} holds no sequence, the plan releases it")
        self._slots[index] = None

    def clear(self) -> None:
        """Drop every sequence."""
        self._slots = [None] * len(self._slots)

    def _checked(self, index: int) -> int:
        if not 0 <= index < len(self._slots):
            raise EngineError(f"slot {index} does not exist, the runner has {len(self._slots)}")
        return index
