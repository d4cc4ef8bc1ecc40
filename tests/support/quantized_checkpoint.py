"""A random Llama of one layer or two, its matrices written in a format of `format_writers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from format_writers import Writer
from safetensors.torch import save_file
from torch import Tensor

from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import Checkpoint
from quickstep.model.checkpoint.tensor_reader import TensorReader, TensorSource
from quickstep.model.checkpoint.tensor_schema import layer_tensors, outer_tensors
from quickstep.model.checkpoint.weights import CheckpointWeights, open_weights
from quickstep.model.formats.detect import open_quantized_reader
from quickstep.model.interface import ForwardBatch, Model
from quickstep.model.loader import load_model
from quickstep.model.spec import parse_spec, read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import PagedLayout
from quickstep.ops.tensors import CPU
from quickstep.runtime.cache.kv_cache import allocate_kv

CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}


def write_quantized(
    path: Path, quantization: Mapping[str, object], writer: Writer, **changes: object
) -> dict[str, Tensor]:
    """Fill the directory; gives the weights that the files mean, in float32.

    Linear modules of the layers go through the writer, everything else is stored whole.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    generator = torch.Generator().manual_seed(0)
    meant: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    spec = parse_spec(config)
    shapes = outer_tensors(spec, "model.", "lm_head.weight")
    for index in range(spec.num_layers):
        shapes |= layer_tensors(spec, "model.", index)
    for name, shape in shapes.items():
        if "_proj.weight" in name:
            written = writer(*shape, generator)
            meant[name] = written.weight
            module = name.removesuffix(".weight")
            stored |= {module + suffix: tensor for suffix, tensor in written.tensors.items()}
        else:
            scale = 1.0 if "embed" in name else 0.1
            offset = 1.0 if "norm" in name else 0.0
            drawn = torch.randn(shape, generator=generator) * scale + offset
            meant[name] = stored[name] = drawn
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()}, path / "a.safetensors"
    )
    config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return meant


def write_whole(path: Path, meant: Mapping[str, Tensor], **changes: object) -> Path:
    """The same model with its weights in float32."""
    path.mkdir(parents=True, exist_ok=True)
    _save(path, meant)
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}), encoding="utf-8")
    return path


def opened(path: Path) -> tuple[CheckpointWeights, TensorSource]:
    """What the checkpoint holds, and its tensors in float32."""
    weights = open_weights(path, read_spec(path))
    weights.check()
    total = sum(weights.files.tensors[name].nbytes for name in weights.stored)
    reader = TensorReader(weights.files, torch.float32, torch.device("cpu"), total, None)
    assert weights.storage is not None
    source = open_quantized_reader(
        reader, weights.storage, weights.shapes, weights.config, weights.spec
    )
    return weights, source


def load(path: Path, quantization: str | None = None, dtype: str = "float32") -> Model:
    config = LoadConfig(model=str(path), dtype=dtype, device="cpu", quantization=quantization)
    ops = resolve_ops(torch.device("cpu"))
    return load_model(Checkpoint(path, "q"), read_spec(path), ops, config)


def logits_of(model: Model, token_ids: Sequence[int]) -> Tensor:
    """Of every position, in one forward: [T, V]."""
    count = len(token_ids)
    kv = allocate_kv(model.kv_layout, 1, count, CPU)
    positions = torch.arange(count)
    table = torch.zeros((1, 1), dtype=torch.int32)
    layout = PagedLayout(positions, positions, (0, count), (count,), table, count)
    return model.logits(model.forward(ForwardBatch(torch.tensor(token_ids), layout), kv))


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path / "model.safetensors")
