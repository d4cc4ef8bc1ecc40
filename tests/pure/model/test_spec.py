"""Reading `config.json`: both forms, defaults, and refusals that name what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.decoder_spec import AltUp, LayerInputs, ModelSpec
from quickstep.model.rope_spec import RopeKind
from quickstep.model.spec import parse_spec, read_spec, with_context

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def parse(**changes: object) -> ModelSpec:
    return parse_spec(LLAMA | changes)


def parse_as(name: str, **changes: object) -> ModelSpec:
    return parse(architectures=[f"{name}ForCausalLM"], **changes)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


def test_a_minimal_config_takes_the_defaults_of_its_family() -> None:
    spec = parse(num_key_value_heads=None)
    assert (spec.num_kv_heads, spec.head_size, spec.max_model_len) == (2, 8, 2048)
    assert spec.ropes[0].theta == 10_000.0
    assert not spec.tied and not spec.qkv_bias


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        ),
        (
            {"partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
    ],
)
def test_old_and_new_forms_of_rope_read_the_same(
    older: dict[str, object], newer: dict[str, object]
) -> None:
    assert parse(**older) == parse(**newer)


def test_an_explicit_null_switches_off_what_the_family_has_by_default() -> None:
    sizes = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
    capped = parse_as("Gemma2", **sizes)
    assert (capped.attention_softcap, capped.logit_softcap) == (50.0, 30.0)
    null = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    uncapped = parse_as("Gemma2", **sizes, **null)
    assert (uncapped.attention_softcap, uncapped.logit_softcap) == (None, None)
    assert windows(parse_as("Mistral")) == [4096] * 4


def test_null_heads_and_head_sizes_follow_from_the_other_sizes() -> None:
    for name in ("Llama", "Mistral", "SmolLM3"):
        spec = parse_as(name, num_key_value_heads=None, head_dim=None)
        assert (spec.num_kv_heads, spec.head_size) == (2, 8)


def test_a_null_where_a_number_is_needed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sets 'rms_norm_eps' to null"):
        parse(rms_norm_eps=None)


def test_rope_scaling_extends_the_context_where_the_config_states_the_trained_length() -> None:
    scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert parse(max_position_embeddings=128, **scaled).max_model_len == 512
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    spec = parse(max_position_embeddings=128, rope_scaling=yarn)
    assert spec.max_model_len == 512
    assert spec.ropes[0].kind is RopeKind.YARN


def test_phi3_reads_su_and_yarn_as_longrope() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for name in ("su", "yarn", "longrope"):
        spec = parse_as("Phi3", rope_scaling={"type": name} | factors)
        assert spec.ropes[0].kind is RopeKind.LONGROPE
        assert spec.ropes[0].trained_len == 4096


def test_windows_follow_each_familys_rule() -> None:
    assert windows(parse_as("Mistral", sliding_window=8)) == [8] * 4
    assert windows(parse_as("Mistral", sliding_window=None)) == [None] * 4
    assert windows(parse_as("Qwen2", sliding_window=8, max_window_layers=1)) == [None] * 4
    sliding = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert windows(parse_as("Qwen2", **sliding)) == [None, None, None, 8]
    assert windows(parse_as("Gemma2", sliding_window=8)) == [8, None, 8, None]
    gemma3 = parse_as("Gemma3", sliding_window=8, sliding_window_pattern=3)
    assert windows(gemma3) == [8, 8, None, 8]
    assert [layer.rope for layer in gemma3.layers] == [1, 1, 0, 1]
    assert [rope.theta for rope in gemma3.ropes] == [1e6, 1e4]
    listed = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert windows(parse_as("Gemma2", sliding_window=8, layer_types=listed))[1] == 8


def test_smollm3_leaves_positions_out_of_every_fourth_layer() -> None:
    spec = parse_as("SmolLM3")
    assert [layer.rope for layer in spec.layers] == [0, 0, 0, None]


def test_qwen3_moe_mixes_dense_and_sparse_layers() -> None:
    spec = parse_as("Qwen3Moe", decoder_sparse_step=2, mlp_only_layers=[3], num_experts=4)
    assert [layer.sparse for layer in spec.layers] == [False, True, False, False]
    assert spec.moe is not None and spec.moe.num_experts == 4 and not spec.moe.normalise


def test_gpt_oss_alternates_windows_and_defaults_to_its_rope() -> None:
    spec = parse_as("GptOss", num_key_value_heads=2)
    assert windows(spec) == [128, None, 128, None]
    assert spec.sinks and spec.activation == "clamped_swiglu"
    assert spec.qkv_bias and spec.output_bias
    assert spec.moe is not None and spec.moe.biases and spec.moe.normalise
    rope = spec.ropes[0]
    assert (rope.kind, rope.factor, rope.trained_len) == (RopeKind.YARN, 32.0, 4096)
    assert not rope.truncate and rope.theta == 150_000.0


GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 0,
}


def test_gemma4_lists_the_sizes_of_full_layers_by_numbers_with_zeros_in_front() -> None:
    own = {"head_dim": 24, "num_key_value_heads": 1}
    spec = parse(**GEMMA4, head_dim=8, per_layer_config={"05": own, "11": own})
    full = [i for i, layer in enumerate(spec.layers) if layer.window is None]
    assert full == [5, 11]
    sizes = [(layer.head_size, layer.num_kv_heads) for layer in spec.layers]
    assert [size for size in sizes if size != (None, None)] == [(24, 1)] * 2
    assert parse(**GEMMA4, head_dim=8, per_layer_config={}).layers[5].head_size is None


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ({"5": {"intermediate_size": 48}}, "'intermediate_size' of layer 5"),
        ({"5": {"head_dim": None}}, "'head_dim' of layer 5"),
        ({"12": {"head_dim": 24}}, "'12' in per_layer_config"),
        ({"-1": {"head_dim": 24}}, "'-1' in per_layer_config"),
        ({"5": 24}, "'5' in per_layer_config"),
        ({"04": {"head_dim": 24}}, "layer 4 in per_layer_config, which has a window"),
    ],
)
def test_gemma4_layers_that_differ_in_another_way_are_refused(
    listed: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(**GEMMA4, head_dim=8, per_layer_config=listed)


def test_granite_with_windows_has_a_rope_per_layer() -> None:
    spec = parse_as("GraniteSWA", layer_rope_theta=[1e6, 0, 1e4, 1e4], num_key_value_heads=2)
    assert windows(spec) == [None, 128, 128, 128]
    assert [layer.rope for layer in spec.layers] == [1, None, 0, 0]
    assert [rope.theta for rope in spec.ropes] == [1e4, 1e6]
    with pytest.raises(ConfigError, match="3 numbers in layer_rope_theta for 4 layers"):
        parse_as("GraniteSWA", layer_rope_theta=[1e4] * 3, num_key_value_heads=2)


def test_gemma3_reads_the_text_part_of_a_multimodal_config() -> None:
    inner = {k: v for k, v in LLAMA.items() if k != "architectures"}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": inner | {"model_type": "gemma3_text"},
        "vision_config": {"hidden_size": 8},
        "torch_dtype": "bfloat16",
        "mm_tokens_per_image": 256,
    }
    spec = parse_spec(config)
    assert (spec.hidden_size, spec.dtype, spec.tied) == (16, "bfloat16", True)


def test_a_config_without_architectures_is_known_by_its_model_type() -> None:
    spec = parse_spec(LLAMA | {"architectures": None, "model_type": "mistral"})
    assert spec.architecture == "MistralForCausalLM"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 3}}, "'twist'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor'"),
        ({"hidden_act": "relu6"}, "'relu6'"),
        ({"hidden_size": None}, "'hidden_size'"),
        ({"hidden_size": "big"}, "'hidden_size'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers'"),
        ({"num_hidden_layers": 2**31}, "'num_hidden_layers' to 2147483648, it must be at most"),
        ({"vocab_size": float("inf")}, "'vocab_size' to inf, it must be an integer"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 query heads"),
        ({"attention_sinks": 4}, "'attention_sinks'"),
        ({"layer_types": ["chunked_attention"] * 4}, "'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert named in str(caught.value)


def test_a_bias_is_refused_where_the_family_has_none() -> None:
    with pytest.raises(ConfigError, match="'attention_bias'"):
        parse_as("Mistral", attention_bias=True)


@pytest.mark.parametrize("family", ["Qwen3Next", "Lfm2"])
def test_a_mixer_that_is_not_known_is_named_next_to_those_that_are(family: str) -> None:
    kinds = ["full_attention", "full_attention", "retention", "full_attention"]
    with pytest.raises(ConfigError, match="a layer of type 'retention'; supported are '"):
        parse_as(family, layer_types=kinds)


def test_a_damaged_number_of_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 2147483648 experts; at most 10000 are read"):
        parse_as("Mixtral", num_local_experts=2**31)


def test_harmless_and_switched_off_keys_pass() -> None:
    spec = parse(attention_dropout=0.1, _name="x", use_mrope=False, rope_scaling=None, foo=None)
    assert spec == parse()


def write(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_spec(tmp_path)


def test_the_config_of_a_model_for_embeddings_is_read_without_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "modules.json").write_text("[]")
    assert read_spec(tmp_path).has_head


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_spec(tmp_path)
    with pytest.raises(ConfigError, match="JSON object"):
        read_spec(write(tmp_path, [1]))


GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"],
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 4,
}


def test_gemma_3n_cuts_gates_of_its_first_layers_and_shares_keys_of_its_last_ones() -> None:
    spec = parse_spec(GEMMA3N)
    cutoffs = [layer.gate_cutoff for layer in spec.layers]
    assert cutoffs[:10] == [pytest.approx(1.644853)] * 10
    assert cutoffs[10:] == [None, None]
    assert [layer.kv_from for layer in spec.layers[8:]] == [7, 4, 7, 7]
    assert spec.altup == AltUp(num_streams=4, active=0, scaled=True, laurel_rank=64)
    assert spec.layer_inputs == LayerInputs(256, 262_144)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"altup_num_inputs": 1}, "stream 0 of 1"),
        ({"altup_active_idx": 4}, "stream 4 of 4"),
        ({"activation_sparsity_pattern": [0.5]}, "1 values"),
        ({"activation_sparsity_pattern": [1.0] * 12}, "below 1"),
        ({"intermediate_size": [64, 96]}, "intermediate_size for each"),
    ],
)
def test_gemma_3n_with_impossible_layers_is_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_spec(GEMMA3N | values)


def test_gemma_3n_may_list_the_width_of_each_layer() -> None:
    widths = [64] * 6 + [96] * 6
    spec = parse_spec(GEMMA3N | {"intermediate_size": widths})
    assert [spec.of_layer(i).intermediate_size for i in range(12)] == widths
    assert spec.intermediate_size == 96


def test_remote_code_is_refused_unless_the_architecture_is_native(tmp_path: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    with pytest.raises(ConfigError, match="auto_map"):
        read_spec(write(tmp_path, {"architectures": ["XForCausalLM"], "auto_map": auto_map}))
    native = read_spec(write(tmp_path, LLAMA | {"auto_map": auto_map}))
    assert "not used" in native.notes[0]
    assert replace(native, notes=()) == parse()


def test_reading_a_spec_imports_no_torch() -> None:
    program = (
        "import sys, quickstep.model.spec, quickstep.model.sizing; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


FOREIGN_KEYS = """
    transformers.js_config model_creator training_args openvino_config license base_model
    mlx_lm_version tags max_sequence_length use_flash_attn notes
"""
COMPUTING_KEYS = """
    attention_multiplier clip_qkv use_parallel_residual logit_scale num_experts qk_layernorm alibi
    sliding_window embedding_scale kv_lora_rank quantization hc_mult index_topk rope_interleaved
    hidden_act_param layer_scale use_mup
"""


@pytest.mark.parametrize("key", FOREIGN_KEYS.split())
def test_a_key_of_another_program_is_noted_and_not_used(key: str) -> None:
    spec = parse(**{key: {"some": "thing"}})
    assert replace(spec, notes=()) == parse()
    assert spec.notes == () or key in spec.notes[0]


@pytest.mark.parametrize("key", COMPUTING_KEYS.split())
def test_a_key_that_may_change_the_computation_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse(**{key: 3})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def test_yarns_attn_factor_multiplies_its_scale_and_is_noted() -> None:
    spec = parse(rope_scaling=YARN | {"attn_factor": 0.5})
    [rope] = spec.ropes
    assert (rope.attention_factor, rope.attn_factor) == (None, 0.5)
    assert "attn_factor 0.5 multiplies" in spec.notes[0]
    assert parse(rope_scaling=YARN | {"attn_factor": 1.0}) == parse(rope_scaling=YARN)
    both = YARN | {"attn_factor": 0.5, "attention_factor": 1.2}
    with pytest.raises(ConfigError, match="both attention_factor"):
        parse(rope_scaling=both)


def test_keys_of_positions_that_change_nothing_for_text_are_accepted() -> None:
    sections = {"mrope_section": [1, 1, 2]}
    for kind in ("default", "mrope"):
        assert parse(rope_scaling=sections | {"type": kind, "factor": 2.0}) == parse()
    assert parse(rope_scaling=sections | YARN) == parse(rope_scaling=YARN)
    with pytest.raises(ConfigError, match="factor"):
        parse(rope_scaling={"factor": 2.0})
    with pytest.raises(ConfigError, match="sections"):
        parse(rope_scaling=YARN | {"sections": 2})


def test_bases_and_layers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope_theta"):
        parse(rope_theta=-1.0)
    with pytest.raises(ConfigError, match="layers"):
        parse(num_hidden_layers=10**9)


def test_an_indexer_limits_the_length_and_is_named() -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    config = sizes | {"architectures": ["GlmMoeDsaForCausalLM"], "num_attention_heads": 4}
    spec = parse_spec(config)
    assert spec.max_model_len == 2048
    assert any("indexer" in note for note in spec.notes)
    for allow_longer in (False, True):
        with pytest.raises(ConfigError, match="by an indexer, which is not implemented"):
            with_context(spec, 4096, allow_longer)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("topk_method", "best", "supported are 'greedy' and 'group_limited_greedy'"),
        ("scoring_func", "sigmoid", "supported is 'softmax'"),
        ("qk_head_dim", 7, "are 192 together"),
        ("attention_bias", True, "does not implement for this architecture"),
        ("norm_topk_prob", True, "does not implement for this architecture"),
        ("moe_layer_freq", 2, "does not implement for this architecture"),
    ],
)
def test_what_latent_attention_does_not_compute_is_refused_by_name(
    key: str, value: object, message: str
) -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    needed = {"num_attention_heads": 4, "num_experts_per_tok": 2}
    config = sizes | needed | {"architectures": ["DeepseekV2ForCausalLM"]}
    assert parse_spec(config).latent is not None
    with pytest.raises(ConfigError, match=message):
        parse_spec(config | {key: value})
