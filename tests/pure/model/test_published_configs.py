"""Configs as published, one per family: every key is honoured or harmless, and the parameters
add up to the published counts.
"""

from __future__ import annotations

import pytest

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

PUBLISHED = {
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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_whole_and_counts_its_parameters(name: str) -> None:
    count, config = PUBLISHED[name]
    assert num_parameters(parse_spec(COMMON | config)) == count
