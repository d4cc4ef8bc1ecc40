"""Drafts from a known continuation, right with a chosen probability: for tests and benchmarks.

Weights that are random make text that no proposer predicts. With the continuation from a run
without speculation, this proposer has any acceptance rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from quickstep.errors import ConfigError
from quickstep.runtime.speculation.proposer import DraftTask
from quickstep.types import Admission

__all__ = ["StaticProposer"]


class StaticProposer:
    """Proposes the output tokens that `reference` returns for an admission (all of them, from the
    first output; () where none are known), each replaced by a wrong one with the probability
    1 - `acceptance`. A position of a sequence has the same draft in every run with the same `seed`.

    Raises ConfigError unless 0 <= acceptance <= 1.
    """

    name = "static"
    needs_hidden = False

    def __init__(
        self,
        reference: Callable[[Admission], Sequence[int]],
        acceptance: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= acceptance <= 1.0:
            raise ConfigError(f"the acceptance of static drafts is {acceptance}, not 0 to 1")
        self._reference = reference
        self._acceptance = acceptance
        self._seed = seed
        self._slots: dict[int, _Continuation] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        drafts = tuple(
            token_id if self._is_right(admission.sequence_id, position) else _other(token_id)
            for position, token_id in enumerate(self._reference(admission))
        )
        num_outputs = len(admission.token_ids) - admission.prompt_len
        self._slots[slot] = _Continuation(drafts, num_outputs)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].num_outputs += len(token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """`Proposer.propose`."""
        proposed = []
        for task in tasks:
            self.observe(task.slot, task.new_token_ids)
            known = self._slots[task.slot]
            proposed.append(known.drafts[known.num_outputs : known.num_outputs + task.num_drafts])
        return proposed

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)

    def _is_right(self, sequence_id: str, position: int) -> bool:
        generator = random.Random(f"{self._seed}/{sequence_id}/{position}")
        return generator.random() < self._acceptance


class _Continuation:
    """The drafts of all output positions, and the number of output tokens so far."""

    def __init__(self, drafts: tuple[int, ...], num_outputs: int) -> None:
        self.drafts = drafts
        self.num_outputs = num_outputs


def _other(token_id: int) -> int:
    """A token id that differs and that every vocabulary with `token_id` and another one has."""
    return token_id - 1 if token_id else 1
