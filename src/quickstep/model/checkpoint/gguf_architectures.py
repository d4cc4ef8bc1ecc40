"""How each `general.architecture` of GGUF is written: the table that `gguf_spec` reads.

An entry names the architecture whose config the file was converted from, the tensors that it calls
otherwise, and the keys of its section that are a key of that config. Facts are those of llama.cpp's
converter and of its graphs: what a graph assumes, the file does not say (`config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from quickstep.model.decoder_spec import GGUF_DELTA, TensorNaming

# [C, K] in files, [C, 1, K] in the architecture
CONVOLUTIONS = ("shortconv.conv", "ssm_conv1d")
# `{}` is the number of an expert, or of a stream: files hold those of a layer, or of the model, as
# one tensor, one after another.
_STANDARD_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
        "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
        "nextn.eh_proj": "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_norm": "shared_head.norm",
    }
)
_GEMMA_PARTS = {
    **_STANDARD_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3N_PARTS = {
    **_GEMMA_PARTS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_PHI_PARTS = {
    **_STANDARD_PARTS,
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_OLMO2_PARTS = {
    **_STANDARD_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL_PARTS = {
    **_STANDARD_PARTS,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_GLM_PARTS = {
    **_STANDARD_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_GLM4_PARTS = {
    **_STANDARD_PARTS,
    "ffn_up": "mlp.gate_up_proj",
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_GPT_OSS_PARTS = {
    **_STANDARD_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "attn_sinks.weight": "self_attn.sinks",
}
_LFM_PARTS = {
    **_STANDARD_PARTS,
    "shortconv.conv": "linear_attn.conv1d",
    "shortconv.in_proj": "linear_attn.in_proj",
    "shortconv.out_proj": "linear_attn.out_proj",
}
_LLAMA4_PARTS = {
    **_STANDARD_PARTS,
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERT_PARTS = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_QWEN_HYBRID_PARTS = {
    **_STANDARD_PARTS,
    **_SHARED_EXPERT_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older files
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MAMBA_PARTS = {
    **_STANDARD_PARTS,
    "ssm_in": "linear_attn.in_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A",
    "ssm_d": "linear_attn.D",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_FALCON_PARTS = {  # some files have a norm without an ending
    **_MAMBA_PARTS,
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "post_attention_layernorm.weight"),
}
_NEMOTRON_PARTS = {
    **_MAMBA_PARTS,
    "attn_norm": "norm",
    "post_attention_norm": "post_attention_layernorm",  # of the layer that drafts
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
_GRANITE_HYBRID_PARTS = {
    **_MAMBA_PARTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_BERT_PARTS = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BERT_OUTER = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "cls": "classifier.dense",
    "cls.output": "classifier.out_proj",
}
OUTER_PARTS = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.norm",  # as LFM2's files call it
    "output": "lm_head",
    "output_norm": "model.norm",
}
_GEMMA3N_OUTER = {
    **OUTER_PARTS,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_EXPERT_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_EXPERT_KEYS = {**_EXPERT_KEYS, "expert_count": "num_local_experts"}
_DELTA_KEYS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_NEMOTRON_KEYS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "moe_latent_size": "moe_latent_size",
}
_GRANITE_KEYS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_QWEN_EXPERT_KEYS = {
    **_EXPERT_KEYS,
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# as llama.cpp's graphs of Qwen's mixtures have it
_NORMED_EXPERTS: Mapping[str, object] = MappingProxyType(
    {"expert_weights_norm": True, "expert_weights_scale": 1.0}
)
_TILED = TensorNaming(shared_expert="mlp.shared_expert", tiled_values=True, stored_rates=True)
_SILU: Mapping[str, object] = MappingProxyType({"hidden_act": "silu"})
_GELU: Mapping[str, object] = MappingProxyType({"hidden_activation": "gelu_pytorch_tanh"})


class Dialect(msgspec.Struct, frozen=True):
    """How one `general.architecture` is written.

    Attributes:
        name: The architecture.
        parts: Modules of a layer, or tensors with their ending, in the architecture's names.
        config: What llama.cpp's graph assumes, as keys of the config.
        keys: Keys of the file's section, and of the config.
        given: Keys of the file's section that have one value only.
        paired: The rows of queries and keys are in pairs, for rotation of neighbours.
        window: Layers may have a window.
        window_base: Layers with a window have frequencies of their own.
        softcaps: Attention and logits have soft-caps.
        yarn: What the model's YaRN differs in, as keys of the config's `rope_scaling`.
        scores_layers: Layers of the one size of the family whose scores are scaled by hidden size /
            heads instead of the head size (Gemma).
        norm_key: The config's key of the norms' epsilon.
        bias_key: Its key of biases of queries, keys and values; None where there always are some.
        without_keys: What layers without key heads are, in the config's `layer_types`.
        expanded: Layers of Mamba-2, an MLP or a mixture with another width than its shared expert,
            and positions only where the file says so (Granite 4).
        delta: Layers are Gated DeltaNet, but for those of full attention.
        chunks: Layers attend in chunks, unless the section has a window of 0.
        streams: There are several residual streams (Gemma 3n).
        single_blocks: A layer is a mixer or a feed-forward part, by the lists of its sizes; the one
            that drafts has both, and two norms.
        flags: Keys of the config that are set where layers have these tensors.
        naming: How the file differs from what the architecture's checkpoints have.
        optional_qk_norm: Queries and keys have norms where the file has them.
        outer: Modules outside layers, in the architecture's names.
        layers: Of the architecture's names, what the number of a layer follows.
        encoder: It is an encoder; `config` and `keys` are all that is said of it.
    """

    name: str
    parts: Mapping[str, str] = msgspec.field(default_factory=lambda: _STANDARD_PARTS)
    config: Mapping[str, object] = msgspec.field(default_factory=lambda: _SILU)
    keys: Mapping[str, str] = msgspec.field(default_factory=dict)
    given: Mapping[str, object] = msgspec.field(default_factory=dict)
    paired: bool = False
    window: bool = False
    window_base: bool = False
    softcaps: bool = False
    yarn: Mapping[str, object] = msgspec.field(default_factory=dict)
    scores_layers: int | None = None
    norm_key: str = "rms_norm_eps"
    bias_key: str | None = "attention_bias"
    without_keys: str | None = None
    expanded: bool = False
    delta: bool = False
    chunks: bool = False
    streams: bool = False
    single_blocks: bool = False
    flags: Mapping[str, str] = msgspec.field(default_factory=dict)
    naming: TensorNaming | None = None
    optional_qk_norm: bool = False
    outer: Mapping[str, str] = msgspec.field(default_factory=lambda: OUTER_PARTS)
    layers: str = "model.layers"
    encoder: bool = False


_NEMOTRON_H = Dialect(
    "NemotronHForCausalLM",
    _NEMOTRON_PARTS,
    # its graph has no least time step
    config={"mlp_hidden_act": "relu2", "time_step_min": 0.0},
    keys=_NEMOTRON_KEYS,
    given={"expert_shared_count": 1},
    paired=True,  # as of Llama, although nothing is rotated
    norm_key="layer_norm_epsilon",
    single_blocks=True,
    flags={"ssm_conv1d.bias": "use_conv_bias"},
    naming=TensorNaming(stored_rates=True),
)

MIXTRAL = Dialect("MixtralForCausalLM", _MIXTRAL_PARTS, keys=_LOCAL_EXPERT_KEYS, paired=True)

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "llama": Dialect("LlamaForCausalLM", paired=True),
        "qwen2": Dialect("Qwen2ForCausalLM", bias_key=None),
        "qwen2moe": Dialect(
            "Qwen2MoeForCausalLM",
            {**_STANDARD_PARTS, **_SHARED_EXPERT_PARTS},
            config={**_SILU, "norm_topk_prob": False},
            keys=_QWEN_EXPERT_KEYS,
            given={"expert_weights_norm": False, "expert_weights_scale": 1.0},
            bias_key="qkv_bias",
        ),
        "qwen3": Dialect("Qwen3ForCausalLM"),
        "qwen3moe": Dialect(
            "Qwen3MoeForCausalLM",
            config={**_SILU, "norm_topk_prob": True},
            keys={**_EXPERT_KEYS, "expert_feed_forward_length": "moe_intermediate_size"},
            given=_NORMED_EXPERTS,
        ),
        "qwen3next": Dialect(
            "Qwen3NextForCausalLM",
            _QWEN_HYBRID_PARTS,
            config={**_SILU, "norm_topk_prob": True},
            keys={**_DELTA_KEYS, **_QWEN_EXPERT_KEYS},
            given=_NORMED_EXPERTS,
            delta=True,
            naming=replace(_TILED, delta=GGUF_DELTA, tiled_values=False),
        ),
        "qwen35": Dialect(
            "Qwen3_5ForCausalLM", _QWEN_HYBRID_PARTS, keys=_DELTA_KEYS, delta=True, naming=_TILED
        ),
        "qwen35moe": Dialect(
            "Qwen3_5MoeForCausalLM",
            _QWEN_HYBRID_PARTS,
            keys={**_DELTA_KEYS, **_QWEN_EXPERT_KEYS},
            given=_NORMED_EXPERTS,
            delta=True,
            naming=_TILED,
        ),
        "phi3": Dialect("Phi3ForCausalLM", _PHI_PARTS, window=True),
        "gemma2": Dialect(
            "Gemma2ForCausalLM", _GEMMA_PARTS, _GELU, window=True, softcaps=True, scores_layers=46
        ),
        "gemma3": Dialect(
            "Gemma3ForCausalLM",
            _GEMMA_PARTS,
            _GELU,
            window=True,
            window_base=True,
            scores_layers=62,
        ),
        "gemma3n": Dialect(
            "Gemma3nForCausalLM",
            _GEMMA3N_PARTS,
            _GELU,
            keys={
                "altup.active_idx": "altup_active_idx",
                "altup.num_inputs": "altup_num_inputs",
                "embedding_length_per_layer_input": "hidden_size_per_layer_input",
                "attention.shared_kv_layers": "num_kv_shared_layers",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            window=True,
            window_base=True,
            streams=True,
            flags={"altup_correct_scale.weight": "altup_correct_scale"},
            outer=_GEMMA3N_OUTER,
        ),
        "olmo2": Dialect("Olmo2ForCausalLM", _OLMO2_PARTS),
        "exaone4": Dialect("Exaone4ForCausalLM", _OLMO2_PARTS, window=True),
        "seed_oss": Dialect(
            "SeedOssForCausalLM",
            {**_STANDARD_PARTS, "post_attention_norm": "post_attention_layernorm"},
        ),
        "arcee": Dialect("ArceeForCausalLM", config={"hidden_act": "relu2"}, paired=True),
        "ernie4_5": Dialect("Ernie4_5ForCausalLM", bias_key="use_bias"),
        "olmoe": Dialect(
            "OlmoeForCausalLM",
            config={**_SILU, "norm_topk_prob": False},
            keys=_EXPERT_KEYS,
        ),
        "granite": Dialect(
            "GraniteForCausalLM",
            keys=_GRANITE_KEYS,
            paired=True,
        ),
        "granitehybrid": Dialect(
            "GraniteMoeHybridForCausalLM",
            _GRANITE_HYBRID_PARTS,
            config={**_SILU, "num_local_experts": 0},  # where there is no count
            keys={
                **_LOCAL_EXPERT_KEYS,
                **_GRANITE_KEYS,
                "ssm.conv_kernel": "mamba_d_conv",
                "ssm.state_size": "mamba_d_state",
                "ssm.group_count": "mamba_n_groups",
                "ssm.time_step_rank": "mamba_n_heads",
            },
            paired=True,
            without_keys="linear_attention",
            expanded=True,
            flags={"ssm_conv1d.bias": "mamba_conv_bias"},
            naming=TensorNaming(stored_rates=True),
        ),
        "smollm3": Dialect(
            "SmolLM3ForCausalLM", config={**_SILU, "no_rope_layer_interval": 4}, paired=True
        ),
        "glm4moe": Dialect(
            "Glm4MoeForCausalLM",
            _GLM_PARTS,
            keys={
                "expert_count": "n_routed_experts",
                "expert_used_count": "num_experts_per_tok",
                "expert_feed_forward_length": "moe_intermediate_size",
                "expert_shared_count": "n_shared_experts",
                "leading_dense_block_count": "first_k_dense_replace",
                "expert_weights_scale": "routed_scaling_factor",
                "expert_weights_norm": "norm_topk_prob",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
            },
            given={"expert_gating_func": 2},  # sigmoid
            optional_qk_norm=True,
        ),
        "glm4": Dialect("Glm4ForCausalLM", _GLM4_PARTS),
        "cohere2": Dialect(
            "Cohere2ForCausalLM",
            keys={"logit_scale": "logit_scale"},
            window=True,
            norm_key="layer_norm_eps",
        ),
        "gpt-oss": Dialect(
            "GptOssForCausalLM",
            _GPT_OSS_PARTS,
            config={**_SILU, "rope_parameters": None},
            keys=_LOCAL_EXPERT_KEYS | {"expert_feed_forward_length": "intermediate_size"},
            window=True,
            yarn={"truncate": False},
        ),
        "falcon-h1": Dialect(
            "FalconH1ForCausalLM",
            _FALCON_PARTS,
            config={**_SILU, "mamba_norm_before_gate": False},  # multipliers are in its matrices
            keys={
                "ssm.conv_kernel": "mamba_d_conv",
                "ssm.inner_size": "mamba_d_ssm",
                "ssm.state_size": "mamba_d_state",
                "ssm.group_count": "mamba_n_groups",
                "ssm.time_step_rank": "mamba_n_heads",
            },
            flags={"ssm_norm.weight": "mamba_rms_norm", "ssm_conv1d.bias": "mamba_conv_bias"},
            naming=TensorNaming(stored_rates=True),
        ),
        "nemotron_h": _NEMOTRON_H,
        "nemotron_h_moe": _NEMOTRON_H,
        "llama4": Dialect(
            "Llama4ForCausalLM",
            _LLAMA4_PARTS,
            keys={
                **_LOCAL_EXPERT_KEYS,
                "feed_forward_length": "intermediate_size_mlp",
                "expert_feed_forward_length": "intermediate_size",
                "interleave_moe_layer_step": "interleave_moe_layer_step",
            },
            chunks=True,
            naming=TensorNaming(router="mlp.router", shared_expert="mlp.shared_expert"),
        ),
        "lfm2": Dialect(
            "Lfm2ForCausalLM",
            _LFM_PARTS,
            config={"block_auto_adjust_ff_dim": False},
            keys={"shortconv.l_cache": "conv_L_cache"},
            norm_key="norm_eps",
            without_keys="conv",
        ),
        "bert": Dialect(
            "BertModel",
            _BERT_PARTS,
            config={"hidden_act": "gelu", "pad_token_id": -1},  # positions begin with the first row
            keys={
                "block_count": "num_hidden_layers",
                "embedding_length": "hidden_size",
                "feed_forward_length": "intermediate_size",
                "attention.head_count": "num_attention_heads",
                "attention.layer_norm_epsilon": "layer_norm_eps",
            },
            outer=_BERT_OUTER,
            layers="encoder.layer",
            encoder=True,
        ),
    }
)
