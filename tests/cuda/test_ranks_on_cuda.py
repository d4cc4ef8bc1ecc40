"""Ranks on two GPUs, over NCCL. Nobody has run this yet: with one GPU it is left out."""

from __future__ import annotations

import pytest
import torch

from quickstep import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_two_gpus_have_the_tokens_and_logprobs_of_one(
    kernels: str, quantization: str | None
) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, logprobs=2, prompt_logprobs=1)
    prompts = ["def add(a, b):\n", "import os\n", "class Stack:\n"]
    options = {"device": "cuda", "kernels": kernels, "quantization": quantization}
    found = []
    for size in (1, 2):
        with LLM("demo", tensor_parallel_size=size, **options) as llm:
            answers = llm.generate(prompts, params, use_tqdm=False)
            found.append(
                [
                    (
                        answer.prompt_logprobs,
                        answer.outputs[0].token_ids,
                        answer.outputs[0].logprobs,
                    )
                    for answer in answers
                ]
            )
    assert found[0] == found[1]
