"""A random gpt-oss with experts in MXFP4, as it was released."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from golden_cases import CASES, Case
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

GPT_OSS = next(case for case in CASES if case.name == "gpt-oss")
EXPERTS = ("gate_up_proj", "down_proj")
UNCONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]


def save_mxfp4(path: Path, case: Case = GPT_OSS) -> transformers.PreTrainedModel:
    """A checkpoint as OpenAI released it; gives what transformers makes of it, in float32."""
    model = case.save(path).bfloat16()
    model.save_pretrained(path)
    rng = torch.Generator().manual_seed(7)
    tensors = load_file(path / "model.safetensors")
    dequantized = dict(tensors)
    for layer, part in ((i, part) for i in range(3) for part in EXPERTS):
        name = f"model.layers.{layer}.mlp.experts.{part}"
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=rng, dtype=torch.uint8)
        scales = torch.randint(121, 125, shape, generator=rng, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        dequantized[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config=mxfp4_config())
    reference = transformers.GptOssForCausalLM(case.config())
    reference.load_state_dict({name: tensor.float() for name, tensor in dequantized.items()})
    return reference.float().eval()


def mxfp4_config(**more: object) -> dict[str, object]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": UNCONVERTED} | more


def edit_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values), encoding="utf-8")
