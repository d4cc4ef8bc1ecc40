"""GGUF files for tests, through ggml's own Python package: names and order as its converter has.

`TYPED` draws matrices in each block type; the package's `dequantize` says what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

HEADS, KV_HEADS, HIDDEN, WIDTH, LAYERS = 4, 2, 256, 512, 2
# types whose blocks hold a float16 scale, at these bytes
SCALES_AT = {
    Kind.Q4_0: (0,),
    Kind.Q4_1: (0, 2),
    Kind.Q5_0: (0,),
    Kind.Q5_1: (0, 2),
    Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
    Kind.TQ1_0: (52,),
    Kind.TQ2_0: (64,),
    Kind.IQ1_S: (0,),
    Kind.IQ2_XXS: (0,),
    Kind.IQ2_XS: (0,),
    Kind.IQ2_S: (0,),
    Kind.IQ3_XXS: (0,),
    Kind.IQ3_S: (0,),
}
# types whose scales have another form, see `random_blocks`
OTHER_SCALES = (Kind.MXFP4, Kind.NVFP4, Kind.IQ1_M)
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}


def random_blocks(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Any bytes, with scales that keep weights near 0.1: [N, bytes of a row]."""
    generator = np.random.default_rng(seed)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (outputs * inputs // elements, size), dtype=np.uint8)
    steps = {Kind.Q8_0: 100, Kind.Q5_0: 16, Kind.Q5_1: 16, Kind.Q6_K: 1500}.get(kind, 8)
    steps = {Kind.Q4_K: 250, Kind.Q5_K: 500, Kind.Q2_K: 20, Kind.Q3_K: 50}.get(kind, steps)
    steps = {Kind.IQ4_NL: 60, Kind.IQ4_XS: 1000, Kind.TQ1_0: 1, Kind.TQ2_0: 1}.get(kind, steps)
    steps = {Kind.IQ1_S: 8, Kind.IQ3_S: 200, Kind.IQ3_XXS: 250}.get(kind, steps)
    steps = {Kind.IQ2_XXS: 100, Kind.IQ2_XS: 100, Kind.IQ2_S: 100}.get(kind, steps)
    if kind == Kind.MXFP4:
        blocks[:, 0] = generator.integers(118, 123, len(blocks))
    if kind == Kind.NVFP4:  # e4m3 without a sign
        blocks[:, :4] = generator.integers(0, 40, (len(blocks), 4))
    if kind == Kind.IQ1_M:  # a float16 in the highest halves of four words
        drawn = (generator.uniform(-1, 1, len(blocks)) * 0.02).astype(np.float16).view(np.uint16)
        words = blocks[:, 48:].view(np.uint16)
        halves = (drawn[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)) << 12
        blocks[:, 48:] = (words & 0xFFF | halves).astype(np.uint16).view(np.uint8)
    for place, at in enumerate(SCALES_AT.get(kind, ())):
        drawn = generator.uniform(-1, 1, (len(blocks), 1)) * 0.15 / steps
        if place == 1:
            drawn *= -8 if kind in (Kind.Q4_1, Kind.Q5_1) else 4
        blocks[:, at : at + 2] = drawn.astype(np.float16).view(np.uint8)
    return blocks.reshape(outputs, -1)


def meaning(kind: Kind, blocks: np.ndarray) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind).astype(np.float32))


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of a Llama's queries and keys (LlamaModel.permute)."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, object],
    tensors: Sequence[tuple[str, np.ndarray, Kind]],
) -> Path:
    """Metadata keys that start with a dot belong to the architecture's section."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add_metadata(writer, f"{architecture}{key}" if key.startswith(".") else key, value)
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def sizes(**changes: object) -> dict[str, object]:
    """The architecture's section, as the converter writes it for Llama."""
    values: dict[str, object] = {
        ".block_count": LAYERS,
        ".context_length": 256,
        ".embedding_length": HIDDEN,
        ".feed_forward_length": WIDTH,
        ".attention.head_count": HEADS,
        ".attention.head_count_kv": KV_HEADS,
        ".attention.layer_norm_rms_epsilon": 1e-5,
        ".rope.freq_base": 10000.0,
        ".rope.dimension_count": HIDDEN // HEADS,
    }
    return values | {f".{key.replace('__', '.')}": value for key, value in changes.items()}


def byte_vocabulary(count: int) -> dict[str, object]:
    """A tokenizer of bytes only and an end token, padded to `count`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    tokens = [chr(b) for b in printable] + [chr(0x100 + n) for n in range(len(others))]
    tokens += ["<|im_end|>", "ab"] + [f"[PAD{n}]" for n in range(count - 258)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 1] + [5] * (count - 258),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
