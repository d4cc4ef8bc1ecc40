"""Architectures outside of the native table, through transformers with our paged attention."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from golden_cases import CASES, VOCAB, Case, rope
from golden_harness import PROMPT_LENS, assert_same_as_transformers, load, random_prompts
from naive_ops import NAIVE_OPS
from paged_driver import PagedDriver
from safetensors.torch import load_file, save_file

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model import spec as spec_module
from quickstep.model.architectures import ARCHITECTURES
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.interface import Model
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops

FALLBACK_CASES = (
    Case("gpt-neox", "GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": None}),
    Case("gpt2", "GPT2", {"num_key_value_heads": None}),
    Case("hunyuan", "HunYuanDenseV1", {"head_dim": 16}),
    Case("phimoe", "Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
)


@pytest.mark.parametrize("case", FALLBACK_CASES, ids=lambda case: case.name)
def test_fallback_equals_transformers(case: Case, tmp_path: Path) -> None:
    reference = case.save(tmp_path)
    model = load(tmp_path)
    assert model.exact is (case.name != "phimoe")
    assert_same_as_transformers(model, reference, random_prompts(PROMPT_LENS, VOCAB))


UNPAGED = (
    Case("opt", "OPT", {"word_embed_proj_dim": 64, "ffn_dim": 96, "num_key_value_heads": None}),
    Case("bloom", "Bloom", {"n_layer": 2, "n_head": 4}),
    Case("falcon", "Falcon"),
    Case("mpt", "Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
)


@pytest.mark.parametrize("case", UNPAGED, ids=lambda case: case.name)
def test_an_architecture_is_served_as_transformers_does_or_refused_in_a_sentence(
    case: Case, tmp_path: Path
) -> None:
    reference = case.save(tmp_path)
    try:
        model = load(tmp_path)
    except ConfigError as error:
        assert "\n" not in str(error) and "cannot be loaded" not in str(error)
    else:
        assert_same_as_transformers(model, reference, random_prompts((5, 17), VOCAB))


def test_tensors_that_transformers_leaves_out_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FALLBACK_CASES[0].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["gpt_neox.layers.0.attention.q_norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path)
    assert "'gpt_neox.layers.0.attention.q_norm.weight' is not used" in caplog.text


def test_a_part_that_raises_anything_is_refused_with_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FALLBACK_CASES[0].save(tmp_path)

    def forward(*_: object, **__: object) -> None:
        raise IndexError("no such layer\nsecond line")

    monkeypatch.setattr("quickstep.model.fallback.model.HiddenStates.forward", forward)
    with pytest.raises(ConfigError, match=r"'GPTNeoXForCausalLM' .* IndexError: no such layer$"):
        load(tmp_path)


def test_a_batch_that_changes_bits_is_not_called_exact(tmp_path: Path) -> None:
    FALLBACK_CASES[0].save(tmp_path)
    assert not load(tmp_path, ops=NAIVE_OPS).exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", FALLBACK_CASES[:3], ids=lambda case: case.name)
def test_exact_fallbacks_give_a_row_the_same_bits_in_a_crowd(
    case: Case, dtype: str, tmp_path: Path
) -> None:
    case.save(tmp_path)
    model = load(tmp_path, dtype=dtype)
    prompt, other = random_prompts((21, 30), VOCAB)
    driver = PagedDriver(model)
    alone, beside, crowd = driver.open(prompt), driver.open(prompt), driver.open(other)
    expected = driver.step([(alone, 21)])[0]
    driver.step([(crowd, 11), (beside, 5)])
    driver.step([(beside, 16), (crowd, 19)])
    assert torch.equal(torch.cat(beside.logits), expected)


@pytest.mark.parametrize("case", FALLBACK_CASES[:3], ids=lambda case: case.name)
def test_fallbacks_honour_an_int8_kv_cache(case: Case, tmp_path: Path) -> None:
    reference = case.save(tmp_path)
    model = load(tmp_path)
    prompt = random_prompts((30,), VOCAB)[0]
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    whole = whole_prompt(model, prompt, "int8")
    assert not torch.equal(whole, whole_prompt(model, prompt, "auto"))
    # codes of a random model's keys: well under the spread of its logits
    assert float((whole - expected).abs().max()) < 0.1 * float(expected.std())
    driver = PagedDriver(model, kv_dtype="int8")
    row, beside = driver.open(prompt), driver.open(prompt[:9])
    driver.step([(row, 11), (beside, 9)])
    driver.step([(row, 19)])
    assert torch.equal(torch.cat(row.logits), whole)


def whole_prompt(model: Model, prompt: list[int], kv_dtype: str) -> torch.Tensor:
    driver = PagedDriver(model, kv_dtype=kv_dtype)
    return driver.step([(driver.open(prompt), len(prompt))])[0]


def test_frequencies_that_depend_on_the_batch_are_refused(tmp_path: Path) -> None:
    positions = rope("dynamic", factor=2.0, partial_rotary_factor=0.5)
    case = Case("stretched", "GPTNeoX", {"num_key_value_heads": None} | positions)
    case.save(tmp_path)
    with pytest.raises(ConfigError, match="'dynamic'"):
        load(tmp_path)


def test_an_architecture_without_replaceable_attention_is_refused(tmp_path: Path) -> None:
    Case("falcon", "Falcon").save(tmp_path)
    with pytest.raises(ConfigError, match="does not let its attention be replaced"):
        load(tmp_path)


def test_quantization_of_a_fallback_is_refused(tmp_path: Path) -> None:
    Case("gpt2", "GPT2", {"num_key_value_heads": None}).save(tmp_path)
    options = LoadConfig(model=str(tmp_path), device="cpu", quantization="int8")
    checkpoint, spec = Checkpoint(tmp_path, "golden"), read_spec(tmp_path)
    with pytest.raises(ConfigError, match="--quantization is int8, but GPT2LMHeadModel runs"):
        load_model(checkpoint, spec, resolve_ops(torch.device("cpu")), options)


def test_an_architecture_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["XyzForCausalLM"], "model_type": "xyz"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'XyzForCausalLM'.*LlamaForCausalLM"):
        load(tmp_path)


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"GPTNeoXForCausalLM.*'\.\[transformers\]'"):
        read_spec(tmp_path)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*paged attention"):
        load(tmp_path)


def test_a_fallback_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    FALLBACK_CASES[0].save(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["gpt_neox.layers.1.attention.dense.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.attention\.dense\.weight' is missing"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["granite-swa", "gpt-oss"])
def test_fallbacks_honour_sinks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.name == name)
    reference = case.save(tmp_path)
    others = dict(ARCHITECTURES)
    del others[f"{case.family}ForCausalLM"]
    monkeypatch.setattr(spec_module, "ARCHITECTURES", others)
    model = load(tmp_path)
    assert not model.spec.native
    assert_same_as_transformers(model, reference, random_prompts(PROMPT_LENS, VOCAB))


def test_an_option_of_attention_that_nobody_honours_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FALLBACK_CASES[0].save(tmp_path)
    layer = transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention
    forward = layer.forward
    monkeypatch.setattr(
        layer, "forward", lambda *args, **options: forward(*args, **options, score_bonus=1.0)
    )
    with pytest.raises(ConfigError, match="needs score_bonus, which cannot be paged"):
        load(tmp_path)
