"""The whole engine over the Triton kernels, interpreted, with a tiny random model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

pytest.importorskip("triton")

from tiny_checkpoint import write_checkpoint

from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.outputs import collect
from quickstep.ops import resolve
from quickstep.types import SamplingParams

PROMPTS = ("ab", "def f(x)")
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, allowed_token_ids=range(94))

SAMPLED = SamplingParams(
    max_tokens=3,
    seed=5,
    temperature=0.9,
    top_p=0.9,
    repetition_penalty=1.2,
    min_tokens=2,
    logit_bias={3: 2.0},
    logprobs=2,
    prompt_logprobs=1,
    allowed_token_ids=range(94),
)

Answers = list[tuple[object, object]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama"))


def answers(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: str,
    quantization: str | None = None,
    params: SamplingParams = GREEDY,
    samples_on_device: bool = True,
) -> tuple[Answers, Answers]:
    """Token ids and logprobs of each prompt, run at the same time and alone."""
    ops = resolve.resolve_ops(torch.device("cpu"), kernels)
    if not samples_on_device:
        ops = replace(ops, samples_on_device=False)
    monkeypatch.setattr(resolve, "resolve_ops", lambda *_: ops)
    config = EngineConfig(
        load=LoadConfig(model=str(checkpoint), num_threads=1, quantization=quantization),
        cache=CacheConfig(block_size=4, num_blocks=64, prefix_caching=False),
        enforce_eager=True,
        seed=0,
    )
    engine = open_engine(config)

    async def answer(prompt: str) -> tuple[object, object]:
        stream = engine.generate(prompt, params)
        [output] = (await collect(stream, prompt, params, engine.tokenizer)).outputs
        return output.token_ids, output.logprobs

    async def both() -> tuple[Answers, Answers]:
        await engine.start()
        try:
            together = await asyncio.gather(*(answer(prompt) for prompt in PROMPTS))
            return list(together), [await answer(prompt) for prompt in PROMPTS]
        finally:
            await engine.stop()

    return asyncio.run(both())


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("quantization", [None])
def test_the_engine_on_triton_has_the_tokens_of_the_reference_and_the_same_bits_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    together, alone = answers(checkpoint, monkeypatch, "triton", quantization)
    assert together == alone
    expected, _ = answers(checkpoint, monkeypatch, "reference", quantization)
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in expected]


@pytest.mark.usefixtures("products_in_order")
def test_tokens_and_logprobs_are_those_of_the_hosts_sampler(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, alone = answers(checkpoint, monkeypatch, "triton", params=SAMPLED)
    assert together == alone
    with monkeypatch.context() as patch:
        on_host, _ = answers(checkpoint, patch, "triton", params=SAMPLED, samples_on_device=False)
    assert together == on_host
