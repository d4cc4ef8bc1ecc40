"""Multi-token prediction: the layer after the last one, which its checkpoint was trained to have.

Position i gets the hidden state of token i and the embedding of token i + 1, both normed; `fc` of
them is the input of one layer of the model's own kind, whose output predicts the token after i + 1
(DeepSeek-V3, arXiv:2412.19437). Further drafts apply the same layer to its own output. Embedding
and output projection are the model's, of which some files hold copies.

Where a checkpoint has several such layers, the first is used. Names are those of released files
and of GGUF (`gguf_architectures`). Recorded and run like a decoder (`runtime.steps`), by the
proposer of EAGLE layers (`runtime.speculation.eagle`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import reading_checkpoint
from quickstep.model.checkpoint.tensor_schema import Shapes, layer_tensors
from quickstep.model.checkpoint.weights import CheckpointWeights, open_weights
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import LayerSpec, ModelSpec
from quickstep.model.decoder_weights import DecoderWeights, LayerWeights
from quickstep.model.drafting_layer import DraftingLayer
from quickstep.model.formats.fused_experts import one_by_one
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.model.layers.interface import LayerStep
from quickstep.model.layers.stack import build_layers
from quickstep.model.loader import open_part, pack_layer
from quickstep.model.rope import RopeTable, make_rope_table
from quickstep.model.sharding import Shard
from quickstep.model.sizing import tensor_bytes
from quickstep.ops.table import KVCache, LoRAMapping, OpTable
from quickstep.ops.tensors import AnyTensor
from quickstep.ops.weights import LinearWeight

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class MtpNaming(msgspec.Struct, frozen=True):
    """How files name a prediction layer's tensors.

    Attributes:
        layer: What the names of its layer begin with.
        fc, embedding_norm, hidden_norm, norm: The other tensors.
        hidden_first: `fc` reads the hidden state before the embedding.
        feeds_normed: The layer's input at the next draft is its output after `norm`.
    """

    layer: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool = False
    feeds_normed: bool = True

    @property
    def outer(self) -> tuple[str, ...]:
        """The tensors outside of the layer."""
        return self.fc, self.embedding_norm, self.hidden_norm, self.norm


class MtpSpec(msgspec.Struct, frozen=True):
    """What a prediction layer is.

    Attributes:
        decoder: Its sizes, as those of a decoder of one layer, without the model's own embedding.
        naming: The names of its tensors.
        num_bytes: Bytes of its weights in memory.
    """

    decoder: ModelSpec
    naming: MtpNaming
    num_bytes: int


class MtpWeights(msgspec.Struct, frozen=True):
    """Packed weights; C is the hidden size.

    Attributes:
        fc_embedding, fc_hidden: C -> C, the parts of `fc`, in the model's dtype.
    """

    fc_embedding: LinearWeight
    fc_hidden: LinearWeight
    embedding_norm: AnyTensor
    hidden_norm: AnyTensor
    layer: LayerWeights
    norm: AnyTensor


class MtpModel(DraftingLayer):
    """A prediction layer; see `model.interface.FeatureModel`."""

    name = "mtp"
    aux_layers: tuple[int, ...] = ()
    target_ids: npt.NDArray[np.int64] | None = None

    def __init__(
        self,
        spec: MtpSpec,
        weights: MtpWeights,
        target: Decoder,
        ropes: tuple[RopeTable, ...],
        ops: OpTable,
        max_model_len: int,
    ) -> None:
        super().__init__(target, ops, max_model_len)
        self._spec = spec
        self._weights = weights
        self._ropes = ropes
        of_decoder = DecoderWeights(None, (weights.layer,), weights.norm, None)
        self._stack = build_layers(spec.decoder, of_decoder, ops, Shard())

    @property
    def spec(self) -> MtpSpec:
        """What it computes."""
        return self._spec

    def with_ops(self, ops: OpTable) -> MtpModel:
        """The same model and weights on another op table, which must read these weights."""
        target = self._target.with_ops(ops)
        return MtpModel(self._spec, self._weights, target, self._ropes, ops, self._max_model_len)

    @property
    def kv_layout(self) -> KVLayout:
        """What to allocate."""
        groups, dtype = self._spec.decoder.kv_groups, self._weights.norm.dtype
        return KVLayout(groups, dtype, in_pairs=self._ops.kv_in_pairs)

    @property
    def feature_sizes(self) -> tuple[int, int]:
        """`FeatureModel.feature_sizes`."""
        size = self._spec.decoder.hidden_size
        return size, size

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """The predicted hidden states of the emitting tokens [E, C]: token_ids [T] are those after
        the tokens that `batch.features` [T, C] are of.
        """
        weights, emitting, (features,) = self._weights, batch.emitting, batch.features
        assert emitting is not None
        embedded = self._norm(self._target.embedded(batch.token_ids), weights.embedding_norm)
        hidden = self._norm(features, weights.hidden_norm)
        ops = self._ops
        x = ops.linear(embedded, weights.fc_embedding) + ops.linear(hidden, weights.fc_hidden)
        rotations = tuple(table.at(ops, batch.layout.positions) for table in self._ropes)
        step = LayerStep(batch.layout, kv, rotations, None)
        (layer,) = self._stack.layers
        stream, _ = layer.forward(self._stack.begin(x), step, emitting)
        if not emitting.tokens.shape[0]:
            return x[emitting.tokens]
        if self._spec.naming.feeds_normed:
            return self._stack.end(stream)
        return self._stack.total(stream)

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """Predicted hidden states [E, C] -> [E, V] fp32. It drafts without adapters."""
        del lora
        if not self._spec.naming.feeds_normed:
            hidden = self._norm(hidden, self._weights.norm)  # type: ignore[arg-type]
        return self._target.logits(hidden)

    def _norm(self, x: Tensor, weight: AnyTensor) -> Tensor:
        spec = self._spec.decoder
        return self._ops.rms_norm(x, weight, spec.norm_eps, spec.norm_offset)


def layer_of_target(target: ModelSpec) -> ModelSpec:
    """The prediction layer of a model, as a decoder of one layer: like the model's last layer with
    attention. `can_have_layer` says whether it is of a kind that has one.
    """
    layer = _kind_of_layer(target)
    assert layer is not None, "the model is of a kind that has one"
    decoder = replace(
        one_by_one(target), num_layers=1, layers=(layer,), parameter_count=None, long_context=None
    )
    shapes = _shapes(decoder, _named("", "", target)[0])
    count = sum(math.prod(shape) for shape in shapes.values())
    return replace(decoder, parameter_count=count)


def can_have_layer(target: ModelSpec) -> bool:
    """Whether a model is of a kind that has prediction layers."""
    is_plain = target.layer_inputs is None and not target.norm_bias and not target.layer_norm
    is_decoder = target.native and target.encoder is None
    return is_decoder and is_plain and _kind_of_layer(target) is not None


def _kind_of_layer(target: ModelSpec) -> LayerSpec | None:
    """A layer with attention and a feed-forward part. Where the model's layers have one part each
    (Nemotron 3), it is one with attention, and a mixture.
    """
    with_attention = [layer for layer in reversed(target.layers) if layer.state_mixer is None]
    complete = next((layer for layer in with_attention if layer.is_complete), None)
    attention = next((layer for layer in with_attention if layer.has_mixer), None)
    if complete is not None or attention is None or target.moe is None:
        return complete
    return replace(attention, has_feed_forward=True, sparse=True)


def planned_bytes(layer: ModelSpec, dtype_bytes: int, quantization: str | None) -> int:
    """Bytes of the weights of `layer_of_target` in memory, of a checkpoint that is not quantized
    already.
    """
    naming = _named("", "", layer)[0]
    of_layer = _layer_shapes(layer, naming)
    return _fixed_bytes(layer, dtype_bytes) + tensor_bytes(
        layer, of_layer.items(), dtype_bytes, quantization
    )


def has_prediction_layer(path: Path, target: ModelSpec) -> bool:
    """Whether the files of a checkpoint hold the layer that its config counts, completely and in
    formats that are read.
    """
    if not (target.num_prediction_layers and can_have_layer(target)):
        return False
    try:
        with reading_checkpoint(path):
            _find(path, target)
    except ConfigError:
        return False
    return True


def lacks_counted_layer(weights: CheckpointWeights) -> bool:
    """Whether the model has such layers by its config, and the files hold none."""
    return weights.spec.num_prediction_layers > 0 and _naming_in(weights) is None


def read_mtp_spec(
    path: Path, target: ModelSpec, dtype_bytes: int, quantization: str | None, natively: bool
) -> MtpSpec:
    """Read what the prediction layer of a checkpoint is; `natively` as for
    `CheckpointWeights.held_bytes`.

    Raises:
        ConfigError: The files hold none, or not all of it.
    """
    with reading_checkpoint(path):
        weights, naming = _find(path, target)
    of_layer = {name: shape for name, shape in weights.shapes.items() if name not in naming.outer}
    decoder = layer_of_target(target)
    held = replace(weights, shapes=of_layer)
    num_bytes = held.quantized_bytes(dtype_bytes, quantization, natively=natively)
    if num_bytes is None:
        num_bytes = tensor_bytes(weights.spec, of_layer.items(), dtype_bytes, quantization)
    decoder = replace(weights.spec, parameter_count=decoder.parameter_count)
    return MtpSpec(decoder, naming, num_bytes + _fixed_bytes(decoder, dtype_bytes))


def load_mtp(path: Path, target: Decoder, load: LoadConfig, max_model_len: int) -> MtpModel:
    """Read and pack the prediction layer of a checkpoint, whose model `target` is.

    Raises:
        ConfigError: A tensor is missing, broken, or has another shape than the model needs.
    """
    norm, ops = target.weights.final_norm, target.ops
    with reading_checkpoint(path):
        weights, naming = _find(path, target.spec)
        source = open_part(weights, norm, load, ops)
        size = target.spec.hidden_size
        fc = source.tensor(naming.fc)
        halves = _columns(fc, 0, size), _columns(fc, size, 2 * size)
        of_embedding, of_hidden = halves[::-1] if naming.hidden_first else halves
        packed = MtpWeights(
            fc_embedding=ops.pack_linear(of_embedding, None),
            fc_hidden=ops.pack_linear(of_hidden, None),
            embedding_norm=source.tensor(naming.embedding_norm),
            hidden_norm=source.tensor(naming.hidden_norm),
            layer=pack_layer(weights.spec, ops, source, naming.layer),
            norm=source.tensor(naming.norm),
        )
    decoder = replace(weights.spec, parameter_count=layer_of_target(target.spec).parameter_count)
    ropes = tuple(make_rope_table(rope, max_model_len, target.device) for rope in decoder.ropes)
    spec = MtpSpec(decoder, naming, 0)
    return MtpModel(spec, packed, target, ropes, ops, max_model_len)


def _find(path: Path, target: ModelSpec) -> tuple[CheckpointWeights, MtpNaming]:
    """What the files hold of the prediction layer, and by which names. Raises ConfigError."""
    if not can_have_layer(target):
        raise ConfigError(
            f"--speculative-method mtp needs a model with a prediction layer, {target.architecture}"
            " has none; use --speculative-method suffix"
        )
    weights = open_weights(path, target)
    naming = _naming_in(weights)
    if naming is None:
        raise ConfigError(
            f"--speculative-method mtp: {path} has no tensors of a prediction layer (mtp.*, or "
            f"layers.{target.num_layers}.eh_proj), which quantizers often drop; use a checkpoint "
            "that has them, or --speculative-method suffix"
        )
    decoder = layer_of_target(target)
    own = weights.of_part(decoder, naming.layer, lambda spec: _shapes(spec, naming))
    own.check_stored("the prediction layer")
    return own, naming


def belongs_to_layer(name: str, weights: CheckpointWeights) -> bool:
    """Whether a tensor of the files is read for the prediction layer."""
    naming = _naming_in(weights)
    return naming is not None and (name.startswith(naming.layer) or name in naming.outer)


def _naming_in(weights: CheckpointWeights) -> MtpNaming | None:
    """The names that the files use, if they have a prediction layer."""
    prefix, files = weights.names.prefix, weights.files.tensors
    module = {name.rpartition(".")[0] for name in files}
    for naming in _named(prefix, prefix.removesuffix("model."), weights.spec):
        if naming.fc.removesuffix(".weight") in module:
            return naming
    return None


def _named(prefix: str, outside: str, target: ModelSpec) -> tuple[MtpNaming, ...]:
    """Of DeepSeek V3, GLM 4.5 and GGUF files, also those of Qwen and Nemotron 3; of Qwen3-Next,
    Qwen3.5 and Nemotron 3 (`TensorNaming.renames`), whose layer is outside of the decoder; of MiMo.
    """
    nextn, mimo = f"{prefix}layers.{target.num_layers}.", f"{prefix}mtp_layers.0."
    return (
        MtpNaming(
            nextn,
            f"{nextn}eh_proj.weight",
            f"{nextn}enorm.weight",
            f"{nextn}hnorm.weight",
            f"{nextn}shared_head.norm.weight",
            feeds_normed=target.architecture.startswith(("Qwen", "NemotronH")),
        ),
        *_qwen(dict.fromkeys(("", outside, prefix))),
        MtpNaming(
            mimo,
            f"{mimo}input_proj.weight",
            f"{mimo}token_layernorm.weight",
            f"{mimo}hidden_layernorm.weight",
            f"{mimo}final_layernorm.weight",
            hidden_first=True,
        ),
    )


def _qwen(starts: Collection[str]) -> Iterator[MtpNaming]:
    for start in starts:
        yield MtpNaming(
            f"{start}mtp.layers.0.",
            f"{start}mtp.fc.weight",
            f"{start}mtp.pre_fc_norm_embedding.weight",
            f"{start}mtp.pre_fc_norm_hidden.weight",
            f"{start}mtp.norm.weight",
        )


def _shapes(decoder: ModelSpec, naming: MtpNaming) -> Shapes:
    """All tensors, by the names of the files."""
    size = decoder.hidden_size
    norms = dict.fromkeys((naming.embedding_norm, naming.hidden_norm, naming.norm), (size,))
    return {**_layer_shapes(decoder, naming), naming.fc: (size, 2 * size), **norms}


def _layer_shapes(decoder: ModelSpec, naming: MtpNaming) -> Shapes:
    start = "layers.0."
    return {
        naming.layer + name.removeprefix(start): shape
        for name, shape in layer_tensors(decoder, "", 0).items()
    }


def _fixed_bytes(decoder: ModelSpec, dtype_bytes: int) -> int:
    """Of `fc` and the norms outside of the layer, which are in the model's dtype."""
    size = decoder.hidden_size
    return (2 * size + 3) * size * dtype_bytes


def _columns(weight: AnyTensor, start: int, stop: int) -> AnyTensor:
    """Columns of a matrix, contiguous."""
    return weight[:, start:stop].contiguous()
