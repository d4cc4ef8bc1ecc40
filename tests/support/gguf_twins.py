"""A checkpoint of transformers as a GGUF file, as llama.cpp's converter writes it.

The names of tensors are those of ggml's own package, so they do not come from the table under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import gguf_files as files
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
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
    "conv_L_cache": ".shortconv.l_cache",
    "sliding_window": ".attention.sliding_window",
    "num_experts": ".expert_count",
    "num_local_experts": ".expert_count",
    "n_routed_experts": ".expert_count",
    "num_experts_per_tok": ".expert_used_count",
    "moe_intermediate_size": ".expert_feed_forward_length",
}


def write_twin(
    checkpoint: Path,
    path: Path,
    architecture: str,
    section: Mapping[str, object],
    *,
    paired: bool,
    kinds: Mapping[str, Kind] = {},
) -> None:
    """Write the file; `kinds` are the types of tensors by parts of their names in GGUF."""
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
    metadata |= files.byte_vocabulary(config["vocab_size"]) if config["vocab_size"] > 258 else {}
    tensors = {
        name: _paired(name, values, config, head_size) if paired else values
        for name, values in _merged(load_file(checkpoint / "model.safetensors")).items()
    }
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    written = []
    for name, values in tensors.items():
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        kind = next((kind for part, kind in kinds.items() if f".{part}." in own), Kind.F32)
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


def _paired(name: str, values: np.ndarray, config: Mapping[str, int], head_size: int) -> np.ndarray:
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{part}." in name:
            assert values.shape[0] == config[heads] * head_size
            return files.paired(values, config[heads])
    return values
