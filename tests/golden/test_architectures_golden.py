"""Every native architecture against transformers: logits, greedy tokens, ragged batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import CASES, VOCAB, Case
from golden_harness import PROMPT_LENS, assert_same_as_transformers, load, random_prompts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ragged_chunked_batch_equals_transformers(case: Case, tmp_path: Path) -> None:
    reference = case.save(tmp_path)
    model = load(tmp_path, max_model_len=case.max_model_len)
    longest = case.max_model_len or 96
    lengths = [min(length, longest - 32) for length in PROMPT_LENS]
    prompts = random_prompts(lengths, VOCAB)
    assert_same_as_transformers(model, reference, prompts, case.atol)
