"""`read_spec`: from a checkpoint's `config.json` to a `ModelSpec`, or one sentence why not.

Called by the engine's assembly, the planner and the command line. Reads no tensor's values (the
headers of files only for models that embed texts) and imports no torch, except for architectures
that only the `transformers` fallback can run.

`with_context` handles contexts beyond the model's limit: refused, or allowed with scaled rotary
positions. The method is YaRN (arXiv:2309.00071) by the ratio of the lengths; positions that the
checkpoint already scales keep their method, with a factor that is larger by the ratio. YaRN is
static: every position has one rotation, so attention still depends on distances only, cached
prefixes stay valid and the same request has the same bits. Dynamic NTK would leave short requests
unchanged, but its keys and queries beyond the limit are rotated by different bases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.architectures import (
    ARCHITECTURES,
    MODEL_TYPES,
    WRAPPERS,
    Architecture,
    text_part,
)
from quickstep.model.checkpoint.config_fields import (
    ConfigFields,
    note_on_foreign,
    read_json,
)
from quickstep.model.checkpoint.gguf_names import is_gguf
from quickstep.model.checkpoint.gguf_spec import gguf_config, gguf_naming
from quickstep.model.checkpoint.safetensors_files import open_tensor_files
from quickstep.model.checkpoint.source import reading_checkpoint
from quickstep.model.decoder_spec import (
    STANDARD_NAMING,
    LongContext,
    ModelSpec,
    NormPlacement,
    QKNorm,
    TensorNaming,
)
from quickstep.model.encoders.encoder_spec import ENCODERS
from quickstep.model.encoders.read_spec import read_encoder_spec
from quickstep.model.layer_patterns.layers import make_layers
from quickstep.model.rope_spec import RopeKind, RopeSpec

# Keys that count layers for drafts after the last one (`model.mtp`).
_PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_MOST_EXPERTS = 10_000  # of a layer; as with layers, a damaged count would take all memory
_CLAMPED_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_WITHOUT_GATE = {"relu": "relu", "relu2": "relu2"}


def read_spec(path: str | Path) -> ModelSpec:
    """Read the spec of the checkpoint in a directory.

    Raises:
        ConfigError: No readable config, an unknown architecture, or a feature that is not
            implemented.
    """
    with reading_checkpoint(path):
        return _read_spec(path)


def _read_spec(path: str | Path) -> ModelSpec:
    config = read_config(path)
    name = _architecture_name(config)
    if is_gguf(path) and name not in ENCODERS:
        # llama.cpp adds Gemma's offset to the norms' weights, and parts gate and up of experts.
        spec = parse_spec(config)
        naming = gguf_naming(config) or _gguf_naming(spec.naming)
        return replace(spec, norm_offset=0.0, naming=naming)
    if name in ARCHITECTURES or name in WRAPPERS:
        return _without_missing_head(Path(path), parse_spec(config))
    if name in ENCODERS:
        return read_encoder_spec(Path(path), config, name)
    supported = ", ".join(sorted({*ARCHITECTURES, *ENCODERS}))
    if config.get("auto_map"):
        raise ConfigError(
            f"architecture {name!r} needs Python code from the checkpoint (`auto_map`), which "
            f"Quickstep never runs; natively supported are {supported}"
        )
    # Imported here: it needs transformers, which is optional and takes seconds to import.
    from quickstep.model.fallback.spec import read_fallback_spec

    return read_fallback_spec(Path(path), name, supported)


def _without_missing_head(path: Path, spec: ModelSpec) -> ModelSpec:
    """The spec of a checkpoint for embeddings (it has the `modules.json` of sentence-transformers)
    that left out the output projection which its config has, as Qwen3-Embedding-8B does. A config
    without weights is read as it is, for a plan.
    """
    has_weights = any(path.glob("*.safetensors"))
    if spec.tied or not has_weights or not (path / "modules.json").is_file():
        return spec
    heads = tuple(name.removesuffix("weight") for name in spec.naming.heads)  # or `qweight`
    is_stored = any(name.startswith(heads) for name in open_tensor_files(path).tensors)
    return spec if is_stored else _without_head(spec)


def _without_head(spec: ModelSpec) -> ModelSpec:
    return replace(spec, has_head=False, tied=True, head_bias=False)


def _gguf_naming(naming: TensorNaming) -> TensorNaming:
    parts = STANDARD_NAMING.expert_parts if naming.fused_experts else naming.expert_parts
    return replace(naming, fused_experts=False, expert_parts=parts)


def read_config(path: str | Path) -> dict[str, object]:
    """The parsed `config.json` of a checkpoint directory, or a GGUF file's metadata in its terms.

    Raises:
        ConfigError: It is missing or cannot be read.
    """
    if is_gguf(path):
        return gguf_config(Path(path))
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no config.json, so it is not a checkpoint")
    return read_json(file)


def parse_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a native architecture's config. Raises ConfigError."""
    name = _architecture_name(config)
    architecture = _architecture(config, name)
    values = dict(config)
    text_config = values.pop("text_config", None)
    if isinstance(text_config, dict):
        tied = values.get("tie_word_embeddings")
        names = ("dtype", "torch_dtype", "tie_word_embeddings")
        values = {key: values[key] for key in names if values.get(key) is not None} | text_config
        if tied is True:  # else as the text part says, where it says something
            values["tie_word_embeddings"] = True
    for key in _QUANTIZATION_KEYS:  # how weights are stored is `formats.detect`'s part
        values.pop(key, None)
    fields = ConfigFields(values, architecture.defaults, "config.json")
    spec = _read_decoder(fields, architecture, name)
    num_prediction_layers = _num_prediction_layers(fields)
    foreign = fields.foreign(architecture.neutral)
    if _listed_name(config) == _base_name(name):
        spec = _without_head(spec)
    return replace(
        spec,
        notes=(*_notes(config, name), *_notes_on(spec, foreign)),
        num_prediction_layers=num_prediction_layers,
    )


def _num_prediction_layers(fields: ConfigFields) -> int:
    return max(fields.optional_integer(key) or 0 for key in _PREDICTION_LAYERS)


def _notes_on(spec: ModelSpec, foreign: Sequence[str]) -> Iterator[str]:
    yield from note_on_foreign(foreign)
    if _has_indexer(spec):
        yield (
            f"sequences have up to {spec.max_model_len} tokens: the model chooses among more "
            "positions by an indexer, which is not implemented"
        )
    for factor in sorted({rope.attn_factor for rope in spec.ropes if rope.attn_factor != 1.0}):
        yield (
            f"rope scaling's attn_factor {factor:g} multiplies YaRN's own scale, as in vLLM and "
            "llama.cpp (transformers ignores it)"
        )


def _notes(config: Mapping[str, object], name: str) -> tuple[str, ...]:
    notes = []
    if config.get("auto_map"):
        notes.append(f"the checkpoint's Python code (auto_map) is not used: {name} is native")
    stored_as = config.get("quantization_config")
    if isinstance(stored_as, Mapping) and stored_as.get("quant_method") == "mxfp4":
        notes.append(
            "the checkpoint's experts are stored in MXFP4 (4.25 bits a weight) and held in 4-bit "
            "values on CPUs, exactly, on GPUs in the model's dtype, or in --quantization's formats"
        )
    if config.get("vision_config"):
        notes.append("the checkpoint's vision part is left out: only text is served")
    return tuple(notes)


def _architecture(config: Mapping[str, object], name: str) -> Architecture:
    """The entry of a name, or of the text part of a wrapper."""
    if name not in WRAPPERS:
        return ARCHITECTURES[name]
    text = config.get("text_config")
    inner = WRAPPERS[name]
    if isinstance(text, Mapping) and (text.get("architectures") or text.get("model_type")):
        inner = _architecture_name(text)
    if inner not in ARCHITECTURES:
        raise ConfigError(
            f"the text part of {name} is {inner!r}, which Quickstep does not run natively; its "
            f"text part may be {', '.join(sorted(ARCHITECTURES))}"
        )
    return text_part(inner)


def _architecture_name(config: Mapping[str, object]) -> str:
    """The name in `ARCHITECTURES`, also for the decoder without its output projection, as
    `MistralForCausalLM` for `MistralModel`; another one as the config has it.
    """
    listed = _listed_name(config)
    if listed is None:
        model_type = str(config.get("model_type", ""))
        return MODEL_TYPES.get(model_type, model_type or "(none named)")
    return next((name for name in ARCHITECTURES if listed == _base_name(name)), listed)


def _listed_name(config: Mapping[str, object]) -> str | None:
    listed = config.get("architectures")
    return str(listed[0]) if isinstance(listed, list) and listed else None


def _base_name(name: str) -> str:
    """transformers' class of the decoder without its output projection."""
    return name.removesuffix("ForCausalLM") + "Model"


def _read_decoder(fields: ConfigFields, entry: Architecture, name: str) -> ModelSpec:
    if fields.value("is_causal") is False:
        raise ConfigError(
            f"{fields.source} has is_causal false: tokens see those after them, which is not "
            "implemented for decoders"
        )
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    head_size = fields.optional_integer("head_dim") or hidden_size // num_heads
    latent = entry.latent(fields)
    if latent is not None:
        num_kv_heads, head_size = 1, latent.nope_size + latent.rope_size
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"config.json has {num_heads} query heads, not a multiple of {num_kv_heads} kv heads"
        )
    num_layers = entry.num_layers(fields)
    moe = entry.experts(fields)
    if moe is not None and moe.num_experts > _MOST_EXPERTS:
        raise ConfigError(
            f"{fields.source} has {moe.num_experts} experts; at most {_MOST_EXPERTS} are read"
        )
    for key, other in entry.repeated.items():
        fields.repeated(key, other)
    if entry.norm_eps_key != "rms_norm_eps":
        fields.optional_number("rms_norm_eps")  # which its norms do not read
    ropes = entry.ropes(fields, num_layers, head_size)
    windows = entry.windows(fields, num_layers)
    sparse = entry.sparse(fields, num_layers)
    mixers = entry.mixers(fields, num_layers)
    bias = fields.flag(entry.bias_key) if entry.bias_key else False
    multiplied, embedding_key = entry.multipliers, entry.embedding_key
    if multiplied:
        embedding_key = "embedding_multiplier"
    embedding = fields.number(embedding_key) if embedding_key else 1.0
    return ModelSpec(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=entry.width(fields),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_model_len=ropes.max_model_len,
        layers=entry.sizes(fields, make_layers(windows, ropes, sparse, mixers)),
        ropes=ropes.specs,
        norm_eps=fields.number(entry.norm_eps_key),
        attention_scale=entry.scale(fields, head_size),
        dtype=fields.text("dtype") or fields.text("torch_dtype"),
        activation=_activation(fields, entry),
        norm_placement=_norm_placement(fields, entry),
        norm_offset=entry.norm_offset,
        qk_norm=_qk_norm(fields, entry),
        qkv_bias=entry.qkv_bias or bias,
        output_bias=_output_bias(fields, entry, bias),
        mlp_bias=fields.flag(entry.mlp_bias_key) if entry.mlp_bias_key else False,
        sinks=entry.sinks,
        attention_softcap=_softcap(fields, entry, "attn_logit_softcapping"),
        logit_softcap=_softcap(fields, entry, "final_logit_softcapping"),
        embedding_multiplier=hidden_size**0.5 if entry.scaled_embedding else embedding,
        residual_multiplier=fields.number("residual_multiplier") if multiplied else 1.0,
        logit_divisor=_logit_divisor(fields, entry),
        tied=_is_tied(fields, entry),
        moe=moe,
        naming=entry.naming,
        attention_gate=entry.attention_gate,
        latent=latent,
        value_norm=entry.value_norm,
        layer_scalars=entry.layer_scalars,
        layer_inputs=entry.layer_inputs(fields),
        layer_norm=entry.layer_norm,
        norm_bias=entry.norm_bias,
        gated=entry.gated,
        head_bias=entry.head_bias,
        multipliers=entry.layer_multipliers(fields),
        altup=entry.altup(fields),
    )


def _is_tied(fields: ConfigFields, entry: Architecture) -> bool:
    tied = fields.flag("tie_word_embeddings")
    if entry.tied_key is None or fields.value(entry.tied_key) is None:
        return tied
    return fields.flag(entry.tied_key)


def _activation(fields: ConfigFields, entry: Architecture) -> str:
    fields.text("hidden_act")  # Gemma files carry both; `hidden_activation` is the one in force
    if entry.clamped_swiglu:
        return _clamped_swiglu(fields)
    name = fields.text(entry.activation_key)
    possible = _ACTIVATIONS if entry.gated else _ACTIVATIONS | _WITHOUT_GATE
    if name not in possible:
        known = ", ".join(sorted(possible))
        raise ConfigError(f"config.json asks for activation {name!r}; supported are {known}")
    return possible[name]


def _norm_placement(fields: ConfigFields, entry: Architecture) -> NormPlacement:
    is_parallel = entry.parallel_key is not None and fields.flag(entry.parallel_key)
    return NormPlacement.PARALLEL if is_parallel else entry.norm_placement


def _logit_divisor(fields: ConfigFields, entry: Architecture) -> float:
    if entry.logit_scale_key is not None:
        return 1.0 / (fields.optional_number(entry.logit_scale_key) or 1.0)
    return fields.number("logits_scaling") if entry.multipliers else 1.0


def _output_bias(fields: ConfigFields, entry: Architecture, bias: bool) -> bool:
    if entry.output_bias_key is not None:
        return fields.flag(entry.output_bias_key)
    return entry.output_bias and bias


def _qk_norm(fields: ConfigFields, entry: Architecture) -> QKNorm:
    is_switched = entry.qk_norm_key is not None and fields.flag(entry.qk_norm_key)
    return entry.switched_qk_norm if is_switched else entry.qk_norm


def _clamped_swiglu(fields: ConfigFields) -> str:
    """Only the released models' numbers have kernels."""
    for name, known in _CLAMPED_SWIGLU.items():
        if fields.number(name) != known:
            raise ConfigError(
                f"{fields.source} sets {name!r} to {fields.number(name)}; supported is {known}"
            )
    return "clamped_swiglu"


def _softcap(fields: ConfigFields, entry: Architecture, key: str) -> float | None:
    return fields.optional_number(key) if entry.softcaps else None


def with_context(spec: ModelSpec, max_model_len: int | None, allow_longer: bool) -> ModelSpec:
    """The spec, with scaled positions if `max_model_len` is above its limit.

    Raises:
        ConfigError: It is, and that is not allowed or not possible.
    """
    limit = spec.max_model_len
    if max_model_len is None or max_model_len <= limit:
        return spec
    if not allow_longer and not _has_indexer(spec):
        raise ConfigError(
            f"--max-model-len is {max_model_len}, the model's limit is {limit}; lower it, or add "
            "--allow-long-context, which scales the model's positions (answers may suffer)"
        )
    if _has_indexer(spec):
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but {spec.architecture} chooses among more than "
            f"{limit} positions by an indexer, which is not implemented; lower it to {limit}"
        )
    if not spec.native or not spec.ropes:
        raise ConfigError(
            f"--allow-long-context is not supported for {spec.architecture}: its positions cannot "
            f"be scaled; lower --max-model-len to {limit}"
        )
    ratio = max_model_len / limit
    # a layer with a window sees no distance that it was not trained for
    seeing = [layer for layer in spec.layers if layer.window is None or layer.window > limit]
    wide = {rope for layer in seeing for rope in (layer.rope, layer.query_rope)}
    ropes = tuple(
        _scaled(rope, ratio, limit) if index in wide else rope
        for index, rope in enumerate(spec.ropes)
    )
    kinds = sorted({ropes[index].kind.value for index in wide if index is not None})
    scaling = LongContext(" and ".join(kinds) or RopeKind.DEFAULT.value, ratio, limit)
    note = (
        f"max_model_len {max_model_len} is above the model's limit of {limit}: its positions are "
        f"scaled ({scaling.rope_type}, factor {ratio:g}), answers may suffer"
    )
    return replace(
        spec,
        max_model_len=max_model_len,
        ropes=ropes,
        long_context=scaling,
        notes=(*spec.notes, note),
    )


def _has_indexer(spec: ModelSpec) -> bool:
    return spec.latent is not None and spec.latent.num_indexed is not None


def _scaled(rope: RopeSpec, ratio: float, limit: int) -> RopeSpec:
    if rope.kind is RopeKind.DEFAULT:
        return replace(rope, kind=RopeKind.YARN, factor=ratio, trained_len=limit)
    if rope.kind is RopeKind.LONGROPE:
        raise ConfigError(
            "--allow-long-context is not supported for longrope, whose factors are of one length; "
            f"lower --max-model-len to {limit}"
        )
    return replace(rope, factor=rope.factor * ratio)
