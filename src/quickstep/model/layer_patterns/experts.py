"""Mixtures of experts: their sizes and routers, and which layers have them."""

from __future__ import annotations

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.decoder_spec import (
    MoESpec,
)
from quickstep.model.layer_patterns.states import nemotron_h_kinds


def lfm_width(fields: ConfigFields) -> int:
    """Two thirds of the stated width, times a factor, rounded up, unless it is stated as it is."""
    width = fields.optional_integer("block_ff_dim") or fields.integer("intermediate_size")
    fields.optional_integer("intermediate_size")
    multiple, factor = (
        fields.integer("block_multiple_of"),
        fields.number("block_ffn_dim_multiplier"),
    )
    if not fields.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(factor * (2 * width // 3))
    return -(-width // multiple) * multiple


def lfm_experts(fields: ConfigFields) -> MoESpec:
    """A sigmoid, and a bias of each expert for the choice unless `use_expert_bias` is off."""
    return MoESpec(
        num_experts=fields.integer("num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
        sigmoid=True,
        selection_bias=fields.flag("use_expert_bias"),
        weight_scale=fields.number("routed_scaling_factor"),
    )


def lfm_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """All but the first `num_dense_layers`."""
    first = fields.optional_integer("num_dense_layers") or 0
    return tuple(index >= first for index in range(num_layers))


def nemotron_h_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """The layers that are a mixture."""
    del num_layers  # those that are listed
    return tuple([kind == "moe" for kind in nemotron_h_kinds(fields)])


def nemotron_h_experts(fields: ConfigFields) -> MoESpec | None:
    """As GLM's, with an expert of all tokens that has its own width, and latents that the others
    read; None for a model without.
    """
    width = fields.optional_integer("moe_shared_expert_intermediate_size")
    for name in ("num_experts_per_tok", "n_shared_experts"):
        fields.value(name)
    experts, latent = glm_experts(fields), fields.optional_integer("moe_latent_size")
    if "moe" not in nemotron_h_kinds(fields):
        return None
    width = width or fields.integer("moe_intermediate_size")
    return replace(experts, shared_width=width, latent_size=latent)


def granite_hybrid_width(fields: ConfigFields) -> int:
    """That of the MLP, which is an expert of all tokens in models that have others."""
    for key in ("intermediate_size", "num_experts_per_tok"):  # of experts
        fields.optional_integer(key)
    return fields.integer("shared_intermediate_size")


def granite_hybrid_experts(fields: ConfigFields) -> MoESpec | None:
    """A softmax over the chosen experts, and the MLP as an expert of all tokens; None for a dense
    model (Granite 4).
    """
    count = fields.optional_integer("num_local_experts")
    if not count:
        return None
    return MoESpec(
        num_experts=count,
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
        shared_width=fields.integer("shared_intermediate_size"),
    )


def granite_hybrid_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every layer, if there are experts."""
    return (bool(fields.optional_integer("num_local_experts")),) * num_layers


def mixtral_experts(fields: ConfigFields) -> MoESpec:
    """Every chosen expert's weight is normalised."""
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
    )


def qwen_experts(fields: ConfigFields) -> MoESpec:
    """Normalised only if `norm_topk_prob` is set."""
    count = fields.optional_integer("num_local_experts")
    return MoESpec(
        num_experts=count or fields.integer("num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
    )


def qwen_vl_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen's, always normalised."""
    return replace(qwen_experts(fields), normalise=True)


def glm_experts(fields: ConfigFields) -> MoESpec:
    """DeepSeek-V3's: a sigmoid, a bias of each expert, groups, and an expert of all tokens."""
    count = fields.optional_integer("num_local_experts") or fields.integer("n_routed_experts")
    width = fields.integer("moe_intermediate_size")
    groups, of_token = fields.integer("n_group"), fields.integer("topk_group")
    groups, of_token = _checked_groups(fields, count, groups, of_token)
    return MoESpec(
        num_experts=count,
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalise=fields.flag("norm_topk_prob"),
        sigmoid=True,
        selection_bias=True,
        num_groups=groups,
        groups_per_token=of_token,
        weight_scale=fields.number("routed_scaling_factor"),
        shared_width=width * fields.integer("n_shared_experts"),
    )


def _checked_groups(
    fields: ConfigFields, count: int, groups: int, of_token: int
) -> tuple[int, int]:
    if groups < 1 or count % groups or not 1 <= of_token <= groups:
        raise ConfigError(
            f"{fields.source} has {count} experts in {groups} groups, of which a token has "
            f"{of_token}; the groups must be of equal size"
        )
    return groups, of_token


def olmoe_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen's; an expert is as wide as `intermediate_size`."""
    return MoESpec(
        num_experts=fields.optional_integer("num_local_experts") or fields.integer("num_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=fields.flag("norm_topk_prob"),
    )


def gpt_oss_experts(fields: ConfigFields) -> MoESpec:
    """Biases everywhere, and a softmax over only the chosen experts."""
    chosen = fields.integer("num_experts_per_tok")
    fields.repeated("experts_per_token", "num_experts_per_tok")
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=chosen,
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
        biases=True,
    )


def all_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every layer is a mixture of experts."""
    del fields
    return (True,) * num_layers


def glm_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """All but the first `first_k_dense_replace` layers."""
    first = fields.optional_integer("first_k_dense_replace") or 0
    return tuple(index >= first for index in range(num_layers))


def qwen_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer, but those in `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step")
    dense = set(fields.sequence("mlp_only_layers") or ())
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def listed_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """By `mlp_layer_types`, or all but the first `first_k_dense_replace` layers."""
    types = fields.sequence("mlp_layer_types")
    after = glm_sparse(fields, num_layers)
    if types is None:
        return after
    if len(types) != num_layers or not {"dense", "sparse"}.issuperset(types):
        raise ConfigError(
            f"{fields.source} has {len(types)} mlp_layer_types for {num_layers} layers; each is "
            "'dense' or 'sparse'"
        )
    return tuple(kind == "sparse" for kind in types)


def deepseek_experts(fields: ConfigFields) -> MoESpec:
    """As GLM's, with the keys that only DeepSeek's files have."""
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    _read_training_keys(fields)
    return glm_experts(fields)


def deepseek_v2_experts(fields: ConfigFields) -> MoESpec:
    """Weights of a softmax, not normalised; the best groups are those of the best experts."""
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{fields.source} sets 'topk_method' to {method!r}; supported are 'greedy' and "
            "'group_limited_greedy'"
        )
    fields.only("scoring_func", "softmax")
    _read_training_keys(fields)
    count, width = fields.integer("n_routed_experts"), fields.integer("moe_intermediate_size")
    groups, of_token = fields.optional_integer("n_group"), fields.optional_integer("topk_group")
    if method == "greedy":
        groups = of_token = 1
    groups, of_token = _checked_groups(fields, count, groups or 1, of_token or 1)
    return MoESpec(
        num_experts=count,
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalise=False,
        num_groups=groups,
        groups_per_token=of_token,
        counted_per_group=1,
        weight_scale=fields.number("routed_scaling_factor"),
        shared_width=width * fields.integer("n_shared_experts"),
    )


def _read_training_keys(fields: ConfigFields) -> None:
    """Where experts were, and what balanced them, in training."""
    for name in ("ep_size", "aux_loss_alpha", "seq_aux"):
        fields.value(name)


def minimax_experts(fields: ConfigFields) -> MoESpec:
    """A sigmoid, and a bias of each expert for the choice."""
    for name in ("mlp_intermediate_size", "mtp_transformer_layers", "use_mtp"):
        fields.value(name)  # of layers that are not there, and of heads that are not computed
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
        sigmoid=True,
        selection_bias=True,
    )


def ernie_experts(fields: ConfigFields) -> MoESpec:
    """A softmax, a bias of each expert for the choice, and an expert of all tokens."""
    fields.value("moe_capacity")  # limits of a token's experts in training
    width = fields.integer("moe_intermediate_size")
    return MoESpec(
        num_experts=fields.optional_integer("num_experts") or fields.integer("moe_num_experts"),
        experts_per_token=fields.integer("moe_k"),
        intermediate_size=width,
        normalise=True,
        selection_bias=True,
        shared_width=width * (fields.optional_integer("moe_num_shared_experts") or 0),
    )


def ernie_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Each `moe_layer_interval`-th layer, from one to another."""
    first = fields.optional_integer("moe_layer_start_index") or 0
    last = fields.optional_integer("moe_layer_end_index")
    last = num_layers - 1 if last in (None, -1) else last
    step = fields.integer("moe_layer_interval")
    return tuple(first <= i <= last and (i + 1) % step == 0 for i in range(num_layers))


def gemma4_experts(fields: ConfigFields) -> MoESpec | None:
    """Next to the MLP, where `enable_moe_block` is set."""
    sizes = [fields.optional_integer(n) for n in ("top_k_experts", "moe_intermediate_size")]
    count = fields.optional_integer("num_experts")
    if not fields.flag("enable_moe_block"):
        return None
    return MoESpec(
        num_experts=count or fields.integer("num_experts"),
        experts_per_token=sizes[0] or fields.integer("top_k_experts"),
        intermediate_size=sizes[1] or fields.integer("moe_intermediate_size"),
        normalise=True,
        with_mlp=True,
    )


def gemma4_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """All layers or none."""
    return (fields.flag("enable_moe_block"),) * num_layers


def llama4_width(fields: ConfigFields) -> int:
    """That of the MLP, which is not that of experts."""
    return fields.integer("intermediate_size_mlp")


def llama4_experts(fields: ConfigFields) -> MoESpec:
    """The sigmoid of the best scores multiplies what the experts read; an expert of all tokens."""
    width = fields.integer("intermediate_size")
    return MoESpec(
        num_experts=fields.integer("num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=width,
        normalise=False,
        sigmoid=True,
        shared_width=width,
        weighs_inputs=True,
    )


def llama4_sparse(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Those of `moe_layers`, or each `interleave_moe_layer_step`-th."""
    step, listed = fields.integer("interleave_moe_layer_step"), fields.sequence("moe_layers")
    if listed is not None:
        return tuple(i in listed for i in range(num_layers))
    return tuple((i + 1) % step == 0 for i in range(num_layers))


def qwen2_moe_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen3's, and an expert of all tokens with a gate."""
    width = fields.integer("shared_expert_intermediate_size")
    return replace(qwen_experts(fields), shared_width=width, shared_gate=True)


def qwen3_5_experts(fields: ConfigFields) -> MoESpec:
    """As Qwen2's, always normalised."""
    return replace(qwen2_moe_experts(fields), normalise=True)


def expert_width(fields: ConfigFields) -> int:
    """That of an expert: no layer has another feed-forward part."""
    fields.optional_integer("intermediate_size")
    return fields.integer("moe_intermediate_size")
