"""Model shapes that a benchmark fills with random weights, as in the `config.json` of the model.

Standard library only, because the command line lists the names. Sizes are the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "qwen2.5-0.5b": MappingProxyType(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_size": 896,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "intermediate_size": 4864,
                "vocab_size": 151_936,
                "max_position_embeddings": 32_768,
                "rope_theta": 1_000_000.0,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
            }
        ),
        "qwen3.5-0.8b": MappingProxyType(
            {
                "architectures": ["Qwen3_5ForCausalLM"],
                "hidden_size": 1024,
                "num_hidden_layers": 24,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "intermediate_size": 3584,
                "vocab_size": 248_320,
                "max_position_embeddings": 262_144,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 16,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "full_attention_interval": 4,
                "rope_theta": 10_000_000.0,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
            }
        ),
        "qwen2.5-7b": MappingProxyType(
            {
                "architectures": ["Qwen2ForCausalLM"],
                "hidden_size": 3584,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "intermediate_size": 18_944,
                "vocab_size": 152_064,
                "max_position_embeddings": 32_768,
                "rope_theta": 1_000_000.0,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
            }
        ),
        "llama-3.1-8b": MappingProxyType(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 14_336,
                "vocab_size": 128_256,
                "max_position_embeddings": 131_072,
                "rope_theta": 500_000.0,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
            }
        ),
        "llama-3.2-1b": MappingProxyType(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 2048,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "intermediate_size": 8192,
                "vocab_size": 128_256,
                "max_position_embeddings": 131_072,
                "rope_theta": 500_000.0,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
            }
        ),
        # 4 of the 48 layers of Qwen3-30B-A3B: what fits a small machine at any precision.
        "qwen3-30b-a3b-4-layers": MappingProxyType(
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "hidden_size": 2048,
                "num_hidden_layers": 4,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "vocab_size": 151_936,
                "max_position_embeddings": 40_960,
                "rope_theta": 1_000_000.0,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
            }
        ),
        # So small that a step is all overhead.
        "tiny2": MappingProxyType(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 128,
                "vocab_size": 1024,
                "max_position_embeddings": 4096,
                "rope_theta": 10_000.0,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
            }
        ),
    }
)
