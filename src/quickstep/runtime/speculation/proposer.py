"""The interface of proposers: what guesses the next tokens of sequences between two steps.

The runner calls a proposer on its own thread: `admit` and `release` as slots change, then `observe`
or `propose` after each step. A draft never changes an output: the model checks it against the token
that it samples itself, so a wrong draft costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.types import Admission

if TYPE_CHECKING:
    from quickstep.ops.tensors import AnyTensor


class DraftTask(msgspec.Struct, frozen=True):
    """A sequence for which drafts are wanted after a step.

    Attributes:
        slot: The runner's slot index.
        num_drafts: Most draft tokens wanted, at least 1.
        new_token_ids: Tokens of the sequence that the proposer has not seen: since its admission or
            its last `observe` or `propose`, newest last.
        hidden: The target's final hidden state [C] from which the newest token was sampled, valid
            during the call; for proposers with `needs_hidden`, else None.
    """

    slot: int
    num_drafts: int
    new_token_ids: tuple[int, ...]
    hidden: AnyTensor | None = None


class DraftTree(msgspec.Struct, frozen=True):
    """Drafts of which several may follow a token: `parents` as in `StepRow`. Those that are more
    likely come first, since any number of the first may be used.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]


Drafts = tuple[int, ...] | DraftTree  # a chain, or a tree


def draft_tree(drafts: Drafts) -> DraftTree:
    """The tree, also of a chain."""
    if isinstance(drafts, DraftTree):
        return drafts
    return DraftTree(drafts, tuple(range(len(drafts))))


def depth_of(drafts: Drafts) -> int:
    """How many drafts can be accepted."""
    if not isinstance(drafts, DraftTree):
        return len(drafts)
    depths = [0]
    for parent in drafts.parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def compare(drafts: Drafts, token_ids: Sequence[int]) -> tuple[int, bool]:
    """How many of the tokens that were sampled were drafts, and whether the token after these had
    drafts, all of them wrong.
    """
    tree = draft_tree(drafts)
    node = num_equal = 0
    for token_id in token_ids:
        children = [child for child, parent in enumerate(tree.parents, 1) if parent == node]
        right = [child for child in children if tree.token_ids[child - 1] == token_id]
        if not right:
            return num_equal, bool(children)
        node = right[0]
        num_equal += 1
    return num_equal, False


class ComputedRow(msgspec.Struct, frozen=True):
    """A row of a step as the target computed it, without drafts that were rejected.

    Attributes:
        slot: The runner's slot index.
        start: Position of its first token.
        num_tokens: Its tokens, which follow those of the row before it in the `ComputedStep`.
        block_ids: The slot's block table, [blocks] int32, valid during the call.
    """

    slot: int
    start: int
    num_tokens: int
    block_ids: npt.NDArray[np.int32]


class ComputedStep(msgspec.Struct, frozen=True):
    """What the target computed in a step; the tensors are valid during the call.

    Attributes:
        rows: One at least.
        hidden: The final hidden states [n, C] of the n tokens of all rows; None for a proposer that
            does not read them.
        aux_hidden: The inputs [n, C] of each of the `aux_layers`.
    """

    rows: tuple[ComputedRow, ...]
    hidden: AnyTensor | None
    aux_hidden: tuple[AnyTensor, ...]


class Proposer(Protocol):
    """Proposes draft tokens for the sequences in the runner's slots."""

    name: str
    """For logs and metrics: `ngram`, `suffix`, `draft`, ..."""
    needs_hidden: bool
    """Whether it drafts only for tasks with a hidden state."""

    def admit(self, slot: int, admission: Admission) -> None:
        """Set up a slot; `admission.token_ids` are all tokens known, prompt and outputs."""

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """Take in tokens that were emitted while no drafts were wanted. Cheap."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Drafts]:
        """Drafts for each task, in order: at most `num_drafts` tokens, () where there are none."""

    def release(self, slot: int) -> None:
        """The sequence has left its slot. Idempotent."""


@runtime_checkable
class HiddenStateProposer(Proposer, Protocol):
    """A proposer that reads hidden states of all tokens."""

    aux_layers: tuple[int, ...]
    """Layers of the target whose inputs it reads, in ascending order."""
    reads_final: bool
    """Whether it reads the final hidden states."""

    def compute(self, step: ComputedStep) -> None:
        """Take in what a step has computed; called before `observe` and `propose`."""
