"""What the golden tests share: loading a directory, prompts, and the comparison itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from paged_driver import PagedDriver
from transformers import PreTrainedModel

from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.interface import Model
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import OpTable

PROMPT_LENS = (1, 5, 17, 40)
NUM_NEW = 32


def load(
    path: Path,
    max_model_len: int | None = None,
    dtype: str = "auto",
    ops: OpTable | None = None,
    quantization: str | None = None,
) -> Model:
    """With the op table that an engine would use, by default."""
    table = ops or resolve_ops(torch.device("cpu"))
    options = LoadConfig(model=str(path), dtype=dtype, device="cpu", quantization=quantization)
    checkpoint, spec = Checkpoint(path, "golden"), read_spec(path)
    return load_model(checkpoint, spec, table, options, max_model_len=max_model_len)


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths
    ]


def assert_same_as_transformers(
    model: Model,
    reference: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    atol: float = 1e-4,
) -> None:
    """32 greedy tokens of each prompt, computed together in chunks, against a dense forward."""
    rows = PagedDriver(model).generate(prompts, NUM_NEW, chunk=6)
    for prompt, row in zip(prompts, rows, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([row.token_ids[:-1]])).logits[0].float()
        assert expected.std() > 0.3, "flat logits would show nothing"
        found = torch.cat(row.logits)
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)
        greedy = expected[len(prompt) - 1 :].argmax(-1).tolist()
        assert row.token_ids[len(prompt) :] == greedy
