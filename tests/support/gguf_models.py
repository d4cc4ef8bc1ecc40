"""Tiny models as GGUF files, with the weights that they mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf_files as files
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from quickstep.model.checkpoint.tensor_schema import layer_tensors, outer_tensors
from quickstep.model.spec import parse_spec

VOCAB = 264
HF = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": files.HIDDEN,
    "intermediate_size": files.WIDTH,
    "num_hidden_layers": files.LAYERS,
    "num_attention_heads": files.HEADS,
    "num_key_value_heads": files.KV_HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
# as Q4_K_M mixes them, and more
KINDS = {
    "q_proj": Kind.Q4_K,
    "k_proj": Kind.Q4_K,
    "v_proj": Kind.Q6_K,
    "o_proj": Kind.Q5_K,
    "gate_proj": Kind.Q4_0,
    "up_proj": Kind.Q8_0,
    "down_proj": Kind.Q5_1,
    "embed_tokens": Kind.Q6_K,
    "lm_head": Kind.Q8_0,
}
# the mixtures of other files that are much downloaded
UD_IQ4_XS = {
    **{"q_proj": Kind.IQ4_XS, "k_proj": Kind.IQ3_S, "v_proj": Kind.Q8_0, "o_proj": Kind.IQ4_NL},
    **{"gate_proj": Kind.IQ3_S, "up_proj": Kind.IQ4_XS, "down_proj": Kind.IQ3_S},
    **{"embed_tokens": Kind.IQ4_NL, "lm_head": Kind.Q8_0},
}
UD_Q2_K_XL = {
    **{"q_proj": Kind.Q2_K, "k_proj": Kind.IQ2_S, "v_proj": Kind.Q4_K, "o_proj": Kind.Q3_K},
    **{"gate_proj": Kind.IQ2_XXS, "up_proj": Kind.IQ2_XS, "down_proj": Kind.IQ3_XXS},
    **{"embed_tokens": Kind.Q4_K, "lm_head": Kind.Q6_K},
}
UD_IQ1_M = {
    **{"q_proj": Kind.IQ1_S, "k_proj": Kind.IQ1_M, "v_proj": Kind.IQ2_XXS, "o_proj": Kind.NVFP4},
    **{"gate_proj": Kind.IQ1_M, "up_proj": Kind.IQ1_S, "down_proj": Kind.IQ2_S},
    **{"embed_tokens": Kind.IQ3_S, "lm_head": Kind.IQ3_XXS},
}
MIXTURES = {"UD-IQ4_XS": UD_IQ4_XS, "UD-Q2_K_XL": UD_Q2_K_XL, "UD-IQ1_M": UD_IQ1_M}


def write_model(
    path: Path,
    architecture: str = "llama",
    kinds: dict[str, Kind] = KINDS,
    factors: Mapping[str, float] = {},
    **changes: object,
) -> dict[str, Tensor]:
    """Write the file; gives the weights that it means, in the architecture's own order. `factors`
    multiply the scales of a projection.
    """
    spec = parse_spec(HF | changes)
    shapes = outer_tensors(spec, "model.", "lm_head.weight")
    for index in range(spec.num_layers):
        shapes |= layer_tensors(spec, "model.", index)
    meant: dict[str, Tensor] = {}
    written = []
    generator = np.random.default_rng(0)
    for seed, (name, shape) in enumerate(shapes.items()):
        part = name.split(".")[-2]
        kind = kinds.get(part, Kind.F32) if name.endswith(".weight") else Kind.F32
        if kind in files.SCALES_AT or kind in files.OTHER_SCALES:
            values = files.random_blocks(kind, *shape, seed=seed)
            meant[name] = files.meaning(kind, values)
        else:
            drawn = generator.normal(0, 0.1, shape) + ("norm" in name)
            values = drawn.astype(np.float16 if kind == Kind.F16 else np.float32)
            meant[name] = torch.from_numpy(values.astype(np.float32))
        heads = {"q_proj": files.HEADS, "k_proj": files.KV_HEADS}.get(part)
        if architecture == "llama" and heads is not None:
            values = files.paired(values, heads)
        written.append((files.gguf_name(name), values, kind))
        if part in factors:
            meant[name] = meant[name] * factors[part]
            factor = np.array([factors[part]], np.float32)
            written.append((files.gguf_name(name).replace(".weight", ".scale"), factor, Kind.F32))
    metadata = files.sizes() | files.byte_vocabulary(VOCAB)
    files.write_gguf(path, architecture, metadata, written)
    return meant
