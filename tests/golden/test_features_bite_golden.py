"""Each feature of a golden case changes its logits: leaving one out cannot go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from golden_cases import CASES, VOCAB
from golden_harness import load, random_prompts
from msgspec.structs import replace
from naive_ops import NAIVE_OPS
from paged_driver import PagedDriver
from torch import Tensor

from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.decoder_spec import ModelSpec, MoESpec, Multipliers
from quickstep.model.interface import Model
from quickstep.model.loader import load_model
from quickstep.model.rope_spec import RopeKind
from quickstep.model.spec import read_spec


def without_windows(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, window=None) for layer in spec.layers))


def one_rope(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, rope=0) for layer in spec.layers))


def plain_rope(spec: ModelSpec) -> ModelSpec:
    ropes = tuple(replace(rope, kind=RopeKind.DEFAULT) for rope in spec.ropes)
    return replace(spec, ropes=ropes)


def other_normalisation(spec: ModelSpec) -> ModelSpec:
    assert isinstance(spec.moe, MoESpec)
    return replace(spec, moe=replace(spec.moe, normalise=not spec.moe.normalise))


def truncated_rope(spec: ModelSpec) -> ModelSpec:
    ropes = tuple(replace(rope, truncate=not rope.truncate) for rope in spec.ropes)
    return replace(spec, ropes=ropes)


def without_cutoffs(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, gate_cutoff=None) for layer in spec.layers))


def other_active_stream(spec: ModelSpec) -> ModelSpec:
    assert spec.altup is not None
    return replace(spec, altup=replace(spec.altup, active=0))


def changed(**values: object) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **values)  # type: ignore[arg-type]


CHANGES = [
    ("mistral", without_windows),
    ("qwen2-windows", without_windows),
    ("gemma2", without_windows),
    ("gemma3", without_windows),
    ("phi3", without_windows),
    ("smollm3-windows", without_windows),
    ("mixtral", without_windows),
    ("gemma3", one_rope),
    ("smollm3", one_rope),
    ("gemma3", plain_rope),
    ("llama-linear", plain_rope),
    ("llama-llama3", plain_rope),
    ("llama-yarn", plain_rope),
    ("phi3-longrope-short", plain_rope),
    ("gemma3n", without_windows),
    ("gemma3n", without_cutoffs),
    ("gemma3n", other_active_stream),
    ("gemma3n", changed(value_norm=False)),
    ("gemma2", changed(attention_softcap=None)),
    ("gemma2", changed(logit_softcap=None)),
    ("gemma2", changed(norm_offset=0.0)),
    ("gemma2", changed(embedding_multiplier=1.0)),
    ("gemma2", changed(activation="gelu")),
    ("granite", changed(attention_scale=0.25)),
    ("granite", changed(embedding_multiplier=1.0)),
    ("granite", changed(residual_multiplier=1.0)),
    ("granite", changed(logit_divisor=1.0)),
    ("qwen3-moe", other_normalisation),
    ("mixtral", other_normalisation),
    ("granite-swa", without_windows),
    ("granite-swa", one_rope),
    ("gpt-oss", without_windows),
    ("gpt-oss", plain_rope),
    ("gpt-oss", truncated_rope),
    ("gpt-oss", changed(activation="silu")),
    ("gpt-oss", other_normalisation),
    ("falcon-h1", changed(multipliers=Multipliers())),
]


def logits(model: Model) -> Tensor:
    driver = PagedDriver(model)
    return driver.step([(driver.open(random_prompts((40,), VOCAB)[0]), 40)])[0]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_leaving_a_feature_out_shows(
    name: str, change: Callable[[ModelSpec], ModelSpec], tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    case.save(tmp_path)
    spec = read_spec(tmp_path)
    options = LoadConfig(model=str(tmp_path), device="cpu")
    checkpoint = Checkpoint(tmp_path, "golden")
    limit = case.max_model_len
    broken = load_model(checkpoint, change(spec), NAIVE_OPS, options, max_model_len=limit)
    whole = load(tmp_path, limit, ops=NAIVE_OPS)
    difference = (logits(broken) - logits(whole)).abs().max()
    assert difference > 5e-4, "five times what the goldens allow"
    assert torch.isfinite(difference)
