"""From an encoder's `config.json` to its `ModelSpec`; called by `model.spec.read_spec`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import ConfigFields, note_on_foreign, read_json
from quickstep.model.checkpoint.gguf_names import is_gguf
from quickstep.model.checkpoint.gguf_spec import gguf_tensor_files
from quickstep.model.checkpoint.safetensors_files import open_tensor_files
from quickstep.model.decoder_spec import LayerSpec, ModelSpec
from quickstep.model.encoders.encoder_spec import ENCODERS, EncoderSpec, HeadSpec
from quickstep.model.rope_spec import RopeKind, RopeSpec

_COMMON: Mapping[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "pad_token_id": 0,
}
_ROBERTA: Mapping[str, object] = {**_COMMON, "pad_token_id": 1}
_MODERN: Mapping[str, object] = {
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "hidden_activation": "gelu",
    "global_rope_theta": 160_000.0,
    "local_rope_theta": 10_000.0,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
    "classifier_bias": False,
}
_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "bert": _COMMON,
    "roberta": _ROBERTA,
    "modernbert": _MODERN,
}
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Of heads that predict tokens, of training, of a pooler that no released model has (BERT), and of
# a program that shows a cross-encoder's logit as it is: scores are its sigmoid in any case.
_NOT_COMPUTED = (
    *("tie_word_embeddings", "decoder_bias", "sparse_prediction", "sparse_pred_ignore_index"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_cutoff_factor"),
    *("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
    *("sentence_transformers", "sbert_ce_default_activation_function"),
)


def read_encoder_spec(path: Path, config: Mapping[str, object], name: str) -> ModelSpec:
    """Read the spec of a checkpoint directory or a GGUF file. Raises ConfigError."""
    family, has_head = ENCODERS[name]
    is_modern = family == "modernbert"
    fields = ConfigFields(config, _DEFAULTS[family], "config.json")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json has hidden_size {hidden_size}, no multiple of its {num_heads} heads"
        )
    num_layers = fields.integer("num_hidden_layers")
    head_size = hidden_size // num_heads
    labels = _labels(config) if has_head else None
    if is_modern:
        encoder, layers, ropes = _modern(fields, num_layers, head_size, labels)
        longest = fields.integer("max_position_embeddings")
        eps = fields.number("norm_eps")
    else:
        encoder, longest = _bert(fields, family, path, labels)
        layers = (LayerSpec(None, None, False),) * num_layers
        ropes, eps = (), fields.number("layer_norm_eps")
    trained = read_json(path / "sentence_bert_config.json").get("max_seq_length")
    if isinstance(trained, int) and trained > 0:
        longest = min(longest, trained)
    files = gguf_tensor_files(path) if is_gguf(path) else open_tensor_files(path)
    tensors = files.tensors.values()
    spec = ModelSpec(
        architecture=name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        max_model_len=longest,
        layers=layers,
        ropes=ropes,
        norm_eps=eps,
        attention_scale=1.0 / math.sqrt(head_size),
        dtype=fields.text("dtype") or fields.text("torch_dtype"),
        native=False,
        parameter_count=sum(math.prod(tensor.shape) for tensor in tensors),
        encoder=encoder,
    )
    for key in _NOT_COMPUTED:
        fields.value(key)
    return replace(spec, notes=tuple(note_on_foreign(fields.foreign({}))))


def _bert(
    fields: ConfigFields, family: str, path: Path, labels: tuple[str, ...] | None
) -> tuple[EncoderSpec, int]:
    """The encoder, and its longest text."""
    kind = fields.text("position_embedding_type")
    if kind != "absolute":
        raise ConfigError(f"config.json has position_embedding_type {kind!r}: not implemented")
    if fields.flag("is_decoder") or fields.flag("add_cross_attention"):
        raise ConfigError("config.json makes a decoder of an encoder (is_decoder): not implemented")
    num_positions = fields.integer("max_position_embeddings")
    first = 0
    if family == "roberta":
        first = (fields.optional_integer("pad_token_id") or 0) + 1
    segments = fields.integer("type_vocab_size")
    # an embedding is of one text, also where that says [SEP]
    reads_pairs = family == "bert" and segments > 1 and labels is not None
    encoder = EncoderSpec(
        family=family,
        activation=_activation(fields, "hidden_act"),
        first_position=first,
        num_positions=num_positions,
        num_segments=segments,
        separator_id=_separator_id(path) if reads_pairs else None,
        head=None if labels is None else HeadSpec(labels),
    )
    return encoder, num_positions - first


def _modern(
    fields: ConfigFields, num_layers: int, head_size: int, labels: tuple[str, ...] | None
) -> tuple[EncoderSpec, tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"):
        if fields.flag(name):
            raise ConfigError(f"config.json sets {name}: not implemented for ModernBERT")
    longest = fields.integer("max_position_embeddings")
    every, window = fields.integer("global_attn_every_n_layers"), fields.integer("local_attention")
    kinds = fields.sequence("layer_types")
    if kinds is None:
        names = ("sliding_attention", "full_attention")
        kinds = [names[i % every == 0] for i in range(num_layers)]
    unknown = next((k for k in kinds if k not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        raise ConfigError(f"config.json has a layer of type {unknown!r}: not implemented")
    is_global = [kind == "full_attention" for kind in kinds]
    if len(is_global) != num_layers:
        raise ConfigError(f"config.json has {len(kinds)} layer_types for {num_layers} layers")
    for name in ("layer_norm_eps", "position_embedding_type"):  # of BERT, in released files too
        fields.value(name)
    thetas = fields.mapping("rope_parameters") or {}
    ropes = tuple(
        RopeSpec(RopeKind.DEFAULT, head_size, _theta(thetas.get(kind), fields.number(key)), longest)
        for kind, key in (
            ("full_attention", "global_rope_theta"),
            ("sliding_attention", "local_rope_theta"),
        )
    )
    layers = tuple(
        LayerSpec(None, 0, False) if is_full else LayerSpec(window // 2, 1, False)
        for is_full in is_global
    )
    is_mean = fields.text("classifier_pooling") == "mean"
    activation_of_head = fields.text("classifier_activation")
    if labels is not None and activation_of_head != "gelu":
        raise ConfigError("config.json has a classifier_activation other than gelu")
    head = None if labels is None else HeadSpec(labels, is_mean)
    activation = _activation(fields, "hidden_activation")
    return EncoderSpec("modernbert", activation, head=head), layers, ropes


def _theta(parameters: object, default: float) -> float:
    """The base of a kind of layers, in the newer form of the config."""
    if not isinstance(parameters, Mapping):
        return default
    kind, theta = parameters.get("rope_type", "default"), parameters.get("rope_theta", default)
    if kind != "default" or not isinstance(theta, (int, float)):
        raise ConfigError(f"config.json has rope_parameters {dict(parameters)}: not implemented")
    return float(theta)


def _activation(fields: ConfigFields, key: str) -> str:
    name = fields.text(key)
    if name not in _ACTIVATIONS:
        known = ", ".join(sorted(_ACTIVATIONS))
        raise ConfigError(f"config.json asks for {key} {name!r}; supported are {known}")
    return _ACTIVATIONS[name]


def _labels(config: Mapping[str, object]) -> tuple[str, ...]:
    """The classes in their order; transformers' names where the config has none."""
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        return tuple(str(names[key]) for key in sorted(names, key=int))
    count = config.get("num_labels")
    return tuple(f"LABEL_{index}" for index in range(count if isinstance(count, int) else 2))


def _separator_id(path: Path) -> int | None:
    """The token between two texts: the one that the tokenizer's file writes after the first."""
    try:
        content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # the tokenizer's reader says what is wrong with it
    for token in content.get("added_tokens") or ():
        if token.get("content") in ("[SEP]", "</s>"):
            return int(token["id"])
    return None
