"""Frequencies that change with length, where ours are defined by position or configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_cases import LONG, VOCAB, Case, rope
from golden_harness import assert_same_as_transformers, load, random_prompts
from paged_driver import PagedDriver
from transformers import DynamicCache

DYNAMIC = Case("dynamic", "Llama", rope("dynamic", factor=4.0) | {"max_position_embeddings": 32})
LONGROPE = Case(
    "longrope",
    "Phi3",
    rope("longrope", partial_rotary_factor=0.5, **LONG) | {"original_max_position_embeddings": 32},
)


def test_dynamic_rope_decodes_beyond_the_trained_length_as_transformers_does(
    tmp_path: Path,
) -> None:
    reference = DYNAMIC.save(tmp_path)
    prompts = random_prompts((3, 20, 31), VOCAB)
    rows = PagedDriver(load(tmp_path)).generate(prompts, 40, chunk=7)
    for prompt, row in zip(prompts, rows, strict=True):
        cache = DynamicCache()
        expected, inputs = [], [prompt, *([token] for token in row.token_ids[len(prompt) : -1])]
        with torch.no_grad():
            for ids in inputs:
                output = reference(torch.tensor([ids]), past_key_values=cache, use_cache=True)
                expected.append(output.logits[0])
        assert row.computed > 32
        torch.testing.assert_close(torch.cat(row.logits), torch.cat(expected), atol=1e-4, rtol=0)


def test_longrope_uses_long_factors_where_the_engine_allows_long_sequences(
    tmp_path: Path,
) -> None:
    reference = LONGROPE.save(tmp_path)
    prompts = random_prompts((33, 40, 60), VOCAB)
    assert_same_as_transformers(load(tmp_path, max_model_len=128), reference, prompts)


def test_longrope_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    LONGROPE.save(tmp_path)
    short, long = (load(tmp_path, max_model_len=n).fingerprint for n in (32, 64))
    assert short != long
    assert load(tmp_path, max_model_len=128).fingerprint == long


@pytest.mark.parametrize("case", [DYNAMIC, LONGROPE], ids=lambda case: case.name)
def test_logits_do_not_depend_on_neighbours_of_another_length(case: Case, tmp_path: Path) -> None:
    case.save(tmp_path)
    model = load(tmp_path)
    short, long = random_prompts((9, 70), VOCAB)
    driver = PagedDriver(model)
    alone, beside, neighbour = driver.open(short), driver.open(short), driver.open(long)
    expected = driver.step([(alone, 9)])[0]
    found = driver.step([(neighbour, 70), (beside, 9)])[1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
