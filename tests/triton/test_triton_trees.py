"""Trees of drafts on the Triton kernels, interpreted: the bits of the same tokens one by one."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")

from graph_double import Reexecution
from recorded_steps import SMALL

from op_checks.attention_cases import AttentionCase, stored_heads
from op_checks.invariance import same_bits, with_tails
from quickstep.errors import EngineError
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import AttentionParams, KVCache, OpTable
from quickstep.ops.tensors import to_torch
from quickstep.ops.triton.backend import load_triton
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.runner import ModelRunner
from quickstep.runtime.steps.step_model import GraphOptions
from quickstep.types import Admission, Phase, SamplingParams, StepPlan, StepRow

CPU = torch.device("cpu")
PROMPT = (5, 9, 2)
NUM_BLOCKS, BLOCK_SIZE = 4, 4


@pytest.fixture(scope="module")
def ops() -> OpTable:
    table = load_triton(CPU)
    assert table is not None
    return table


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_keys_in_other_slots_have_the_bits_of_those_in_blocks(
    ops: OpTable, kv_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(6)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # tails of 1, 0 and 70 keys: the last one over two tiles and two splits
    rows, lengths, block_size = ((0, 5), (62, 4), (1030, 2)), (1, 3, 33), 32
    tables = torch.zeros(3, max(lengths), dtype=torch.int32)
    order = torch.randperm(sum(lengths), generator=generator).int()
    for row, blocks in enumerate(torch.split(order, lengths)):
        tables[row, : len(blocks)] = blocks
    shape = (sum(lengths), block_size, 2, 16)
    keys, values = (stored_heads(normal(*shape), kv_dtype) for _ in range(2))
    q, params = normal(11, 4, 16).bfloat16(), AttentionParams(0.25, 1000, 20.0)
    in_blocks = AttentionCase("tails", q, keys, values, rows, tables, params, normal(4))
    in_tails = with_tails(in_blocks)
    assert [len(tail) for tail in in_tails.tails] == [1, 0, 70]
    expected = ops.paged_attention(*in_blocks.arguments)
    assert same_bits(ops.paged_attention(*in_tails.arguments), expected)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_kv_is_moved_in_the_order_of_the_pairs(ops: OpTable, kv_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    caches = [
        stored_heads(torch.randn(5, 4, 2, 520, generator=generator), kv_dtype) for _ in range(4)
    ]
    found, expected = (
        KVCache(
            tuple(cache.clone() for cache in caches[:2]),
            tuple(cache.clone() for cache in caches[2:]),
        )
        for _ in range(2)
    )
    moves = [(9, 3), (17, 4), (3, 2)]
    ops.move_kv(found, moves)
    reference_ops().move_kv(expected, moves)
    for one, other in zip(
        (*found.keys, *found.values), (*expected.keys, *expected.values), strict=True
    ):
        assert same_bits(to_torch(one), to_torch(other))
    for outside in ([(0, 20)], [(-1, 0)]):
        with pytest.raises(EngineError, match="20"):
            ops.move_kv(found, outside)


@pytest.fixture(scope="module")
def model(ops: OpTable) -> Decoder:
    return random_model(SMALL, ops, RandomValues(torch.float32, CPU, 1, None), 64, None)


class Sequence:
    """One sequence on a runner of its own."""

    def __init__(self, model: Decoder, backend: Reexecution | None) -> None:
        self.kv = allocate_kv(model.kv_layout, NUM_BLOCKS + 1, BLOCK_SIZE, CPU)
        graphs = None if backend is None else GraphOptions(backend, 1)
        self._runner = ModelRunner(model, self.kv, BLOCK_SIZE, 1, lambda: 0.0, graphs=graphs)
        while self._runner.capture_next():
            pass
        self.num_tokens, self.outputs = 0, []

    def prefill(self) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=9)
        admission = Admission(0, "r#0", PROMPT, len(PROMPT), sampling, 0)
        row = StepRow(0, 0, len(PROMPT), PROMPT, (2, 0, 3), Phase.PREFILL, True, 0)
        self._run(StepPlan(0, (row,), (admission,)), len(PROMPT))

    def decode(self, drafts: tuple[int, ...] = (), parents: tuple[int, ...] = ()) -> None:
        tokens = (self.outputs[-1], *drafts)
        row = StepRow(
            0, self.num_tokens, len(tokens), tokens, (), Phase.DECODE, True, len(self.outputs)
        )
        row = replace(row, num_drafts=len(drafts), parents=parents)
        self._run(StepPlan(1, (row,)), 1)

    def _run(self, plan: StepPlan, num_inputs: int) -> None:
        [output] = self._runner.run(plan).outputs
        self.outputs += output.token_ids
        self.num_tokens += num_inputs + len(output.token_ids) - 1


@pytest.mark.usefixtures("products_in_order")
def test_a_tree_gives_the_tokens_and_the_kv_of_steps_one_by_one(model: Decoder) -> None:
    plain, backend = Sequence(model, None), Reexecution()
    plain.prefill()
    for _ in range(4):
        plain.decode()
    first, second, third = plain.outputs[1:4]
    wrong = [token for token in range(SMALL.vocab_size) if token not in plain.outputs]

    in_tree = Sequence(model, backend)
    in_tree.prefill()
    # the right drafts are the second, the fourth and none of those after it
    in_tree.decode((wrong[0], first, wrong[1], second, wrong[2]), (0, 0, 2, 2, 4))
    assert in_tree.outputs == plain.outputs[:4]
    assert backend.replays == 0, "a step with a tree runs op by op"
    in_tree.decode()
    assert backend.replays == 1, "the next one is a graph again"
    assert in_tree.outputs == plain.outputs and in_tree.outputs[3] == third
    assert in_tree.num_tokens == plain.num_tokens == 7
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2])
    for one, other in zip(plain.kv.tensors, in_tree.kv.tensors, strict=True):
        kept, moved = (to_torch(cache).flatten(0, 1)[slots] for cache in (one, other))
        assert same_bits(kept, moved)
