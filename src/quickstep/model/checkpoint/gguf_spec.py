"""GGUF metadata as the `config.json` that the checkpoint was converted from. No torch.

One more dialect of configs: `gguf_config` translates it, so that `spec.parse_spec`, its checks and
the fingerprint work as for any checkpoint, and `gguf_tensor_files` renames the tensors to those of
the architecture. A key of the model's own section that is not understood is refused.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from ctypes import c_float
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from types import MappingProxyType

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import MOST_LAYERS, ConfigFields
from quickstep.model.checkpoint.gguf_architectures import (
    CONVOLUTIONS,
    DIALECTS,
    MIXTRAL,
    Dialect,
)
from quickstep.model.checkpoint.gguf_file import GgufFile, open_gguf
from quickstep.model.checkpoint.safetensors_files import StoredTensor, TensorFiles
from quickstep.model.decoder_spec import TensorNaming

GGUF_ARCHITECTURE = "_gguf_architecture"

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
# tables of an encoder, whose rows are a size of the config
_TABLES: Mapping[str, str] = MappingProxyType(
    {
        "token_embd": "vocab_size",
        "position_embd": "max_position_embeddings",
        "token_types": "type_vocab_size",
    }
)
_POOLINGS: Mapping[object, str] = MappingProxyType({1: "mean", 2: "cls", 3: "last"})
_RANK = 4  # a pooling_type: the head of a reranker
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>[a-z0-9_.]+)")
_COLUMNS = re.compile(r"blk\.\d+\.ssm_(a|d|norm\.weight)")
_WITHOUT_NORMS = 128  # experts of Llama 4 Maverick
_EXPERT = "{}"
_GATE_ABOVE_UP = ".gate_up_proj."  # of all experts, in one tensor


def gguf_config(path: Path) -> dict[str, object]:
    """The config of a GGUF file. Raises ConfigError."""
    return dict(_config_of(open_gguf(path)))


@lru_cache(maxsize=8)  # a start needs it several times
def _config_of(file: GgufFile) -> Mapping[str, object]:
    name, dialect = _dialect(file)
    section = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    fields = ConfigFields(section, {}, f"{file.path.name}'s metadata of {name}")
    if dialect.encoder:
        return _encoder_config(file, fields, name, dialect)
    config = _sizes(file, fields, dialect)
    config[GGUF_ARCHITECTURE] = name
    _read_rope(file, fields, config, dialect)
    if dialect.window:
        _read_windows(fields, config, dialect)
    if dialect.softcaps:
        for ours, theirs in (("attn", "attn_logit"), ("final", "final_logit")):
            config[f"{ours}_logit_softcapping"] = _number(fields, f"{theirs}_softcapping")
    if dialect.scores_layers is not None:
        _scale_scores(config, dialect.scores_layers)
    size = config["head_dim"]
    same = ("rope.dimension_count_swa", "attention.key_length_swa", "attention.value_length_swa")
    fields.refuse_unread({**_NEUTRAL, **dialect.given, **dict.fromkeys(same, size)})
    return config


def _encoder_config(
    file: GgufFile, fields: ConfigFields, name: str, dialect: Dialect
) -> dict[str, object]:
    """The config of an encoder; a reranker's head is that of XLM-R, two layers."""
    rows = {}
    for module, key in _TABLES.items():
        tensor = file.tensors.get(f"{module}.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise ConfigError(
                f"{file.path.name} has no table {module}.weight, so it holds no {name}"
            )
        rows[key] = tensor.shape[0]
    pooling = fields.optional_integer("pooling_type")
    fields.value("context_length")  # the rows of its table count
    fields.value("vocab_size")
    labels = fields.sequence("classifier.output_labels")
    architecture = dialect.name
    if "cls.output.weight" in file.tensors:
        architecture = "XLMRobertaForSequenceClassification"
    elif pooling == _RANK or "cls.weight" in file.tensors:
        raise ConfigError(
            f"{file.path.name} holds a classification head without cls.output, which is not "
            "implemented; the checkpoint in safetensors is read"
        )
    config: dict[str, object] = {
        "architectures": [architecture],
        GGUF_ARCHITECTURE: name,
        "dtype": _dtype(file),
        **rows,
        **dialect.config,
        **_of_keys(fields, dialect.keys),
    }
    if architecture != dialect.name:
        head = file.tensors["cls.output.weight"].shape
        names = labels or [f"LABEL_{index}" for index in range(head[0] if len(head) == 2 else 1)]
        config["id2label"] = dict(enumerate(names))
    fields.refuse_unread({})
    return config


def gguf_pooling(path: Path) -> str | None:
    """How states become one embedding, as an encoder's file has it; None where it has nothing.

    Raises:
        ConfigError: In a way that is not known.
    """
    file = open_gguf(path)
    kind = file.metadata.get(f"{file.metadata.get('general.architecture')}.pooling_type")
    if kind is None or kind in (0, _RANK):
        return None
    if kind not in _POOLINGS:
        raise ConfigError(f"{path.name} has the pooling_type {kind!r:.80}, which is not known")
    return _POOLINGS[kind]


def gguf_tensor_files(path: Path) -> TensorFiles:
    """The file's tensors by the architecture's names, each expert's by its own. Raises ConfigError.

    Files hold a projection of all experts as one tensor [E, N, C], whose experts follow each other.
    """
    return _tensor_files_of(open_gguf(path))


@lru_cache(maxsize=8)  # a start needs them several times
def _tensor_files_of(file: GgufFile) -> TensorFiles:
    dialect = _dialect(file)[1]
    tensors: dict[str, StoredTensor] = {}
    for stored in file.tensors.values():
        name = _name(stored.name, dialect, file.tensors)
        if _EXPERT in name:
            tensors.update({part.name: part for part in _experts(stored, name)})
        else:
            tensors[name] = replace(stored, name=name, shape=_shape(stored))
    return TensorFiles(MappingProxyType(tensors), (file.header,))


def _experts(stored: StoredTensor, name: str) -> Iterator[StoredTensor]:
    """Those of each expert, whose gate may be above its up."""
    count, shape = stored.shape[0], stored.shape[1:]
    names = [name]
    if _GATE_ABOVE_UP in name:
        names = [name.replace(_GATE_ABOVE_UP, part) for part in (".gate_proj.", ".up_proj.")]
    rows, nbytes = shape[0] // len(names), stored.nbytes // (count * len(names))
    for expert in range(count):
        for place, part in enumerate(names, expert * len(names)):
            own, offset = part.replace(_EXPERT, str(expert)), stored.offset + place * nbytes
            of_expert = (rows, *shape[1:])
            yield replace(stored, name=own, shape=of_expert, offset=offset, nbytes=nbytes)


def _shape(stored: StoredTensor) -> tuple[int, ...]:
    """The architecture's: files drop the middle dimension, 1, of a convolution [C, 1, K], and some
    of them the first one of a gate [1, hidden]; numbers of Mamba's heads and groups are columns.
    """
    shape = stored.shape
    if _COLUMNS.fullmatch(stored.name):
        return (math.prod(shape),)
    if any(f".{name}.weight" in stored.name for name in CONVOLUTIONS) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (1, *shape) if ".ffn_gate_inp_shexp." in stored.name and len(shape) == 1 else shape


def gguf_has_paired_heads(config: Mapping[str, object]) -> bool:
    """Whether the rows of a file's queries and keys are in pairs, for rotation of neighbours."""
    dialect = DIALECTS.get(str(config.get(GGUF_ARCHITECTURE)))
    return dialect is not None and dialect.paired


def gguf_naming(config: Mapping[str, object]) -> TensorNaming | None:
    """The names of a file's tensors, where they are not those of the architecture."""
    dialect = DIALECTS.get(str(config.get(GGUF_ARCHITECTURE)))
    return None if dialect is None else dialect.naming


def _dialect(file: GgufFile) -> tuple[str, Dialect]:
    name = str(file.metadata.get("general.architecture", ""))
    if name == "clip":
        raise ConfigError(
            f"{file.path.name} holds an image encoder, which goes with a model; name the model's "
            "own file"
        )
    if name not in DIALECTS:
        from difflib import get_close_matches

        near = get_close_matches(name, DIALECTS, 1)
        hint = f", the nearest is {near[0]}" if near else ""
        raise ConfigError(
            f"{file.path.name} holds a model of architecture {name!r}; GGUF files are read for "
            f"{', '.join(DIALECTS)}{hint}"
        )
    is_mixtral = name == "llama" and file.metadata.get("llama.expert_count", 0) != 0
    return name, MIXTRAL if is_mixtral else DIALECTS[name]


def _name(name: str, dialect: Dialect, names: Collection[str]) -> str:
    """The architecture's name; a layer's tensor that it does not know keeps its own name there.
    `names` are those of all tensors.
    """
    parts = dialect.parts
    module, _, kind = name.rpartition(".")
    if module in dialect.outer:
        return f"{dialect.outer[module]}.{kind}"
    block = _BLOCK.fullmatch(name)
    if block is None:
        return name
    part = block["part"]
    own = parts.get(part) or f"{parts.get(part.rpartition('.')[0], '')}.{kind}"
    is_complete = f"blk.{block['layer']}.post_attention_norm.weight" in names
    if dialect.single_blocks and is_complete and own == "norm.weight":
        own = "input_layernorm.weight"
    return f"{dialect.layers}.{block['layer']}.{part if own.startswith('.') else own}"


def _sizes(file: GgufFile, fields: ConfigFields, dialect: Dialect) -> dict[str, object]:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_size = fields.optional_integer("attention.key_length") or hidden // heads
    value_size = fields.optional_integer("attention.value_length") or head_size
    if head_size < 1:
        raise ConfigError(f"{file.path.name} has {heads} heads in {hidden} inputs")
    layers = fields.integer("block_count", MOST_LAYERS)
    num_nextn = fields.optional_integer("nextn_predict_layers") or 0  # the last ones, for drafts
    layers -= num_nextn
    if value_size != head_size:
        raise ConfigError(
            f"{file.path.name} has keys of {head_size} and values of {value_size}, they must agree"
        )
    fields.optional_integer("vocab_size")  # padded or not: the embedding's rows are what counts
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path.name} has no token_embd.weight, so it holds no model")
    kinds = _single_blocks(file, fields, layers) if dialect.single_blocks else {}
    width = kinds.pop("intermediate_size", None)
    if not dialect.single_blocks:
        width = _width(fields)
    has_bias = "blk.0.attn_q.bias" in file.tensors
    has_qk_norm = "blk.0.attn_q_norm.weight" in file.tensors
    return {
        "architectures": [dialect.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_size,
        "max_position_embeddings": fields.integer("context_length"),
        dialect.norm_key: _number(fields, "attention.layer_norm_rms_epsilon")
        or _number(fields, "attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **({} if dialect.bias_key is None else {dialect.bias_key: has_bias}),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _dtype(file),
        **({} if width is None else {"intermediate_size": width}),
        **_key_heads(fields, dialect),
        **kinds,
        **(_delta(file, fields, layers) if dialect.delta else {}),
        **(_chunks(fields, layers) if dialect.chunks else {}),
        **(_streams(file, fields) if dialect.streams else {}),
        **(_expanded(fields, hidden) if dialect.expanded else {}),
        **{key: _has_part(file, part) for part, key in dialect.flags.items()},
        **dialect.config,
        **_of_keys(fields, dialect.keys),
        **({"use_qk_norm": has_qk_norm} if dialect.optional_qk_norm else {}),
        **({"num_nextn_predict_layers": num_nextn} if num_nextn else {}),
    }


def _key_heads(fields: ConfigFields, dialect: Dialect) -> dict[str, object]:
    """How many key heads there are, which files may list by layer."""
    listed = fields.value("attention.head_count_kv")
    if dialect.single_blocks:
        return {}
    if dialect.without_keys is None or not isinstance(listed, tuple):
        count = fields.optional_integer("attention.head_count_kv")
        return {} if not count else {"num_key_value_heads": count}
    layers = ["full_attention" if count else dialect.without_keys for count in listed]
    return {"num_key_value_heads": max(listed, default=0), "layer_types": layers}


def _delta(file: GgufFile, fields: ConfigFields, layers: int) -> dict[str, object]:
    """Sizes of value heads, and which layers are Gated DeltaNet."""
    heads, values = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if values % heads:
        raise ConfigError(f"{file.path.name} has {heads} value heads in {values} values")
    listed = fields.sequence("attention.recurrent_layers")
    period = fields.optional_integer("full_attention_interval") or 4
    if listed is None:
        listed = [(index + 1) % period != 0 for index in range(layers)]
    kinds = ["linear_attention" if recurrent else "full_attention" for recurrent in listed]
    return {"linear_value_head_dim": values // heads, "layer_types": kinds[:layers]}


def _chunks(fields: ConfigFields, layers: int) -> dict[str, object]:
    """What llama.cpp knows of Llama 4: chunks and growing queries, unless a window of 0 says that
    each layer has positions and sees all; norms of queries and keys but for 128 experts.
    """
    known: dict[str, object] = {"use_qk_norm": fields.value("expert_count") != _WITHOUT_NORMS}
    if fields.value("attention.sliding_window") == 0:
        known |= {"no_rope_layers": [1] * layers, "attention_chunk_size": None}
    return known


def _width(fields: ConfigFields) -> object:
    """That of all layers, or a list of them; mixtures may have none."""
    listed = fields.value("feed_forward_length")
    return (
        list(listed)
        if isinstance(listed, tuple)
        else fields.optional_integer("feed_forward_length")
    )


def _expanded(fields: ConfigFields, hidden: int) -> dict[str, object]:
    """How much wider Mamba-2 is, the MLP's width, and whether attention turns queries and keys, as
    llama.cpp reads a key of its own that files have for all models.
    """
    values = fields.integer("ssm.inner_size")
    if values % hidden:
        raise ConfigError(f"{fields.source} has {values} values of states in {hidden} inputs")
    shared = fields.optional_integer("expert_shared_feed_forward_length")
    is_turned = fields.value("rope.scaling.finetuned")
    return {
        "mamba_expand": values // hidden,
        "shared_intermediate_size": shared or fields.optional_integer("feed_forward_length"),
        "position_embedding_type": "nope" if is_turned is False else "rope",
    }


def _streams(file: GgufFile, fields: ConfigFields) -> dict[str, object]:
    """Sizes that only tensors have, and the part of gates that is 0 by the deviation that cuts it:
    -inf for none.
    """
    shapes = {}
    for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight"):
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{file.path.name} has no {name}, so it holds no Gemma 3n")
        shapes[name] = tensor.shape[0]
    listed = fields.sequence("activation_sparsity_scale")
    rows, rank = shapes.values()
    sizes: dict[str, object] = {"vocab_size_per_layer_input": rows, "laurel_rank": rank}
    if listed is None:
        return sizes
    cutoffs = [float(value) for value in listed if isinstance(value, (int, float))]
    if len(cutoffs) != len(listed) or any(map(math.isnan, cutoffs)):
        raise ConfigError(f"{fields.source} has an activation_sparsity_scale of other than numbers")
    normal = NormalDist()
    return sizes | {"activation_sparsity_pattern": [normal.cdf(cutoff) for cutoff in cutoffs]}


def _single_blocks(file: GgufFile, fields: ConfigFields, layers: int) -> dict[str, object]:
    """What each layer is: attention where it has key heads, else a feed-forward part where it has a
    width, and the sizes of these.
    """
    heads, widths = (
        _by_layer(fields, name, layers)
        for name in ("attention.head_count_kv", "feed_forward_length")
    )
    values, num_states = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    kinds = []
    for layer, (count, width) in enumerate(zip(heads, widths, strict=True)):
        is_mixture = f"blk.{layer}.ffn_gate_inp.weight" in file.tensors
        feed_forward = "moe" if is_mixture else "mlp"
        kinds.append("full_attention" if count else feed_forward if width else "linear_attention")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads, default=0) or None,
        "intermediate_size": max(widths, default=0) or None,
        "mamba_head_dim": values // num_states,
    }


def _by_layer(fields: ConfigFields, name: str, layers: int) -> list[int]:
    """A list with a number for each layer."""
    listed = fields.sequence(name) or ()
    numbers = [value for value in listed[:layers] if isinstance(value, int)]
    if len(numbers) != layers:
        raise ConfigError(f"{fields.source} has {name!r} of {len(numbers)} of {layers} layers")
    return numbers


def _has_part(file: GgufFile, part: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in file.tensors)


def _of_keys(fields: ConfigFields, keys: Mapping[str, str]) -> dict[str, object]:
    """The values of a section's keys, as far as it has them, by the config's keys."""
    found: dict[str, object] = {}
    for theirs, ours in keys.items():
        value = fields.value(theirs)
        if value is not None:
            found[ours] = _number(fields, theirs) if isinstance(value, float) else value
    return found


def _dtype(file: GgufFile) -> str:
    """That of most matrices; bfloat16 if these are quantized."""
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    most = max(sizes, key=lambda kind: sizes[kind], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _read_rope(
    file: GgufFile, fields: ConfigFields, config: dict[str, object], dialect: Dialect
) -> None:
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
        own = dialect.yarn if scaling["rope_type"] == "yarn" else {}
        config["rope_scaling"] = {"original_max_position_embeddings": length, **scaling, **own}


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


def _read_windows(fields: ConfigFields, config: dict[str, object], dialect: Dialect) -> None:
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
    """A float32 as the shortest decimal that rounds to it: 1e-05, not 9.99999974e-06."""
    value = fields.optional_number(name)
    if value is None or not math.isfinite(value):
        return None
    decimals = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((number for number in decimals if c_float(number).value == value), value)


def _floats(tensor: StoredTensor) -> list[float]:
    if tensor.dtype != "F32":
        raise ConfigError(f"{tensor.name} is stored as {tensor.dtype}, it must be F32")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.nbytes // 4}f", stream.read(tensor.nbytes)))
