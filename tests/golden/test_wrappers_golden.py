"""Models of text and images are read as text: the same logits as transformers without images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from golden_cases import SIZES, VOCAB, randomise
from golden_harness import assert_same_as_transformers, load, random_prompts
from safetensors.torch import load_file, save_file

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.weights import open_weights
from quickstep.model.spec import read_spec

TEXT = SIZES | {"num_hidden_layers": 2, "head_dim": 16}
# on text, the three positions of a token are one
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "head_dim": 16,
}
CLIP = PIXTRAL | {"model_type": "clip_vision_model", "projection_dim": 32}
QWEN3_TOWER = TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
DELTA = {
    "num_hidden_layers": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
WRAPPED = {
    "Qwen2_5_VL": (TEXT | MROPE, TOWER | {"fullatt_block_indexes": [0]}, "visual"),
    "Qwen3VL": (TEXT | MROPE, QWEN3_TOWER, "visual"),
    "Qwen3VLMoe": (TEXT | MROPE | EXPERTS, QWEN3_TOWER, "visual"),
    "Mistral3": (TEXT | {"model_type": "mistral"}, PIXTRAL, "vision_tower"),
    "Llava": (TEXT | {"model_type": "qwen2"}, CLIP, "multi_modal_projector"),
    "LlavaOnevision": (
        TEXT | {"model_type": "qwen2", "tie_word_embeddings": True},
        SIGLIP,
        "multi_modal_projector",
    ),
    "Gemma3": (TEXT | {"sliding_window": 6}, SIGLIP, "vision_tower"),
    "Qwen3_5": (TEXT | DELTA, QWEN3_TOWER, "visual"),
}


def save(family: str, path: Path) -> transformers.PreTrainedModel:
    text, vision, _ = WRAPPED[family]
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
    model_class = getattr(transformers, f"{family}ForConditionalGeneration")
    torch.manual_seed(0)
    model = randomise(model_class(config), 0)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("family", WRAPPED)
def test_the_text_part_of_a_wrapper_equals_transformers(family: str, tmp_path: Path) -> None:
    reference = save(family, tmp_path)
    model = load(tmp_path)
    assert_same_as_transformers(model, reference, random_prompts((5, 17), VOCAB))
    spec = read_spec(tmp_path)
    assert any("only text is served" in note for note in spec.notes)
    assert WRAPPED[family][2] in open_weights(tmp_path, spec).other_parts()


def test_experts_with_inputs_first_are_read_as_well(tmp_path: Path) -> None:
    reference = save("Qwen3VLMoe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file)
    assert_same_as_transformers(load(tmp_path), reference, random_prompts((5, 17), VOCAB))


def test_a_wrapper_around_an_unknown_text_part_is_refused_in_a_sentence(tmp_path: Path) -> None:
    save("Mistral3", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "mistral"', '"model_type": "bert"'))
    with pytest.raises(ConfigError, match=r"the text part of Mistral3.* is 'bert'"):
        read_spec(tmp_path)


def test_a_tensor_of_the_text_part_too_many_is_still_an_error(tmp_path: Path) -> None:
    save("Qwen3VL", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.language_model.layers.0.self_attn.extra"] = torch.zeros(1)
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="not part of the architecture"):
        load(tmp_path)
