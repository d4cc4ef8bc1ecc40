"""Several ranks, and stages, give the bits of one process: every architecture, format, and kind of
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_cases import CASES, Case
from golden_harness import PROMPT_LENS, random_prompts
from mxfp4_checkpoint import save_mxfp4
from paged_driver import PagedDriver
from rank_threads import run_ranks

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.decoder import Decoder
from quickstep.model.loader import load_model
from quickstep.model.sharding import check_ranks
from quickstep.model.spec import read_spec
from quickstep.model.stages import Stage, check_stages
from quickstep.ops.native.backend import load_native
from quickstep.ops.tensors import AnyTensor, HostTensor, host_dtype, to_numpy
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.opening import open_steps
from quickstep.runtime.steps.step_model import EmittingToken, StepModel
from quickstep.sampling_params import SamplingParams
from quickstep.types import Admission, Phase, StepRow

FORMATS = ("int8", "int8-g32", "int4", "int4-g64", "int4-g128")
BLOCK_SIZE = 16
PROMPT_LEN = 40


def sizes_of(path: Path) -> list[int]:
    """2 and 4, where the model's heads allow it."""
    spec = read_spec(path)
    check_ranks(spec, 2)
    return [2, 4] if spec.num_heads % 4 == 0 else [2]


def captured(model: Decoder, _: int) -> list[Any]:
    """Results of captured steps: a prompt in two chunks, the second with a decode row."""
    return results_of(opened(model), model.vocab_size)


def opened(model: Decoder) -> StepModel:
    kv = allocate_kv(model.kv_layout, 8, BLOCK_SIZE, model.device)
    # the first and the last layer's, as a layer of EAGLE 3 reads them
    aux_layers = (0, model.spec.num_layers - 1)
    return open_steps(model, kv, BLOCK_SIZE, enforce_eager=False, aux_layers=aux_layers)


class StageChain:
    """The stages of a pipeline one after the other, as one `StepModel`."""

    def __init__(self, stages: list[StepModel]) -> None:
        self._stages = stages

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        for stage in self._stages:
            stage.prepare(rows, slots)

    def run(
        self, emitting: Sequence[EmittingToken], every_token: bool
    ) -> tuple[AnyTensor, AnyTensor]:
        carried: HostTensor | None = None
        for stage in self._stages[:-1]:
            stage.run(emitting, False, carried)
            parts = stage.aux_hidden_states()
            arrays = [to_numpy(part) for part in parts]
            dtype = host_dtype(parts[0].dtype)
            assert dtype is not None
            carried = HostTensor(np.concatenate(arrays), dtype)
        return self._stages[-1].run(emitting, every_token, carried)

    def aux_hidden_states(self) -> tuple[AnyTensor, ...]:
        return self._stages[-1].aux_hidden_states()

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        return self._stages[-1].logits(hidden, adapter)


def staged(path: Path, load: LoadConfig, num_stages: int) -> list[Any]:
    """`captured`, of a pipeline."""
    checkpoint, spec, ops = Checkpoint(path, "m"), read_spec(path), load_native(1)
    assert ops is not None
    stages = []
    for number in range(num_stages):
        stage = Stage(number, num_stages)
        model = load_model(checkpoint, spec, ops, load, stage=stage)
        assert isinstance(model, Decoder)
        stages.append(opened(model))
    return results_of(StageChain(stages), spec.vocab_size)


def results_of(steps: StepModel | StageChain, vocab_size: int) -> list[Any]:
    prompt = tuple(np.random.default_rng(3).integers(3, vocab_size, PROMPT_LEN).tolist())
    slots = []
    for index in range(2):
        admission = Admission(index, str(index), prompt, PROMPT_LEN, SamplingParams(), 0)
        slots.append(Slot(admission, vocab_size))
        slots[index].append_blocks(range(4 * index, 4 * index + 4))
    found = []
    for rows, every_token in (
        ([(0, 0, 30)], False),
        ([(0, 30, 1), (1, 0, 17)], True),
        ([(0, 31, 1), (1, 17, 1)], False),
    ):
        steps.prepare(
            [
                StepRow(slot, start, count, prompt[start : start + count], (), phase, True, 0)
                for slot, start, count in rows
                for phase in (Phase.PREFILL if count > 1 else Phase.DECODE,)
            ],
            [slots[slot] for slot, _, _ in rows],
        )
        emitting = [(index, 0) for index in range(len(rows))]
        results = steps.run(emitting, every_token)
        results = *results, *steps.aux_hidden_states()
        found += [to_numpy(result).copy() for result in results]
        found.append(to_numpy(steps.logits(results[0], "")).copy())
    return found


def op_by_op(model: Decoder, _: int) -> list[Any]:
    """Logits of prompts that are computed together in chunks, without a recorded step."""
    driver = PagedDriver(model)
    rows = [driver.open(prompt) for prompt in random_prompts(PROMPT_LENS, model.vocab_size)]
    found = []
    while any(row.computed < len(row.token_ids) for row in rows):
        left = [(row, min(6, len(row.token_ids) - row.computed)) for row in rows]
        found += [part.numpy() for part in driver.step([work for work in left if work[1]])]
    return found


def both(model: Decoder, rank: int) -> tuple[list[Any], list[Any]]:
    """`captured` and `op_by_op`, of one model that was loaded once."""
    return captured(model, rank), op_by_op(model, rank)


def assert_equal_results(expected: Sequence[list[Any]], found: Sequence[list[Any]]) -> None:
    """Of `both`."""
    for name, mine, theirs in zip(("captured", "op by op"), expected, found, strict=True):
        assert len(mine) == len(theirs)
        assert all(map(np.array_equal, mine, theirs)), name


def assert_same(path: Path, load: LoadConfig) -> None:
    (expected,) = run_ranks(path, load, 1, both)
    for size in sizes_of(path):
        found, *others = run_ranks(path, load, size, both)
        assert_equal_results(expected, found)
        for hidden, _ in others:  # the hidden states; only rank 0 has all logits
            assert all(map(np.array_equal, expected[0][::5], hidden[::5])), f"{size} ranks"
    for num_stages in range(2, min(3, read_spec(path).num_layers) + 1):
        found = staged(path, load, num_stages)
        assert all(map(np.array_equal, expected[0], found)), f"{num_stages} stages"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_architecture(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    spec = read_spec(tmp_path)
    if not (spec.native and spec.is_uniform) or spec.state_sizes:
        for check in (check_ranks, check_stages):
            with pytest.raises(ConfigError, match="leave the option out"):
                check(spec, 2)
        return
    assert_same(tmp_path, LoadConfig(str(tmp_path), dtype="float32"))


@pytest.mark.parametrize("name", ["llama-biases-mqa", "olmo2", "gpt-oss"])
def test_gloo_exchanges_what_shared_memory_does(name: str, tmp_path: Path) -> None:
    """The exchange of GPUs, on CPUs; NCCL in place of gloo is not tested."""
    (case,) = [case for case in CASES if case.name == name]
    case.save(tmp_path)
    load = LoadConfig(str(tmp_path), dtype="bfloat16")
    (expected,) = run_ranks(tmp_path, load, 1, both)
    for size in sizes_of(tmp_path):
        found, *_ = run_ranks(tmp_path, load, size, both, store=tmp_path / f"store-{size}")
        assert_equal_results(expected, found)


@pytest.mark.parametrize("quantization", FORMATS)
def test_every_format(quantization: str, tmp_path: Path) -> None:
    sizes: dict[str, object] = {"hidden_size": 256, "intermediate_size": 384}
    Case("wide", "Llama", sizes).save(tmp_path)
    for dtype in ("float32", "bfloat16"):
        assert_same(tmp_path, LoadConfig(str(tmp_path), dtype=dtype, quantization=quantization))


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Of which a rank has rows of gates and of ups that the file has in turn."""
    save_mxfp4(tmp_path)
    for quantization in (None, "int8"):
        assert_same(
            tmp_path, LoadConfig(str(tmp_path), dtype="bfloat16", quantization=quantization)
        )
