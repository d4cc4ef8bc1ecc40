"""The suite is tested too: bugs planted in a copy of `core` have to be found by random runs.

Each bug is one replaced line or expression. A run is one seed of `random_runs`: a scheduler with
narrow random inputs, the shadow executor below it, and every sequence compared with its tokens
at batch size 1. The bugs, all of kinds that engines have shipped:

 1 hit-without-token-compare      only a digest decides a prefix hit
 2 hit-without-parent-compare     a block hits after another prefix
 3 hits-missing-in-the-row        prefix-hit blocks are left out of `new_block_ids`
 4 released-twice                 a sequence gives its blocks back twice
 5 shared-block-freed             the first holder's release frees a shared block
 6 one-block-too-few              growth is computed without the new token
 7 partial-block-registered       the last, partly filled block is indexed too
 8 hit-covers-the-prompt          a full hit leaves no token to compute
 9 outputs-lost-by-preemption     the recomputed sequence starts from its prompt
10 output-position-restarts       after preemption the noise counter starts at 0 again
11 failed-blocks-stay-indexed     blocks of a failed step can still be hit
12 readers-of-failed-kv-continue  a sequence that shared a failed step's blocks keeps its state
13 salt-ignored                   tenants share prefixes
14 planned-row-preempted          a victim has a row in the step under construction
15 limit-overrun-by-overlap       tokens in flight do not count towards max_tokens
16 evicted-block-stays-indexed    an evicted block can still be hit
17 admitted-with-tokens-in-flight a preempted sequence returns before its token is known
18 hit-without-reference          prefix-hit blocks are not referenced
19 tokens-after-the-end           a row in flight extends a sequence that has ended
20 scored-prompt-from-the-cache   prompt logprobs skip positions that are cached
21 scores-lost-by-preemption      the recomputed prompt starts after tokens that were not scored
22 mean-from-the-cache            a mean misses the hidden states of cached blocks
23 prompt-only-continues          a request that ends with its prompt decodes
24 paused-continues               a paused sequence decodes
25 paused-prompt-continues        a paused sequence's prompt is computed
26 paused-is-admitted             a paused sequence leaves the queue
27 paused-blocks-the-queue        a sequence after a paused one waits for its reader
28 paused-is-never-preempted      paused sequences keep their slots and blocks
29 resumed-in-part                one of a resumed request's sequences stays paused
30 hits-outlive-their-blocks      a waiting sequence keeps hits whose blocks were given away
31 rejected-drafts-stay-computed  the next row starts after drafts that were rejected
32 drafts-are-cached              a block with drafts is a prefix hit before they are accepted
33 drafts-outrun-the-limit        drafts are checked past max_tokens
34 drafts-outlive-their-tokens    drafts of an earlier token follow a later one
35 continued-with-drafts-pending  a row starts before it is known which drafts were accepted
36 continued-by-an-older-commit   drafts of the newest row are not waited for
37 trees-become-chains            the drafts of a tree are checked one after the other
38 trees-outlive-their-drafts     the parents of an earlier tree are those of later drafts
39 trees-lose-their-first-draft   parents are those of the drafts before
40 adapter-drained-for-nothing    an adapter stays unusable after the load that needed its place
41 adapter-without-room-awaited   sequences wait for an adapter that pinned ones keep out
42 victims-without-need           all lower priorities make way although fewer would do
43 allocation-evicts-first        cached blocks are evicted while free ones are left
44 moved-outputs-become-prompt    the outputs of a request from another engine count as its prompt
45 moved-scores-are-sent-again    a request from another engine scores its prompt once more

42 and 43 waste and never corrupt: tokens cannot show them, `test_pauses` and `test_block_pool`
do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

import pytest
from random_runs import draw_setup, random_run
from scheduler_world import Setup, policy_of

from quickstep.core.scheduler import Scheduler

# In the order of their imports.
_MODULES = (
    "shares",
    "repetition",
    "resources.block_pool",
    "cost_model",
    "sequence",
    "drafts.control",
    "step",
    "service_order",
    "shares",
    "queues",
    "accounting",
    "resources.resource",
    "resources.kv_blocks",
    "resources.arriving_blocks",
    "resources.kv_retention",
    "resources.kv_tiers",
    "resources.kv_transfers",
    "resources.state_slots",
    "resources.adapter_residency",
    "resources.adapter_places",
    "resources.held",
    "admission",
    "policies",
    "step_budget",
    "scheduler",
)
_MAX_LIVES = 800

# name -> (module, text, replacement)
_BUGS = {
    "hit-without-token-compare": (
        "resources.block_pool",
        "if key.token_ids != self._block_tokens(token_ids, index):",
        "if False:",
    ),
    "hit-without-parent-compare": (
        "resources.block_pool",
        "or key is None or key.parent != parent:",
        "or key is None:",
    ),
    "hits-missing-in-the-row": (
        "scheduler",
        "tuple(residency.blocks))",
        "tuple(residency.blocks[residency.planned // self._pool.block_size :]))",
    ),
    "released-twice": (
        "resources.kv_blocks",
        "self._pool.release(residency.blocks)",
        "self._pool.release(residency.blocks * 2)",
    ),
    "shared-block-freed": (
        "resources.block_pool",
        "count = ref_counts[block_id] = ref_counts[block_id] - 1\n",
        "count = ref_counts[block_id] = 0\n",
    ),
    "one-block-too-few": (
        "resources.kv_blocks",
        "self._blocks_for(residency.planned + num_tokens)",
        "self._blocks_for(residency.planned)",
    ),
    "partial-block-registered": (
        "resources.kv_blocks",
        "num_full = min(residency.planned, len(sequence.token_ids)) // block_size\n        if not",
        "num_full = -(-min(residency.planned, len(sequence.token_ids)) // block_size)\n"
        "        if not",
    ),
    "hit-covers-the-prompt": (
        "sequence",
        "return len(self.token_ids) - 1\n",
        "return len(self.token_ids)\n",
    ),
    "adapter-evicted-in-use": (
        "resources.adapter_residency",
        "if any(other.num_running or other.adapter_id in in_flight for other in leaving):",
        "if any(other.adapter_id in in_flight for other in leaving):",
    ),
    "adapter-evicted-in-flight": (
        "resources.adapter_residency",
        "if any(other.num_running or other.adapter_id in in_flight for other in leaving):",
        "if any(other.num_running for other in leaving):",
    ),
    "adapter-drained-for-nothing": (
        "resources.adapter_residency",
        "elif not drains and adapter.state is AdapterState.DRAINING:",
        "elif adapter.state is AdapterState.ABSENT:",
    ),
    "adapter-without-room-awaited": (
        "scheduler",
        "self.held.lost(self._waiting) if self._waiting.parked_by_key else ():",
        "():",
    ),
    "adapter-not-released": (
        "resources.adapter_places",
        "        self.residency.release(sequence.request.adapter_id)\n",
        "        pass\n",
    ),
    "admitted-before-its-adapter": (
        "queues",
        "            if key and not gate.is_ready(key):\n",
        "            if False:\n",
    ),
    "outputs-lost-by-preemption": (
        "sequence",
        "token_ids=tuple(self.token_ids),",
        "token_ids=tuple(self.token_ids[: self.prompt_len]),",
    ),
    "output-position-restarts": (
        "sequence",
        "output_position=end - self.prompt_len",
        "output_position=end - residency.prefill_end",
    ),
    "failed-blocks-stay-indexed": (
        "scheduler",
        "self._pool.forget(invalidated_by(failed, rows, self._pool.block_size))",
        "invalidated_by(failed, rows, self._pool.block_size)",
    ),
    "readers-of-failed-kv-continue": (
        "step",
        "for entry in in_flight if not entry.residency.invalidated]",
        "for entry in ()]",
    ),
    "salt-ignored": (
        "sequence",
        "ChainRoot(request.adapter_id, request.cache_salt)",
        'ChainRoot(request.adapter_id, "")',
    ),
    "planned-row-preempted": ("queues", "if victim.last_step_id != step_id", "if True"),
    "limit-overrun-by-overlap": (
        "sequence",
        "num_outputs + residency.pending <",
        "num_outputs <",
    ),
    "evicted-block-stays-indexed": (
        "resources.block_pool",
        "        self._unindex(block_ids)\n        self._num_evictions",
        "        self._num_evictions",
    ),
    "admitted-with-tokens-in-flight": (
        "scheduler",
        "if sequence is None or sequence.num_pending:",
        "if sequence is None:",
    ),
    "hit-without-reference": ("resources.kv_blocks", "        self._pool.acquire(hits)\n", ""),
    "tokens-after-the-end": (
        "scheduler",
        "if sequence.state is SequenceState.FINISHED or residency.invalidated:",
        "if residency.invalidated:",
    ),
    "scored-prompt-from-the-cache": (
        "sequence",
        "if self._num_scored_tokens < self.prompt_len:\n            return max",
        "if False:\n            return max",
    ),
    "scores-lost-by-preemption": (
        "sequence",
        "return max(0, self._num_scored_tokens - 1)",
        "return max(0, self._num_scored_tokens + 1)",
    ),
    "mean-from-the-cache": (
        "sequence",
        "if pooling is not None and pooling.needs_all:",
        "if False:",
    ),
    "prompt-only-continues": ("admission", "if request.prompt_only:", "if False:"),
    "paused-continues": ("sequence", "            and not self.is_paused\n", ""),
    "paused-prompt-continues": (
        "queues",
        "self.prompts[: _num_active(self.prompts)]",
        "self.prompts",
    ),
    "paused-is-admitted": (
        "queues",
        "if not one.is_paused and (first is None or (rank, one.rank) < first):",
        "if first is None or (rank, one.rank) < first:",
    ),
    "paused-blocks-the-queue": (
        "queues",
        "insort(queues.setdefault(name, []), sequence, key=_rank)",
        "insort(queues.setdefault(name, []), sequence, key=lambda one: (False, *one.rank[1:]))",
    ),
    "paused-is-never-preempted": (
        "scheduler",
        "        if self._waiting.num:\n            self._preempt_for_waiting(draft, now)\n",
        "",
    ),
    "resumed-in-part": (
        "scheduler",
        "in self._requests.get(request_id, ()):\n            runs",
        "in self._requests.get(request_id, ())[: None if is_paused else 1]:\n            runs",
    ),
    "hits-outlive-their-blocks": (
        "resources.block_pool",
        "if unindexed_at[block_id] > known.version:",
        "if False:",
    ),
    "rejected-drafts-stay-computed": (
        "drafts.control",
        "        residency.planned -= row.num_drafts - num_accepted\n",
        "",
    ),
    "drafts-are-cached": (
        "resources.kv_blocks",
        "num_full = min(residency.planned, len(sequence.token_ids)) // block_size\n        if",
        "num_full = residency.planned // block_size\n        if",
    ),
    "drafts-outrun-the-limit": (
        "drafts.control",
        "- sequence.num_outputs - 1\n        return min(",
        "- sequence.num_outputs\n        return min(",
    ),
    "drafts-outlive-their-tokens": ("scheduler", "        sequence.drafts.token_ids = ()\n", ""),
    "continued-with-drafts-pending": (
        "sequence",
        "            and not residency.awaits_drafts\n",
        "",
    ),
    "continued-by-an-older-commit": (
        "scheduler",
        "        if entry.awaits_drafts:\n",
        "        if entry.row.emits:\n",
    ),
    "trees-become-chains": (
        "sequence",
        "            parents=self.drafts.parents[: len(drafts)],\n",
        "",
    ),
    "trees-outlive-their-drafts": (
        "sequence",
        "            self.drafts.parents = output.draft_parents\n",
        "            self.drafts.parents = output.draft_parents or self.drafts.parents\n",
    ),
    "trees-lose-their-first-draft": (
        "sequence",
        "parents=self.drafts.parents[: len(drafts)]",
        "parents=self.drafts.parents[1 : 1 + len(drafts)]",
    ),
    "victims-without-need": (
        "queues",
        "lower[:num] for num in counts if fits_without(lower[:num])",
        "lower for num in counts",
    ),
    "allocation-evicts-first": (
        "resources.block_pool",
        "free.pop() if free else self._evict()",
        "self._evict() if self._cached else free.pop()",
    ),
    "stage-without-the-token-before": (
        "step_budget",
        "due = [sequence for sequence in decoding if not sequence.num_pending]",
        "due = decoding",
    ),
    "stage-gives-its-turn-to-the-stuck": (
        "step_budget",
        "return due, -(-len(decoding) // num_stages)",
        "return due[: -(-len(decoding) // num_stages)], -(-len(decoding) // num_stages)",
    ),
    "moved-outputs-become-prompt": (
        "sequence",
        "self.token_ids.append(token_id)\n            reason",
        "self.token_ids.append(token_id)\n            self.prompt_len += 1\n            reason",
    ),
    "moved-scores-are-sent-again": (
        "sequence",
        "max(self._num_scored_tokens, min(num_scored, self.prompt_len))",
        "self._num_scored_tokens",
    ),
    "state-of-a-shorter-prefix": (
        "resources.state_slots",
        "source, before = self.begun_with.slot, start",
        "source, before = self.begun_with.slot, start - 1",
    ),
    "state-with-rejected-drafts": (
        "resources.state_slots",
        "self.position = certain = end - num_drafts",
        "self.position = certain = end",
    ),
    "accepted-drafts-not-replayed": (
        "resources.state_slots",
        "start - before if start else 0",
        "0",
    ),
    "state-read-in-the-step-that-saves-it": (
        "resources.state_slots",
        "if source is not None and source.step_id == self._in_flight.next_id:",
        "if False:",
    ),
    "state-saved-one-token-early": (
        "resources.state_slots",
        "saves.append((position - before, free))",
        "saves.append((max(1, position - before - 1), free))",
    ),
    "state-of-an-evicted-block": (
        "resources.state_slots",
        "if not self._pool.has_content(block_id, saved.key) or (",
        "if (",
    ),
    "state-of-a-failed-row": (
        "resources.state_slots",
        "writer is not None and writer.invalidated",
        "False",
    ),
    "state-of-a-planned-step-is-certain": (
        "resources.state_slots",
        "return step_id < in_flight.next_id and in_flight",
        "return in_flight",
    ),
    "state-slot-taken-in-its-last-step": (
        "resources.state_slots",
        "return self._touched[slot] != self._in_flight.next_id",
        "return True",
    ),
    "reader-of-a-failed-state-goes-on": (
        "step",
        "if writer is not None and writer.invalidated:",
        "if False:",
    ),
    "ended-retention-still-counts": (
        "resources.kv_retention",
        "self._shares.give_back(retained.account)",
        "pass",
    ),
    "retained-blocks-are-pinned": (
        "resources.block_pool",
        "(cached or self._cached_retained).popitem(last=False)",
        "cached.popitem(last=False)",
    ),
    "stored-before-it-is-computed": (
        "resources.kv_tiers",
        "if not self._steps.are_over_before(self._candidates[0].step_id + 1):",
        "if False:",
    ),
    "stored-blocks-written-under-a-step": (
        "resources.kv_tiers",
        "while self._ordered and self._steps.are_over_before(self._ordered[0][0]):",
        "while self._ordered:",
    ),
    "stored-blocks-never-released": (
        "resources.kv_tiers",
        "restore.arriving.release()",
        "restore.arriving",
    ),
    "stored-identity-without-what-is-before": (
        "resources.kv_tiers",
        'content += array("q", token_ids).tobytes()',
        'content = array("q", token_ids).tobytes()',
    ),
    "stored-block-used-before-it-is-filled": (
        "resources.kv_tiers",
        "restore.request_ids.append(request_id)",
        "restore.request_ids.append(request_id)\n            restore.arriving.filled(1)",
    ),
}
_HARMLESS_TO_TOKENS = frozenset({"victims-without-need", "allocation-evicts-first"})
# The runs of these bugs are tried from the first seed that caught them, which saves time; where
# it does not any more, all others are tried as well.
_FIRST_SEEDS = {
    "adapter-drained-for-nothing": 24,
    "admitted-with-tokens-in-flight": 41,
    "continued-by-an-older-commit": 154,
    "failed-blocks-stay-indexed": 30,
    "hit-without-token-compare": 24,
    "paused-continues": 14,
    "paused-is-never-preempted": 12,
    "paused-prompt-continues": 182,
    "planned-row-preempted": 77,
    "reader-of-a-failed-state-goes-on": 135,
    "readers-of-failed-kv-continue": 194,
    "state-of-a-failed-row": 82,
    "state-of-a-planned-step-is-certain": 500,
    "state-of-an-evicted-block": 32,
    "state-read-in-the-step-that-saves-it": 44,
    "stored-blocks-written-under-a-step": 53,
}


def _plant(name: str) -> Iterator[tuple[str, str]]:
    """The source of each module of `core`, imports turned to the copy, with the bug in it."""
    module, text, replacement = _BUGS[name]
    for stem in _MODULES:
        spec = find_spec(f"quickstep.core.{stem}")
        assert spec is not None and spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        if stem == module:
            assert source.count(text) == 1, f"{name}: the text to replace is not there once"
            source = source.replace(text, replacement)
        yield stem, source.replace("from quickstep.core.", "from planted.core.")


@cache
def _compiled(source: str, stem: str) -> CodeType:
    """Most modules of a copy have no bug and are the same in all copies."""
    return compile(source, f"<planted {stem}>", "exec")


@pytest.fixture
def open_planted(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Setup], Scheduler]:
    """Opens schedulers of a copy of `core` that has the bug."""
    for package in ("planted", "planted.core", "planted.core.drafts", "planted.core.resources"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    modules: dict[str, ModuleType] = {}
    for stem, source in _plant(request.param):
        module = ModuleType(f"planted.core.{stem}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(_compiled(source, stem), module.__dict__)
        modules[stem] = module

    def open_one(setup: Setup) -> Scheduler:
        pool = modules["resources.block_pool"].KVBlockPool(
            setup.num_blocks, setup.block_size, setup.prefix_caching, setup.digest
        )
        cost_model = modules["cost_model"].LinearCostModel()
        scheduler: Scheduler = modules["scheduler"].Scheduler(
            setup.config, pool, policy_of(setup), cost_model
        )
        return scheduler

    return open_one


def _is_caught(name: str, open_one: Callable[[Setup], Scheduler]) -> bool:
    first_seed = _FIRST_SEEDS.get(name, 0)
    has_adapters, resumes = name.startswith("adapter"), name.startswith("moved")
    stores = name.startswith("stored")
    for seed in (*range(first_seed, _MAX_LIVES), *range(first_seed)):
        try:
            random_run(seed, open_one, 100, draw_setup, has_adapters, resumes, stores)
        except Exception:  # whatever it breaks, it was noticed
            return True
    return False


@pytest.mark.parametrize("open_planted", sorted(set(_BUGS) - _HARMLESS_TO_TOKENS), indirect=True)
def test_random_runs_catch_a_planted_bug(
    open_planted: Callable[[Setup], Scheduler], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["open_planted"]
    assert _is_caught(name, open_planted)


@pytest.mark.parametrize("seed", range(0, _MAX_LIVES, 25))
def test_random_runs_find_nothing_without_a_planted_bug(seed: int) -> None:
    for offset in range(5):
        random_run(seed + offset, num_calls=50)
