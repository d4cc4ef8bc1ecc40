"""GGUF metadata as the `config.json` that the checkpoint was converted from. No torch.

One more dialect of configs: `gguf_config` translates it, so that `spec.parse_spec`, its checks and
the fingerprint work as for any checkpoint, and `gguf_tensor_files` renames the tensors to those of
the architecture. A key of the model's own section that is not understood is refused.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields
from quickstep.model.checkpoint.gguf_file import GgufFile, open_gguf
from quickstep.model.checkpoint.safetensors_files import StoredTensor, TensorFiles

GGUF_ARCHITECTURE = "_gguf_architecture"

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
    }
)
_GEMMA_PARTS = {
    **_STANDARD_PARTS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI_PARTS = {
    **_STANDARD_PARTS,
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
}
_SCALING_TYPES = ("none", "linear", "yarn", "longrope")
# tensor -> the keys of a config's rope_scaling that it holds
_DIVISORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rope_freqs.weight": ("short_factor", "long_factor"),
        "rope_factors_short.weight": ("short_factor",),
        "rope_factors_long.weight": ("long_factor",),
    }
)
# llama.cpp reads these for other architectures only.
_WITHOUT_EFFECT = (
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.dimension_sections",
    "attention.layer_norm_epsilon",
)
_NEUTRAL: Mapping[str, object] = MappingProxyType(
    {
        "attention.causal": True,
        "pooling_type": 3,  # the last token, as here
        "tensor_data_layout": "Meta AI original pth",
    }
)
_BLOCK = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


class _Dialect(msgspec.Struct, frozen=True):
    """How one `general.architecture` is written; `scores_layers`: layers of the one size of the
    family whose scores are scaled by hidden size / heads instead of the head size (Gemma).
    """

    name: str
    parts: Mapping[str, str] = msgspec.field(default_factory=lambda: _STANDARD_PARTS)
    activation: Mapping[str, object] = msgspec.field(default_factory=lambda: {"hidden_act": "silu"})
    window: bool = False
    window_base: bool = False  # layers with a window have frequencies of their own
    softcaps: bool = False
    scores_layers: int | None = None


_GELU = {"hidden_activation": "gelu_pytorch_tanh"}

_DIALECTS: Mapping[str, _Dialect] = MappingProxyType(
    {
        "llama": _Dialect("LlamaForCausalLM"),
        "qwen2": _Dialect("Qwen2ForCausalLM"),
        "qwen3": _Dialect("Qwen3ForCausalLM"),
        "phi3": _Dialect("Phi3ForCausalLM", _PHI_PARTS, window=True),
        "gemma2": _Dialect(
            "Gemma2ForCausalLM", _GEMMA_PARTS, _GELU, window=True, softcaps=True, scores_layers=46
        ),
        "gemma3": _Dialect(
            "Gemma3ForCausalLM",
            _GEMMA_PARTS,
            _GELU,
            window=True,
            window_base=True,
            scores_layers=62,
        ),
    }
)


def gguf_config(path: Path) -> dict[str, object]:
    """The config of a GGUF file. Raises ConfigError."""
    file = open_gguf(path)
    name, dialect = _dialect(file)
    section = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    fields = ConfigFields(section, {}, f"{path.name}'s metadata of {name}")
    config = _sizes(file, fields, dialect)
    config[GGUF_ARCHITECTURE] = name
    _read_rope(file, fields, config)
    if dialect.window:
        _read_windows(fields, config, dialect)
    if dialect.softcaps:
        for ours, theirs in (("attn", "attn_logit"), ("final", "final_logit")):
            config[f"{ours}_logit_softcapping"] = _number(fields, f"{theirs}_softcapping")
    if dialect.scores_layers is not None:
        _scale_scores(config, dialect.scores_layers)
    size = config["head_dim"]
    same = ("rope.dimension_count_swa", "attention.key_length_swa", "attention.value_length_swa")
    fields.refuse_unread({**_NEUTRAL, **dict.fromkeys(same, size)})
    return config


def gguf_tensor_files(path: Path) -> TensorFiles:
    """The file's tensors by the architecture's names. Raises ConfigError."""
    file = open_gguf(path)
    parts = _dialect(file)[1].parts
    named = {_name(name, parts): tensor for name, tensor in file.tensors.items()}
    tensors = {name: replace(tensor, name=name) for name, tensor in named.items()}
    return TensorFiles(MappingProxyType(tensors), (file.header,))


def _dialect(file: GgufFile) -> tuple[str, _Dialect]:
    name = str(file.metadata.get("general.architecture", ""))
    if name not in _DIALECTS:
        raise ConfigError(
            f"{file.path.name} holds a model of architecture {name!r}; GGUF files are read for "
            f"{', '.join(_DIALECTS)}"
        )
    return name, _DIALECTS[name]


def _name(name: str, parts: Mapping[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return f"{_OUTER[module]}.{kind}"
    block = _BLOCK.fullmatch(name)
    if block is None or block[2] not in parts:
        return name
    return f"model.layers.{block[1]}.{parts[block[2]]}.{block[3]}"


def _sizes(file: GgufFile, fields: ConfigFields, dialect: _Dialect) -> dict[str, object]:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_size = fields.optional_integer("attention.key_length") or hidden // heads
    value_size = fields.optional_integer("attention.value_length") or head_size
    if head_size < 1:
        raise ConfigError(f"{file.path.name} has {heads} heads in {hidden} inputs")
    layers = fields.integer("block_count")
    if value_size != head_size:
        raise ConfigError(
            f"{file.path.name} has keys of {head_size} and values of {value_size}, they must agree"
        )
    fields.optional_integer("vocab_size")  # padded or not: the embedding's rows are what counts
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path.name} has no token_embd.weight, so it holds no model")
    return {
        "architectures": [dialect.name],
        **dialect.activation,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.optional_integer("attention.head_count_kv") or heads,
        "head_dim": head_size,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": _number(fields, "attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": dialect.name != "Qwen2ForCausalLM"
        and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _dtype(file),
    }


def _dtype(file: GgufFile) -> str:
    """That of most matrices; bfloat16 if these are quantized."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(sizes, key=lambda kind: sizes[kind], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _read_rope(file: GgufFile, fields: ConfigFields, config: dict[str, object]) -> None:
    """Frequencies: base, scaling, and divisors where the file has a tensor of them."""
    head_size, dim = config["head_dim"], fields.optional_integer("rope.dimension_count")
    if dim is not None and dim != head_size:
        config["partial_rotary_factor"] = dim / int(str(head_size))
    config["rope_theta"] = _number(fields, "rope.freq_base") or 10_000.0
    trained = fields.optional_integer("rope.scaling.original_context_length")
    if config["architectures"] == ["Phi3ForCausalLM"]:
        config["original_max_position_embeddings"] = trained or config["max_position_embeddings"]
    fields.flag("rope.scaling.finetuned")
    scaling = _read_scaling(file, fields, (dim or int(str(head_size))) // 2)
    if scaling:
        length = trained or config["max_position_embeddings"]
        config["rope_scaling"] = {"original_max_position_embeddings": length} | scaling


def _read_scaling(file: GgufFile, fields: ConfigFields, num_pairs: int) -> dict[str, object]:
    """What llama.cpp computes from the scaling keys, as a config's `rope_scaling`.

    Its angles are position / (factor * divisor); without a type the type is linear, `none` has no
    factor. `attn_factor` multiplies cos and sin for every type, in addition to YaRN's own scale;
    longrope has no scale of its own. Keys for details of YaRN (`yarn_ext_factor`, ...), which its
    converter writes, have no effect on the architectures that are read here.
    """
    kind = fields.text("rope.scaling.type") or "linear"
    if kind not in _SCALING_TYPES:
        raise ConfigError(
            f"{fields.source} asks for rope scaling {kind!r}; supported are "
            f"{', '.join(_SCALING_TYPES)}"
        )
    old_factor = _number(fields, "rope.scale_linear")
    factor = _number(fields, "rope.scaling.factor") or old_factor or 1.0
    factor = 1.0 if kind == "none" else factor
    scale = _number(fields, "rope.scaling.attn_factor") or 1.0
    for key in _WITHOUT_EFFECT:
        fields.value(key)
    divisors = {
        key: [factor * number for number in _floats(file.tensors[tensor])]
        for tensor, keys in _DIVISORS.items()
        if tensor in file.tensors
        for key in keys
    }
    if kind == "yarn" and not divisors:
        return {"rope_type": "yarn", "factor": factor, "attn_factor": scale}
    if kind == "yarn":
        raise ConfigError(f"{file.path.name} has both YaRN and a tensor of rotary divisors")
    if not divisors and scale != 1.0:  # no type of a config has such a scale but this one
        divisors = dict.fromkeys(("short_factor", "long_factor"), [factor] * num_pairs)
    if divisors:
        return {"rope_type": "longrope", "factor": 1.0, "attention_factor": scale, **divisors}
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _read_windows(fields: ConfigFields, config: dict[str, object], dialect: _Dialect) -> None:
    """Layers with a window: which ones they are, and the base of their frequencies."""
    config["sliding_window"] = fields.optional_integer("attention.sliding_window")
    pattern = fields.value("attention.sliding_window_pattern")
    layers = range(int(str(config["num_hidden_layers"])))
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        has_window = [pattern == 0 or (i + 1) % pattern != 0 for i in layers]
        config["layer_types"] = list(map(_layer_type, has_window))
    elif isinstance(pattern, tuple):
        config["layer_types"] = list(map(_layer_type, pattern))
    base = _number(fields, "rope.freq_base_swa")
    if dialect.window_base:
        config["rope_local_base_freq"] = base or 10_000.0
    elif base is not None and base != config["rope_theta"]:
        raise ConfigError(
            f"{fields.source} sets 'rope.freq_base_swa' to {base:g} and 'rope.freq_base' to "
            f"{config['rope_theta']}; this architecture has one base"
        )


def _layer_type(has_window: object) -> str:
    return "sliding_attention" if has_window else "full_attention"


def _scale_scores(config: dict[str, object], layers_of_exception: int) -> None:
    """GGUF leaves Gemma's query_pre_attn_scalar out, llama.cpp knows it by the size."""
    if config["num_hidden_layers"] == layers_of_exception:
        heads = int(str(config["num_attention_heads"]))
        config["query_pre_attn_scalar"] = int(str(config["hidden_size"])) // heads
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]


def _number(fields: ConfigFields, name: str) -> float | None:
    """A float32 as the shortest decimal that it may come from: 1e-05, not 9.99999974e-06."""
    value = fields.optional_number(name)
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


def _floats(tensor: StoredTensor) -> list[float]:
    if tensor.dtype != "F32":
        raise ConfigError(f"{tensor.name} is stored as {tensor.dtype}, it must be F32")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.nbytes // 4}f", stream.read(tensor.nbytes)))
