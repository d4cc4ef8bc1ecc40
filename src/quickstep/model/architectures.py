"""The table of natively supported architectures: each entry is data about one model family.

To add one: write an entry here (keys, defaults, which of `layer_patterns` it uses);
where it computes something new, add a field to `ModelSpec` and honour it in `decoder.py`; add a
case to `tests/support/golden_cases.py`. Defaults are those of the family's config class, for files
that leave them out. `spec.py` reads configs with this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from quickstep.model.checkpoint.config_fields import MOST_LAYERS, ConfigFields
from quickstep.model.decoder_spec import (
    FUSED_DELTA,
    STANDARD_NAMING,
    AltUp,
    LatentSpec,
    LayerInputs,
    LayerSpec,
    MoESpec,
    Multipliers,
    NormPlacement,
    QKNorm,
    TensorNaming,
)
from quickstep.model.layer_patterns import experts, layers, ropes, states, windows
from quickstep.model.layer_patterns.ropes import Ropes
from quickstep.model.layer_patterns.states import StateMixers
from quickstep.model.layer_patterns.windows import Windows
from quickstep.model.rope_spec import rope_parameters, yarn_scale


def _head_scale(fields: ConfigFields, head_size: int) -> float:
    del fields
    return 1.0 / math.sqrt(head_size)


def _gemma_scale(fields: ConfigFields, head_size: int) -> float:
    del head_size
    return 1.0 / math.sqrt(fields.number("query_pre_attn_scalar"))


def _granite_scale(fields: ConfigFields, head_size: int) -> float:
    del head_size
    return fields.number("attention_multiplier")


def _latent_scale(fields: ConfigFields, head_size: int) -> float:
    """Of DeepSeek: times the square of YaRN's scale, if `mscale_all_dim` is set."""
    parameters = rope_parameters(fields)
    factor, multiplier = parameters.get("factor"), parameters.get("mscale_all_dim")
    is_scaled = (parameters.get("rope_type") or parameters.get("type")) not in (None, "default")
    scale = 1.0
    if is_scaled and isinstance(factor, (int, float)) and isinstance(multiplier, (int, float)):
        scale = yarn_scale(factor, multiplier)
    return scale * scale / math.sqrt(head_size)


def _no_scale(fields: ConfigFields, head_size: int) -> float:
    del fields, head_size
    return 1.0


def _falcon_scale(fields: ConfigFields, head_size: int) -> float:
    """With the factor of keys."""
    return fields.number("key_multiplier") / math.sqrt(head_size)


def _no_multipliers(fields: ConfigFields) -> Multipliers:
    del fields
    return Multipliers()


def _no_inputs(fields: ConfigFields) -> LayerInputs | None:
    del fields
    return None


def _one_stream(fields: ConfigFields) -> AltUp | None:
    del fields
    return None


def _no_experts(fields: ConfigFields) -> MoESpec | None:
    del fields
    return None


def _no_latents(fields: ConfigFields) -> LatentSpec | None:
    del fields
    return None


def _all_dense(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    del fields
    return (False,) * num_layers


def _same_sizes(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    del fields
    return layers


def _num_layers(fields: ConfigFields) -> int:
    return fields.integer("num_hidden_layers", MOST_LAYERS)


def _intermediate_size(fields: ConfigFields) -> int:
    return fields.integer("intermediate_size")


class Architecture(msgspec.Struct, frozen=True):
    """How to read one family's config, and what its decoder does that the config does not say.

    Attributes:
        defaults: Values for keys that a config may leave out.
        neutral: Keys with the one value at which they change nothing.
        repeated: Keys that say the same as others, by the others' names.
        tied_key: Another name of `tie_word_embeddings`, which has priority.
        activation_key: The config key of the activation.
        bias_key: A key that switches the biases of q, k, v (and o, with `output_bias`).
        output_bias_key: The key of o's bias, where that has one of its own.
        qkv_bias: q, k and v always have a bias.
        mlp_bias_key: A key that switches the biases of gate, up and down.
        qk_norm_key: A key that switches the norm of each head's queries and keys.
        scaled_embedding: Embeddings are multiplied by sqrt(hidden_size).
        multipliers: Reads Granite's four multipliers.
        softcaps: Reads the soft-caps of attention and logits.
        sinks: Attention has a learned sink per query head.
        clamped_swiglu: The activation is gpt-oss's, whatever `activation_key` says.
        sizes: What of its layers differs from the model's sizes.
        value_norm, layer_scalars, layer_inputs: As in `ModelSpec`.
        layer_norm, norm_bias, gated, head_bias: As in `ModelSpec`.
        parallel_key: A key that makes attention and MLP parallel.
        logit_scale_key: The key of a factor of the logits.
        switched_qk_norm: The norm that `qk_norm_key` switches on.
        width: Reads the width of the feed-forward part.
        num_layers: Reads how many layers there are.
        attention_gate: `ModelSpec.attention_gate`.
        norm_eps_key: The config key of the norms' epsilon.
        latent: Reads the sizes of attention over latents.
        layer_multipliers: `ModelSpec.multipliers`.
        embedding_key: The key of a factor of the embeddings.
        altup: Reads how many residual streams there are.
    """

    defaults: Mapping[str, object]
    neutral: Mapping[str, object] = msgspec.field(default_factory=dict)
    repeated: Mapping[str, str] = msgspec.field(default_factory=dict)
    tied_key: str | None = None
    activation_key: str = "hidden_act"
    bias_key: str | None = None
    output_bias_key: str | None = None
    qkv_bias: bool = False
    output_bias: bool = True
    mlp_bias_key: str | None = None
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_offset: float = 0.0
    qk_norm: QKNorm = QKNorm.NONE
    qk_norm_key: str | None = None
    scaled_embedding: bool = False
    multipliers: bool = False
    softcaps: bool = False
    sinks: bool = False
    clamped_swiglu: bool = False
    scale: Callable[[ConfigFields, int], float] = _head_scale
    windows: Callable[[ConfigFields, int], Windows] = windows.full_attention
    ropes: Callable[[ConfigFields, int, int], Ropes] = ropes.one_rope
    experts: Callable[[ConfigFields], MoESpec | None] = _no_experts
    sparse: Callable[[ConfigFields, int], tuple[bool, ...]] = _all_dense
    mixers: Callable[[ConfigFields, int], StateMixers] = states.all_attention
    width: Callable[[ConfigFields], int] = _intermediate_size
    num_layers: Callable[[ConfigFields], int] = _num_layers
    attention_gate: bool = False
    norm_eps_key: str = "rms_norm_eps"
    naming: TensorNaming = STANDARD_NAMING
    latent: Callable[[ConfigFields], LatentSpec | None] = _no_latents
    sizes: Callable[[ConfigFields, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]] = _same_sizes
    value_norm: bool = False
    layer_scalars: bool = False
    layer_inputs: Callable[[ConfigFields], LayerInputs | None] = _no_inputs
    layer_norm: bool = False
    norm_bias: bool = False
    gated: bool = True
    head_bias: bool = False
    parallel_key: str | None = None
    logit_scale_key: str | None = None
    switched_qk_norm: QKNorm = QKNorm.HEAD
    layer_multipliers: Callable[[ConfigFields], Multipliers] = _no_multipliers
    embedding_key: str | None = None
    altup: Callable[[ConfigFields], AltUp | None] = _one_stream


def _defaults(**values: object) -> Mapping[str, object]:
    common = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
    return MappingProxyType(common | values)


def _wrapped(naming: TensorNaming) -> TensorNaming:
    """As part of a larger model, under the names that these have had."""
    return replace(
        naming,
        prefixes=("model.language_model.", "language_model.model.", "model."),
        heads=("lm_head.weight", "language_model.lm_head.weight"),
        wrapped=True,
    )


_LLAMA = Architecture(
    defaults=_defaults(max_position_embeddings=2048),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
)

_MISTRAL = Architecture(
    defaults=_defaults(num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096),
    windows=windows.every_layer_window,
)

_QWEN2 = Architecture(
    defaults=_defaults(
        num_key_value_heads=32,
        max_position_embeddings=32_768,
        sliding_window=4096,
        max_window_layers=28,
    ),
    qkv_bias=True,
    output_bias=False,
    windows=windows.qwen_windows,
)

_QWEN3 = Architecture(
    defaults=_defaults(
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=32_768,
        sliding_window=4096,
        max_window_layers=28,
    ),
    bias_key="attention_bias",
    qk_norm=QKNorm.HEAD,
    windows=windows.qwen_windows,
)

_QWEN3_MOE = Architecture(
    defaults=_defaults(
        max_position_embeddings=32_768,
        sliding_window=4096,
        num_key_value_heads=4,
        decoder_sparse_step=1,
        moe_intermediate_size=768,
        num_experts_per_tok=8,
        num_experts=128,
    ),
    bias_key="attention_bias",
    qk_norm=QKNorm.HEAD,
    windows=windows.optional_window,
    experts=experts.qwen_experts,
    sparse=experts.qwen_sparse,
)

_MIXTRAL = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        num_experts_per_tok=2,
        num_local_experts=8,
    ),
    windows=windows.every_layer_window,
    experts=experts.mixtral_experts,
    sparse=experts.all_sparse,
    naming=TensorNaming(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_parts=("w1", "w3", "w2"),
    ),
)

_OLMOE = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        num_experts_per_tok=8,
        num_experts=64,
    ),
    bias_key="attention_bias",
    qk_norm=QKNorm.FULL,
    experts=experts.olmoe_experts,
    sparse=experts.all_sparse,
)

_GLM4_MOE = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        partial_rotary_factor=0.5,
        moe_intermediate_size=1408,
        num_experts_per_tok=8,
        n_routed_experts=128,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
    ),
    bias_key="attention_bias",
    output_bias=False,
    qk_norm_key="use_qk_norm",
    experts=experts.glm_experts,
    sparse=experts.glm_sparse,
)

_GEMMA_SIZES: Mapping[str, object] = MappingProxyType(
    {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
)

_GEMMA2 = Architecture(
    defaults=_defaults(
        **_GEMMA_SIZES,
        vocab_size=256_000,
        max_position_embeddings=8192,
        final_logit_softcapping=30.0,
        attn_logit_softcapping=50.0,
    ),
    activation_key="hidden_activation",
    bias_key="attention_bias",
    norm_placement=NormPlacement.SANDWICH,
    norm_offset=1.0,
    scaled_embedding=True,
    softcaps=True,
    scale=_gemma_scale,
    windows=windows.gemma2_windows,
)

_GEMMA3 = Architecture(
    defaults=_defaults(
        **_GEMMA_SIZES, vocab_size=262_208, max_position_embeddings=131_072, rope_theta=None
    ),
    activation_key="hidden_activation",
    bias_key="attention_bias",
    norm_placement=NormPlacement.SANDWICH,
    norm_offset=1.0,
    qk_norm=QKNorm.HEAD,
    scaled_embedding=True,
    softcaps=True,
    scale=_gemma_scale,
    windows=windows.gemma3_windows,
    ropes=ropes.gemma3_ropes,
    naming=_wrapped(STANDARD_NAMING),
)

_PHI3 = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
    ),
    neutral=MappingProxyType({"interpolate_factor": 1, "full_attn_mod": 1}),
    windows=windows.every_layer_window,
    ropes=ropes.phi_ropes,
    naming=TensorNaming(fused_qkv=True, fused_gate_up=True),
)

_SMOLLM3 = Architecture(
    defaults=_defaults(
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        rope_theta=2_000_000.0,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    ),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
    windows=windows.smollm_windows,
    ropes=ropes.smollm_ropes,
)

_OLMO2 = Architecture(
    defaults=_defaults(rms_norm_eps=1e-5, max_position_embeddings=2048),
    bias_key="attention_bias",
    norm_placement=NormPlacement.POST,
    qk_norm=QKNorm.FULL,
)

_GRANITE_MULTIPLIERS: Mapping[str, object] = MappingProxyType(
    {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    }
)

_GRANITE = Architecture(
    defaults=_defaults(max_position_embeddings=2048, **_GRANITE_MULTIPLIERS),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
    multipliers=True,
    scale=_granite_scale,
)

_GRANITE_SWA = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        sliding_window=128,
        tie_word_embeddings=True,
        **_GRANITE_MULTIPLIERS,
    ),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
    multipliers=True,
    sinks=True,
    scale=_granite_scale,
    windows=windows.granite_windows,
    ropes=ropes.granite_ropes,
)

_GPT_OSS = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        head_dim=64,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_theta=150_000.0,
        rope_parameters=MappingProxyType(
            {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        ),
        sliding_window=128,
        attention_bias=True,
        num_local_experts=128,
        num_experts_per_tok=4,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
    ),
    bias_key="attention_bias",
    sinks=True,
    clamped_swiglu=True,
    windows=windows.gemma2_windows,  # the same pattern
    ropes=ropes.gpt_oss_ropes,
    experts=experts.gpt_oss_experts,
    sparse=experts.all_sparse,
    naming=TensorNaming(
        fused_experts=True,
        router="mlp.router",
        expert_parts=("gate_up_proj", "gate_up_proj", "down_proj"),
    ),
)


_GEMMA4 = Architecture(
    defaults=_defaults(
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        vocab_size=262_144,
        vocab_size_per_layer_input=262_144,
        hidden_size_per_layer_input=256,
        max_position_embeddings=131_072,
        sliding_window=512,
        tie_word_embeddings=True,
        rope_theta=None,
    ),
    # images attend to all of themselves; text does not
    neutral=MappingProxyType({"use_bidirectional_attention": "vision"}),
    activation_key="hidden_activation",
    bias_key="attention_bias",
    norm_placement=NormPlacement.SANDWICH,
    qk_norm=QKNorm.HEAD,
    scaled_embedding=True,
    softcaps=True,
    scale=_no_scale,
    windows=windows.gemma4_windows,
    ropes=ropes.gemma4_ropes,
    experts=experts.gemma4_experts,
    sparse=experts.gemma4_sparse,
    sizes=layers.gemma4_sizes,
    value_norm=True,
    layer_scalars=True,
    layer_inputs=layers.gemma4_inputs,
    naming=_wrapped(TensorNaming(router="router.proj", experts="experts")),
)


_GEMMA3N = Architecture(
    defaults=_defaults(
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=2048,
        intermediate_size=16_384,
        num_hidden_layers=35,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        vocab_size=262_400,
        vocab_size_per_layer_input=262_144,
        hidden_size_per_layer_input=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        num_kv_shared_layers=15,
        final_logit_softcapping=30.0,
        altup_num_inputs=4,
        altup_correct_scale=True,
        laurel_rank=64,
        tie_word_embeddings=True,
        rope_theta=None,
    ),
    activation_key="hidden_activation",
    bias_key="attention_bias",
    norm_placement=NormPlacement.SANDWICH,
    qk_norm=QKNorm.HEAD,
    scaled_embedding=True,
    softcaps=True,
    scale=_no_scale,
    windows=windows.gemma3n_windows,
    ropes=ropes.gemma3n_ropes,
    width=layers.gemma3n_width,
    sizes=layers.gemma3n_layers,
    value_norm=True,
    layer_inputs=layers.gemma3n_inputs,
    altup=layers.gemma3n_streams,
    naming=_wrapped(STANDARD_NAMING),
)

_COHERE_SIZES: Mapping[str, object] = MappingProxyType(
    {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)
# what every released file says of the family
_COHERE_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {
        "use_parallel_block": True,
        "use_gated_activation": True,
        "position_embedding_type": "rope_gptj",
        "rotary_pct": 1.0,
        "use_embedding_sharing": True,
        "order_of_interleaved_layers": "local_attn_first",
    }
)

_COHERE = Architecture(
    defaults=_defaults(**_COHERE_SIZES, rope_theta=500_000.0),
    neutral=_COHERE_NEUTRAL,
    bias_key="attention_bias",
    norm_placement=NormPlacement.PARALLEL,
    qk_norm_key="use_qk_norm",
    switched_qk_norm=QKNorm.EACH_HEAD,
    layer_norm=True,
    norm_eps_key="layer_norm_eps",
    logit_scale_key="logit_scale",
    ropes=ropes.interleaved_rope,
)

_COHERE2 = Architecture(
    defaults=_defaults(**_COHERE_SIZES, sliding_window=4096),
    neutral=_COHERE_NEUTRAL,
    bias_key="attention_bias",
    norm_placement=NormPlacement.PARALLEL,
    layer_norm=True,
    norm_eps_key="layer_norm_eps",
    logit_scale_key="logit_scale",
    windows=windows.cohere2_windows,
    ropes=ropes.cohere2_ropes,
)

_NEMOTRON = Architecture(
    defaults=_defaults(
        hidden_act="relu2",
        norm_eps=1e-5,
        max_position_embeddings=4096,
        partial_rotary_factor=0.5,
    ),
    repeated=MappingProxyType(
        dict.fromkeys(("rope_percent", "rope_percentage"), "partial_rotary_factor")
    ),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
    norm_offset=1.0,
    layer_norm=True,
    norm_bias=True,
    gated=False,
    norm_eps_key="norm_eps",
)

_STABLELM = Architecture(
    defaults=_defaults(
        layer_norm_eps=1e-5,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        partial_rotary_factor=0.25,
    ),
    repeated=MappingProxyType(
        {
            "norm_eps": "layer_norm_eps",
            "num_heads": "num_attention_heads",
            "rope_pct": "partial_rotary_factor",
        }
    ),
    bias_key="use_qkv_bias",
    output_bias=False,
    layer_norm=True,
    norm_bias=True,
    norm_eps_key="layer_norm_eps",
    parallel_key="use_parallel_residual",
)

_STARCODER2 = Architecture(
    defaults=_defaults(
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        use_bias=True,
        tie_word_embeddings=True,
    ),
    neutral=MappingProxyType(
        {
            "activation_function": "gelu",  # `hidden_act` is the one in force
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "scale_attn_weights": True,
        }
    ),
    repeated=MappingProxyType({"layer_norm_epsilon": "norm_epsilon"}),
    bias_key="use_bias",
    mlp_bias_key="use_bias",
    layer_norm=True,
    norm_bias=True,
    gated=False,
    norm_eps_key="norm_epsilon",
    windows=windows.every_layer_window,
    naming=TensorNaming(
        renames=((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj."))
    ),
)

_PHI = Architecture(
    defaults=_defaults(
        hidden_act="gelu_new",
        layer_norm_eps=1e-5,
        max_position_embeddings=2048,
        partial_rotary_factor=0.5,
        attention_bias=True,
        mlp_bias=True,
    ),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
    norm_placement=NormPlacement.PARALLEL,
    layer_norm=True,
    norm_bias=True,
    gated=False,
    head_bias=True,
    norm_eps_key="layer_norm_eps",
    naming=TensorNaming(
        renames=(
            (".self_attn.dense.", ".self_attn.o_proj."),
            (".mlp.fc1.", ".mlp.up_proj."),
            (".mlp.fc2.", ".mlp.down_proj."),
            ("model.final_layernorm.", "model.norm."),
        )
    ),
)

_ARCEE = Architecture(
    defaults=_defaults(
        hidden_act="relu2",
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
    ),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
    gated=False,
)


_QWEN3_VL_MOE = replace(
    _QWEN3_MOE,
    defaults=MappingProxyType(
        {
            **_QWEN3_MOE.defaults,
            "rope_theta": 500_000.0,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128_000,
            "tie_word_embeddings": True,
        }
    ),
    experts=experts.qwen_vl_experts,
    naming=_wrapped(STANDARD_NAMING),
)

_OLMO3 = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position_embeddings=2048,
        sliding_window=4096,
    ),
    bias_key="attention_bias",
    norm_placement=NormPlacement.POST,
    qk_norm=QKNorm.FULL,
    windows=windows.olmo3_windows,
    ropes=ropes.olmo3_ropes,
)

_EXAONE4 = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        sliding_window=4096,
        sliding_window_pattern=4,
    ),
    norm_placement=NormPlacement.POST,
    qk_norm=QKNorm.HEAD,
    windows=windows.exaone_windows,
    ropes=ropes.exaone_ropes,
)

_ERNIE: Mapping[str, object] = MappingProxyType(
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }
)

_ERNIE4_5 = Architecture(
    defaults=_defaults(**_ERNIE, num_key_value_heads=2, head_dim=128),
    neutral=MappingProxyType({"use_rmsnorm": True}),
    bias_key="use_bias",
    mlp_bias_key="use_bias",
    ropes=ropes.interleaved_rope,
)

_ERNIE4_5_MOE = Architecture(
    defaults=_defaults(
        **_ERNIE,
        num_key_value_heads=4,
        moe_intermediate_size=1536,
        moe_k=6,
        moe_num_experts=64,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
    ),
    neutral=MappingProxyType(
        {"use_rmsnorm": True, "moe_use_aux_free": True, "moe_gate": "topk", "moe_norm_min": 1e-12}
    ),
    bias_key="use_bias",
    mlp_bias_key="use_bias",
    ropes=ropes.interleaved_rope,
    experts=experts.ernie_experts,
    sparse=experts.ernie_sparse,
    naming=TensorNaming(selection_bias="mlp.moe_statics.e_score_correction_bias", bias_row=True),
)

_SEED_OSS = Architecture(
    defaults=_defaults(
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=524_288,
        attention_bias=True,
        attention_out_bias=False,
    ),
    bias_key="attention_bias",
    output_bias_key="attention_out_bias",
    mlp_bias_key="mlp_bias",
)

_MINIMAX_M2 = Architecture(
    defaults=_defaults(
        rope_theta=5_000_000.0,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=196_608,
        num_experts_per_tok=8,
        num_local_experts=256,
    ),
    neutral=MappingProxyType(
        {
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "shared_moe_mode": "sigmoid",
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
            "swa_rope_theta": -1.0,
        }
    ),
    qk_norm=QKNorm.FULL,
    windows=windows.minimax_windows,
    ropes=ropes.minimax_ropes,
    experts=experts.minimax_experts,
    sparse=experts.all_sparse,
    naming=TensorNaming(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        expert_parts=("w1", "w3", "w2"),
        selection_bias="block_sparse_moe.e_score_correction_bias",
    ),
)

_GLM_SIZES: Mapping[str, object] = MappingProxyType(
    {
        "rms_norm_eps": 1.5625e-07,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }
)

_GLM = Architecture(
    defaults=_defaults(**_GLM_SIZES),
    bias_key="attention_bias",
    output_bias=False,
    ropes=ropes.interleaved_rope,
    naming=TensorNaming(fused_gate_up=True),
)

_GLM4 = Architecture(
    defaults=_defaults(**_GLM_SIZES),
    bias_key="attention_bias",
    output_bias=False,
    norm_placement=NormPlacement.SANDWICH,
    ropes=ropes.interleaved_rope,
    naming=TensorNaming(
        fused_gate_up=True,
        renames=(
            (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
            (".post_self_attn_layernorm.", ".post_attention_layernorm."),
            (".post_mlp_layernorm.", ".post_feedforward_layernorm."),
        ),
    ),
)

_HELIUM = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-8,
        rope_theta=100_000.0,
        num_key_value_heads=20,
        head_dim=128,
        max_position_embeddings=4096,
    ),
    bias_key="attention_bias",
    output_bias=False,
    mlp_bias_key="mlp_bias",
    ropes=ropes.interleaved_rope,
)

_MINISTRAL = Architecture(
    defaults=_defaults(num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096),
    windows=windows.ministral_windows,
)

_MINISTRAL3 = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262_144,
        rope_theta=None,
        rope_parameters=MappingProxyType(
            {
                "rope_type": "yarn",
                "rope_theta": 1_000_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        ),
    ),
    windows=windows.every_layer_window,
    ropes=ropes.ministral3_ropes,
)

_LFM2 = Architecture(
    defaults=_defaults(
        norm_eps=1e-5,
        rms_norm_eps=None,
        rope_theta=1_000_000.0,
        max_position_embeddings=128_000,
        num_key_value_heads=8,
        conv_bias=False,
        conv_L_cache=3,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        tie_word_embeddings=True,
    ),
    neutral=MappingProxyType({"block_use_swiglu": True, "use_pos_enc": True}),
    repeated=MappingProxyType(
        {
            "block_dim": "hidden_size",
            "block_norm_eps": "norm_eps",
            "conv_dim": "hidden_size",
            "conv_dim_out": "hidden_size",
            "num_heads": "num_attention_heads",
            "theta": "rope_theta",
        }
    ),
    tied_key="tie_embedding",
    norm_eps_key="norm_eps",
    qk_norm=QKNorm.HEAD,
    windows=windows.no_windows,
    mixers=states.lfm_mixers,
    width=experts.lfm_width,
    naming=TensorNaming(
        renames=(
            (".feed_forward.w1.", ".mlp.gate_proj."),
            (".feed_forward.w3.", ".mlp.up_proj."),
            (".feed_forward.w2.", ".mlp.down_proj."),
            (".operator_norm.", ".input_layernorm."),
            (".ffn_norm.", ".post_attention_layernorm."),
            (".self_attn.out_proj.", ".self_attn.o_proj."),
            (".self_attn.q_layernorm.", ".self_attn.q_norm."),
            (".self_attn.k_layernorm.", ".self_attn.k_norm."),
            (".conv.conv.", ".linear_attn.conv1d."),
            (".conv.in_proj.", ".linear_attn.in_proj."),
            (".conv.out_proj.", ".linear_attn.out_proj."),
            ("model.embedding_norm.", "model.norm."),
        ),
    ),
)

_QWEN3_5 = Architecture(
    defaults=_defaults(
        head_dim=256,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        partial_rotary_factor=0.25,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        attention_bias=False,
    ),
    neutral=MappingProxyType({"attn_output_gate": True, "mamba_ssm_dtype": "float32"}),
    bias_key="attention_bias",
    norm_offset=1.0,
    qk_norm=QKNorm.HEAD,
    attention_gate=True,
    windows=windows.no_windows,
    mixers=states.delta_mixers,
    naming=_wrapped(STANDARD_NAMING),
)

_GRANITE_HYBRID = Architecture(
    defaults=_defaults(
        max_position_embeddings=2048,
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=1024,
        mamba_n_heads=128,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_d_head="auto",
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_conv_bias=True,
        **_GRANITE_MULTIPLIERS,
    ),
    neutral=MappingProxyType({"normalization_function": "rmsnorm", "init_method": "mup"}),
    bias_key="attention_bias",
    multipliers=True,
    scale=_granite_scale,
    windows=windows.no_windows,
    mixers=states.mamba_mixers,
    ropes=ropes.granite_hybrid_ropes,
    width=experts.granite_hybrid_width,
    experts=experts.granite_hybrid_experts,
    sparse=experts.granite_hybrid_sparse,
    naming=TensorNaming(
        fused_gate_up=True,
        shared_expert="mlp",
        renames=(
            (".block_sparse_moe.input_linear.weight", ".mlp.experts.gate_up_proj"),
            (".block_sparse_moe.output_linear.weight", ".mlp.experts.down_proj"),
            (".block_sparse_moe.router.layer.", ".mlp.gate."),
            (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
            (".shared_mlp.output_linear.", ".mlp.down_proj."),
            (".mamba.", ".linear_attn."),
        ),
    ),
)

_FALCON_H1 = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        mamba_d_ssm=1024,
        mamba_n_heads=128,
        mamba_n_groups=1,
        mamba_d_state=256,
        mamba_d_head="auto",
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_conv_bias=True,
        mamba_norm_before_gate=True,
        mamba_use_mlp=True,
        attention_in_multiplier=1.0,
        attention_out_multiplier=1.0,
        embedding_multiplier=1.0,
        key_multiplier=1.0,
        lm_head_multiplier=1.0,
        ssm_in_multiplier=1.0,
        ssm_out_multiplier=1.0,
    ),
    # the MLP's width is stated by itself
    neutral=MappingProxyType({"mamba_use_mlp": True, "mlp_expansion_factor": 8}),
    bias_key="attention_bias",
    mlp_bias_key="mlp_bias",
    scale=_falcon_scale,
    windows=windows.no_windows,
    mixers=states.falcon_h1_mixers,
    sizes=layers.falcon_h1_layers,
    layer_multipliers=layers.falcon_h1_multipliers,
    embedding_key="embedding_multiplier",
    logit_scale_key="lm_head_multiplier",
    naming=TensorNaming(
        renames=(
            (".feed_forward.", ".mlp."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            (".final_layernorm.", ".norm."),
            (".mamba.", ".linear_attn."),
        ),
    ),
)

_NEMOTRON_H = Architecture(
    defaults=_defaults(
        layer_norm_epsilon=1e-5,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        intermediate_size=21_504,
        mlp_hidden_act="relu2",
        ssm_state_size=128,
        mamba_num_heads=128,
        mamba_head_dim=64,
        mamba_hidden_act="silu",
        n_groups=8,
        conv_kernel=4,
        use_conv_bias=True,
        time_step_min=0.001,
        n_routed_experts=8,
        n_shared_experts=1,
        moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688,
        num_experts_per_tok=2,
        routed_scaling_factor=1.0,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
    ),
    neutral=MappingProxyType(
        {
            "mamba_ssm_cache_dtype": "float32",
            "moe_shared_expert_overlap": True,  # of kernels that run at once
            "rescale_prenorm_residual": True,  # of training's start
            "use_mamba_kernels": True,
        }
    ),
    repeated=MappingProxyType(
        {
            "norm_eps": "layer_norm_epsilon",
            "attention_head_dim": "head_dim",
        }
    ),
    activation_key="mlp_hidden_act",
    mlp_bias_key="mlp_bias",
    gated=False,
    windows=windows.no_windows,
    mixers=states.nemotron_h_mixers,
    ropes=ropes.no_ropes,
    sizes=layers.nemotron_h_layers,
    experts=experts.nemotron_h_experts,
    sparse=experts.nemotron_h_sparse,
    num_layers=layers.nemotron_h_count,
    norm_eps_key="layer_norm_epsilon",
    naming=TensorNaming(
        prefixes=("backbone.", "model."),
        renames=(
            ("backbone.embeddings.", "backbone.embed_tokens."),
            ("backbone.norm_f.", "backbone.norm."),
            # the prediction layer: attention and a mixture, each with its norm, are one layer here
            ("mtp.layers.0.enorm.", "mtp.pre_fc_norm_embedding."),
            ("mtp.layers.0.hnorm.", "mtp.pre_fc_norm_hidden."),
            ("mtp.layers.0.eh_proj.", "mtp.fc."),
            ("mtp.layers.0.norm.", "mtp.layers.0.input_layernorm."),
            ("mtp.layers.1.norm.", "mtp.layers.0.post_attention_layernorm."),
            ("mtp.layers.1.mixer.", "mtp.layers.0.mlp."),
            ("mtp.layers.1.final_layernorm.", "mtp.norm."),
            *((f".mixer.{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
            *(
                (f".mixer.{name}", f".linear_attn.{name}")
                for name in ("in_proj.", "out_proj.", "conv1d.", "norm.", "A_log", "dt_bias", "D")
            ),
            (".mixer.", ".mlp."),
        ),
    ),
)

_LATENT_SIZES: Mapping[str, object] = MappingProxyType(
    {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
    }
)

_DEEPSEEK_V2 = Architecture(
    defaults=_defaults(
        **_LATENT_SIZES,
        max_position_embeddings=2048,
        moe_intermediate_size=1407,
        n_routed_experts=64,
        n_shared_experts=2,
        routed_scaling_factor=1.0,
        first_k_dense_replace=0,
        topk_method="greedy",
    ),
    neutral=MappingProxyType({"moe_layer_freq": 1}),
    scale=_latent_scale,
    ropes=ropes.latent_ropes,
    experts=experts.deepseek_v2_experts,
    sparse=experts.glm_sparse,
    latent=layers.latent_attention,
)

_DEEPSEEK_V3 = Architecture(
    defaults=_defaults(
        **_LATENT_SIZES,
        max_position_embeddings=4096,
        moe_intermediate_size=2048,
        num_experts_per_tok=8,
        n_routed_experts=256,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        norm_topk_prob=True,
        num_nextn_predict_layers=1,
    ),
    neutral=MappingProxyType({"moe_layer_freq": 1}),
    scale=_latent_scale,
    ropes=ropes.latent_ropes,
    experts=experts.deepseek_experts,
    sparse=experts.glm_sparse,
    latent=layers.latent_attention,
)

_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    defaults=MappingProxyType(
        {**_DEEPSEEK_V3.defaults, "max_position_embeddings": 163_840, "index_topk": 2048}
    ),
    windows=windows.indexed_attention,
    sparse=experts.listed_sparse,
    naming=TensorNaming(ignored_module="indexer"),
)

_GLM_LATENT_SIZES: Mapping[str, object] = MappingProxyType(
    {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202_752,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
    }
)

_GLM4_MOE_LITE = replace(
    _DEEPSEEK_V3,
    defaults=MappingProxyType(
        {
            **_DEEPSEEK_V3.defaults,
            **_GLM_LATENT_SIZES,
            "q_lora_rank": 768,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.8,
            "first_k_dense_replace": 1,
        }
    ),
    sparse=experts.listed_sparse,
)

_GLM_MOE_DSA = replace(
    _DEEPSEEK_V32,
    defaults=MappingProxyType({**_DEEPSEEK_V32.defaults, **_GLM_LATENT_SIZES, "q_lora_rank": 2048}),
)

_YOUTU = Architecture(
    defaults=_defaults(**_LATENT_SIZES, max_position_embeddings=131_072, tie_word_embeddings=True),
    scale=_latent_scale,
    ropes=ropes.latent_ropes,
    latent=layers.latent_attention,
)

_KIMI_K25 = replace(_DEEPSEEK_V3, naming=_wrapped(STANDARD_NAMING))

_LLAMA4 = Architecture(
    defaults=_defaults(
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        intermediate_size_mlp=16_384,
        num_experts_per_tok=1,
        num_local_experts=16,
        interleave_moe_layer_step=1,
        use_qk_norm=True,
        no_rope_layer_interval=4,
        attention_chunk_size=8192,
        attn_temperature_tuning=True,
        floor_scale=8192,
        attn_scale=0.1,
    ),
    bias_key="attention_bias",
    qk_norm_key="use_qk_norm",
    switched_qk_norm=QKNorm.UNWEIGHTED,
    windows=windows.no_windows,
    ropes=ropes.llama4_ropes,
    sizes=layers.llama4_layers,
    width=experts.llama4_width,
    experts=experts.llama4_experts,
    sparse=experts.llama4_sparse,
    naming=_wrapped(
        TensorNaming(
            router="mlp.router",
            shared_expert="mlp.shared_expert",
            renames=((".feed_forward.", ".mlp."),),
        )
    ),
)

_QWEN2_MOE = Architecture(
    defaults=_defaults(
        num_key_value_heads=16,
        max_position_embeddings=32_768,
        sliding_window=4096,
        max_window_layers=28,
        decoder_sparse_step=1,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        num_experts_per_tok=4,
        num_experts=60,
        qkv_bias=True,
    ),
    bias_key="qkv_bias",
    output_bias=False,
    windows=windows.qwen2_moe_windows,
    experts=experts.qwen2_moe_experts,
    sparse=experts.qwen_sparse,
    naming=TensorNaming(shared_expert="mlp.shared_expert"),
)

_QWEN3_5_MOE = replace(
    _QWEN3_5,
    defaults=MappingProxyType(
        {
            **_QWEN3_5.defaults,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        }
    ),
    width=experts.expert_width,
    experts=experts.qwen3_5_experts,
    sparse=experts.all_sparse,
    naming=replace(
        _QWEN3_5.naming,
        shared_expert="mlp.shared_expert",
    ),
)

_LFM2_MOE = replace(
    _LFM2,
    defaults=MappingProxyType(
        {
            **_LFM2.defaults,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        }
    ),
    tied_key=_LLAMA.tied_key,
    width=_LLAMA.width,
    experts=experts.lfm_experts,
    sparse=experts.lfm_sparse,
    naming=replace(
        _LFM2.naming,
        expert_parts=("w1", "w3", "w2"),
        renames=(
            (".feed_forward.experts.", ".mlp.experts."),
            (".feed_forward.gate.", ".mlp.gate."),
            (".feed_forward.expert_bias", ".mlp.gate.e_score_correction_bias"),
            *_LFM2.naming.renames,
        ),
    ),
)

_QWEN3_NEXT = replace(
    _QWEN3_5_MOE,
    defaults=MappingProxyType(
        {
            **_QWEN3_5_MOE.defaults,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "num_nextn_predict_layers": 1,  # which its configs do not state
        }
    ),
    width=_QWEN2_MOE.width,
    experts=experts.qwen2_moe_experts,
    sparse=experts.qwen_sparse,
    naming=TensorNaming(shared_expert="mlp.shared_expert", delta=FUSED_DELTA),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "MistralForCausalLM": _MISTRAL,
        "Qwen2ForCausalLM": _QWEN2,
        "Qwen3ForCausalLM": _QWEN3,
        "Gemma2ForCausalLM": _GEMMA2,
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": _GEMMA3,
        "Phi3ForCausalLM": _PHI3,
        "SmolLM3ForCausalLM": _SMOLLM3,
        "Olmo2ForCausalLM": _OLMO2,
        "GraniteForCausalLM": _GRANITE,
        "MixtralForCausalLM": _MIXTRAL,
        "Qwen3MoeForCausalLM": _QWEN3_MOE,
        "GraniteSWAForCausalLM": _GRANITE_SWA,
        "GptOssForCausalLM": _GPT_OSS,
        "OlmoeForCausalLM": _OLMOE,
        "Glm4MoeForCausalLM": _GLM4_MOE,
        "Lfm2ForCausalLM": _LFM2,
        "Lfm2MoeForCausalLM": _LFM2_MOE,
        "GraniteMoeHybridForCausalLM": _GRANITE_HYBRID,
        "Llama4ForCausalLM": _LLAMA4,
        "Llama4ForConditionalGeneration": _LLAMA4,
        "FalconH1ForCausalLM": _FALCON_H1,
        "NemotronHForCausalLM": _NEMOTRON_H,
        "Qwen3_5ForCausalLM": _QWEN3_5,
        "Qwen3_5ForConditionalGeneration": _QWEN3_5,
        "DeepseekV2ForCausalLM": _DEEPSEEK_V2,
        "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
        "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
        "Glm4MoeLiteForCausalLM": _GLM4_MOE_LITE,
        "GlmMoeDsaForCausalLM": _GLM_MOE_DSA,
        "KimiK25ForConditionalGeneration": _KIMI_K25,
        "YoutuForCausalLM": _YOUTU,
        "Olmo3ForCausalLM": _OLMO3,
        "Exaone4ForCausalLM": _EXAONE4,
        "Ernie4_5ForCausalLM": _ERNIE4_5,
        "Ernie4_5_MoeForCausalLM": _ERNIE4_5_MOE,
        "SeedOssForCausalLM": _SEED_OSS,
        "MiniMaxM2ForCausalLM": _MINIMAX_M2,
        "GlmForCausalLM": _GLM,
        "Glm4ForCausalLM": _GLM4,
        "HeliumForCausalLM": _HELIUM,
        "MinistralForCausalLM": _MINISTRAL,
        "Ministral3ForCausalLM": _MINISTRAL3,
        "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL_MOE,
        "Qwen2MoeForCausalLM": _QWEN2_MOE,
        "MiMoForCausalLM": _QWEN2,
        "Qwen3NextForCausalLM": _QWEN3_NEXT,
        "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
        "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
        "CohereForCausalLM": _COHERE,
        "Cohere2ForCausalLM": _COHERE2,
        "NemotronForCausalLM": _NEMOTRON,
        "StableLmForCausalLM": _STABLELM,
        "Starcoder2ForCausalLM": _STARCODER2,
        "PhiForCausalLM": _PHI,
        "ArceeForCausalLM": _ARCEE,
        "Gemma3nForCausalLM": _GEMMA3N,
        "Gemma3nForConditionalGeneration": _GEMMA3N,
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": _GEMMA4,
    }
)

# For configs without `architectures`.
MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3": "Gemma3ForConditionalGeneration",
        "gemma3_text": "Gemma3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "granite": "GraniteForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "granite_swa": "GraniteSWAForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2_moe": "Lfm2MoeForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "llama4": "Llama4ForConditionalGeneration",
        "llama4_text": "Llama4ForCausalLM",
        "falcon_h1": "FalconH1ForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
        "kimi_k25": "KimiK25ForConditionalGeneration",
        "youtu": "YoutuForCausalLM",
        "olmo3": "Olmo3ForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "ernie4_5": "Ernie4_5ForCausalLM",
        "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "minimax_m2": "MiniMaxM2ForCausalLM",
        "glm": "GlmForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "helium": "HeliumForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "qwen2_vl_text": "Qwen2ForCausalLM",
        "qwen2_5_vl_text": "Qwen2ForCausalLM",
        "qwen3_vl_text": "Qwen3ForCausalLM",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "mistral3": "Mistral3ForConditionalGeneration",
        "gemma3n": "Gemma3nForConditionalGeneration",
        "gemma3n_text": "Gemma3nForCausalLM",
        "gemma4": "Gemma4ForConditionalGeneration",
        "gemma4_text": "Gemma4ForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "mimo": "MiMoForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "cohere": "CohereForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "nemotron": "NemotronForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
        "phi": "PhiForCausalLM",
        "arcee": "ArceeForCausalLM",
    }
)

# Models of text and images (or sound) whose text part is a decoder of the table: that part runs.
# By name, what the text part is where its config does not say.
WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "AyaVisionForConditionalGeneration": "Cohere2ForCausalLM",
        "InternVLForConditionalGeneration": "Qwen2ForCausalLM",
        "LlavaForConditionalGeneration": "LlamaForCausalLM",
        "LlavaNextForConditionalGeneration": "LlamaForCausalLM",
        "LlavaOnevisionForConditionalGeneration": "Qwen2ForCausalLM",
        "Mistral3ForConditionalGeneration": "MistralForCausalLM",
        "Qwen2AudioForConditionalGeneration": "Qwen2ForCausalLM",
        "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
        "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
        "VoxtralForConditionalGeneration": "LlamaForCausalLM",
    }
)


# Sizes of transformers' config classes, which the text part of older files leaves out: vocabulary,
# hidden and intermediate size, layers, heads.
_SIZES_OF_TEXT: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "LlamaForCausalLM": (32_000, 4096, 11_008, 32, 32),
        "MistralForCausalLM": (32_000, 4096, 14_336, 32, 32),
        "Qwen2ForCausalLM": (151_936, 4096, 22_016, 32, 32),
        "Qwen3ForCausalLM": (151_936, 4096, 22_016, 32, 32),
        "Cohere2ForCausalLM": (256_000, 8192, 22_528, 40, 64),
    }
)
_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
)


def text_part(name: str) -> Architecture:
    """An architecture of the table as part of a larger model, whose other tensors are left out."""
    architecture = ARCHITECTURES[name]
    sizes = dict(zip(_SIZE_KEYS, _SIZES_OF_TEXT.get(name, ()), strict=False))
    defaults = MappingProxyType({**sizes, **architecture.defaults})
    return replace(architecture, defaults=defaults, naming=_wrapped(architecture.naming))
