"""A row that checks drafts gives each of its tokens the bits of a decode row, at every width, and
each draft of a tree those that it has in the chain of its path.

This is what speculation relies on: with other bits, the output would depend on the drafts.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from quickstep.config import MAX_SPECULATIVE_TOKENS, EngineConfig, LoadConfig
from quickstep.engine.assembly import load_weights
from quickstep.model.interface import Model
from quickstep.ops.native.backend import native_status
from quickstep.ops.tensors import to_numpy
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.opening import open_steps
from quickstep.runtime.steps.step_model import StepModel
from quickstep.types import Admission, Phase, SamplingParams, StepRow

BLOCK_SIZE = 16
PROMPT_LEN = 29  # rows of several tokens cross the border of a block
_TEXT_LEN = PROMPT_LEN + MAX_SPECULATIVE_TOKENS + 1
TEXT = tuple(np.random.default_rng(5).integers(300, 2000, _TEXT_LEN).tolist())


class Sequences:
    """Slots with the prompt computed, on one model and one cache."""

    def __init__(
        self, model: Model, kv_dtype: str, num_slots: int, enforce_eager: bool = False
    ) -> None:
        num_blocks = -(-len(TEXT) // BLOCK_SIZE)
        shape = model.kv_layout.stored_as(kv_dtype)
        kv = allocate_kv(shape, num_blocks * num_slots, BLOCK_SIZE, model.device)
        self.steps: StepModel = open_steps(model, kv, BLOCK_SIZE, enforce_eager)
        self.slots = []
        for index in range(num_slots):
            admission = Admission(index, f"r#{index}", TEXT, PROMPT_LEN, SamplingParams(), 0)
            slot = Slot(admission, model.vocab_size)
            assert not slot.failure
            slot.append_blocks(range(index * num_blocks, (index + 1) * num_blocks))
            self.slots.append(slot)
        self.logits([(index, 0, PROMPT_LEN) for index in range(num_slots)])

    def logits(self, spans: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """The logits [n, V] of each span (slot, start, n), all computed in one step."""
        rows = [
            StepRow(slot, start, count, TEXT[start : start + count], (), Phase.DECODE, True, 0)
            for slot, start, count in spans
        ]
        self.steps.prepare(rows, [self.slots[slot] for slot, _, _ in spans])
        emitting = [
            (index, num_after)
            for index, (_, _, count) in enumerate(spans)
            for num_after in range(count - 1, -1, -1)
        ]
        _, logits = self.steps.run(emitting, every_token=False)
        counts = np.cumsum([count for _, _, count in spans])[:-1]
        return np.split(to_numpy(logits).view(np.uint32).copy(), counts)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("level", native_status().levels)
def test_a_row_of_any_width_has_the_bits_of_decode_rows(
    level: str, quantization: str | None, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICKSTEP_CPU_ISA", level)
    load = LoadConfig("demo", quantization=quantization)
    model = load_weights(EngineConfig(load=load, max_model_len=64), None).model
    sequences = Sequences(model, kv_dtype, num_slots=3)
    ends = range(PROMPT_LEN, len(TEXT))
    expected = np.concatenate([sequences.logits([(0, start, 1)])[0] for start in ends])
    for width in range(1, MAX_SPECULATIVE_TOKENS + 2):
        # the row alone, and between a row of one token and one of another width
        alone = sequences.logits([(0, PROMPT_LEN, width)])
        other = MAX_SPECULATIVE_TOKENS + 2 - width
        batch = [(1, PROMPT_LEN, 1), (0, PROMPT_LEN, width), (2, PROMPT_LEN, other)]
        for found in (*alone, *sequences.logits(batch)):
            np.testing.assert_array_equal(found, expected[: len(found)], f"width {width}")


class TreeSequences(Sequences):
    """Rows of which each has the prompt's last token and then drafts, in a chain or a tree."""

    def checked(
        self, trees: list[tuple[int, tuple[int, ...], tuple[int, ...]]], every_token: bool = False
    ) -> list[np.ndarray]:
        """The logits [1 + n, V] of rows (slot, n drafts, parents), all computed in one step."""
        start = PROMPT_LEN - 1
        rows = [
            StepRow(
                slot,
                start,
                1 + len(drafts),
                (TEXT[start], *drafts),
                (),
                Phase.DECODE,
                True,
                0,
                len(drafts),
                parents=parents,
            )
            for slot, drafts, parents in trees
        ]
        self.steps.prepare(rows, [self.slots[slot] for slot, _, _ in trees])
        emitting = [
            (index, num_after)
            for index, row in enumerate(rows)
            for num_after in range(row.num_drafts, -1, -1)
        ]
        _, logits = self.steps.run(emitting, every_token)
        counts = np.cumsum([row.num_tokens for row in rows])[:-1]
        return np.split(to_numpy(logits).view(np.uint32).copy(), counts)


def random_tree(rng: random.Random, num_drafts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Drafts and parents: deep ones and broad ones."""
    deep = rng.random()
    parents = [node if rng.random() < deep else rng.randint(0, node) for node in range(num_drafts)]
    return tuple(rng.randrange(300, 2000) for _ in parents), tuple(parents)


def assert_trees_are_chains(sequences: TreeSequences, rng: random.Random) -> None:
    """Trees of every size, two of them in one step with a chain between them."""
    for num_drafts in range(1, MAX_SPECULATIVE_TOKENS + 1):
        first = (0, *random_tree(rng, num_drafts))
        second = (2, *random_tree(rng, rng.randint(1, MAX_SPECULATIVE_TOKENS)))
        chain = (1, tuple(rng.randrange(300, 2000) for _ in range(3)), ())
        found = sequences.checked([first, chain, second], every_token=rng.random() < 0.5)
        for (_, drafts, parents), logits in ((first, found[0]), (second, found[2])):
            row = StepRow(0, 0, 1, (0,), (), Phase.DECODE, True, 0, parents=parents)
            for leaf in set(range(len(drafts) + 1)) - set(parents):
                path = row.path(leaf)
                [single] = sequences.checked([(1, tuple(drafts[one - 1] for one in path), ())])
                for node, expected in zip((0, *path), single, strict=True):
                    np.testing.assert_array_equal(logits[node], expected, f"{parents}, {node}")


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("level", native_status().levels)
def test_a_draft_of_a_tree_has_the_bits_of_its_path_as_a_chain(
    level: str, quantization: str | None, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICKSTEP_CPU_ISA", level)
    load = LoadConfig("demo", quantization=quantization)
    model = load_weights(EngineConfig(load=load, max_model_len=64), None).model
    rng = random.Random(f"{level}/{quantization}/{kv_dtype}")
    assert_trees_are_chains(TreeSequences(model, kv_dtype, num_slots=3), rng)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_trees_op_by_op_have_the_bits_of_chains(kernels: str) -> None:
    load = LoadConfig("demo", kernels=kernels)
    model = load_weights(EngineConfig(load=load, max_model_len=64, enforce_eager=True), None).model
    sequences = TreeSequences(model, "auto", num_slots=3, enforce_eager=True)
    assert_trees_are_chains(sequences, random.Random(4))
