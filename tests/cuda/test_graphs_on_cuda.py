"""Decode steps as CUDA graphs on a GPU: the bits of steps op by op."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from quickstep import LLM, SamplingParams
from quickstep.ops.resolve import resolve_ops

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from recorded_steps import (
    FIRST,
    MIXTURE,
    OTHER_ROWS,
    OTHERS,
    PROMPT_ROWS,
    ROWS,
    SMALL,
    VOCAB,
    BothSteps,
    decode_row,
    make_adapter,
    prompt_row,
)

from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.ops.table import OpTable
from quickstep.runtime.steps.graphs import CudaGraphs

GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def ops() -> OpTable:
    return resolve_ops(GPU, "triton")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def model(ops: OpTable, request: pytest.FixtureRequest) -> Decoder:
    return random_model(SMALL, ops, RandomValues(request.param, GPU, 1, None), 64, None)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_one_graph_fits_other_lengths_blocks_and_tokens(model: Decoder, kv_dtype: str) -> None:
    steps = BothSteps(model, CudaGraphs(GPU), None, 3, kv_dtype)
    steps.capture_all()
    drafted = [decode_row(0, 9, (17, 2, 4)), decode_row(1, 2, (5,)), decode_row(2, 17, (30, 1))]
    for rows, slots in ((ROWS, FIRST), (OTHER_ROWS, OTHERS), (drafted, FIRST), (ROWS, FIRST)):
        steps.check(rows, slots)


def test_one_graph_fits_other_prompts_next_to_decode_rows(model: Decoder) -> None:
    steps = BothSteps(model, CudaGraphs(GPU), max_prompt_tokens=8)
    steps.capture_all()
    for every_token in (False, True):
        steps.check(PROMPT_ROWS, FIRST, every_token)
        steps.check([prompt_row(1, 0, (9, 3))], FIRST[1:2], every_token)


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_one_graph_fits_other_choices_of_experts(ops: OpTable, quantization: str | None) -> None:
    values = RandomValues(torch.float32, GPU, 1, quantization)
    steps = BothSteps(random_model(MIXTURE, ops, values, 64, None), CudaGraphs(GPU))
    steps.capture_all()
    other_tokens = [replace(row, token_ids=((row.token_ids[0] + 9) % VOCAB,)) for row in ROWS]
    for rows, slots in ((ROWS, FIRST), (other_tokens, FIRST), (OTHER_ROWS, OTHERS)):
        steps.check(rows, slots)


def test_adapters_are_data_of_a_graph(ops: OpTable) -> None:
    model = random_model(SMALL, ops, RandomValues(torch.float32, GPU, 1, None), 64, None)
    adapters = {
        "a": make_adapter(ops, 4, 1, "cuda"),
        "b": make_adapter(ops, 7, 2, "cuda"),
    }
    steps = BothSteps(model, CudaGraphs(GPU), adapters)
    for names in (("a", "", "b"), ("b", "b", ""), ("", "a", "a")):
        rows = [replace(row, adapter=name) for row, name in zip(ROWS, names, strict=True)]
        steps.check(rows, FIRST)
        steps.capture_all()
        steps.check(rows, FIRST)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=48),
        SamplingParams(temperature=0.8, seed=3, max_tokens=48),
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.5,
            logprobs=2,
            seed=3,
            max_tokens=48,
        ),
    ],
)
def test_the_engine_with_graphs_has_the_tokens_of_an_eager_one(params: SamplingParams) -> None:
    prompts = ["def add(a, b):\n", "import os\n", "class Stack:\n"]
    found = []
    for is_eager in (True, False):
        with LLM("demo", device="cuda", kernels="triton", enforce_eager=is_eager) as llm:
            outputs = [one.outputs[0] for one in llm.generate(prompts, params)]
            found.append([(output.token_ids, output.logprobs) for output in outputs])
    assert found[0] == found[1]


def test_nothing_is_compiled_after_an_engine_has_opened(caplog: pytest.LogCaptureFixture) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=20),
        SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=0.5, seed=3, max_tokens=20),
        SamplingParams(temperature=0.8, logprobs=2, logit_bias={5: 1.0}, seed=3, max_tokens=20),
    ]
    with LLM("demo", device="cuda", kernels="triton") as llm:
        for num_rows in (1, 3, 7):
            prompts = ["def add(a, b):\n" * (1 + 9 * row) for row in range(num_rows)]
            for param in params:
                llm.generate(prompts, param)
    assert "compiled a kernel while serving" not in caplog.text
