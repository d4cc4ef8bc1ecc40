"""Same request, same bits: alone, in a crowd, whole, in chunks, with one thread or two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_cases import CASES, VOCAB, Case
from golden_harness import load, random_prompts
from paged_driver import PagedDriver
from torch import Tensor

from quickstep.model.interface import Model

LENGTH = 21


def bits(logits: Tensor) -> Tensor:
    return logits.contiguous().view(torch.int32)


def in_arrangement(model: Model, prompt: list[int], chunks: tuple[int, ...]) -> Tensor:
    """The prompt's logits, its chunks run beside a growing crowd of other sequences."""
    driver = PagedDriver(model)
    row = driver.open(prompt)
    crowd = [driver.open(other) for other in random_prompts((30, 9, 14), VOCAB)]
    for step, chunk in enumerate(chunks):
        before = [(other, 1 + (step + i) % 3) for i, other in enumerate(crowd[:step])]
        after = [(other, 1) for other in crowd[step:]]
        driver.step([*before, (row, chunk), *after])
    return torch.cat(row.logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bits_do_not_depend_on_the_batch(case: Case, dtype: str, tmp_path: Path) -> None:
    case.save(tmp_path)
    model = load(tmp_path, dtype=dtype)
    prompt = random_prompts((LENGTH,), VOCAB)[0]
    driver = PagedDriver(model)
    alone = driver.open(prompt)
    expected = bits(driver.step([(alone, LENGTH)])[0])
    for chunks in ((LENGTH,), (16, 5), (1, 13, 7)):
        assert torch.equal(bits(in_arrangement(model, prompt, chunks)), expected)


def test_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen3-moe")
    case.save(tmp_path)
    model = load(tmp_path)
    prompt = random_prompts((LENGTH,), VOCAB)[0]
    one = bits(in_arrangement(model, prompt, (LENGTH,)))
    torch.set_num_threads(2)
    try:
        two = bits(in_arrangement(model, prompt, (LENGTH,)))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, two)
