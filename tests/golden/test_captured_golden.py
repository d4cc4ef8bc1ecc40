"""A captured step computes what the model's Python computes op by op, to the bit.

And either computes the same for emitting tokens alone as for every token of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, product
from pathlib import Path

import msgspec
import pytest
import torch
from golden_cases import CASES, VOCAB, Case
from golden_harness import load, random_prompts
from msgspec.structs import replace
from torch import Tensor

from adapter_files import ALL, write_adapter
from quickstep.config import LoadConfig
from quickstep.errors import EngineError
from quickstep.model.adapters.checkpoint import open_adapter
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.model.loader import load_model
from quickstep.model.sizing import StateMemory, activation_bytes
from quickstep.model.spec import read_spec
from quickstep.ops.native.program import program_bytes
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import KVCache, LoRAAdapter
from quickstep.ops.tensors import AnyTensor, host_dtype, to_torch
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.captured import CapturedSteps, record
from quickstep.runtime.steps.opening import open_steps
from quickstep.types import Admission, Phase, RowState, SamplingParams, StepRow

FUSED = ("qkv_proj", "gate_up_proj")
BLOCK = 4


class Sequences(msgspec.Struct, frozen=True):
    """Prompts of these lengths, (sequence, tokens) of each step, and its emitting rows."""

    lengths: tuple[int, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    emitting: tuple[tuple[int, ...], ...]
    num_blocks: int


# one row, prompts in chunks next to decode rows, more than a bucket
SHORT = Sequences(
    lengths=(38, 9, 70, 1),
    steps=(
        ((0, 1),),
        ((0, 16), (1, 4)),
        ((1, 1), (0, 1), (2, 66)),
        ((3, 1), (1, 2), (0, 20), (2, 1)),
        ((2, 1),),
    ),
    emitting=((0,), (), (0, 2), (3, 0), (0,)),
    num_blocks=80,
)
# more rows than the kernels have in one piece of their work, and few
LONG = Sequences(
    lengths=(310, 60),
    steps=(((0, 300), (1, 17)), ((1, 33), (0, 1)), ((0, 9), (1, 10))),
    emitting=((0, 1), (0,), (1, 0)),
    num_blocks=160,
)


def steps_of(
    sequences: Sequences, blocks: torch.Tensor
) -> Iterator[tuple[list[StepRow], list[Slot], tuple[int, ...]]]:
    prompts = random_prompts(sequences.lengths, VOCAB)
    tables = blocks.split(blocks.numel() // len(prompts))
    slots = []
    for prompt, table in zip(prompts, tables, strict=True):
        slot = Slot(Admission(0, "", tuple(prompt), len(prompt), SamplingParams(), 0), VOCAB)
        slot.append_blocks(table.tolist())
        slots.append(slot)
    computed = [0] * len(prompts)
    for step, emitting in zip(sequences.steps, sequences.emitting, strict=True):
        rows = []
        for index, count in step:
            start = computed[index]
            computed[index] += count
            tokens = tuple(prompts[index][start : start + count])
            rows.append(StepRow(index, start, count, tokens, (), Phase.PREFILL, True, 0))
        yield rows, [slots[index] for index, _ in step], emitting


def state_of(row: StepRow) -> RowState:
    """Each sequence has the slot of its number."""
    return RowState(row.slot if row.start else -1, row.slot)


def bits(x: AnyTensor) -> Tensor:
    return to_torch(x).contiguous().view(torch.uint8)


def assert_same_steps(
    model: Model,
    case: Case,
    kv_dtype: str = "auto",
    adapters: Mapping[str, LoRAAdapter] | None = None,
    sequences: Sequences = SHORT,
) -> None:
    assert isinstance(model, Decoder) and model.ops.steps is not None
    kv_layout = model.kv_layout.stored_as(kv_dtype)
    states, num_blocks = StateMemory(8), sequences.num_blocks
    caches = [allocate_kv(kv_layout, num_blocks, BLOCK, model.device, states) for _ in range(4)]
    # op by op with every token's hidden states, against the three other ways
    ways = [
        (open_steps(model, kv, BLOCK, enforce_eager, adapters), every_token)
        for kv, (enforce_eager, every_token) in zip(
            caches, product((True, False), (True, False)), strict=True
        )
    ]
    for steps, _ in ways[2:]:
        assert isinstance(steps, CapturedSteps)
    assert_memory_is_planned(model, caches[0])
    longest = case.max_model_len or 256
    order = torch.randperm(sequences.num_blocks, generator=torch.Generator().manual_seed(3))
    for rows, slots, emitting in steps_of(sequences, order):
        if max(row.end for row in rows) > longest:
            continue
        if adapters is not None:  # every third slot has none
            names = ("", *adapters)
            rows = [replace(row, adapter=names[row.slot % len(names)]) for row in rows]
        if caches[0].states:
            rows = [replace(row, state=state_of(row)) for row in rows]
        for steps, _ in ways:
            steps.prepare(rows, slots)
        last = [(index, 0) for index in emitting]
        hidden, logits = ways[0][0].run(last, True)
        ends = list(accumulate(row.num_tokens for row in rows))
        of_emitting = hidden[[ends[index] - 1 for index in emitting]]
        for steps, every_token in ways[1:]:
            found = steps.run(last, every_token)
            assert_same_bits(found, (hidden if every_token else of_emitting, logits))
    for kv in caches[1:]:
        expected = caches[0].tensors + caches[0].states
        assert_same_bits(kv.tensors + kv.states, expected)
    assert all(keys.any() for keys in caches[0].keys)


def assert_same_bits(found: Sequence[AnyTensor], expected: Sequence[AnyTensor]) -> None:
    for got, right in zip(found, expected, strict=True):
        assert host_dtype(got.dtype) == host_dtype(right.dtype) and got.shape == right.shape
        assert torch.equal(bits(got), bits(right))


def assert_memory_is_planned(model: Decoder, kv: KVCache) -> None:
    counts, element = (256, 16), model.kv_layout.dtype.itemsize
    planned = activation_bytes(model.spec, element, *counts, model.ops.scratch_bytes)
    for every_token in (False, True):
        recording = record(model, kv, BLOCK, every_token)
        assert recording is not None and program_bytes(recording, counts) < planned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_captured_steps_have_the_bits_of_eager_ones(case: Case, dtype: str, tmp_path: Path) -> None:
    case.save(tmp_path)
    assert_same_steps(load(tmp_path, case.max_model_len, dtype), case)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float32", "float16"])
@pytest.mark.parametrize("name", ["llama-biases-mqa", "qwen3", "gemma2", "granite-swa"])
def test_captured_steps_over_another_kv_dtype_have_the_bits_of_eager_ones(
    name: str, kv_dtype: str, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    case.save(tmp_path)
    assert_same_steps(load(tmp_path, case.max_model_len, "bfloat16"), case, kv_dtype)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama-biases-mqa", "qwen3", "gemma2"])
def test_captured_steps_of_low_bit_weights_have_the_bits_of_eager_ones(
    name: str, quantization: str, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    case.save(tmp_path)
    options = LoadConfig(model=str(tmp_path), dtype="bfloat16", quantization=quantization)
    table, spec = resolve_ops(torch.device("cpu")), read_spec(tmp_path)
    model = load_model(Checkpoint(tmp_path, name), spec, table, options)
    assert_same_steps(model, case)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_steps_of_wide_layers_have_the_bits_of_eager_ones(
    quantization: str | None, tmp_path: Path
) -> None:
    sizes = {
        "hidden_size": 1152, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64,
        "max_position_embeddings": 512,
    }  # fmt: skip
    case = Case("wide", "Llama", sizes, max_model_len=512)
    case.save(tmp_path)
    options = LoadConfig(model=str(tmp_path), dtype="bfloat16", quantization=quantization)
    table, spec = resolve_ops(torch.device("cpu")), read_spec(tmp_path)
    model = load_model(Checkpoint(tmp_path, case.name), spec, table, options)
    assert_same_steps(model, case, sequences=LONG)


def random_adapters(model: Decoder, path: Path) -> dict[str, LoRAAdapter]:
    """Two adapters of different ranks and targets."""
    adapters = {}
    for seed, (rank, targets) in enumerate(((3, ALL), (16, ("q_proj", "down_proj")))):
        expression = "all-linear" if targets == ALL else rf".*\.({'|'.join((*targets, *FUSED))})"
        name, spec = f"a{seed}", model.spec
        every = (*targets, *FUSED)
        write_adapter(path / name, spec, every, rank, seed, target_modules=expression)
        weights = open_adapter(path / name, spec, 64).read(host_dtype(model.kv_layout.dtype))
        adapters[name] = model.ops.pack_lora(weights.modules)
    return adapters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama-biases-mqa", "qwen3", "gemma2", "phi3"])
def test_captured_steps_with_adapters_have_the_bits_of_eager_ones(
    name: str, dtype: str, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name.startswith(name))
    case.save(tmp_path / "base")
    model = load(tmp_path / "base", case.max_model_len, dtype)
    assert isinstance(model, Decoder)
    assert_same_steps(model, case, adapters=random_adapters(model, tmp_path))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapters_on_low_bit_weights_have_the_bits_of_eager_steps(
    quantization: str, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == "qwen3")
    case.save(tmp_path / "base")
    base = tmp_path / "base"
    options = LoadConfig(model=str(base), dtype="bfloat16", quantization=quantization)
    table = resolve_ops(torch.device("cpu"))
    model = load_model(Checkpoint(base, "qwen3"), read_spec(base), table, options)
    assert isinstance(model, Decoder)
    assert_same_steps(model, case, adapters=random_adapters(model, tmp_path))


def test_a_row_without_its_adapter_is_an_error(tmp_path: Path) -> None:
    CASES[0].save(tmp_path)
    model = load(tmp_path)
    kv = allocate_kv(model.kv_layout, 4, BLOCK, model.device)
    slot = Slot(Admission(0, "", (1, 2), 2, SamplingParams(), 0), VOCAB)
    slot.append_blocks((0,))
    row = StepRow(0, 0, 2, (1, 2), (), Phase.PREFILL, True, 0, adapter="gone")
    for enforce_eager in (True, False):
        steps = open_steps(model, kv, BLOCK, enforce_eager, {})
        with pytest.raises(EngineError, match="gone"):
            steps.prepare([row], [slot])


def test_a_captured_step_refuses_what_an_eager_one_refuses(tmp_path: Path) -> None:
    CASES[0].save(tmp_path)
    model = load(tmp_path)
    kv = allocate_kv(model.kv_layout, 4, BLOCK, model.device)
    slot = Slot(Admission(0, "", (1, 2), 2, SamplingParams(), 0), VOCAB)
    slot.append_blocks((0,))
    unknown = StepRow(0, 0, 2, (1, VOCAB), (), Phase.PREFILL, True, 0)
    beyond = StepRow(0, 3, 2, (1, 1), (), Phase.PREFILL, True, 0)
    for enforce_eager in (True, False):
        steps = open_steps(model, kv, BLOCK, enforce_eager)
        with pytest.raises(EngineError, match="outside"):
            steps.prepare([unknown], [slot])
            steps.run([(0, 0)], False)
        with pytest.raises(EngineError, match="its 1 blocks hold 4"):
            steps.prepare([beyond], [slot])
