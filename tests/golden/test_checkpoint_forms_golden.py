"""One model in several forms: sharded, other dtypes, old config keys, inside a multimodal one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from golden_cases import CASES, VOCAB, Case, randomise
from golden_harness import PROMPT_LENS, assert_same_as_transformers, load, random_prompts
from safetensors.torch import load_file, save_file

from quickstep.model.checkpoint.tensor_schema import num_parameters
from quickstep.model.spec import parse_spec, read_spec

LLAMA = next(case for case in CASES if case.name == "llama")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parameter_count_equals_transformers(case: Case, tmp_path: Path) -> None:
    config = case.config()
    config.architectures = [f"{case.family.removesuffix('Text')}ForCausalLM"]
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.save_pretrained(tmp_path)
    stored = ("_correction_bias", "expert_bias", "layer_scalar")
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith(stored)]
    expected = model.num_parameters() + sum(buffer.numel() for buffer in buffers)
    # an indexer is not read
    indexers = [weight for name, weight in model.named_parameters() if ".indexer." in name]
    expected -= sum(weight.numel() for weight in indexers)
    assert num_parameters(read_spec(tmp_path)) == expected


def test_sharded_checkpoint_equals_transformers(tmp_path: Path) -> None:
    reference = LLAMA.save(tmp_path / "whole")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    prompts = random_prompts(PROMPT_LENS, VOCAB)
    assert_same_as_transformers(load(tmp_path / "sharded"), reference, prompts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoint_read_as_float32_equals_transformers(
    dtype: str, tmp_path: Path
) -> None:
    model = LLAMA.save(tmp_path / "whole").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "half")
    assert load(tmp_path / "half").kv_layout.dtype is getattr(torch, dtype)
    # read again: `.to(dtype)` has rounded the rotary frequencies of the model in memory as well
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "half", dtype=torch.float32
    )
    prompts = random_prompts(PROMPT_LENS, VOCAB)
    assert_same_as_transformers(load(tmp_path / "half", dtype="float32"), reference, prompts)


def old_form(config: dict[str, object]) -> dict[str, object]:
    """`config.json` as transformers 4 wrote it."""
    parameters = dict(config.pop("rope_parameters"))  # type: ignore[call-overload]
    config["rope_theta"] = parameters.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype")
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    config["rope_scaling"] = parameters if parameters["rope_type"] != "default" else None
    return config


# of these, positions by kind of layer have no older form, or there are none
BY_KIND = ("gemma3", "gemma3n", "gemma4", "gemma4-mixture", "olmo3", "nemotron-h", "nemotron-h-moe")


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in BY_KIND], ids=lambda case: case.name
)
def test_old_config_form_reads_the_same(case: Case, tmp_path: Path) -> None:
    config = case.config()
    config.architectures = [f"{case.family.removesuffix('Text')}ForCausalLM"]
    config.dtype = torch.float32
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert parse_spec(old_form(dict(written))) == parse_spec(written)


def test_gemma3_inside_a_multimodal_checkpoint_equals_transformers(tmp_path: Path) -> None:
    text = next(case for case in CASES if case.name == "gemma3").config()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "model_type": "siglip_vision_model",
    }
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    reference = randomise(transformers.Gemma3ForConditionalGeneration(config), seed=3)
    reference.save_pretrained(tmp_path)
    prompts = random_prompts(PROMPT_LENS, VOCAB)
    assert_same_as_transformers(load(tmp_path), reference, prompts)


def test_deepseek_inside_a_kimi_checkpoint_equals_transformers(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "deepseek-v3")
    reference = case.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    moved["vision_tower.patch_embed.proj.weight"] = torch.zeros(4, 3)
    moved["mm_projector.pre_norm.weight"] = torch.zeros(4)
    save_file(moved, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text | {"model_type": "kimi_k2"},
        "vision_config": {"hidden_size": 16},
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert_same_as_transformers(load(tmp_path), reference, random_prompts(PROMPT_LENS, VOCAB))
