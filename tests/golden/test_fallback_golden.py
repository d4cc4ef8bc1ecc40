"""Architectures outside of the native table, through transformers with our paged attention."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import VOCAB, Case
from golden_harness import PROMPT_LENS, assert_same_as_transformers, load, random_prompts

FALLBACK_CASES = (
    Case("gpt-neox", "GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": None}),
    Case("starcoder2", "Starcoder2", {"sliding_window": 9}),
    Case("cohere", "Cohere", {"logit_scale": 0.5}),
    Case("glm", "Glm", {"head_dim": 16}),
    Case("gpt2", "GPT2", {"num_key_value_heads": None}),
    Case("olmoe", "Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
)


@pytest.mark.parametrize("case", FALLBACK_CASES, ids=lambda case: case.name)
def test_fallback_equals_transformers(case: Case, tmp_path: Path) -> None:
    reference = case.save(tmp_path)
    model = load(tmp_path)
    print(case.name, model.exact)
    assert_same_as_transformers(model, reference, random_prompts(PROMPT_LENS, VOCAB))
