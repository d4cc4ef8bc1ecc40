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

DEEPSEEK: dict[str, object] = (
    {"attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "hidden_act": "silu"}
    | {"kv_lora_rank": 512, "moe_layer_freq": 1, "n_shared_experts": 1}
    | {"norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1}
    | {"pretraining_tp": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False}
    | {"topk_method": "noaux_tc", "v_head_dim": 128}
)

YARN: dict[str, object] = {
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
} | {"type": "yarn"}

MAMBA: dict[str, object] = (
    {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4}
    | {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1}
    | {"mamba_proj_bias": False}
)

GRANITE: dict[str, object] = (
    {"attention_bias": False, "embedding_multiplier": 12, "init_method": "mup"}
    | {"max_position_embeddings": 131_072, "normalization_function": "rmsnorm"}
    | {"num_experts_per_tok": 0, "num_local_experts": 0, "output_router_logits": False}
    | {"residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None}
    | {"router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192}
    | {"tie_word_embeddings": True}
)

COHERE2: dict[str, object] = (
    {"cache_implementation": "hybrid", "layer_switch": 4}
    | {"order_of_interleaved_layers": "local_attn_first"}
    | {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0}
    | {"use_embedding_sharing": True, "use_gated_activation": True}
    | {"use_parallel_block": True, "use_parallel_embedding": True}
)


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
    "DeepSeek-V3": (
        671_026_419_200,
        sizes(129_280, 7168, 18_432, 61, 128, 128)
        | DEEPSEEK
        | {"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3}
        | {"max_position_embeddings": 163_840, "moe_intermediate_size": 2048, "n_group": 8}
        | {"n_routed_experts": 256, "q_lora_rank": 1536}
        | {"quantization_config": {"quant_method": "fp8"}}
        | {"rope_scaling": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}
        | {"rope_theta": 10_000, "routed_scaling_factor": 2.5, "topk_group": 4},
    ),
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        sizes(102_400, 2048, 10_944, 27, 16, 16)
        | DEEPSEEK
        | {"architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1}
        | {"max_position_embeddings": 163_840, "moe_intermediate_size": 1408, "n_group": 1}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"num_experts_per_tok": 6, "q_lora_rank": None}
        | {"rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}}
        | {"rope_theta": 10_000, "routed_scaling_factor": 1.0, "scoring_func": "softmax"}
        | {"topk_group": 1, "topk_method": "greedy"},
    ),
    "DeepSeek-V2": (
        235_741_434_880,
        sizes(102_400, 5120, 12_288, 60, 128, 128)
        | DEEPSEEK
        | {"architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1}
        | {"max_position_embeddings": 163_840, "moe_intermediate_size": 1536, "n_group": 8}
        | {"n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"num_experts_per_tok": 6, "q_lora_rank": 1536}
        | {"rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}}
        | {"rope_theta": 10_000, "routed_scaling_factor": 16.0, "scoring_func": "softmax"}
        | {"topk_group": 3, "topk_method": "group_limited_greedy"},
    ),
    "granite-4.0-h-micro": (
        3_191_396_096,
        sizes(100_352, 2048, 8192, 40, 32, 8)
        | MAMBA
        | GRANITE
        | {"architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.015625}
        | {"layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)]}
        | {"logits_scaling": 8, "mamba_n_heads": 64, "position_embedding_type": "nope"}
        | {"rope_theta": 10_000},
    ),
    "c4ai-command-r-v01": (
        34_980_831_232,
        sizes(256_000, 8192, 22_528, 40, 64, 64)
        | {"architectures": ["CohereForCausalLM"], "attention_bias": False}
        | {"layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192}
        | {"model_max_length": 131_072, "pretraining_tp": 1, "rope_theta": 8000_000.0},
    ),
    "c4ai-command-r-plus": (
        103_810_674_688,
        sizes(256_000, 12_288, 33_792, 64, 96, 8)
        | {"architectures": ["CohereForCausalLM"], "attention_bias": False}
        | {"layer_norm_eps": 1e-05, "logit_scale": 0.8333333333333334}
        | {"max_position_embeddings": 8192, "model_max_length": 131_072}
        | {"rope_theta": 75000_000.0, "use_qk_norm": True},
    ),
    "c4ai-command-r7b-12-2024": (
        8_028_033_024,
        sizes(256_000, 4096, 14_336, 32, 32, 8)
        | COHERE2
        | {"architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "head_dim": 128}
        | {"layer_norm_eps": 1e-05, "logit_scale": 0.25, "max_position_embeddings": 132_096}
        | {"rope_scaling": None, "rope_theta": 50_000, "sliding_window": 4096}
        | {"sliding_window_pattern": 4},
    ),
    "Nemotron-Mini-4B-Instruct": (
        4_190_509_056,
        sizes(256_000, 3072, 9216, 32, 24, 8)
        | {"architectures": ["NemotronForCausalLM"], "attention_bias": False, "head_dim": 128}
        | {"hidden_act": "relu2", "max_position_embeddings": 4096, "mlp_bias": False}
        | {"norm_eps": 1e-05, "partial_rotary_factor": 0.5, "rope_percent": 0.5}
        | {"rope_theta": 10_000, "tie_word_embeddings": False},
    ),
    "stablelm-3b-4e1t": (
        2_795_443_200,
        sizes(50_304, 2560, 6912, 32, 32, 32)
        | {"architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-05}
        | {"max_position_embeddings": 4096, "norm_eps": 1e-05, "num_heads": 32}
        | {"partial_rotary_factor": 0.25, "rope_pct": 0.25, "rope_theta": 10_000}
        | {"use_qkv_bias": False},
    ),
    "starcoder2-3b": (
        3_030_371_328,
        sizes(49_152, 3072, 12_288, 30, 24, 2)
        | {"activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"]}
        | {"attention_softmax_in_fp32": True, "embedding_dropout": 0.1}
        | {"hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-05}
        | {"max_position_embeddings": 16_384, "mlp_type": "default", "norm_epsilon": 1e-05}
        | {"norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813}
        | {"scale_attention_softmax_in_fp32": True, "scale_attn_weights": True}
        | {"sliding_window": 4096, "use_bias": True},
    ),
    "phi-2": (
        2_779_683_840,
        sizes(51_200, 2560, 10_240, 32, 32, 32)
        | {"architectures": ["PhiForCausalLM"], "embd_pdrop": 0.0, "hidden_act": "gelu_new"}
        | {"layer_norm_eps": 1e-05, "max_position_embeddings": 2048}
        | {"partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1}
        | {"rope_scaling": None, "rope_theta": 10_000},
    ),
    "phi-1_5": (
        1_418_270_720,
        sizes(51_200, 2048, 8192, 24, 32, 32)
        | {"architectures": ["PhiForCausalLM"], "embd_pdrop": 0.0, "hidden_act": "gelu_new"}
        | {"layer_norm_eps": 1e-05, "max_position_embeddings": 2048}
        | {"partial_rotary_factor": 0.5, "qk_layernorm": False, "resid_pdrop": 0.0}
        | {"rope_theta": 10_000},
    ),
    "LFM2-350M": (
        354_483_968,
        sizes(65_536, 1024, 6656, 16, 16, 8)
        | {"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True}
        | {"block_dim": 1024, "block_ff_dim": 6656, "block_ffn_dim_multiplier": 1.0}
        | {"block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 1024}
        | {"conv_dim_out": 1024, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
        | {
            "layer_types": [
                "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
            ]
        }
        | {"norm_eps": 1e-05, "num_heads": 16, "rms_norm_eps": None, "rope_theta": 1000_000.0}
        | {"theta": 1000_000.0, "use_pos_enc": True},
    ),
    "Olmo-3-7B": (
        7_298_011_136,
        sizes(100_278, 4096, 11_008, 32, 32, 32)
        | {"architectures": ["Olmo3ForCausalLM"], "attention_bias": False}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}
        | {"max_position_embeddings": 65_536, "rms_norm_eps": 1e-06}
        | {
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            }
        }
        | {"rope_theta": 500_000, "sliding_window": 4096, "tie_word_embeddings": False},
    ),
    "EXAONE-4.0-32B": (
        32_003_216_384,
        sizes(102_400, 5120, 27_392, 64, 40, 8)
        | {"architectures": ["Exaone4ForCausalLM"], "head_dim": 128}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16}
        | {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-05}
        | {
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            }
        }
        | {"rope_theta": 1_000_000, "sliding_window": 4096, "sliding_window_pattern": "LLLG"}
        | {"tie_word_embeddings": False},
    ),
    "EXAONE-4.0-1.2B": (
        1_279_391_488,
        sizes(102_400, 2048, 4096, 30, 32, 8)
        | {"architectures": ["Exaone4ForCausalLM"], "head_dim": 64}
        | {"layer_types": ["full_attention"] * 30, "max_position_embeddings": 65_536}
        | {"rms_norm_eps": 1e-05}
        | {
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            }
        }
        | {"rope_theta": 1_000_000, "sliding_window": None, "sliding_window_pattern": None}
        | {"tie_word_embeddings": True},
    ),
    "ERNIE-4.5-0.3B": (
        360_748_032,
        sizes(103_424, 1024, 3072, 18, 16, 2)
        | {"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 128}
        | {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0}
        | {"tie_word_embeddings": True, "use_bias": False},
    ),
    "ERNIE-4.5-21B-A3B": (
        21_825_437_888,
        sizes(103_424, 2560, 12_288, 28, 20, 4)
        | {"architectures": ["Ernie4_5_MoeForCausalLM"], "max_position_embeddings": 131_072}
        | {"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536}
        | {"moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1}
        | {"moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2}
        | {"moe_use_aux_free": True, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05}
        | {"rope_theta": 500_000, "tie_word_embeddings": True, "use_bias": False},
    ),
    "Seed-OSS-36B": (
        36_151_104_512,
        sizes(155_136, 5120, 27_648, 64, 80, 8)
        | {"architectures": ["SeedOssForCausalLM"], "attention_bias": True}
        | {"attention_out_bias": False, "head_dim": 128, "max_position_embeddings": 524_288}
        | {"mlp_bias": False, "residual_dropout": 0.1, "rms_norm_eps": 1e-06}
        | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000_000.0}
        | {"tie_word_embeddings": False},
    ),
    "MiniMax-M2": (
        228_689_764_864,
        sizes(200_064, 3072, 1536, 62, 48, 8)
        | {"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62}
        | {"head_dim": 128, "layernorm_full_attention_beta": 1.0}
        | {"layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0}
        | {"max_position_embeddings": 196_608, "mlp_intermediate_size": 8192}
        | {"mtp_transformer_layers": 1, "num_experts_per_tok": 8, "num_local_experts": 256}
        | {"num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer"}
        | {"rms_norm_eps": 1e-06, "rope_theta": 5_000_000, "rotary_dim": 64}
        | {"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid"}
        | {"shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None}
        | {"tie_word_embeddings": False, "use_mtp": True, "use_qk_norm": True}
        | {"use_routing_bias": True},
    ),
    "GLM-4-9B-0414": (
        9_400_279_040,
        sizes(151_552, 4096, 13_696, 40, 32, 2)
        | {"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "head_dim": 128}
        | {"max_position_embeddings": 32_768, "partial_rotary_factor": 0.5}
        | {"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False},
    ),
    "glm-4-9b-chat-hf": (
        9_399_951_360,
        sizes(151_552, 4096, 13_696, 40, 32, 2)
        | {"architectures": ["GlmForCausalLM"], "attention_bias": True, "head_dim": 128}
        | {"max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-07}
        | {"rope_theta": 10000.0, "tie_word_embeddings": False},
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        sizes(151_936, 2048, 5632, 24, 16, 16)
        | {"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1}
        | {"max_position_embeddings": 8192, "max_window_layers": 21}
        | {"moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60}
        | {"num_experts_per_tok": 4, "output_router_logits": False, "rope_theta": 1000_000.0}
        | {"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632}
        | {"sliding_window": 32_768, "tie_word_embeddings": False, "use_sliding_window": False},
    ),
    "Qwen3-VL-30B-A3B": (
        30_532_122_624,
        {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151_655}
        | {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False}
        | {"video_token_id": 151_656, "vision_config": {"hidden_size": 1152}}
        | {"vision_end_token_id": 1, "vision_start_token_id": 1}
        | {
            "text_config": sizes(151_936, 2048, 6144, 48, 32, 4)
            | {"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128}
            | {"hidden_act": "silu", "max_position_embeddings": 262_144, "mlp_only_layers": []}
            | {"model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768}
            | {"norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
            | {"rms_norm_eps": 1e-06}
            | {
                "rope_scaling": {
                    "mrope_interleaved": True,
                    "mrope_section": [24, 20, 20],
                    "rope_type": "default",
                }
            }
            | {"rope_theta": 5_000_000}
        },
    ),
    "llava-1.5-7b-hf": (
        6_738_939_904,
        {"architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100}
        | {"image_token_index": 32_000, "model_type": "llava", "pad_token_id": 32_001}
        | {"projector_hidden_act": "gelu", "tie_word_embeddings": False}
        | {"vision_config": {"hidden_size": 1024, "model_type": "clip_vision_model"}}
        | {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
        | {"vocab_size": 32_064}
        | {
            "text_config": {
                "_name_or_path": "lmsys/vicuna-7b-v1.5",
                "architectures": ["LlamaForCausalLM"],
            }
            | {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05}
            | {"torch_dtype": "float16", "vocab_size": 32_064}
        },
    ),
    "llava-v1.6-mistral-7b-hf": (
        7_242_256_384,
        {"architectures": ["LlavaNextForConditionalGeneration"]}
        | {"image_grid_pinpoints": [[336, 672]], "image_token_index": 32_000}
        | {"model_type": "llava_next", "projector_hidden_act": "gelu"}
        | {"tie_word_embeddings": False, "use_image_newline_parameter": True}
        | {"vision_config": {"hidden_size": 1024}}
        | {
            "text_config": {"_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2"}
            | {"architectures": ["MistralForCausalLM"], "intermediate_size": 14_336}
            | {"max_position_embeddings": 32_768, "model_type": "mistral", "num_key_value_heads": 8}
            | {"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None}
            | {"torch_dtype": "bfloat16", "vocab_size": 32_064}
        },
    ),
    "pixtral-12b": (
        12_247_782_400,
        {"architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100}
        | {"image_seq_length": 1, "image_token_index": 10, "model_type": "llava"}
        | {"projector_hidden_act": "gelu"}
        | {"vision_config": {"head_dim": 64, "hidden_size": 1024, "model_type": "pixtral"}}
        | {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        | {
            "text_config": {"head_dim": 128, "hidden_size": 5120, "intermediate_size": 14_336}
            | {"is_composition": True, "max_position_embeddings": 1_024_000}
            | {"model_type": "mistral", "num_hidden_layers": 40, "num_key_value_heads": 8}
            | {"rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None}
            | {"vocab_size": 131_072}
        },
    ),
    "Qwen2-VL-7B": (
        7_615_616_512,
        sizes(152_064, 3584, 18_944, 28, 28, 4)
        | {"architectures": ["Qwen2VLForConditionalGeneration"], "image_token_id": 151_655}
        | {"max_position_embeddings": 32_768, "max_window_layers": 28, "model_type": "qwen2_vl"}
        | {"rms_norm_eps": 1e-06}
        | {"rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}}
        | {"rope_theta": 1000000.0, "sliding_window": 32_768, "tie_word_embeddings": False}
        | {"use_sliding_window": False, "video_token_id": 151_656}
        | {"vision_config": {"depth": 32}, "vision_end_token_id": 151_653}
        | {"vision_start_token_id": 151_652, "vision_token_id": 151_654},
    ),
    "Qwen2.5-VL-3B": (
        3_085_938_688,
        sizes(151_936, 2048, 11_008, 36, 16, 2)
        | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "image_token_id": 151_655}
        | {"max_position_embeddings": 128_000, "max_window_layers": 70}
        | {"model_type": "qwen2_5_vl", "rms_norm_eps": 1e-06}
        | {
            "rope_scaling": {
                "mrope_section": [16, 24, 24],
                "rope_type": "default",
                "type": "default",
            }
        }
        | {"rope_theta": 1000000.0, "sliding_window": 32_768, "tie_word_embeddings": True}
        | {"use_sliding_window": False, "video_token_id": 151_656}
        | {"vision_config": {"depth": 32}},
    ),
    "Mistral-Small-3.1-24B": (
        23_572_403_200,
        {"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10}
        | {"model_type": "mistral3", "multimodal_projector_bias": False}
        | {"projector_hidden_act": "gelu", "spatial_merge_size": 2}
        | {"vision_config": {"hidden_size": 1024}, "vision_feature_layer": -1}
        | {
            "text_config": sizes(131_072, 5120, 32_768, 40, 32, 8)
            | {"head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131_072}
            | {"model_type": "mistral", "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0}
            | {"sliding_window": None, "use_cache": True}
        },
    ),
    "gemma-3-4b-it": (
        3_880_263_168,
        {"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999}
        | {"eoi_token_index": 256_000, "image_token_index": 262_144, "mm_tokens_per_image": 256}
        | {"model_type": "gemma3"}
        | {"vision_config": {"hidden_size": 1152, "vision_use_head": False}}
        | {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10_240,
                "model_type": "gemma3_text",
            }
            | {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
            | {"sliding_window": 1024}
        },
    ),
}

# published in billions only; GLM-5 without its indexer
ROUNDED: dict[str, tuple[int, dict[str, Any]]] = {
    "GLM-4.7-Flash": (
        30,
        sizes(154_880, 2048, 10_240, 47, 20, 20)
        | {"architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False}
        | {"eos_token_id": [154_820], "first_k_dense_replace": 1, "kv_lora_rank": 512}
        | {"max_position_embeddings": 202_752, "moe_intermediate_size": 1536, "n_group": 1}
        | {"n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True}
        | {"num_experts_per_tok": 4, "num_nextn_predict_layers": 1, "pad_token_id": 154_820}
        | {"partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192}
        | {"qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None}
        | {"rope_theta": 1_000_000, "routed_scaling_factor": 1.8, "tie_word_embeddings": False}
        | {"topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256},
    ),
    "GLM-5": (
        743,
        sizes(154_880, 6144, 12_288, 78, 64, 64)
        | {"architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False}
        | {"dtype": "bfloat16", "ep_size": 1, "first_k_dense_replace": 3, "head_dim": 64}
        | {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048}
        | {"indexer_rope_interleave": True, "kv_lora_rank": 512}
        | {"max_position_embeddings": 202_752, "model_type": "glm_moe_dsa"}
        | {"moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True}
        | {"num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "pretraining_tp": 1}
        | {"q_lora_rank": 2048, "qk_head_dim": 256, "qk_nope_head_dim": 192}
        | {"qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True}
        | {"rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"}}
        | {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid"}
        | {"tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc"}
        | {"v_head_dim": 256},
    ),
    "Kimi-K2": (
        1026,
        sizes(163_840, 7168, 18_432, 61, 64, 64)
        | DEEPSEEK
        | {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"a": "b"}}
        | {"first_k_dense_replace": 1, "max_position_embeddings": 131_072}
        | {"model_type": "kimi_k2", "moe_intermediate_size": 2048, "n_group": 1}
        | {"n_routed_experts": 384, "num_nextn_predict_layers": 0, "q_lora_rank": 1536}
        | {
            "rope_scaling": YARN
            | {"beta_fast": 1.0, "factor": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
        }
        | {"rope_theta": 50_000, "routed_scaling_factor": 2.827, "topk_group": 1},
    ),
    "granite-4.0-micro": (
        3,
        sizes(100_352, 2560, 8192, 40, 40, 8)
        | MAMBA
        | GRANITE
        | {"architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.015625}
        | {"layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_d_head": "auto"}
        | {"mamba_d_state": 256, "mamba_n_heads": 128, "position_embedding_type": "rope"}
        | {"rope_theta": 10_000_000},
    ),
    "AFM-4.5B": (
        5,
        sizes(128_004, 2560, 18_432, 36, 20, 4)
        | {"architectures": ["ArceeForCausalLM"], "attention_bias": False, "head_dim": 128}
        | {"hidden_act": "relu2", "max_position_embeddings": 65_536, "mlp_bias": False}
        | {"rms_norm_eps": 1e-05}
        | {"rope_scaling": YARN | {"rope_type": "yarn", "factor": 20.0, "mscale": 1.0}}
        | {"rope_theta": 10000.0},
    ),
    "Ministral-3-3B": (
        3,
        {"architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10}
        | {"model_type": "mistral3", "multimodal_projector_bias": False}
        | {"projector_hidden_act": "gelu", "spatial_merge_size": 2}
        | {"vision_config": {"hidden_size": 1024}, "vision_feature_layer": -1}
        | {
            "text_config": sizes(131_072, 3072, 9216, 26, 32, 8)
            | {"head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 262_144}
            | {"model_type": "ministral3", "rms_norm_eps": 1e-05}
            | {
                "rope_parameters": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 16.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 16_384,
                    "rope_theta": 1000_000.0,
                    "rope_type": "yarn",
                    "type": "yarn",
                }
            }
            | {"sliding_window": None, "tie_word_embeddings": True, "use_cache": True}
        },
    ),
    "Falcon-H1-0.5B": (
        1,  # 0.52
        sizes(32_784, 1024, 2048, 36, 8, 2)
        | {"architectures": ["FalconH1ForCausalLM"], "attention_bias": False}
        | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375}
        | {"attn_layer_indices": None, "embedding_multiplier": 5.656854249492381}
        | {"head_dim": 64, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625}
        | MAMBA
        | {"mamba_chunk_size": 128, "mamba_d_ssm": 1536, "mamba_n_heads": 24}
        | {"mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True}
        | {"max_position_embeddings": 16_384, "mlp_bias": False, "mlp_expansion_factor": 8}
        | {"mlp_multipliers": [0.8838834764831844, 0.5859375], "num_logits_to_keep": 1}
        | {"projectors_bias": False, "rope_scaling": None, "rope_theta": 100_000_000_000.0}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587}
        | {"ssm_multipliers": [0.3535, 0.25, 0.3535, 0.5, 0.3535], "tie_word_embeddings": False}
        | {"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001},
    ),
    "Nemotron-3-Nano-30B-A3B": (
        32,
        sizes(131_072, 2688, 1856, 52, 32, 2)
        | {"architectures": ["NemotronHForCausalLM"], "attention_bias": False}
        | {"chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128}
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
        | {"layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu"}
        | {"mamba_num_heads": 64, "mamba_proj_bias": False, "max_position_embeddings": 262_144}
        | {"mlp_bias": False, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856}
        | {"moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05}
        | {"norm_topk_prob": True, "num_experts_per_tok": 6, "partial_rotary_factor": 1.0}
        | {"rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10_000}
        | {"routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128}
        | {"tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")]}
        | {"time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001}
        | {"topk_group": 1, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True},
    ),
    "Llama-4-Scout-17B-16E": (
        108,
        {"architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200_080}
        | {"eoi_token_index": 200_081, "image_token_index": 200_092, "model_type": "llama4"}
        | {"vision_config": {"hidden_size": 1408}}
        | {
            "text_config": sizes(202_048, 5120, 8192, 48, 40, 8)
            | {"attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1}
            | {"attn_temperature_tuning": 4, "cache_implementation": "hybrid"}
            | {"floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128}
            | {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16_384}
            | {"max_position_embeddings": 10_485_760, "model_type": "llama4_text"}
            | {"moe_layers": list(range(48)), "no_rope_layers": [], "num_experts_per_tok": 1}
            | {"num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-05}
            | {
                "rope_scaling": {
                    "factor": 16.0,
                    "high_freq_factor": 1.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "llama3",
                }
            }
            | {"rope_theta": 500_000.0, "router_aux_loss_coef": 0.001}
            | {"router_jitter_noise": 0.0, "use_qk_norm": True}
        },
    ),
    "Youtu-LLM-2B": (
        2,
        sizes(128_256, 2048, 6144, 32, 16, 16)
        | {"architectures": ["YoutuForCausalLM"], "attention_bias": False, "head_dim": 64}
        | {"kv_lora_rank": 512, "max_position_embeddings": 131_072, "mlp_bias": False}
        | {"q_lora_rank": 1536, "qk_head_dim": 192, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True}
        | {"rope_scaling": None, "rope_theta": 1_600_000, "tie_word_embeddings": True}
        | {"v_head_dim": 128},
    ),
    "Qwen2-Audio-7B": (
        8,
        {"architectures": ["Qwen2AudioForConditionalGeneration"]}
        | {"audio_config": {"model_type": "qwen2_audio_encoder"}, "audio_token_index": 151_646}
        | {"ignore_index": -100, "model_type": "qwen2_audio", "vocab_size": 156_032}
        | {
            "text_config": {
                "bos_token_id": 151_643,
                "eos_token_id": 151_645,
                "intermediate_size": 11_008,
            }
            | {"max_position_embeddings": 8192, "model_type": "qwen2", "rms_norm_eps": 1e-05}
            | {"rope_theta": 10_000, "sliding_window": 32_768, "torch_dtype": "bfloat16"}
            | {"use_mrope": False, "vocab_size": 156_032}
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_read_whole_and_counts_its_parameters(name: str) -> None:
    count, config = PUBLISHED[name]
    assert num_parameters(parse_spec(COMMON | config)) == count


@pytest.mark.parametrize("name", ROUNDED)
def test_published_config_is_read_and_counts_its_billions(name: str) -> None:
    billions, config = ROUNDED[name]
    assert round(num_parameters(parse_spec(COMMON | config)) / 1e9) == billions


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
        ("starcoder2-3b", {"activation_function": "relu"}),
        ("Nemotron-Mini-4B-Instruct", {"rope_percent": 0.25}),
        ("Nemotron-3-Nano-30B-A3B", {"residual_in_fp32": True}),
        ("Nemotron-3-Nano-30B-A3B", {"mamba_hidden_act": "relu"}),
        ("Falcon-H1-0.5B", {"mlp_multipliers": [0.0, 1.0]}),
        ("Falcon-H1-0.5B", {"mamba_use_mlp": False}),
        ("Llama-4-Scout-17B-16E", {"attention_k_eq_v": True}),
    ],
)
def test_another_value_than_the_published_one_is_refused_by_name(
    name: str, changes: dict[str, object]
) -> None:
    config = dict((PUBLISHED | ROUNDED)[name][1])
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **changes}
    else:
        config |= changes
    with pytest.raises(ConfigError, match=next(iter(changes))):
        parse_spec(COMMON | config)


@pytest.mark.parametrize("value", [False, True])
def test_keys_of_precision_and_of_training_pass_at_any_value(value: bool) -> None:
    config = COMMON | PUBLISHED["starcoder2-15b"][1] | {"attention_softmax_in_fp32": value}
    assert parse_spec(config | {"scale_attention_softmax_in_fp32": value}).notes == ()
    config = COMMON | PUBLISHED["c4ai-command-r7b-12-2024"][1]
    assert parse_spec(config | {"use_parallel_embedding": value}).notes == ()


@pytest.mark.parametrize("tied", [False, True])
def test_lfm2_calls_the_tied_head_by_another_name(tied: bool) -> None:
    config = COMMON | PUBLISHED["LFM2-1.2B"][1] | {"tie_embedding": tied}
    assert parse_spec(config).tied is tied
    assert parse_spec(config | {"tie_word_embeddings": not tied}).tied is tied
