"""Configs as published, one per family: every key is honoured or harmless, and the parameters
add up to the published counts.
"""

from __future__ import annotations

from typing import Any

import pytest

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import num_parameters
from quickstep.model.spec import parse_spec

COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
}


def sizes(*values: int) -> dict[str, int]:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return dict(zip(names, values, strict=True))


FACTORS = {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}

QWEN3_5 = {
    "attention_bias": False,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000,
        "rope_type": "default",
    },
}

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-2-7b": (
        6_738_415_616,
        sizes(32_000, 4096, 11_008, 32, 32, 32)
        | {"architectures": ["LlamaForCausalLM"], "pretraining_tp": 1, "rope_scaling": None}
        | {"max_position_embeddings": 4096, "tie_word_embeddings": False},
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        sizes(128_256, 2048, 8192, 16, 32, 8)
        | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False}
        | {"head_dim": 64, "max_position_embeddings": 131_072, "rope_theta": 500_000.0}
        | {"tie_word_embeddings": True, "pretraining_tp": 1}
        | {
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            }
        },
    ),
    "Mistral-7B-v0.3": (
        7_248_023_552,
        sizes(32_768, 4096, 14_336, 32, 32, 8)
        | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32_768}
        | {"rope_theta": 1e6, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        sizes(151_936, 896, 4864, 24, 14, 2)
        | {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32_768}
        | {"max_window_layers": 24, "sliding_window": 32_768, "use_sliding_window": False}
        | {"use_mrope": False, "rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    "Qwen3-0.6B": (
        596_049_920,
        sizes(151_936, 1024, 3072, 28, 16, 8)
        | {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128}
        | {"max_position_embeddings": 40_960, "max_window_layers": 28, "rope_scaling": None}
        | {"rope_theta": 1_000_000, "sliding_window": None, "use_sliding_window": False}
        | {"tie_word_embeddings": True},
    ),
    "gemma-2-2b": (
        2_614_341_888,
        sizes(256_000, 2304, 9216, 26, 8, 4)
        | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0}
        | {"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
        | {"max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "rope_theta": 10_000.0}
        | {"sliding_window": 4096, "attention_bias": False},
    ),
    "gemma-3-1b": (
        999_885_952,
        sizes(262_144, 1152, 6912, 26, 4, 1)
        | {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None}
        | {"cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256}
        | {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32_768}
        | {"query_pre_attn_scalar": 256, "rope_local_base_freq": 10_000, "rope_scaling": None}
        | {"rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 6},
    ),
    "gemma-3-4b": (
        3_880_263_168,
        {"architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256}
        | {"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144}
        | {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}}
        | {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            }
        },
    ),
    "Phi-3-mini-128k": (
        3_821_079_552,
        sizes(32_064, 3072, 8192, 32, 32, 32)
        | {"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "x.Phi3Config"}}
        | {"attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        | {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
        | {"rope_scaling": FACTORS, "rope_theta": 10_000.0, "sliding_window": 262_144}
        | {"tie_word_embeddings": False},
    ),
    "Phi-4-mini": (
        3_836_021_760,
        sizes(200_064, 3072, 8192, 32, 24, 8)
        | {"architectures": ["Phi3ForCausalLM"], "full_attn_mod": 1, "interpolate_factor": 1}
        | {"lm_head_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.75}
        | {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
        | {"rope_scaling": FACTORS, "sliding_window": 262_144, "tie_word_embeddings": True},
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        sizes(128_256, 2048, 11_008, 36, 16, 4)
        | {"architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "mlp_bias": False}
        | {"layer_types": ["full_attention"] * 36, "max_window_layers": 28}
        | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "pretraining_tp": 2}
        | {"max_position_embeddings": 65_536, "rope_theta": 5e6, "sliding_window": None}
        | {"use_sliding_window": False, "tie_word_embeddings": True},
    ),
    "OLMo-2-1B": (
        1_484_916_736,
        sizes(100_352, 2048, 8192, 16, 16, 16)
        | {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "rope_scaling": None}
        | {"max_position_embeddings": 4096, "rope_theta": 500_000, "tie_word_embeddings": False},
    ),
    "granite-3.1-2b": (
        2_533_531_648,
        sizes(49_155, 2048, 8192, 40, 32, 8)
        | {"architectures": ["GraniteForCausalLM"], "attention_bias": False, "mlp_bias": False}
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22, "rope_theta": 5e6, "rope_scaling": None}
        | {"max_position_embeddings": 131_072, "tie_word_embeddings": True},
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        sizes(32_000, 4096, 14_336, 32, 32, 8)
        | {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2}
        | {"num_local_experts": 8, "output_router_logits": False, "router_aux_loss_coef": 0.02}
        | {"max_position_embeddings": 32_768, "rope_theta": 1e6, "sliding_window": None}
        | {"tie_word_embeddings": False},
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        sizes(201_088, 2880, 2880, 24, 64, 8)
        | {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 64}
        | {"experts_per_token": 4, "initial_context_length": 4096, "num_experts_per_tok": 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32}
        | {"max_position_embeddings": 131_072, "output_router_logits": False, "rms_norm_eps": 1e-5}
        | {"quantization_config": {"modules_to_not_convert": [], "quant_method": "mxfp4"}}
        | {"router_aux_loss_coef": 0.9, "rope_theta": 150_000, "sliding_window": 128}
        | {"swiglu_limit": 7.0, "tie_word_embeddings": False}
        | {
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            }
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        sizes(151_936, 2048, 6144, 48, 32, 4)
        | {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "head_dim": 128}
        | {"decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": []}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128}
        | {"num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None}
        | {"router_aux_loss_coef": 0.001, "rope_theta": 1e6, "sliding_window": None}
        | {"max_position_embeddings": 40_960, "use_sliding_window": False}
        | {"tie_word_embeddings": False},
    ),
    "LFM2-1.2B": (
        1_170_340_608,
        sizes(65_536, 2048, 12_288, 16, 32, 8)
        | {"architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
        | {"block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12_288}
        | {"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256}
        | {"block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": True}
        | {"block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048}
        | {"conv_dim_out": 2048, "conv_use_xavier_init": True, "max_position_embeddings": 128_000}
        | {"norm_eps": 1e-5, "num_heads": 32, "rope_theta": 1e6, "use_pos_enc": True}
        | {"tie_embedding": True, "rms_norm_eps": None},
    ),
    "starcoder2-15b": (
        15_957_889_024,
        sizes(49_152, 6144, 24_576, 40, 48, 4)
        | {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}
        | {"attention_softmax_in_fp32": True, "embedding_dropout": 0.1, "mlp_type": "default"}
        | {"layer_norm_epsilon": 1e-5, "norm_epsilon": 1e-5, "norm_type": "layer_norm"}
        | {"residual_dropout": 0.1, "rms_norm_eps": 1e-6, "rope_theta": 100_000}
        | {"max_position_embeddings": 16_384, "scale_attention_softmax_in_fp32": True}
        | {"scale_attn_weights": True, "sliding_window": 4096, "use_bias": True}
        | {"tie_word_embeddings": False},
    ),
    "stablelm-2-1_6b": (
        1_644_515_328,
        sizes(100_352, 2048, 5632, 24, 32, 32)
        | {"architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5, "norm_eps": 1e-5}
        | {"max_position_embeddings": 4096, "num_heads": 32, "partial_rotary_factor": 0.25}
        | {"qk_layernorm": False, "rope_pct": 0.25, "rope_theta": 10_000, "use_qkv_bias": True}
        | {"use_parallel_residual": False, "tie_word_embeddings": False},
    ),
    "Qwen3.5-27B": (
        26_895_998_464,
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
        | {"image_token_id": 248_056, "video_token_id": 248_057, "tie_word_embeddings": False}
        | {"vision_config": {"hidden_size": 1152}}
        | {
            "text_config": sizes(248_320, 5120, 17_408, 64, 24, 4)
            | QWEN3_5
            | {"linear_num_value_heads": 48}
        },
    ),
    "Qwen3.5-35B-A3B": (
        34_660_610_688,
        {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
        | {"tie_word_embeddings": False, "vision_config": {"hidden_size": 1152}}
        | {
            "text_config": sizes(248_320, 2048, 512, 40, 16, 2)
            | QWEN3_5
            | {"linear_num_value_heads": 32, "moe_intermediate_size": 512, "mlp_only_layers": []}
            | {"num_experts": 256, "num_experts_per_tok": 8, "output_router_logits": False}
            | {"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512}
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_whole_and_counts_its_parameters(name: str) -> None:
    count, config = PUBLISHED[name]
    assert num_parameters(parse_spec(COMMON | config)) == count


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3.5-27B", {"output_gate_type": "sigmoid"}),
        ("Qwen3.5-27B", {"attn_output_gate": False}),
        ("Qwen3.5-27B", {"mamba_ssm_dtype": "bfloat16"}),
        ("LFM2-1.2B", {"block_dim": 1024}),
        ("LFM2-1.2B", {"conv_dim_out": 1024}),
        ("LFM2-1.2B", {"use_pos_enc": False}),
        ("starcoder2-15b", {"mlp_type": "gated"}),
        ("starcoder2-15b", {"norm_type": "rms_norm"}),
        ("stablelm-2-1_6b", {"norm_eps": 1e-6}),
        ("stablelm-2-1_6b", {"rope_pct": 0.5}),
    ],
)
def test_another_value_than_the_published_one_is_refused_by_name(
    name: str, changes: dict[str, object]
) -> None:
    config = dict(PUBLISHED[name][1])
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **changes}
    else:
        config |= changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        parse_spec(COMMON | config)


@pytest.mark.parametrize("tied", [False, True])
def test_lfm2_calls_the_tied_head_by_another_name(tied: bool) -> None:
    config = COMMON | PUBLISHED["LFM2-1.2B"][1] | {"tie_embedding": tied}
    assert parse_spec(config).tied is tied
    assert parse_spec(config | {"tie_word_embeddings": not tied}).tied is tied
