"""Models from quantized checkpoints: near what they mean, exact in batches, counted right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import format_writers as writers
import msgspec
import pytest
import torch
from published_formats import AWQ, BNB4, EXACT, GPTQ, ROUNDED_AGAIN
from quantized_checkpoint import load, logits_of, write_quantized, write_whole
from tiny_checkpoint import write_tokenizer
from torch import Tensor

from quickstep import LLM, SamplingParams
from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.checkpoint.weights import open_weights
from quickstep.model.decoder import Decoder
from quickstep.model.fallback.spec import read_fallback_spec
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.weights import LinearWeight

CASES = EXACT | ROUNDED_AGAIN
SERVED = (
    *("awq-g32", "gptq4-g32", "packed4-asymmetric", "w8a8", "nf4-nested", "bnb-int8"),
    "modelopt-nvfp4",
)
TOKENS = [(7 * i + 3) % 256 for i in range(24)]


@pytest.mark.parametrize("case", SERVED)
def test_logits_are_near_those_of_the_weights_it_means(case: str, tmp_path: Path) -> None:
    quantization, writer = CASES[case]
    meant = write_quantized(tmp_path / "codes", quantization, writer)
    expected = logits_of(load(write_whole(tmp_path / "whole", meant)), TOKENS)
    found = logits_of(load(tmp_path / "codes"), TOKENS)
    assert float((found - expected).square().mean() / expected.square().mean()) < 0.1**2


@pytest.mark.parametrize("case", SERVED)
def test_a_request_alone_answers_as_in_a_batch(case: str, tmp_path: Path) -> None:
    quantization, writer = CASES[case]
    write_quantized(tmp_path, quantization, writer)
    write_tokenizer(tmp_path)
    prompts = ["one", "another prompt that is longer", "x" * 40]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    with LLM(str(tmp_path), num_threads=1) as llm:
        together = [output.outputs[0] for output in llm.generate(prompts, params)]
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
    assert [(o.token_ids, o.logprobs) for o in together] == [
        (o.token_ids, o.logprobs) for o in alone
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_what_the_weights_take(case: str, tmp_path: Path) -> None:
    quantization, writer = CASES[case]
    write_quantized(tmp_path, quantization, writer)
    weights = open_weights(tmp_path, read_spec(tmp_path))
    assert weights.quantized
    model = load(tmp_path)
    assert isinstance(model, Decoder)
    held = sum(_nbytes(part) for part in _parts(model.weights))
    is_reference = resolve_ops(torch.device("cpu")).name == "reference"
    planned = weights.held_bytes(torch.float32.itemsize, natively=not is_reference)
    if is_reference:
        assert planned < sum(4 * shape[0] * shape[-1] for shape in weights.shapes.values())
    else:
        assert held <= planned <= 1.1 * held


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_codes_are_not_rounded_again_on_request(quantization: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, AWQ | {"group_size": 32}, writers.awq(32))
    with pytest.raises(ConfigError, match=r"quantized already \(awq\)"):
        load(tmp_path, quantization)


def test_the_fallback_refuses_quantized_checkpoints(tmp_path: Path) -> None:
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    config |= {"quantization_config": GPTQ | {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="only unquantized checkpoints"):
        read_fallback_spec(tmp_path, "GPTNeoXForCausalLM", "")


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    for case in ("gptq4-g32", "packed4-asymmetric", "bnb-int8", "nf4-nested"):
        path = tmp_path / case
        write_quantized(path, *CASES[case])
        seen: list[tuple[int, int]] = []
        ops = resolve_ops(torch.device("cpu"))
        options = LoadConfig(model=str(path), device="cpu")
        load_model(
            Checkpoint(path, "q"),
            read_spec(path),
            ops,
            options,
            progress=lambda done, total, seen=seen: seen.append((done, total)),
        )
        assert seen[-1][0] == seen[-1][1]
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_bnb_blocks_are_served_beside_whole_projections(tmp_path: Path) -> None:
    """Only V is stored quantized: queries and keys bring it back to float32."""

    def write(outputs: int, inputs: int, generator: torch.Generator) -> writers.Written:
        if outputs != 64:
            drawn = torch.randn(outputs, inputs, generator=generator) * 0.1
            return writers.Written({".weight": drawn}, drawn)
        return writers.bnb_4bit("nf4", nested=False)(outputs, inputs, generator)

    meant = write_quantized(tmp_path / "codes", BNB4, write)
    expected = logits_of(load(write_whole(tmp_path / "whole", meant)), TOKENS)
    found = logits_of(load(tmp_path / "codes"), TOKENS)
    assert float((found - expected).square().mean() / expected.square().mean()) < 0.02**2


def _parts(value: object) -> Iterator[Tensor | LinearWeight]:
    """All distinct tensors and packed weights below a struct."""
    if isinstance(value, Tensor | LinearWeight):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, msgspec.Struct):
        for part in msgspec.structs.asdict(value).values():
            yield from _parts(part)


def _nbytes(part: Tensor | LinearWeight) -> int:
    return part.nbytes
