"""Beam search against transformers' own: the same tokens and the same scores."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from quickstep import LLM, BeamSearchParams

PROMPTS = ["def add(first, second):\n    return", "import os\n", "class Stack:\n    def"]


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", dtype="float32", num_threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(llm):
    model = AutoModelForCausalLM.from_pretrained(llm.engine.model.path, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("params", "early_stopping"),
    [
        (BeamSearchParams(beam_width=4, max_tokens=12), "never"),
        (BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=2.0), "never"),
        (BeamSearchParams(beam_width=2, max_tokens=10, early_stopping=True), True),
    ],
    ids=["4-beams", "long", "early"],
)
def test_beams_are_those_of_transformers(llm, reference, prompt, params, early_stopping):
    [found] = llm.beam_search(prompt, params)
    ids = llm.engine.tokenizer.encode(prompt)
    expected = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=early_stopping,
        eos_token_id=sorted(llm.engine.tokenizer.eos_token_ids),
        pad_token_id=0,
        temperature=None,
        top_p=None,
        top_k=None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for one, tokens, score in zip(
        found.sequences, expected.sequences.tolist(), expected.sequences_scores, strict=True
    ):
        padding = [0] * (len(tokens) - len(one.tokens))
        assert [*one.tokens, *padding] == tokens
        assert one.score == pytest.approx(score.item(), abs=1e-4)
