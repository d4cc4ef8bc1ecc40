"""EAGLE: one decoder layer that predicts the target's next hidden state from the last one.

Position i gets the hidden state of token i and the embedding of token i + 1; its output predicts
the hidden state of token i + 1, and so the token after it. EAGLE 1 and 2 (arXiv:2401.15077) read
the target's final hidden states, `fc([embedding; hidden])` is the layer's input, and the output
projection is the target's. EAGLE 3 (arXiv:2503.01840) reads the inputs of three of the target's
layers, made one by `fc`; its attention reads [embedding; hidden], each normed, and it may have a
vocabulary of its own, which `d2t` maps to the target's.

Reads the published safetensors layouts, with the names that vLLM reads: `fc.weight`, `layers.0.*`
or `midlayer.*`, `norm.weight`, `lm_head.weight`, `d2t`, `embed_tokens.weight`. It is recorded and
run like a decoder (`runtime.steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.source import reading_checkpoint
from quickstep.model.checkpoint.tensor_reader import TensorReader
from quickstep.model.checkpoint.weights import open_checkpoint_files
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.drafting_layer import DraftingLayer
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.model.rope import RopeTable, make_rope_table
from quickstep.model.spec import parse_spec, read_config
from quickstep.ops.table import AttentionParams, KVCache, LoRAMapping, OpTable
from quickstep.ops.tensors import AnyTensor, HostTensor
from quickstep.ops.weights import LinearWeight

if TYPE_CHECKING:
    from torch import Tensor

_NUM_AUX_LAYERS = 3
# Keys of EAGLE checkpoints that say nothing of the layer, or that are read here.
_OWN_KEYS = frozenset(
    {
        "bias",
        "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "target_hidden_size",
    }
)
_WINDOW_KEYS = frozenset({"max_window_layers", "sliding_window"})  # of a window that is off
_PREFIXES = ("model.", "")


class EagleSpec(msgspec.Struct, frozen=True):
    """What an EAGLE checkpoint is.

    Attributes:
        decoder: The layer's sizes, as those of a decoder of one layer.
        is_fused: EAGLE 3.
        draft_vocab_size: Width of its logits; the target's V without a vocabulary of its own.
        aux_layers: Layers of the target whose inputs are its features, in ascending order; () for
            EAGLE 1 and 2.
        num_bytes: Bytes of its tensors.
    """

    decoder: ModelSpec
    is_fused: bool
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    num_bytes: int


class EagleWeights(msgspec.Struct, frozen=True):
    """Packed weights; C is the layer's hidden size, N a product's outputs.

    Attributes:
        fc_features: EAGLE 1: C -> C, the part of `fc` for hidden states; EAGLE 3: 3 C -> C.
        fc_embedding: EAGLE 1: C -> C, the part of `fc` for embeddings, without its bias.
        qkv: From the layer's input; in EAGLE 3 the part for hidden states.
        qkv_embedding: EAGLE 3: the part for embeddings.
        input_layernorm, hidden_norm, norm: EAGLE 3: of embeddings, hidden states, the output.
        draft_lm_head: None where it is the target's.
        target_ids: [draft V] the target's ids of the draft vocabulary; None where they are equal.
    """

    embed_tokens: AnyTensor | LinearWeight
    fc_features: LinearWeight
    fc_embedding: LinearWeight | None
    qkv: LinearWeight
    qkv_embedding: LinearWeight | None
    o_proj: LinearWeight
    gate_up: LinearWeight
    down_proj: LinearWeight
    input_layernorm: AnyTensor | None
    hidden_norm: AnyTensor | None
    post_attention_layernorm: AnyTensor
    norm: AnyTensor | None
    draft_lm_head: LinearWeight | None
    target_ids: npt.NDArray[np.int64] | None


class EagleModel(DraftingLayer):
    """An EAGLE layer; see `model.interface.FeatureModel`."""

    def __init__(
        self,
        spec: EagleSpec,
        weights: EagleWeights,
        target: Decoder,
        rope: RopeTable,
        ops: OpTable,
        max_model_len: int,
    ) -> None:
        super().__init__(target, ops, max_model_len)
        self._spec = spec
        self._weights = weights
        self._rope = rope
        self._attention = AttentionParams(spec.decoder.attention_scale, None, None)
        self.name = "eagle3" if spec.is_fused else "eagle"
        self.aux_layers = spec.aux_layers
        self.target_ids = weights.target_ids

    @property
    def spec(self) -> EagleSpec:
        """What it computes."""
        return self._spec

    @property
    def weights(self) -> EagleWeights:
        """The packed weights."""
        return self._weights

    def with_ops(self, ops: OpTable) -> EagleModel:
        """The same model and weights on another op table, which must read these weights."""
        target = self._target.with_ops(ops)
        return EagleModel(self._spec, self._weights, target, self._rope, ops, self._max_model_len)

    @property
    def kv_layout(self) -> KVLayout:
        """What to allocate."""
        dtype = self._weights.post_attention_layernorm.dtype
        return KVLayout(self._spec.decoder.kv_groups, dtype, in_pairs=self._ops.kv_in_pairs)

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """`FeatureModel.feature_sizes`."""
        hidden_size = self._spec.decoder.hidden_size
        return hidden_size * (len(self._spec.aux_layers) or 1), hidden_size

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """The predicted features of the emitting tokens [E, C]: token_ids [T] are those after the
        tokens that `batch.features` [T, C] are of ([T, 3 C] from three layers of the target).
        """
        ops, weights, decoder = self._ops, self._weights, self._spec.decoder
        emitting, layout, (features,) = batch.emitting, batch.layout, batch.features
        assert emitting is not None
        cos, sin = self._rope.at(ops, layout.positions)
        embedded = ops.embedding(
            batch.token_ids, weights.embed_tokens, weights.post_attention_layernorm.dtype
        )
        residual, qkv = self._input(embedded, features)
        queries = decoder.num_heads * decoder.head_size
        keys = decoder.num_kv_heads * decoder.head_size
        q = qkv[:, :queries].view(-1, decoder.num_heads, decoder.head_size)
        k, v = (
            part.view(-1, decoder.num_kv_heads, decoder.head_size)
            for part in (qkv[:, queries : queries + keys], qkv[:, queries + keys :])
        )
        q, k = ops.rotary(q, cos, sin, False), ops.rotary(k, cos, sin, False)
        ops.write_kv(k, v, kv.keys[0], kv.values[0], layout.slot_mapping)
        q, residual = q[emitting.tokens], residual[emitting.tokens]
        if not emitting.tokens.shape[0]:
            return residual
        mixed = ops.paged_attention(
            q, kv.keys[0], kv.values[0], emitting.layout, self._attention, None
        )
        delta = ops.linear(mixed.reshape(-1, queries), weights.o_proj)
        eps = decoder.norm_eps
        x, residual = ops.add_rms_norm(delta, residual, weights.post_attention_layernorm, eps, 0.0)
        x = ops.gated_activation(ops.linear(x, weights.gate_up), decoder.activation)
        return residual + ops.linear(x, weights.down_proj)

    def _input(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [T, C], and queries, keys and values [T, N]."""
        ops, weights = self._ops, self._weights
        if weights.qkv_embedding is None:
            assert weights.fc_embedding is not None
            residual = ops.linear(embedded, weights.fc_embedding)
            residual = residual + ops.linear(features, weights.fc_features)
            return residual, ops.linear(residual, weights.qkv)
        assert weights.hidden_norm is not None and weights.input_layernorm is not None
        eps = self._spec.decoder.norm_eps
        if features.shape[1] != self.feature_sizes[1]:
            features = ops.linear(features, weights.fc_features)
        normed = ops.rms_norm(features, weights.hidden_norm, eps, 0.0)
        embedded = ops.rms_norm(embedded, weights.input_layernorm, eps, 0.0)
        qkv = ops.linear(embedded, weights.qkv_embedding) + ops.linear(normed, weights.qkv)
        return features, qkv

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """Predicted features [E, C] -> [E, draft V] fp32. It drafts without adapters."""
        del lora
        ops, weights = self._ops, self._weights
        if weights.norm is not None:
            eps = self._spec.decoder.norm_eps
            hidden = ops.rms_norm(hidden, weights.norm, eps, 0.0)  # type: ignore[arg-type]
        if weights.draft_lm_head is None:
            return self._target.logits(hidden)
        return ops.logits(hidden, weights.draft_lm_head, 1.0, None, None)


def read_eagle_spec(path: Path, target: ModelSpec, is_fused: bool) -> EagleSpec:
    """Read what the EAGLE checkpoint of a directory is, and check that it fits the target.
    `is_fused`: it has to be EAGLE 3.

    Raises:
        ConfigError: It is no such checkpoint, or that of another model.
    """
    with reading_checkpoint(path):
        return _read_eagle_spec(path, target, is_fused)


def _read_eagle_spec(path: Path, target: ModelSpec, is_fused: bool) -> EagleSpec:
    config = read_config(path)
    files = open_checkpoint_files(path)
    names = _names(files)
    method = "eagle3" if is_fused else "eagle"
    start = _layer_prefix(names)
    if "fc.weight" not in names or f"{start}mlp.down_proj.weight" not in names:
        raise ConfigError(f"{path} has no EAGLE layer: its tensors are fc.weight and layers.0.*")
    if (f"{start}hidden_norm.weight" in names) != is_fused:
        other = "eagle" if is_fused else "eagle3"
        raise ConfigError(f"{path} is no checkpoint for --speculative-method {method}; use {other}")
    ignored = _OWN_KEYS if config.get("use_sliding_window", True) else _OWN_KEYS | _WINDOW_KEYS
    values = {key: value for key, value in config.items() if key not in ignored}
    decoder = parse_spec(values | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    if decoder.num_layers != 1:
        raise ConfigError(f"{path} has {decoder.num_layers} layers, an EAGLE checkpoint has one")
    if not is_fused and decoder.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{path} has the hidden size {decoder.hidden_size}, the model {target.hidden_size}"
        )
    num_bytes = sum(tensor.nbytes for tensor in files.tensors.values())
    draft_vocab_size = target.vocab_size
    if "lm_head.weight" in names:
        draft_vocab_size = files.tensors[names["lm_head.weight"]].shape[0]
    num_parameters = sum(int(np.prod(tensor.shape)) for tensor in files.tensors.values())
    aux_layers = _aux_layers(config, target) if is_fused else ()
    decoder = replace(decoder, parameter_count=num_parameters, vocab_size=target.vocab_size)
    return EagleSpec(decoder, is_fused, draft_vocab_size, aux_layers, num_bytes)


def _aux_layers(config: Mapping[str, object], target: ModelSpec) -> tuple[int, ...]:
    """The layers whose inputs are the features: as listed, or as vLLM chooses them; in ascending
    order, in which engines collect them.
    """
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    nested = config.get("eagle_config")
    if listed is None and isinstance(nested, dict):
        listed = nested.get("eagle_aux_hidden_state_layer_ids")
    if listed is None:
        count = target.num_layers
        listed = [2, count // 2, count - 3]
    ids = (
        tuple(layer for layer in listed if isinstance(layer, int))
        if isinstance(listed, list)
        else ()
    )
    if len(ids) != _NUM_AUX_LAYERS or not all(0 < layer < target.num_layers for layer in ids):
        raise ConfigError(
            f"EAGLE 3 reads the inputs of three layers of the model, {listed}; "
            f"the model has the layers 1 to {target.num_layers - 1}"
        )
    return tuple(sorted(ids))


def _names(files: TensorFiles) -> dict[str, str]:
    """The tensors' names in files, by the name without a prefix."""
    names = {}
    for name in files.tensors:
        prefix = next(start for start in _PREFIXES if name.startswith(start))
        names[name.removeprefix(prefix)] = name
    return names


def _layer_prefix(names: Mapping[str, str]) -> str:
    return "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."


def load_eagle(path: Path, spec: EagleSpec, target: Decoder, max_model_len: int) -> EagleModel:
    """Read and pack a checkpoint for the op table of `target`.

    Raises:
        ConfigError: A tensor is missing, broken, or has another shape than the target needs.
    """
    with reading_checkpoint(path):
        weights = _EaglePacking(path, spec, target).weights()
    rope = make_rope_table(spec.decoder.ropes[0], max_model_len, target.device)
    return EagleModel(spec, weights, target, rope, target.ops, max_model_len)


class _EaglePacking:
    """Reads tensors by their names without a prefix, checks shapes, and packs matrices."""

    def __init__(self, path: Path, spec: EagleSpec, target: Decoder) -> None:
        files = open_checkpoint_files(path)
        norm = target.weights.final_norm
        self._path = path
        self._spec = spec
        self._target = target
        self._files = files
        self._names = _names(files)
        self._start = _layer_prefix(self._names)
        self._reader = TensorReader(files, norm.dtype, norm.device, spec.num_bytes, None)

    def weights(self) -> EagleWeights:
        spec, decoder, start = self._spec, self._spec.decoder, self._start
        size, width, is_fused = decoder.hidden_size, decoder.intermediate_size, spec.is_fused
        queries = decoder.num_heads * decoder.head_size
        keys = decoder.num_kv_heads * decoder.head_size
        target_size = self._target.spec.hidden_size
        fc_inputs = len(spec.aux_layers) * target_size if is_fused else 2 * size
        fc = self._tensor("fc.weight", (size, fc_inputs))
        fc_bias = self._tensor("fc.bias", (size,)) if "fc.bias" in self._names else None
        inputs = 2 * size if is_fused else size
        parts = ((f"{start}self_attn.{name}_proj", count) for name, count in
                 (("q", queries), ("k", keys), ("v", keys)))  # fmt: skip
        qkv, qkv_bias = self._stacked(tuple(parts), inputs)
        gate_up, gate_up_bias = self._stacked(
            ((f"{start}mlp.gate_proj", width), (f"{start}mlp.up_proj", width)), size
        )
        pack = self._target.ops.pack_linear
        return EagleWeights(
            embed_tokens=self._embedding(),
            fc_features=pack(fc if is_fused else _columns(fc, size, 2 * size), fc_bias),
            fc_embedding=None if is_fused else pack(_columns(fc, 0, size), None),
            qkv=pack(_columns(qkv, size, 2 * size) if is_fused else qkv, qkv_bias),
            qkv_embedding=pack(_columns(qkv, 0, size), None) if is_fused else None,
            o_proj=self._linear(f"{start}self_attn.o_proj", size, queries),
            gate_up=pack(gate_up, gate_up_bias),
            down_proj=self._linear(f"{start}mlp.down_proj", size, width),
            input_layernorm=self._norm(f"{start}input_layernorm.weight") if is_fused else None,
            hidden_norm=self._norm(f"{start}hidden_norm.weight") if is_fused else None,
            post_attention_layernorm=self._norm(f"{start}post_attention_layernorm.weight"),
            norm=self._norm("norm.weight") if is_fused else None,
            draft_lm_head=self._lm_head(),
            target_ids=self._target_ids(),
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> AnyTensor:
        if name not in self._names:
            raise ConfigError(f"{self._path} has no EAGLE tensor {name}")
        found = tuple(self._files.tensors[self._names[name]].shape)
        if found != shape:
            raise ConfigError(
                f"the EAGLE tensor {name} has the shape {list(found)}, "
                f"the model needs {list(shape)}"
            )
        return self._reader.tensor(self._names[name])

    def _norm(self, name: str) -> AnyTensor:
        return self._tensor(name, (self._spec.decoder.hidden_size,))

    def _stacked(
        self, parts: tuple[tuple[str, int], ...], num_inputs: int
    ) -> tuple[AnyTensor, AnyTensor | None]:
        """Matrices one below the other, [N, num_inputs], and their biases."""
        for name, count in parts:
            self._tensor(f"{name}.weight", (count, num_inputs))
        names = tuple(self._names[f"{name}.weight"] for name, _ in parts)
        biases = [f"{name}.bias" for name, _ in parts if f"{name}.bias" in self._names]
        if not biases:
            return self._reader.stacked(names), None
        for name, count in parts:
            self._tensor(f"{name}.bias", (count,))
        bias = self._reader.stacked(tuple(self._names[name] for name in biases))
        return self._reader.stacked(names), bias

    def _linear(self, name: str, num_outputs: int, num_inputs: int) -> LinearWeight:
        weight, bias = self._stacked(((name, num_outputs),), num_inputs)
        return self._target.ops.pack_linear(weight, bias)

    def _embedding(self) -> AnyTensor | LinearWeight:
        """Its own, if it has one, otherwise the target's."""
        target = self._target
        size = self._spec.decoder.hidden_size
        if "embed_tokens.weight" in self._names:
            return self._tensor("embed_tokens.weight", (target.vocab_size, size))
        if target.spec.hidden_size != size:
            raise ConfigError(f"{self._path} has no EAGLE tensor embed_tokens.weight")
        embedding = target.weights.embed_tokens
        assert embedding is not None, "the target is complete but for its layers"
        return embedding

    def _lm_head(self) -> LinearWeight | None:
        size = self._spec.decoder.hidden_size
        if "lm_head.weight" in self._names:
            weight = self._tensor("lm_head.weight", (self._spec.draft_vocab_size, size))
            return self._target.ops.pack_linear(weight, None)
        if self._target.spec.hidden_size != size:
            raise ConfigError(f"{self._path} has no EAGLE tensor lm_head.weight")
        return None

    def _target_ids(self) -> npt.NDArray[np.int64] | None:
        """`d2t` has, for each draft id, the distance to the target's id."""
        count, vocab_size = self._spec.draft_vocab_size, self._target.vocab_size
        if "d2t" not in self._names:
            if count != vocab_size:
                raise ConfigError(
                    f"{self._path} has a vocabulary of {count} tokens and no d2t, "
                    f"the model has {vocab_size}"
                )
            return None
        info = self._files.tensors[self._names["d2t"]]
        if tuple(info.shape) != (count,) or info.dtype != "I64":
            raise ConfigError(
                f"the EAGLE tensor d2t is {info.dtype} {list(info.shape)}, it must be I64 [{count}]"
            )
        stored = bytearray(info.nbytes)
        self._files.read_into(self._names["d2t"], memoryview(stored))
        ids: npt.NDArray[np.int64] = np.frombuffer(stored, dtype=np.int64) + np.arange(count)
        if ids.min() < 0 or ids.max() >= vocab_size or np.unique(ids).size < count:
            raise ConfigError(f"{self._path}: d2t maps tokens to ids that the model does not have")
        return ids


def _columns(weight: AnyTensor, start: int, stop: int) -> AnyTensor:
    """Columns of a matrix, contiguous."""
    if isinstance(weight, HostTensor):
        return weight[:, start:stop].contiguous()
    return weight[:, start:stop].contiguous()
