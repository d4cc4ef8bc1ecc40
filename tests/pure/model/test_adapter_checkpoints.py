"""PEFT checkpoints: what is read, and that everything else is refused in one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file

from adapter_files import ALL, adapter_config, adapter_tensors, write_adapter, write_files
from adapter_files import SMALL_LLAMA as SPEC
from quickstep.errors import ConfigError
from quickstep.model.adapters.checkpoint import open_adapter
from quickstep.model.adapters.int8 import as_int8
from quickstep.model.adapters.lora_modules import (
    Projection,
    embedding_number,
    lm_head_number,
    lora_modules,
    module_number,
    num_modules,
)
from quickstep.model.spec import parse_spec
from quickstep.ops.table import LoRAPart
from quickstep.ops.tensors import BFLOAT16, FLOAT16, FLOAT32, HostTensor

PHI = parse_spec(
    {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
)
MIXTRAL = parse_spec(
    {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def refusal(path: Path, max_rank: int = 64, roots: list[Path] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        open_adapter(path, SPEC, max_rank, roots).read(FLOAT32)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_fused_projections_are_parts_of_one_matrix(tmp_path: Path) -> None:
    adapter = open_adapter(write_adapter(tmp_path, SPEC), SPEC, 64).read(FLOAT32)
    assert len(adapter.modules) == num_modules(SPEC) == 3 * len(Projection) + 2
    qkv = adapter.modules[module_number(1, Projection.QKV)]
    assert [(part.first_output, part.b.shape) for part in qkv] == [
        (0, (32, 4)),
        (32, (16, 4)),
        (48, (16, 4)),
    ]
    gate_up = adapter.modules[module_number(2, Projection.GATE_UP)]
    assert [(part.first_output, part.b.shape) for part in gate_up] == [(0, (48, 4)), (48, (48, 4))]
    assert adapter.modules[module_number(2, Projection.DOWN_PROJ)][0].a.shape == (4, 48)
    planned = open_adapter(tmp_path, SPEC, 64).num_bytes(FLOAT32.itemsize)
    assert 0 <= planned - adapter.num_bytes < 64 * 2 * 3 * 7


def test_checkpoints_with_fused_names_have_one_part(tmp_path: Path) -> None:
    targets = ("qkv_proj", "gate_up_proj")
    adapter = open_adapter(write_adapter(tmp_path, PHI, targets), PHI, 64).read(FLOAT32)
    [part] = adapter.modules[module_number(0, Projection.QKV)]
    assert part.b.shape == (64, 4)


def test_ranks_and_scales_follow_their_patterns(tmp_path: Path) -> None:
    tensors = adapter_tensors(SPEC, ALL, ranks={"q_proj": 8, "down_proj": 2})
    config = adapter_config(
        target_modules=list(ALL),
        rank_pattern={"q_proj": 8, r"layers\.\d+\.mlp\.down_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
    )
    write_files(tmp_path, config, tensors)
    adapter = open_adapter(tmp_path, SPEC, 64).read(FLOAT32)
    scales = [adapter.modules[module_number(i, Projection.QKV)][0].scale for i in range(3)]
    assert scales == [1.0, 3 / 8, 1.0]
    assert adapter.modules[module_number(0, Projection.DOWN_PROJ)][0].scale == 4.0
    assert adapter.rank == 8
    write_files(tmp_path, config | {"use_rslora": True}, tensors)
    other = open_adapter(tmp_path, SPEC, 64).read(FLOAT32)
    assert other.modules[0][0].scale == 8 / math.sqrt(8)
    assert other.content_id != adapter.content_id


@pytest.mark.parametrize(
    ("targets", "config"),
    [
        (("q_proj", "v_proj"), {"target_modules": r".*\.self_attn\.(q|v)_proj"}),
        (ALL, {"target_modules": "all-linear"}),
        (("q_proj",), {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}),
    ],
)
def test_targets_by_expression(
    tmp_path: Path, targets: tuple[str, ...], config: dict[str, object]
) -> None:
    write_adapter(tmp_path, SPEC, targets, **config)
    assert open_adapter(tmp_path, SPEC, 64).read(FLOAT32).num_bytes > 0


@pytest.mark.parametrize("pattern", [None, "layers", ["h", "layers"]])
def test_some_layers_only(tmp_path: Path, pattern: object) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj",))
    tensors = {name: value for name, value in tensors.items() if ".layers.1." in name}
    config = adapter_config(
        target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=pattern
    )
    write_files(tmp_path, config, tensors)
    adapter = open_adapter(tmp_path, SPEC, 64).read(FLOAT32)
    changed = [number for number, parts in enumerate(adapter.modules) if parts]
    assert changed == [module_number(1, Projection.QKV)]


def test_tensors_are_rounded_to_the_models_dtype(tmp_path: Path) -> None:
    checkpoint = open_adapter(write_adapter(tmp_path, SPEC), SPEC, 64)
    wide, narrow = checkpoint.read(FLOAT32), checkpoint.read(BFLOAT16)
    first, second = wide.modules[0][0].a, narrow.modules[0][0].a
    assert np.array_equal(first.to(BFLOAT16).numpy(), second.numpy())
    assert wide.content_id == narrow.content_id


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"lora_bias": True}, "without lora_B.bias"),
        ({"bias": "some"}, "'bias'"),
        ({"modules_to_save": ["lm_head"]}, "0 of 1 tensors for 'lm_head'"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"modules_to_save": ["q_proj"]}, "no target"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"something_new": 3}, "something_new"),
        ({"target_modules": "(.*)*x"}, "too complex"),
        ({"target_modules": "(q_proj"}, "no regular expression"),
        ({"rank_pattern": {"(a+)+$": 4}}, "too complex"),
        ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": "big"}}, "alpha_pattern"),
        ({"lora_alpha": math.inf}, "lora_alpha"),
        ({"r": 0}, "'r'"),
        ({"r": 8}, "shape"),
        ({"target_modules": ["q_proj"]}, "no target"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "0 of 2 tensors"),
    ],
)
def test_a_config_that_is_not_applied_exactly_is_refused(
    tmp_path: Path, values: dict[str, object], named: str
) -> None:
    write_adapter(tmp_path, SPEC, ("q_proj", "v_proj"), **values)
    assert named in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
        "base_model.model.model.layers.0.self_attn.k_proj.weight",
        "base_model.model.model.layers.0.input_layernorm.weight",
        "base_model.model.model.norm.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_a_tensor_without_its_place_is_refused_by_name(tmp_path: Path, name: str) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj", "v_proj"))
    write_files(tmp_path, adapter_config(), tensors | {name: np.zeros((4, 32), np.float32)})
    assert name in refusal(tmp_path)


START = "base_model.model.model.layers.0.self_attn."
QWEN = replace(SPEC, qkv_bias=True)


def test_a_complete_module_is_a_part_without_b(tmp_path: Path) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj", "v_proj"))
    matrices = {
        "base_model.model.lm_head.weight": (64, 32),
        "base_model.model.model.embed_tokens.weight": (64, 32),
        f"{START}o_proj.weight": (32, 32),
    }
    complete = {name: np.full(shape, 0.5, np.float32) for name, shape in matrices.items()}
    config = adapter_config(modules_to_save=["lm_head", "embed_tokens", "0.self_attn.o_proj"])
    checkpoint = open_adapter(write_files(tmp_path, config, tensors | complete), SPEC, 64)
    adapter = checkpoint.read(FLOAT32)
    assert adapter.rank == 4 and adapter.has_complete_matrices
    [head] = adapter.modules[lm_head_number(SPEC)]
    assert head.b is None and head.a.shape == (64, 32) and head.scale == 1.0
    [embedding] = adapter.modules[embedding_number(SPEC)]
    assert embedding.is_embedding and (embedding.num_inputs, embedding.num_outputs) == (64, 32)
    [o_proj] = adapter.modules[module_number(0, Projection.O_PROJ)]
    assert o_proj.num_outputs == 32
    plain = open_adapter(write_adapter(tmp_path / "b", SPEC, ("q_proj", "v_proj")), SPEC, 64)
    more = checkpoint.num_bytes(2) - plain.num_bytes(2)
    assert more == 2 * sum(math.prod(shape) for shape in matrices.values())
    config = adapter_config(modules_to_save=["lm_head"], target_modules=["q_proj"])
    tensors = adapter_tensors(SPEC, ("q_proj",))
    tensors["base_model.model.lm_head.weight"] = np.zeros((70, 32), np.float32)
    write_files(tmp_path, config, tensors)
    assert "[70, 32]" in refusal(tmp_path)


def test_a_trained_bias_adds_its_difference_from_the_base_models(tmp_path: Path) -> None:
    """Of a target (`base_layer`), and of another layer."""
    tensors = adapter_tensors(QWEN, ("q_proj",))
    config = adapter_config(target_modules=["q_proj"], bias="all")
    for layer in range(3):
        for name, size in (("q_proj.base_layer", 32), ("k_proj", 16), ("v_proj", 16)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}.bias"
            tensors[key] = np.full(size, 2.0, np.float32)
    checkpoint = open_adapter(write_files(tmp_path, config, tensors), QWEN, 64)
    base = {
        module_number(layer, Projection.QKV): np.arange(64, dtype=np.float32) for layer in range(3)
    }
    q, k, v = checkpoint.read(FLOAT32, base).modules[0]
    assert (q.rank, k.rank, v.rank) == (4, 0, 0)
    for part, first in ((q, 0), (k, 32), (v, 48)):
        assert part.first_output == first and part.bias is not None
        assert np.array_equal(part.bias.numpy(), 2.0 - np.arange(first, first + part.num_outputs))
    assert checkpoint.num_bytes(1) == 3 * (2 * 4 * 32 + 64 + 4 * 64)
    del tensors[f"{START}v_proj.bias"]
    write_files(tmp_path, config, tensors)
    with pytest.raises(ConfigError, match=r"0 of 1 tensors for '.*v_proj'; without bias"):
        open_adapter(tmp_path, QWEN, 64)
    write_files(tmp_path, config | {"bias": "lora_only"}, tensors)
    with pytest.raises(ConfigError, match=r"k_proj.bias"):
        open_adapter(tmp_path, QWEN, 64)


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj", "v_proj"))
    write_files(
        tmp_path, adapter_config(), tensors | {FIRST[len("base_model.model.") :]: tensors[FIRST]}
    )
    assert "has both" in refusal(tmp_path)


def test_a_bias_of_b_is_scaled_as_b(tmp_path: Path) -> None:
    tensors = adapter_tensors(SPEC, ("o_proj",))
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_B.bias"
        tensors[name] = np.arange(32, dtype=np.float32)
    config = adapter_config(target_modules=["o_proj"], lora_bias=True)
    adapter = open_adapter(write_files(tmp_path, config, tensors), SPEC, 64).read(BFLOAT16)
    [part] = adapter.modules[module_number(1, Projection.O_PROJ)]
    assert part.bias is not None and part.scale == 2.0
    assert np.array_equal(part.bias.numpy(), 2.0 * np.arange(32))


@pytest.mark.parametrize("is_embedding", [False, True])
def test_int8_values_are_off_by_half_a_step(is_embedding: bool) -> None:
    rng = np.random.default_rng(0)
    shape = (40, 5) if is_embedding else (5, 40)
    a, b = (HostTensor(rng.normal(size=one).astype(np.float32), FLOAT32) for one in (shape, (7, 5)))
    zero = HostTensor(np.zeros((7, 5), np.float32), FLOAT32)
    parts = [LoRAPart(a, one, 3, 0.5, is_embedding) for one in (b, zero)]
    [[part, of_zero]] = as_int8([parts])
    assert part.first_output == 3 and part.scale == 0.5 and part.rank_scales is not None
    change = a.numpy() if is_embedding else a.numpy().T
    exact = change @ b.numpy().T
    low = part.a.numpy() if is_embedding else part.a.numpy().T
    found = low * part.rank_scales.numpy() @ part.b.numpy().T.astype(np.float32)
    steps = [np.abs(one).max() / 254 * 5 for one in (change, b.numpy())]
    bound = steps[0] * np.abs(b.numpy()).max() + steps[1] * np.abs(change).max()
    assert 0 < np.abs(found - exact).max() < bound
    assert of_zero.b is not None and not of_zero.b.numpy().any()


def test_half_an_update_is_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj", "v_proj"))
    del tensors[FIRST]
    write_files(tmp_path, adapter_config(), tensors)
    assert "1 of 2 tensors" in refusal(tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj", "v_proj"))
    tensors[FIRST][1, 2] = value
    write_files(tmp_path, adapter_config(), tensors)
    assert FIRST in refusal(tmp_path)


def test_values_beyond_the_models_dtype_are_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj", "v_proj"))
    tensors[FIRST][1, 2] = 1e6
    checkpoint = open_adapter(write_files(tmp_path, adapter_config(), tensors), SPEC, 64)
    with pytest.raises(ConfigError, match="float16"):
        checkpoint.read(FLOAT16)


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    assert "--max-lora-rank" in refusal(write_adapter(tmp_path, SPEC, rank=16), max_rank=8)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    write_adapter(tmp_path, SPEC)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    assert "pickle" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    file = write_adapter(tmp_path, SPEC) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "truncated" in refusal(tmp_path)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    assert "no directory" in refusal(tmp_path / "absent")
    assert "adapter_config.json" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    assert "JSON object" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config()))
    assert "adapter_model.safetensors" in refusal(tmp_path)


def test_paths_and_links_out_of_the_roots_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write_adapter(tmp_path / "outside", SPEC)
    inside = write_adapter(root / "inside", SPEC)
    assert open_adapter(inside, SPEC, 64, [root]).rank == 4
    assert "outside" in refusal(root / ".." / "outside", roots=[root])
    (root / "linked").symlink_to(outside)
    assert "outside" in refusal(root / "linked", roots=[root])
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert "outside" in refusal(inside, roots=[root])


def test_every_matrix_can_be_changed() -> None:
    modules = lora_modules(SPEC)
    assert len(modules) == 3 * 7 + 2
    outputs = [module.num_outputs for module in modules.values() if module.number == 0]
    assert outputs == [32, 16, 16]
    assert {one.number for one in modules.values()} <= set(range(num_modules(SPEC)))
    of_experts = lora_modules(MIXTRAL)
    assert len(of_experts) == 2 * (4 + 1 + 3 * 4) + 2
    assert {slot.number for slot in of_experts.values()} <= set(range(num_modules(MIXTRAL)))
    places = [(slot.number, slot.first_output) for slot in of_experts.values()]
    assert len(set(places)) == len(places)
    assert of_experts["layers.1.block_sparse_moe.experts.3.w3"].first_output == 48


ENDS = ("embed_tokens", "lm_head")


def test_an_embedding_is_held_by_token(tmp_path: Path) -> None:
    write_adapter(tmp_path, SPEC, ENDS)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    adapter = open_adapter(tmp_path, SPEC, 64).read(FLOAT32)
    [part] = adapter.modules[embedding_number(SPEC)]
    stored = tensors["base_model.model.model.embed_tokens.lora_embedding_A"]
    assert part.is_embedding and part.rank == 4
    assert np.array_equal(part.a.numpy(), stored.T)
    [head] = adapter.modules[lm_head_number(SPEC)]
    assert head.a.shape == (4, 32) and head.b.shape == (64, 4)


def test_copies_of_the_base_models_embedding_are_left_out(tmp_path: Path) -> None:
    """As peft writes them next to an adapter of the embedding."""
    tensors = adapter_tensors(SPEC, ENDS)
    expected = open_adapter(write_adapter(tmp_path / "a", SPEC, ENDS), SPEC, 64).read(FLOAT32)
    copy = np.zeros((64, 32), np.float32)
    names = ("model.embed_tokens", "lm_head")
    copies = {f"base_model.model.{name}.base_layer.weight": copy for name in names}
    write_files(tmp_path / "b", adapter_config(target_modules=list(ENDS)), tensors | copies)
    found = open_adapter(tmp_path / "b", SPEC, 64).read(FLOAT32)
    assert found.content_id == expected.content_id


@pytest.mark.parametrize("size", [60, 70])
@pytest.mark.parametrize(
    ("name", "is_saved"),
    [
        ("model.embed_tokens.base_layer.weight", False),
        ("model.embed_tokens.lora_embedding_A", False),
        ("lm_head.base_layer.weight", False),
        ("lm_head.lora_B.weight", False),
        ("model.embed_tokens.weight", True),
        ("lm_head.weight", True),
        ("model.embed_tokens.weight", False),  # as peft adds it after a resize
    ],
)
def test_another_vocabulary_than_the_base_models_is_refused(
    name: str, is_saved: bool, size: int, tmp_path: Path
) -> None:
    full_name, ends = f"base_model.model.{name}", () if name.endswith("s.weight") else ENDS
    tensors = adapter_tensors(SPEC, ends or ("q_proj",))
    shape = {"lora_embedding_A": (4, size), "lora_B.weight": (size, 4)}
    tensors[full_name] = np.zeros(
        next((s for end, s in shape.items() if name.endswith(end)), (size, 32)), np.float32
    )
    saved = [name.split(".")[-2]] if is_saved else None
    config = adapter_config(target_modules=list(ends or ("q_proj",)), modules_to_save=saved)
    write_files(tmp_path, config, tensors)
    message = refusal(tmp_path)
    assert full_name in message
    assert f"a vocabulary of {size} tokens" in message and "base model has 64" in message


def test_a_change_of_tied_matrices_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SPEC, ("embed_tokens",), ensure_weight_tying=True)
    open_adapter(tmp_path, SPEC, 64)
    with pytest.raises(ConfigError, match="ensure_weight_tying"):
        open_adapter(tmp_path, replace(SPEC, tied=True), 64)


def test_halves_of_another_kind_of_layer_are_refused(tmp_path: Path) -> None:
    tensors = adapter_tensors(SPEC, ("q_proj",))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_embedding_A"
    write_files(tmp_path, adapter_config(), tensors | {name: np.zeros((4, 32), np.float32)})
    assert name in refusal(tmp_path)


def test_a_name_of_experts_may_have_no_tensors(tmp_path: Path) -> None:
    """`target_modules` of a training whose framework held experts in another form."""
    values = {"target_modules": ["q_proj", "w1"]}
    write_adapter(tmp_path, MIXTRAL, ("q_proj",), **values)
    assert len(open_adapter(tmp_path, MIXTRAL, 64).targets) == 2
    tensors = adapter_tensors(MIXTRAL, ("q_proj", "w1"))
    tensors.pop("base_model.model.model.layers.0.block_sparse_moe.experts.2.w1.lora_A.weight")
    tensors.pop("base_model.model.model.layers.0.block_sparse_moe.experts.2.w1.lora_B.weight")
    write_files(tmp_path, adapter_config(**values), tensors)
    with pytest.raises(ConfigError, match=r"experts\.2\.w1"):
        open_adapter(tmp_path, MIXTRAL, 64)
