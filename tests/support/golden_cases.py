"""Tiny checkpoints, one or more per architecture, with every feature that its config can switch on.

Windows are shorter than the sequences, vocabularies small, weights wide enough that logits are
not flat. To add an architecture, add a `Case`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

VOCAB = 96

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A name, the transformers classes, and what differs from the common tiny sizes."""

    name: str
    family: str
    values: dict[str, object] = field(default_factory=dict)
    max_model_len: int | None = None
    atol: float = 1e-4  # of logits

    @property
    def has_states(self) -> bool:
        """Whether layers keep a state of each sequence."""
        families = (
            *("Lfm2", "Lfm2Moe", "Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next"),
            "GraniteMoeHybrid",
            "FalconH1",
            "NemotronH",
        )
        only_attention = self.values.get("layer_types") == ["full_attention"] * 3
        return self.family in families and not only_attention

    def config(self) -> transformers.PreTrainedConfig:
        config_class = getattr(transformers, f"{self.family}Config")
        return config_class(**(SIZES | self.values))

    def save(self, path: Path, seed: int = 0) -> transformers.PreTrainedModel:
        """Write a seeded checkpoint; give the transformers model that it came from."""
        family = self.family.removesuffix("Text")
        head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
        model_class = getattr(transformers, f"{family}{head}")
        torch.manual_seed(seed)  # some parameters begin at random (A_log of Qwen3.5)
        model = randomise(model_class(self.config()), seed)
        model.save_pretrained(path)
        return model


def randomise(model: transformers.PreTrainedModel, seed: int) -> transformers.PreTrainedModel:
    """Weights that make every part matter: norms away from 1, biases away from 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("sinks"):
                parameter.copy_(noise * 2.0)
            elif parameter.dim() > 1:
                parameter.copy_(noise * (0.7 if "embed" in name else 0.15))
            else:
                parameter.add_(noise * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model.float().eval()


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0} | values}


LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.5, 2.0, 4.0, 8.0]}

LATENT = {
    "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4,
}  # fmt: skip

# dense, as no sequence is longer than what the indexer chooses
INDEXED = LATENT | {
    "q_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "index_topk": 96,
    "index_head_dim": 32, "index_n_heads": 4,
} | rope("default")  # fmt: skip

CASES = (
    Case("llama", "Llama"),
    Case("llama-biases-mqa", "Llama", {
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 24,
        "tie_word_embeddings": True,
    }),
    Case("llama-linear", "Llama", rope("linear", factor=4.0)),
    Case("llama-llama3", "Llama", rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )),
    Case("llama-yarn", "Llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    Case("llama-yarn-tuned", "Llama", rope(
        "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0,
        mscale=0.7, mscale_all_dim=0.9, truncate=False,
    )),
    Case("mistral", "Mistral", {"sliding_window": 9}),
    Case("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    Case("qwen2-windows", "Qwen2", {
        "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    }),
    Case("qwen3", "Qwen3", {"head_dim": 24}),
    Case("gemma2", "Gemma2", {
        "head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0,
    }),
    Case("gemma3", "Gemma3Text", {
        "head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 20, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    Case("phi3", "Phi3", {"sliding_window": 11} | rope("default", partial_rotary_factor=0.5)),
    Case("phi3-longrope-short", "Phi3", rope("longrope", partial_rotary_factor=0.5, **LONG) | {
        "original_max_position_embeddings": 64,
    }, max_model_len=64),
    Case("smollm3", "SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    Case("smollm3-windows", "SmolLM3", {
        "num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1], "use_sliding_window": True,
        "sliding_window": 6,
    }),
    Case("olmo2", "Olmo2"),
    Case("granite", "Granite", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    }),
    Case("mixtral", "Mixtral", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 13,
    }),
    Case("qwen3-moe", "Qwen3Moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "norm_topk_prob": False, "mlp_only_layers": [1], "head_dim": 24,
    }),
    Case("granite-swa", "GraniteSWA", {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 0.5, "sliding_window": 7, "attention_bias": True, "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "layer_rope_theta": [1e6, 1e4, 0, 1e4],
    }),
    Case("granite-swa-plain", "GraniteSWA", {
        "logits_scaling": 0.5, "attention_multiplier": 0.25, "sliding_window": 5,
    }),
    Case("gpt-oss", "GptOss", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 24,
    } | rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)),
    Case("gpt-oss-defaults", "GptOss", {"num_local_experts": 3, "num_experts_per_tok": 3}, 256),
    Case("olmoe", "Olmoe", {
        "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": False,
        "num_key_value_heads": 4,
    }),
    Case("glm4-moe", "Glm4Moe", {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
        "norm_topk_prob": True, "use_qk_norm": True, "attention_bias": True, "head_dim": 24,
        "first_k_dense_replace": 1,
    } | rope("default", partial_rotary_factor=0.5)),
    Case("glm4-moe-one-group", "Glm4Moe", {
        "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": False, "head_dim": 16,
    } | rope("default", partial_rotary_factor=0.5)),
    Case("lfm2", "Lfm2", {
        "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
        "block_multiple_of": 32,
    }),
    Case("lfm2-biases", "Lfm2", {
        "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention", "conv", "conv"],
    }),
    Case("lfm2-moe", "Lfm2Moe", {
        "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
    }),
    Case("lfm2-moe-no-bias", "Lfm2Moe", {
        "layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 0,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "use_expert_bias": False, "norm_topk_prob": False,
    }),
    Case("qwen3.5", "Qwen3_5Text", {
        "num_hidden_layers": 4, "head_dim": 24, "linear_key_head_dim": 12,
        "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention",
                        "linear_attention"],
    }, atol=3e-4),  # transformers computes 64 tokens at once, in float32
    Case("granite-hybrid", "GraniteMoeHybrid", {
        "num_local_experts": 0, "shared_intermediate_size": 96, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention",
                        "linear_attention"],
        "mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_d_conv": 3,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    }, atol=3e-4),
    Case("granite-hybrid-moe", "GraniteMoeHybrid", {
        "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40,
        "shared_intermediate_size": 48, "residual_multiplier": 0.4, "logits_scaling": 0.5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 12,
    }, atol=3e-4),
    Case("granite-hybrid-moe-attention", "GraniteMoeHybrid", {
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48,
        "shared_intermediate_size": 64, "layer_types": ["full_attention"] * 3,
        "mamba_n_heads": 16, "position_embedding_type": "rope",
    }),
    Case("granite-hybrid-biases", "GraniteMoeHybrid", {
        "num_local_experts": 0, "shared_intermediate_size": 64, "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "mamba_n_heads": 4, "mamba_d_state": 22, "mamba_proj_bias": True, "mamba_conv_bias": False,
    }, atol=3e-4),
    Case("falcon-h1", "FalconH1", {
        "mamba_d_ssm": 80, "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_d_conv": 3,
        "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "key_multiplier": 0.5,
        "embedding_multiplier": 3.0, "lm_head_multiplier": 0.7, "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.9, 0.6],
        "ssm_multipliers": [0.7, 0.9, 1.3, 1.1, 0.8], "head_dim": 24,
    }, atol=3e-4),
    Case("falcon-h1-norm", "FalconH1", {
        "mamba_d_ssm": 96, "mamba_n_heads": 16, "mamba_n_groups": 2, "mamba_d_state": 12,
        "mamba_rms_norm": True, "mamba_norm_before_gate": False, "num_key_value_heads": 1,
        "mamba_proj_bias": True, "projectors_bias": True, "mamba_conv_bias": False,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
        "ssm_multipliers": [0.7, 0.9, 1.3, 1.1, 0.8], "key_multiplier": 0.5,
    }, atol=3e-4),
    Case("nemotron-h", "NemotronH", {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention",
                              "mlp"],
        "head_dim": 24, "mamba_num_heads": 16, "mamba_head_dim": 6, "n_groups": 2,
        "ssm_state_size": 12, "conv_kernel": 3, "time_step_min": 0.5,
    }, atol=3e-4),
    Case("nemotron-h-moe", "NemotronH", {
        "layers_block_type": ["moe", "linear_attention", "full_attention", "linear_attention",
                              "moe", "linear_attention"],
        "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 10, "n_groups": 1,
        "ssm_state_size": 20, "n_routed_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 32,
        "routed_scaling_factor": 1.5, "use_bias": True, "mamba_proj_bias": True,
        "use_conv_bias": False,
    }, atol=3e-4),
    Case("llama4", "Llama4Text", {
        "intermediate_size": 40, "intermediate_size_mlp": 96, "num_hidden_layers": 4,
        "num_local_experts": 5, "head_dim": 24, "attention_chunk_size": 7, "floor_scale": 6,
        "interleave_moe_layer_step": 2,
    } | rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0,
             original_max_position_embeddings=32)),
    Case("llama4-two-experts", "Llama4Text", {
        "intermediate_size": 48, "intermediate_size_mlp": 64, "num_local_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 16, "no_rope_layers": [0, 1, 1], "moe_layers": [1, 2],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
        "attention_chunk_size": 16, "attn_temperature_tuning": False, "use_qk_norm": False,
        "attention_bias": True,
    } | rope("default")),
    Case("qwen3-moe-normalised", "Qwen3Moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 16,
    }),
    Case("deepseek-v2-lite", "DeepseekV2", LATENT | {
        "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    } | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7,
             mscale_all_dim=0.7)),
    Case("deepseek-v2-groups", "DeepseekV2", LATENT | {
        "q_lora_rank": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 32, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "qk_nope_head_dim": 24, "v_head_dim": 48,
    } | rope("default")),
    Case("deepseek-v3", "DeepseekV3", LATENT | {
        "q_lora_rank": 48, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    } | rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0,
             mscale_all_dim=1.0)),
    Case("deepseek-v3-halves", "DeepseekV3", LATENT | {
        "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 2,
        "rope_interleave": False, "norm_topk_prob": False,
    } | rope("default")),
    Case("deepseek-v32", "DeepseekV32", INDEXED | {"n_group": 2, "topk_group": 1}),
    Case("glm4-moe-lite", "Glm4MoeLite", LATENT | {
        "q_lora_rank": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "mlp_layer_types": ["sparse", "dense", "sparse"],
    } | rope("default")),
    Case("glm-moe-dsa", "GlmMoeDsa", INDEXED | {"indexer_types": ["full", "shared", "full"]}),
    Case("youtu", "Youtu", LATENT | {"q_lora_rank": 32} | rope("default")),
    Case("qwen3.5-moe", "Qwen3_5MoeText", {
        "num_hidden_layers": 3, "head_dim": 24, "linear_key_head_dim": 12,
        "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48,
    }, atol=3e-4),
    Case("qwen3-next", "Qwen3Next", {
        "num_hidden_layers": 4, "head_dim": 24, "linear_key_head_dim": 12,
        "linear_value_head_dim": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention",
                        "linear_attention"],
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48, "mlp_only_layers": [2],
    }, atol=3e-4),
    Case("qwen3-next-one-by-one", "Qwen3Next", {
        "num_hidden_layers": 2, "head_dim": 16, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48, "norm_topk_prob": False,
        "layer_types": ["linear_attention", "full_attention"],
    }, atol=3e-4),
    Case("qwen2-moe", "Qwen2Moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 48, "mlp_only_layers": [1],
    }),
    Case("olmo3", "Olmo3", {
        "sliding_window": 9, "num_hidden_layers": 4, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                               "original_max_position_embeddings": 64},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    Case("exaone4", "Exaone4", {
        "sliding_window": 7, "num_hidden_layers": 4, "sliding_window_pattern": 2,
    }),
    Case("exaone4-full", "Exaone4", {
        "sliding_window": None, "layer_types": ["full_attention"] * 3,
    }),
    Case("ernie4.5", "Ernie4_5", {"head_dim": 24, "use_bias": True}),
    Case("ernie4.5-moe", "Ernie4_5_Moe", {
        "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 40, "num_hidden_layers": 4,
        "moe_layer_end_index": 2,
    }),
    Case("seed-oss", "SeedOss", {"head_dim": 24, "attention_out_bias": True, "mlp_bias": True}),
    Case("minimax-m2", "MiniMaxM2", {
        "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24,
    } | rope("default", partial_rotary_factor=0.5)),
    Case("glm", "Glm", {"head_dim": 16}),
    Case("glm4", "Glm4", {"head_dim": 16}),
    Case("helium", "Helium", {
        "head_dim": 16, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True,
    }),
    Case("ministral", "Ministral", {
        "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    Case("gemma3n", "Gemma3nText", {
        "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "intermediate_size": [96, 96, 96, 96, 80, 80], "vocab_size_per_layer_input": VOCAB - 8,
        "hidden_size_per_layer_input": 16, "laurel_rank": 8, "altup_active_idx": 1,
        "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.9, 0.0],
        "final_logit_softcapping": 5.0,
    }),
    Case("gemma4", "Gemma4Text", {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 6, "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": True, "final_logit_softcapping": 5.0,
    }),
    Case("gemma4-mixture", "Gemma4Text", {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 3, "moe_intermediate_size": 40,
    }),
    Case("cohere", "Cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    Case("cohere2", "Cohere2", {
        "logit_scale": 0.5, "sliding_window": 7, "num_hidden_layers": 4, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    Case("nemotron", "Nemotron", {"attention_bias": True, "mlp_bias": True}),
    Case("stablelm", "StableLm", {"use_qkv_bias": True} | rope(
        "default", partial_rotary_factor=0.5,
    )),
    Case("stablelm-parallel", "StableLm", {"use_parallel_residual": True} | rope(
        "default", partial_rotary_factor=0.25,
    )),
    Case("starcoder2", "Starcoder2", {"sliding_window": 9}),
    Case("phi", "Phi", {"num_key_value_heads": None} | rope("default", partial_rotary_factor=0.5)),
    Case("phi-tied", "Phi", {"tie_word_embeddings": True} | rope(
        "linear", factor=2.0, partial_rotary_factor=0.25,
    )),
    Case("arcee", "Arcee", {"mlp_bias": True}),
    Case("ministral3", "Ministral3", {"head_dim": 16} | rope(
        "yarn", factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0,
        llama_4_scaling_beta=0.3,
    )),
)  # fmt: skip
