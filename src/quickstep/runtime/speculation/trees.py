"""Trees of drafts: which tokens may follow a position, and the likeliest tree of a given size.

The candidates of a position are the token that the proposer samples there and the next best ones.
The target samples with the same noise, so candidates are compared with it: if the target's logits
differed from the proposer's by Gumbel noise of scale 1, the target would sample the candidate x
with a probability in proportion to

    exp(logit(x) + T * noise(x))        T the temperature, 0 for the best token

The probability of a draft is the product of those on its path (as in EAGLE-2, arXiv:2406.16858), so
no draft is likelier than the one before it, and the likeliest drafts are a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quickstep.runtime.sampling.filters import kept_token_ids
from quickstep.runtime.sampling.noise import noise_bits
from quickstep.runtime.sampling.sampler import Sample, SampleFailure
from quickstep.runtime.sampling.state import SamplingState
from quickstep.runtime.speculation.draft_model import draft_admission
from quickstep.runtime.speculation.proposer import Drafts, DraftTree
from quickstep.types import Admission

_NUM_COMPARED = 16  # tokens of the largest logits, to which the noise is added


class DraftCandidate(msgspec.Struct, frozen=True):
    """A token that may follow a position, and how likely the target samples it there."""

    token_id: int
    probability: float


def tree_admission(admission: Admission, width: int) -> Admission:
    """`draft_admission`, for samples of which `candidates_of` makes up to `width` candidates."""
    drafting = draft_admission(admission)
    if width == 1:
        return drafting
    return replace(drafting, sampling=replace(drafting.sampling, logprobs=_NUM_COMPARED))


def candidates_of(
    sampled: Sample | SampleFailure, state: SamplingState, width: int
) -> list[DraftCandidate]:
    """The likeliest tokens for the position that was sampled with `state`, at most `width`."""
    if not isinstance(sampled, Sample):
        return []
    if width == 1 or sampled.logprobs is None:
        return [DraftCandidate(sampled.token_id, 1.0)]
    known = {token_id: logprob for token_id, logprob in sampled.logprobs.top if logprob > -np.inf}
    known[sampled.token_id] = sampled.logprobs.logprob
    ids = np.array(list(known), dtype=np.int64)
    scores = np.array(list(known.values()))
    temperature, xtc = state.sampling.temperature, state.applies_xtc
    if temperature > 0.0:
        kept = kept_token_ids((scores - scores.max()) / temperature, state.sampling, xtc)
        is_kept = ids == sampled.token_id
        is_kept[kept] = True
        ids, scores = ids[is_kept], scores[is_kept]
        scores += temperature * _noise(state, ids)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")[:width]
    return [DraftCandidate(int(ids[place]), float(weights[place])) for place in order]


def _noise(state: SamplingState, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """`noise.gumbel` of the position, with NumPy's logarithm: drafts need no exact one."""
    v = (noise_bits(state.seed, state.num_outputs, ids).astype(np.float64) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-v))
    return noise


def likeliest_tree(levels: Sequence[Sequence[DraftCandidate]], num_drafts: int) -> Drafts:
    """The tree of the likeliest drafts, where the candidates depend on the depth only."""
    token_ids: list[int] = []
    parents: list[int] = []
    heap: list[tuple[float, int, int, int, int]] = []  # -probability, order, parent, depth, token
    order = count()

    def add_children(parent: int, depth: int, probability: float) -> None:
        for candidate in levels[depth] if depth < len(levels) else ():
            entry = (
                -probability * candidate.probability,
                next(order),
                parent,
                depth,
                candidate.token_id,
            )
            heapq.heappush(heap, entry)

    add_children(0, 0, 1.0)
    while heap and len(token_ids) < num_drafts:
        negative, _, parent, depth, token_id = heapq.heappop(heap)
        token_ids.append(token_id)
        parents.append(parent)
        add_children(len(token_ids), depth + 1, -negative)
    return _drafts(token_ids, parents)


class DraftNode(msgspec.Struct):
    """A draft that was found: the place of its parent among the drafts, None for the root."""

    token_id: int
    parent: int | None
    depth: int
    probability: float
    is_expanded: bool = False


class TreeGrowth:
    """The likeliest tree of `num_drafts` drafts, where the candidates after a draft are computed
    from it: `take_next` says for which of the `nodes`, then `add` gives their candidates.

    At most `max_expanded` drafts get any, `max_at_once` each time, none at `max_depth`.
    """

    def __init__(
        self, num_drafts: int, max_depth: int, max_expanded: int, max_at_once: int
    ) -> None:
        self._num_drafts = num_drafts
        self._max_depth = max_depth
        self._num_left = max_expanded
        self._max_at_once = max_at_once
        self.nodes: list[DraftNode] = []

    def add(self, parent: int | None, candidates: Sequence[DraftCandidate]) -> None:
        """Add what may follow a draft; None for the first drafts."""
        depth = 1 if parent is None else self.nodes[parent].depth + 1
        probability = 1.0 if parent is None else self.nodes[parent].probability
        for candidate in candidates:
            node = DraftNode(candidate.token_id, parent, depth, probability * candidate.probability)
            self.nodes.append(node)

    def take_next(self) -> list[int]:
        """The drafts of the tree so far whose candidates are not known and may belong to it."""
        best = self._best()
        if len(best) == self._num_drafts:
            best = best[:-1]  # what follows the last one is not likelier than it
        found = [
            node
            for node in best
            if not self.nodes[node].is_expanded and self.nodes[node].depth < self._max_depth
        ][: min(self._num_left, self._max_at_once)]
        for node in found:
            self.nodes[node].is_expanded = True
        self._num_left -= len(found)
        return found

    def _best(self) -> list[int]:
        """The likeliest drafts, at most `num_drafts`; parents are before their children."""
        order = sorted(range(len(self.nodes)), key=lambda one: -self.nodes[one].probability)
        return order[: self._num_drafts]

    def drafts(self) -> Drafts:
        """The tree."""
        best = self._best()
        places = {node: place for place, node in enumerate(best, 1)}
        parents = [self.nodes[node].parent for node in best]
        return _drafts(
            [self.nodes[node].token_id for node in best],
            [0 if parent is None else places[parent] for parent in parents],
        )


def _drafts(token_ids: Sequence[int], parents: Sequence[int]) -> Drafts:
    """A chain where each draft follows the one before it."""
    if list(parents) == list(range(len(parents))):
        return tuple(token_ids)
    return DraftTree(tuple(token_ids), tuple(parents))
