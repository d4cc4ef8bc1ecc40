"""Writes LoRA adapters as peft does, with NumPy only. Importable from every folder of tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quickstep.model.adapters.lora_modules import LM_HEAD, lora_modules
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.spec import parse_spec

# A decoder of three layers, to which adapters are checked.
SMALL_LLAMA = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
)

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_config(**values: object) -> dict[str, object]:
    """What peft writes for a plain LoRA, with `values` in place of some keys."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "fan_in_fan_out": False,
    } | values


def adapter_tensors(
    spec: ModelSpec,
    targets: Sequence[str],
    rank: int = 4,
    seed: int = 0,
    scale: float = 0.5,
    ranks: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Random A and B of the targets (ends of names), in float32; `ranks` by end of name.

    Also of `lm_head`; tensors of `embed_tokens` have peft's other names.
    """
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, module in lora_modules(spec).items():
        end = name.rpartition(".")[2]
        if end not in targets:
            continue
        r = (ranks or {}).get(end, rank)
        start = f"base_model.model.{'' if name == LM_HEAD else 'model.'}{name}"
        a = generator.normal(size=(r, module.num_inputs))
        if not module.is_embedding:
            a /= module.num_inputs**0.5
        b = generator.normal(size=(module.num_outputs, r)) * scale / r**0.5
        for half, tensor in (("A", a), ("B", b)):
            end = f"embedding_{half}" if module.is_embedding else f"{half}.weight"
            tensors[f"{start}.lora_{end}"] = tensor.astype(np.float32)
    return tensors


def write_adapter(
    path: Path,
    spec: ModelSpec,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    scale: float = 0.5,
    **config: object,
) -> Path:
    """Fill the directory `path` with an adapter of all layers; returns it."""
    tensors = adapter_tensors(spec, targets, rank, seed, scale)
    values = adapter_config(r=rank, target_modules=list(targets)) | config
    return write_files(path, values, tensors)


def write_files(
    path: Path, config: Mapping[str, object], tensors: Mapping[str, np.ndarray]
) -> Path:
    """Write the two files of an adapter."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), path / "adapter_model.safetensors")
    return path
