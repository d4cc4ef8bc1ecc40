"""The whole engine on a GPU, with the bundled model."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from quickstep import LLM, SamplingParams
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.interface import Model
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops import resolve
from quickstep.ops.resolve import resolve_ops
from quickstep.text.tokenizer import Tokenizer
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

PROMPTS = ["def add(a, b):\n", "import os\n", "class Stack:\n"]


@pytest.mark.parametrize(
    ("kernels", "pipeline_depth"), [("reference", 1), ("triton", 1), ("triton", 2)]
)
def test_a_batch_on_a_gpu_equals_each_request_alone(kernels: str, pipeline_depth: int) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=2)
    with LLM("demo", device="cuda", kernels=kernels, pipeline_depth=pipeline_depth) as llm:
        together = llm.generate(PROMPTS, params)
        alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_no_mismatch_on_a_gpu(kernels: str) -> None:
    config = LoadConfig("demo", device="cuda")
    checkpoint = find_checkpoint(config)
    spec = read_spec(checkpoint.path)
    ops = resolve_ops(torch.device("cuda"), kernels)

    def load(_: int) -> Model:
        return load_model(checkpoint, spec, ops, config)

    eos = Tokenizer.open(checkpoint.path).eos_token_ids
    report = verify(load, VerifyOptions(num_requests=60, threads=(1,)), eos)
    assert report.mismatches == 0
    assert report.comparisons >= 60


def test_tokens_and_logprobs_on_a_gpu_are_those_of_the_hosts_sampler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=24, logprobs=2, prompt_logprobs=1)
    params = [
        sampled,
        replace(sampled, top_p=0.9, top_k=40, min_p=0.01),
        replace(sampled, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=8),
    ]
    ops = resolve.resolve_ops(torch.device("cuda"), "triton")
    answers = []
    for samples_on_device in (True, False):
        chosen = replace(ops, samples_on_device=samples_on_device)
        monkeypatch.setattr(resolve, "resolve_ops", lambda *_, chosen=chosen: chosen)
        with LLM("demo", device="cuda") as llm:
            answers.append([one.outputs for one in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]
