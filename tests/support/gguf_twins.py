"""A checkpoint of transformers as a GGUF file, as llama.cpp's converter writes it.

The names of tensors are those of ggml's own package, so they do not come from the table under test.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import gguf_files as files
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_STREAM = re.compile(r"(.+\.altup_(?:unembed_)?projections)\.\d+\.weight")
_LAYER_THAT_DRAFTS = re.compile(r"mtp\.layers\.0\.")
_DRAFTING_NAMES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
_NEMOTRON_DRAFTING_NAMES = {
    "layers.0.eh_proj.": "eh_proj.",
    "layers.0.enorm.": "enorm.",
    "layers.0.hnorm.": "hnorm.",
    "layers.1.norm.": "post_attention_layernorm.",
    "layers.1.final_layernorm.": "shared_head.norm.",
    "layers.0.": "",
    "layers.1.": "",
}
# config key -> key of the section
_KEYS = {
    "num_hidden_layers": ".block_count",
    "max_position_embeddings": ".context_length",
    "hidden_size": ".embedding_length",
    "intermediate_size": ".feed_forward_length",
    "num_attention_heads": ".attention.head_count",
    "num_key_value_heads": ".attention.head_count_kv",
    "rms_norm_eps": ".attention.layer_norm_rms_epsilon",
    "norm_eps": ".attention.layer_norm_rms_epsilon",
    "layer_norm_eps": ".attention.layer_norm_epsilon",
    "conv_L_cache": ".shortconv.l_cache",
    "sliding_window": ".attention.sliding_window",
    "num_experts": ".expert_count",
    "num_local_experts": ".expert_count",
    "n_routed_experts": ".expert_count",
    "num_experts_per_tok": ".expert_used_count",
    "moe_intermediate_size": ".expert_feed_forward_length",
    "shared_expert_intermediate_size": ".expert_shared_feed_forward_length",
    "mamba_d_conv": ".ssm.conv_kernel",
    "mamba_d_ssm": ".ssm.inner_size",
    "mamba_d_state": ".ssm.state_size",
    "mamba_n_groups": ".ssm.group_count",
    "mamba_n_heads": ".ssm.time_step_rank",
    "linear_conv_kernel_dim": ".ssm.conv_kernel",
    "linear_key_head_dim": ".ssm.state_size",
    "linear_num_key_heads": ".ssm.group_count",
    "linear_num_value_heads": ".ssm.time_step_rank",
}


def write_twin(
    checkpoint: Path,
    path: Path,
    architecture: str,
    section: Mapping[str, object],
    *,
    paired: bool,
    kinds: Mapping[str, Kind] = {},
    is_older: bool = False,
    fuses_experts: bool = False,
) -> None:
    """Write the file; `kinds` are the types of tensors by parts of their names in GGUF. `is_older`:
    with one projection of Qwen3-Next as in its checkpoints.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    metadata: dict[str, object] = {
        ".attention.key_length": head_size,
        ".attention.value_length": head_size,
        ".rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
        ".rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
    }
    metadata |= {ours: config[key] for key, ours in _KEYS.items() if config.get(key) is not None}
    if "linear_num_key_heads" in config:
        metadata |= _delta_section(config, architecture)
    if "layers_block_type" in config:
        metadata |= _sizes_of_layers(config)
    metadata |= files.byte_vocabulary(config["vocab_size"]) if config["vocab_size"] > 258 else {}
    merged = _merged(load_file(checkpoint / "model.safetensors"))
    if "linear_num_key_heads" in config:
        is_tiled = architecture != "qwen3next"
        merged = _delta(merged, config, is_tiled=is_tiled, is_older=is_older)
    if architecture == "llama4":
        metadata |= {
            ".feed_forward_length": config["intermediate_size_mlp"],
            ".expert_feed_forward_length": config["intermediate_size"],
            ".interleave_moe_layer_step": config["interleave_moe_layer_step"],
        }
    if architecture == "gemma3n":
        metadata |= _stream_section(config)
        merged = _stacked(merged)
    if architecture == "granitehybrid":
        metadata |= _granite_section(config)
        merged = _parted(merged, is_mixture=config["num_local_experts"] > 0)
    if architecture == "nemotron_h_moe":
        merged = _one_drafting_layer(merged, len(config["layers_block_type"]))
    if architecture in ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe"):
        merged = _mamba(merged, config)
    if architecture == "falcon-h1":
        merged = {name: values * _factor(name, config) for name, values in merged.items()}
    tensors = {
        name: _paired(name, values, config, head_size) if paired else values
        for name, values in merged.items()
    }
    num_layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    num_blocks = num_layers + int(section.get(".nextn_predict_layers", 0))
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        num_blocks,
    )
    written = []
    if fuses_experts:
        tensors = _fused_experts(tensors)
    for name, values in tensors.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias")) or _drafting_name(name)
        assert own is not None, name
        kind = next((kind for part, kind in kinds.items() if f".{part}." in own), Kind.F32)
        kind = kind if values.ndim > 1 and not own.endswith(".bias") else Kind.F32
        stored = values if kind == Kind.F32 else gguf.quants.quantize(values, kind)
        written.append((own, np.ascontiguousarray(stored), kind))
    files.write_gguf(path, architecture, metadata | dict(section), written)


def _merged(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor for all experts of a layer, gate and up apart; sinks end in `.weight`."""
    merged: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is not None:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = values
        elif ".feed_forward.experts.gate_up_proj" in name:  # Llama 4: gate first
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=2), strict=True):
                merged[name.replace("gate_up_proj", f"{part}_proj.weight")] = half.swapaxes(1, 2)
        elif "experts.gate_up_proj" in name:  # gpt-oss: inputs first, gate and up in turn
            start, ending = name.split("gate_up_proj")
            rows = values if ending else values.swapaxes(1, 2)
            kind = "bias" if ending else "weight"
            merged[f"{start}gate_proj.{kind}"] = rows[:, 0::2]
            merged[f"{start}up_proj.{kind}"] = rows[:, 1::2]
        elif name.endswith("experts.down_proj"):
            merged[f"{name}.weight"] = values.swapaxes(1, 2)
        elif name.endswith("experts.down_proj_bias"):
            merged[name.replace("_bias", ".bias")] = values
        elif ".conv.conv." in name:
            merged[name] = values[:, 0]
        elif name.endswith("sinks"):
            merged[f"{name}.weight"] = values
        elif name.endswith("e_score_correction_bias"):
            merged[name.replace("_bias", ".bias")] = values
        else:
            merged[name] = values
    return merged | {
        name: np.stack([rows[index] for index in range(len(rows))])
        for name, rows in experts.items()
    }


def _granite_section(config: Mapping[str, Any]) -> dict[str, object]:
    """What Granite 4 has in addition: layers without key heads are Mamba-2."""
    keys = config["num_key_value_heads"]
    kinds = config["layer_types"]
    return {
        ".attention.head_count_kv": [keys if kind == "full_attention" else 0 for kind in kinds],
        ".expert_shared_feed_forward_length": config["shared_intermediate_size"],
        ".rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
        ".ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        ".attention.scale": config["attention_multiplier"],
        ".embedding_scale": config["embedding_multiplier"],
        ".residual_scale": config["residual_multiplier"],
        ".logit_scale": config["logits_scaling"],
    }


def _parted(tensors: Mapping[str, np.ndarray], *, is_mixture: bool) -> dict[str, np.ndarray]:
    """Gate and up apart, of experts and of the MLP, which is one of them in a mixture."""
    mlp = "mlp.shared_expert" if is_mixture else "mlp"
    parted: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        start = name.partition(".block_sparse_moe.")[0].partition(".shared_mlp.")[0]
        module = mlp if ".shared_mlp." in name else "mlp.experts"
        if name.endswith("input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
                parted[f"{start}.{module}.{part}_proj.weight"] = half
        elif name.endswith("output_linear.weight"):
            parted[f"{start}.{module}.down_proj.weight"] = values
        elif ".router.layer." in name:
            parted[f"{start}.mlp.gate.weight"] = values
        else:
            parted[name] = values
    return parted


def _stream_section(config: Mapping[str, Any]) -> dict[str, object]:
    """What Gemma 3n has in addition."""
    parts = config["activation_sparsity_pattern"]
    ropes = config["rope_parameters"]
    return {
        ".altup.active_idx": config["altup_active_idx"],
        ".altup.num_inputs": config["altup_num_inputs"],
        ".embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        ".attention.shared_kv_layers": config["num_kv_shared_layers"],
        ".activation_sparsity_scale": [
            float(np.float32(NormalDist().inv_cdf(part))) if part else -math.inf for part in parts
        ],
        ".attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config["layer_types"]
        ],
        ".final_logit_softcapping": config["final_logit_softcapping"],
        ".rope.freq_base": float(ropes["full_attention"]["rope_theta"]),
        ".rope.freq_base_swa": float(ropes["sliding_attention"]["rope_theta"]),
    }


def _stacked(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor for the projections of all streams; factors end in `.weight`."""
    kept: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name in sorted(tensors):
        found = _STREAM.fullmatch(name)
        if found is None:
            ending = ".weight" if name.endswith("_scale") else ""
            kept[name + ending] = tensors[name]
        else:
            stacks.setdefault(found[1], []).append(tensors[name])
    return kept | {f"{name}.weight": np.stack(rows) for name, rows in stacks.items()}


def _drafting_name(name: str) -> str | None:
    """In layers that draft, which the package does not know of Qwen and Nemotron."""
    block, _, part = name.removeprefix("model.layers.").partition(".")
    module = part.removesuffix(".weight")
    if module == "post_attention_layernorm":
        return f"blk.{block}.post_attention_norm.weight"
    if module not in _DRAFTING_NAMES.values():
        return None
    return f"blk.{block}.nextn.{module.replace('.', '_')}.weight"


def _one_drafting_layer(
    tensors: Mapping[str, np.ndarray], num_layers: int
) -> dict[str, np.ndarray]:
    """Both parts of Nemotron's layer that drafts as one, after the last layer."""
    named: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        part = name.removeprefix("mtp.")
        if part != name:
            start, own = next(
                pair for pair in _NEMOTRON_DRAFTING_NAMES.items() if part.startswith(pair[0])
            )
            outer = "backbone" if own == "" else "model"
            name = f"{outer}.layers.{num_layers}.{own}{part.removeprefix(start)}"
        named[name] = values
    return named


def _mamba(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Rates instead of their logarithms; numbers of heads and groups as columns."""
    groups = config.get("mamba_n_groups") or config.get("n_groups")
    written: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        part = name.rpartition(".")[2]
        if part in ("A_log", "D"):
            values = (-np.exp(values) if part == "A_log" else values)[:, None]
        elif part == "dt_bias":
            name = name.replace("dt_bias", "dt_proj.bias")
        elif name.endswith("conv1d.weight"):
            values = values[:, 0]
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            values = values.reshape(groups, -1)
        elif ".mixer.experts." in name:
            name = name.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        written[name] = values
    return written


def _factor(name: str, config: Mapping[str, Any]) -> np.ndarray:
    """What the converter multiplies a matrix of Falcon-H1 by."""
    inner = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    if ".mamba.in_proj." in name:
        values, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (values, values, keys, keys, config["mamba_n_heads"])
        factors = np.array(config["ssm_multipliers"], np.float32) * config["ssm_in_multiplier"]
        return np.repeat(factors, sizes)[:, None]
    factors_of_parts = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": inner,
        "k_proj": inner * config["key_multiplier"],
        "v_proj": inner,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    return np.float32(factors_of_parts.get(name.split(".")[-2], 1.0))


def _sizes_of_layers(config: Mapping[str, Any]) -> dict[str, object]:
    """By layer, as of Nemotron-H."""
    kinds = config["layers_block_type"]
    is_mixture = "moe" in kinds
    width = config["moe_intermediate_size" if is_mixture else "intermediate_size"]
    of_mixture = {
        ".expert_used_count": config["num_experts_per_tok"],
        ".expert_feed_forward_length": width,
        ".expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        ".expert_shared_count": 1,
        ".expert_weights_norm": config["norm_topk_prob"],
        ".expert_weights_scale": float(config["routed_scaling_factor"]),
    }
    if config.get("moe_latent_size"):
        of_mixture[".moe_latent_size"] = config["moe_latent_size"]
    keys = config["num_key_value_heads"]
    return {
        ".block_count": len(kinds),
        ".feed_forward_length": [width if kind in ("mlp", "moe") else 0 for kind in kinds],
        ".attention.head_count_kv": [keys if kind == "full_attention" else 0 for kind in kinds],
        ".attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        ".rope.scaling.finetuned": False,
        ".ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        ".ssm.state_size": config["ssm_state_size"],
        ".ssm.group_count": config["n_groups"],
        ".ssm.time_step_rank": config["mamba_num_heads"],
        ".ssm.conv_kernel": config["conv_kernel"],
        **(of_mixture if is_mixture else {}),
    }


def _delta_section(config: Mapping[str, Any], architecture: str) -> dict[str, object]:
    """What Qwen3-Next and Qwen3.5 have in addition."""
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    sections = {".rope.dimension_sections": [11, 11, 10, 0]} if architecture != "qwen3next" else {}
    return {
        ".ssm.inner_size": values,
        ".attention.recurrent_layers": recurrent,
        ".full_attention_interval": 4,
        **sections,
    }


def _delta(
    tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], *, is_tiled: bool, is_older: bool
) -> dict[str, np.ndarray]:
    """Rates instead of their logarithms, 1 added to norms, and the order of heads that ggml has."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_size, value_size = config["linear_key_head_dim"], config["linear_value_head_dim"]
    num_layers, of_keys = config["num_hidden_layers"], 2 * keys * key_size

    def tiled(values: np.ndarray, size: int) -> np.ndarray:
        by_key = values.reshape(keys, heads // keys, size, *values.shape[1:])
        return by_key.swapaxes(0, 1).reshape(values.shape) if is_tiled else values

    written: dict[str, np.ndarray] = {}
    for full_name, values in tensors.items():
        name = _LAYER_THAT_DRAFTS.sub(f"model.layers.{num_layers}.", full_name)
        for part, ours in _DRAFTING_NAMES.items():
            name = name.replace(f"mtp.{part}.", f"model.layers.{num_layers}.{ours}.")
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part.endswith("norm") and "linear_attn" not in name:
            values = values + 1
        elif part == "A_log":
            values = tiled(-np.exp(values), 1)
        elif part == "dt_bias":
            name, values = name.replace("dt_bias", "dt_proj.bias"), tiled(values, 1)
        elif part in ("in_proj_a", "in_proj_b"):
            values = tiled(values, 1)
        elif part in ("conv1d", "in_proj_qkv"):
            values = values.reshape(values.shape[0], -1)
            values = np.concatenate((values[:of_keys], tiled(values[of_keys:], value_size)))
        elif part == "in_proj_z":
            values = tiled(values, value_size)
        elif part == "out_proj" and "linear_attn" in name:
            values = tiled(values.T, value_size).T
        elif part == "in_proj_qkvz" and not is_older:
            sizes = np.array([key_size, key_size] + [heads // keys * value_size] * 2)
            kinds = np.split(values.reshape(keys, sizes.sum(), -1), sizes.cumsum()[:-1], axis=1)
            *qkv, z = (kind.reshape(-1, values.shape[1]) for kind in kinds)
            written[name.replace("in_proj_qkvz", "in_proj_qkv")] = np.concatenate(qkv)
            name, values = name.replace("in_proj_qkvz", "in_proj_z"), z
        written[name] = values
    return written


def _fused_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gate above up, in one tensor for all experts of a layer."""
    fused: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if name.endswith("experts.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            name, values = name.replace("gate", "gate_up"), np.concatenate((values, up), axis=1)
        if not name.endswith("experts.up_proj.weight"):
            fused[name] = values
    return fused


def _paired(name: str, values: np.ndarray, config: Mapping[str, int], head_size: int) -> np.ndarray:
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{part}." in name:
            assert values.shape[0] == config[heads] * head_size
            return files.paired(values, config[heads])
    return values
