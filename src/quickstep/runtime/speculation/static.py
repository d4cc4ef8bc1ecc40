"""Drafts from a known continuation, right with a chosen probability: for tests and benchmarks.

Weights that are random make text that no proposer predicts. With the continuation from a run
without speculation, this proposer has any acceptance rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from quickstep.errors import ConfigError
from quickstep.runtime.speculation.proposer import Drafts, DraftTask, DraftTree
from quickstep.types import Admission


class StaticProposer:
    """Proposes the output tokens that `reference` returns for an admission (all of them, from the
    first output; () where none are known), each replaced by a wrong one with the probability
    1 - `acceptance`. A position of a sequence has the same draft in every run with the same `seed`.

    With `in_trees`, it draws random trees: the right tokens are a path through wrong ones.

    Raises ConfigError unless 0 <= acceptance <= 1.
    """

    name = "static"
    needs_hidden = False

    def __init__(
        self,
        reference: Callable[[Admission], Sequence[int]],
        acceptance: float = 1.0,
        seed: int = 0,
        in_trees: bool = False,
    ) -> None:
        if not 0.0 <= acceptance <= 1.0:
            raise ConfigError(f"the acceptance of static drafts is {acceptance}, not 0 to 1")
        self._reference = reference
        self._acceptance = acceptance
        self._seed = seed
        self._in_trees = in_trees
        self._slots: dict[int, _Continuation] = {}

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        right = tuple(self._reference(admission))
        drafts = tuple(
            token_id if self._is_right(admission.sequence_id, position) else _other(token_id)
            for position, token_id in enumerate(right)
        )
        num_outputs = len(admission.token_ids) - admission.prompt_len
        self._slots[slot] = _Continuation(admission.sequence_id, right, drafts, num_outputs)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        self._slots[slot].num_outputs += len(token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        """`Proposer.propose`."""
        proposed: list[Drafts] = []
        for task in tasks:
            self.observe(task.slot, task.new_token_ids)
            known = self._slots[task.slot]
            first, last = known.num_outputs, known.num_outputs + task.num_drafts
            if self._in_trees:
                proposed.append(self._tree(known, known.right[first:last], task.num_drafts))
            else:
                proposed.append(known.drafts[first:last])
        return proposed

    def _tree(self, known: _Continuation, right: Sequence[int], num_drafts: int) -> Drafts:
        """A random tree of so many drafts, of which some path is the beginning of `right`."""
        if not right:
            return ()
        generator = random.Random(f"{self._seed}/{known.sequence_id}/{known.num_outputs}/tree")
        token_ids: list[int] = []
        parents: list[int] = []
        depths, end_of_path = [0], 0
        for node in range(1, num_drafts + 1):
            parent = end_of_path if generator.random() < 0.5 else generator.randrange(node)
            depth = depths[parent]
            depths.append(depth + 1)
            wanted = right[min(depth, len(right) - 1)]
            is_right = parent == end_of_path and depth < len(right)
            if is_right and generator.random() < self._acceptance:
                token_ids.append(wanted)
                end_of_path = node
            else:  # no two of a parent are equal, and none is the right one
                others = sum(other == parent for other in parents)
                token_ids.append(wanted - 1 - others if wanted > others else wanted + 1 + others)
            parents.append(parent)
        return DraftTree(tuple(token_ids), tuple(parents))

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        self._slots.pop(slot, None)

    def _is_right(self, sequence_id: str, position: int) -> bool:
        generator = random.Random(f"{self._seed}/{sequence_id}/{position}")
        return generator.random() < self._acceptance


class _Continuation:
    """The right token and the draft of all output positions, and how many outputs there are."""

    def __init__(
        self,
        sequence_id: str,
        right: tuple[int, ...],
        drafts: tuple[int, ...],
        num_outputs: int,
    ) -> None:
        self.sequence_id = sequence_id
        self.right = right
        self.drafts = drafts
        self.num_outputs = num_outputs


def _other(token_id: int) -> int:
    """A token id that differs and that every vocabulary with `token_id` and another one has."""
    return token_id - 1 if token_id else 1
