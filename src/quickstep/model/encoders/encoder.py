"""An encoder's forward pass: every token of a text sees all others of it, in one step.

Called by the loader for specs with an `EncoderSpec`. There is no KV cache: a row of a step is a
complete text (`SchedulerConfig.complete_prompts`), and nothing of it is kept. All rows run together
over the op table, whose bits do not depend on other rows, and attention runs text by text. So the
same text has the same bits in every batch. Tensors are of torch, or `HostTensor`s, with which
nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from quickstep.errors import ConfigError, EngineError
from quickstep.model.checkpoint.fingerprint import Fingerprinting
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import Progress, TensorReader
from quickstep.model.decoder_spec import LayerSpec, ModelSpec
from quickstep.model.encoders.encoder_spec import EncoderSpec
from quickstep.model.formats.gguf_kinds import BLOCK_KINDS
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.model.rope import RopeTable, make_rope_table
from quickstep.ops.table import KVCache, LoRAMapping, OpTable
from quickstep.ops.tensors import (
    FLOAT32,
    INT64,
    AnyTensor,
    Device,
    DType,
    HostTensor,
    as_float64,
    to_numpy,
    to_torch,
)
from quickstep.ops.weights import LinearWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Integers = npt.NDArray[np.int64]

# Prefixes of an encoder's tensors; the first that the checkpoint uses counts.
_PREFIXES = {
    "bert": ("", "bert."),
    "roberta": ("", "roberta."),
    "modernbert": ("", "model."),
}


class Norm(msgspec.Struct, frozen=True):
    """A layer norm's weight [H], its bias [H] or None, and its epsilon."""

    weight: AnyTensor
    bias: AnyTensor | None
    eps: float


class EncoderLayer(msgspec.Struct, frozen=True):
    """The weights of a layer; `attention_norm` None is no norm (ModernBERT's first layer)."""

    qkv: LinearWeight
    output: LinearWeight
    attention_norm: Norm | None
    up: LinearWeight
    down: LinearWeight
    mlp_norm: Norm


class ClassifierWeights(msgspec.Struct, frozen=True):
    """A classification head: a dense layer, for ModernBERT with a norm, and the classes."""

    dense: LinearWeight
    norm: Norm | None
    classes: LinearWeight


class EncoderWeights(msgspec.Struct, frozen=True):
    """All weights; the tables of positions and segments are None where there are none."""

    tokens: LinearWeight | AnyTensor
    positions: LinearWeight | AnyTensor | None
    segments: LinearWeight | AnyTensor | None
    embedding_norm: Norm
    layers: tuple[EncoderLayer, ...]
    final_norm: Norm | None
    classifier: ClassifierWeights | None


class Encoder:
    """An encoder over packed weights; see `model.interface.Model`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: EncoderWeights,
        ops: OpTable,
        max_model_len: int,
        fingerprint: str,
    ) -> None:
        assert spec.encoder is not None, "an encoder's spec"
        self._spec, self._encoder, self._weights, self._ops = spec, spec.encoder, weights, ops
        self._compute = _Ops(ops)
        self._max_model_len, self._fingerprint = max_model_len, fingerprint
        ropes = [make_rope_table(rope, max_model_len, self.device) for rope in spec.ropes]
        self._ropes: list[RopeTable] = ropes

    @property
    def spec(self) -> ModelSpec:
        """The sizes."""
        return self._spec

    @property
    def kv_layout(self) -> KVLayout:
        """Nothing is kept of a token."""
        return KVLayout((), self._dtype)

    @property
    def _dtype(self) -> DType | torch.dtype:
        return self._weights.embedding_norm.weight.dtype

    @property
    def ops(self) -> OpTable:
        """What matrix products are computed with."""
        return self._ops

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        return self._spec.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest text in tokens."""
        return self._max_model_len

    @property
    def device(self) -> torch.device | Device:
        """Where weights live."""
        return self._weights.embedding_norm.weight.device

    @property
    def fingerprint(self) -> str:
        """Stable name of weights, dtype and kernel set (hex digest)."""
        return self._fingerprint

    @property
    def exact(self) -> bool:
        """Always."""
        return True

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """The final hidden states [T, hidden] of rows that are complete texts."""
        layout = batch.layout
        return to_torch(self.encode(batch.token_ids, layout.row_offsets, layout.context_lens))

    def encode(
        self, token_ids: AnyTensor, offsets: Sequence[int], context_lens: Sequence[int]
    ) -> AnyTensor:
        """The final hidden states [T, hidden] of texts that begin at `offsets` of the token ids."""
        if list(context_lens) != [end - start for start, end in pairwise(offsets)]:
            raise EngineError("a row of an encoder is a part of a text")
        places = np.concatenate([np.arange(b - a, dtype=np.int64) for a, b in pairwise(offsets)])
        x = self._embedded(token_ids, offsets, places)
        at = _integers(places, token_ids)
        turns = [
            tuple(self._compute.rows(part, at, part.dtype) for part in (rope.cos, rope.sin))
            for rope in self._ropes
        ]
        texts = _Texts(offsets, turns)
        layers = zip(self._spec.layers, self._weights.layers, strict=True)
        if self._encoder.family == "modernbert":
            return self._with_norms_before(x, list(layers), texts)
        for layer, weights in layers:
            x = self._layer(x, layer, weights, texts)
        return x

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """There are none. Raises EngineError."""
        raise EngineError("an encoder generates no tokens")

    def class_logits(self, hidden: AnyTensor) -> tuple[float, ...]:
        """The logits of the classes, from the hidden states [L, hidden] of one text."""
        weights, head = self._weights.classifier, self._encoder.head
        assert weights is not None and head is not None, "a model with a classification head"
        pooled = hidden[:1]
        if head.is_mean:
            pooled = _floats(as_float64(hidden).mean(0, keepdims=True), hidden)
        x = self._compute.linear(pooled, weights.dense)
        if self._encoder.family == "modernbert":
            x = self._compute.activation(x, None, "gelu")
        else:
            x = _floats(np.tanh(as_float64(x)), x)
        if weights.norm is not None:
            x = self._compute.norm(x, weights.norm)
        return tuple(map(float, as_float64(self._compute.linear(x, weights.classes))[0]))

    def _embedded(self, ids: AnyTensor, offsets: Sequence[int], places: Integers) -> AnyTensor:
        weights, encoder, dtype = self._weights, self._encoder, self._dtype
        x = self._compute.rows(weights.tokens, ids, dtype)
        if weights.segments is not None:
            host_ids = to_numpy(ids)
            found = [_segments(host_ids[a:b], encoder) for a, b in pairwise(offsets)]
            segments = _integers(np.concatenate(found), ids)
            x = _sum(x, self._compute.rows(weights.segments, segments, dtype))
        if weights.positions is not None:
            rows = _integers(places + encoder.first_position, ids)
            x = _sum(x, self._compute.rows(weights.positions, rows, dtype))
        return self._compute.norm(x, weights.embedding_norm)

    def _layer(
        self,
        x: AnyTensor,
        layer: LayerSpec,
        weights: EncoderLayer,
        texts: _Texts,
    ) -> AnyTensor:
        """A layer of BERT, which has a norm after each part."""
        ops = self._compute
        assert weights.attention_norm is not None, "BERT has a norm after each part"
        attended = ops.linear(self._attention(x, layer, weights, texts), weights.output)
        x, _ = ops.add_norm(attended, x, weights.attention_norm)
        activated = ops.activation(ops.linear(x, weights.up), None, self._encoder.activation)
        return ops.add_norm(ops.linear(activated, weights.down), x, weights.mlp_norm)[0]

    def _with_norms_before(
        self,
        x: AnyTensor,
        layers: Sequence[tuple[LayerSpec, EncoderLayer]],
        texts: _Texts,
    ) -> AnyTensor:
        """The layers of ModernBERT, which have norms before each part, and the final norm."""
        ops, final = self._compute, self._weights.final_norm
        assert final is not None, "ModernBERT has a final norm"
        width = self._spec.intermediate_size
        following = [weights.attention_norm for _, weights in layers[1:]]
        first = layers[0][1].attention_norm
        normed = x if first is None else ops.norm(x, first)
        for (layer, weights), norm in zip(layers, [*following, final], strict=True):
            assert norm is not None, "only the first layer has no norm"
            attended = self._attention(normed, layer, weights, texts)
            normed, x = ops.add_norm(ops.linear(attended, weights.output), x, weights.mlp_norm)
            up = ops.linear(normed, weights.up)
            gated = ops.activation(up[:, :width], up[:, width:], self._encoder.activation)
            normed, x = ops.add_norm(ops.linear(gated, weights.down), x, norm)
        return normed

    def _attention(
        self,
        x: AnyTensor,
        layer: LayerSpec,
        weights: EncoderLayer,
        texts: _Texts,
    ) -> AnyTensor:
        spec, num_tokens, num_heads = self._spec, x.shape[0], self._spec.num_heads
        qkv = self._compute.linear(x, weights.qkv)
        heads = qkv.view(num_tokens, 3 * num_heads, spec.head_size)
        q, k = heads[:, :num_heads], heads[:, num_heads : 2 * num_heads]
        if layer.rope is not None:
            q, k = (self._compute.rotary(part, *texts.turns[layer.rope]) for part in (q, k))
        v = heads[:, 2 * num_heads :]
        mixed = self._compute.attention(q, k, v, texts.offsets, spec.attention_scale, layer.window)
        return mixed.view(num_tokens, num_heads * spec.head_size)


class _Texts(msgspec.Struct, frozen=True):
    """Where each text of a step begins and the last one ends, and the rows [T, D / 2] of cosine and
    sine of each table of rotary positions.
    """

    offsets: Sequence[int]
    turns: Sequence[tuple[AnyTensor, ...]]


class _Ops:
    """The ops of a table that an encoder uses, on tensors of either class."""

    def __init__(self, table: OpTable) -> None:
        self._table: Any = table  # its protocols name one class of tensors only

    def rows(
        self, weight: LinearWeight | AnyTensor, ids: AnyTensor, dtype: DType | torch.dtype
    ) -> AnyTensor:
        """Rows [T, C] of a table, in `dtype`."""
        found: AnyTensor = self._table.embedding(ids, weight, dtype)
        return found

    def linear(self, x: AnyTensor, weight: LinearWeight) -> AnyTensor:
        """[T, C] -> [T, N]."""
        product: AnyTensor = self._table.linear(x, weight)
        return product

    def rotary(self, x: AnyTensor, cos: AnyTensor, sin: AnyTensor) -> AnyTensor:
        """[T, H, D] -> [T, H, D]: the halves of a head are pairs."""
        rotated: AnyTensor = self._table.rotary(x, cos, sin, False)
        return rotated

    def norm(self, x: AnyTensor, norm: Norm) -> AnyTensor:
        """[T, C] -> [T, C]."""
        op = self._table.layer_norm
        if op is None:
            from quickstep.ops.reference.elementary import layer_norm as op
        normed: AnyTensor = op(x, norm.weight, norm.bias, norm.eps, 0.0)
        return normed

    def add_norm(
        self, x: AnyTensor, residual: AnyTensor, norm: Norm
    ) -> tuple[AnyTensor, AnyTensor]:
        """The norm of a sum [T, C], and the sum."""
        op = self._table.add_layer_norm
        if op is None:
            from quickstep.ops.reference.elementary import add_layer_norm as op
        found: tuple[AnyTensor, AnyTensor] = op(x, residual, norm.weight, norm.bias, norm.eps, 0.0)
        return found

    def activation(self, x: AnyTensor, factor: AnyTensor | None, kind: str) -> AnyTensor:
        """[T, N] -> [T, N], times a factor."""
        op = self._table.activation
        if op is None:
            from quickstep.ops.reference.elementary import activation as op
        activated: AnyTensor = op(x, factor, kind)
        return activated

    def attention(
        self,
        q: AnyTensor,
        k: AnyTensor,
        v: AnyTensor,
        offsets: Sequence[int],
        scale: float,
        window: int | None,
    ) -> AnyTensor:
        """[T, H, D] of texts that begin at `offsets` -> [T, H, D]."""
        op = self._table.text_attention
        if op is None:
            from quickstep.ops.reference.text_attention import text_attention as op
        mixed: AnyTensor = op(q, k, v, offsets, scale, window)
        return mixed


def load_encoder(
    files: TensorFiles,
    spec: ModelSpec,
    ops: OpTable,
    placement: tuple[torch.device | Device, torch.dtype | DType],
    max_model_len: int,
    fingerprint: Fingerprinting,
    progress: Progress | None,
) -> Encoder:
    """Read and pack the weights. Raises ConfigError for a tensor that is missing or misshapen."""

    def report(num_bytes: int, total_bytes: int) -> None:
        fingerprint.begin()
        if progress is not None:
            progress(num_bytes, total_bytes)

    device, dtype = placement
    total_bytes = sum(tensor.nbytes for tensor in files.tensors.values())
    weights = _Reading(files, TensorReader(files, dtype, device, total_bytes, report), spec, ops)
    return Encoder(spec, weights.all(), ops, max_model_len, fingerprint.result())


class _Reading:
    """Reads tensors by a family's names."""

    def __init__(
        self, files: TensorFiles, reader: TensorReader, spec: ModelSpec, ops: OpTable
    ) -> None:
        assert spec.encoder is not None, "an encoder's spec"
        self._files, self._reader, self._spec, self._ops = files, reader, spec, ops
        self._encoder = spec.encoder
        first = "embeddings.tok_embeddings.weight"
        if self._encoder.family != "modernbert":
            first = "embeddings.word_embeddings.weight"
        prefixes = _PREFIXES[self._encoder.family]
        found = [prefix for prefix in prefixes if f"{prefix}{first}" in files.tensors]
        self._prefix = found[0] if found else prefixes[-1]

    def all(self) -> EncoderWeights:
        """The weights. Raises ConfigError."""
        hidden, vocab = self._spec.hidden_size, self._spec.vocab_size
        start = f"{self._prefix}embeddings."
        modern = self._encoder.family == "modernbert"
        positions = segments = None
        if not modern:
            table = (self._encoder.num_positions, hidden)
            positions = self._table(f"{start}position_embeddings.weight", table)
            size = (self._encoder.num_segments, hidden)
            segments = self._table(f"{start}token_type_embeddings.weight", size)
        name = "tok_embeddings" if modern else "word_embeddings"
        norm = self._norm(f"{start}norm") if modern else self._norm(f"{start}LayerNorm")
        read = self._modern_layer if modern else self._bert_layer
        return EncoderWeights(
            self._table(f"{start}{name}.weight", (vocab, hidden)),
            positions,
            segments,
            norm,
            tuple(read(index) for index in range(self._spec.num_layers)),
            self._norm(f"{self._prefix}final_norm") if modern else None,
            None if self._encoder.head is None else self._classifier(),
        )

    def _bert_layer(self, index: int) -> EncoderLayer:
        start = f"{self._prefix}encoder.layer.{index}."
        hidden, wide = self._spec.hidden_size, self._spec.intermediate_size
        parts = [f"{start}attention.self.{part}" for part in ("query", "key", "value")]
        return EncoderLayer(
            self._linear(parts, (hidden, hidden)),
            self._linear([f"{start}attention.output.dense"], (hidden, hidden)),
            self._norm(f"{start}attention.output.LayerNorm"),
            self._linear([f"{start}intermediate.dense"], (wide, hidden)),
            self._linear([f"{start}output.dense"], (hidden, wide)),
            self._norm(f"{start}output.LayerNorm"),
        )

    def _modern_layer(self, index: int) -> EncoderLayer:
        start = f"{self._prefix}layers.{index}."
        hidden, wide = self._spec.hidden_size, self._spec.intermediate_size
        return EncoderLayer(
            self._linear([f"{start}attn.Wqkv"], (3 * hidden, hidden), bias=False),
            self._linear([f"{start}attn.Wo"], (hidden, hidden), bias=False),
            self._norm(f"{start}attn_norm") if index else None,
            self._linear([f"{start}mlp.Wi"], (2 * wide, hidden), bias=False),
            self._linear([f"{start}mlp.Wo"], (hidden, wide), bias=False),
            self._norm(f"{start}mlp_norm"),
        )

    def _classifier(self) -> ClassifierWeights:
        head = self._encoder.head
        assert head is not None, "a model with a classification head"
        hidden, count = self._spec.hidden_size, len(head.labels)
        match self._encoder.family:
            case "bert":
                dense, norm, classes = f"{self._prefix}pooler.dense", None, "classifier"
            case "roberta":
                dense, norm, classes = "classifier.dense", None, "classifier.out_proj"
            case _:
                dense, norm, classes = "head.dense", self._norm("head.norm"), "classifier"
        has_bias = self._encoder.family != "modernbert"
        return ClassifierWeights(
            self._linear([dense], (hidden, hidden), has_bias),
            norm,
            self._linear([classes], (count, hidden)),
        )

    def _norm(self, name: str) -> Norm:
        """A norm; the oldest files of BERT have TensorFlow's names, `gamma` and `beta`."""
        size = (self._spec.hidden_size,)
        is_older = f"{name}.gamma" in self._files.tensors
        weight, offset = ("gamma", "beta") if is_older else ("weight", "bias")
        bias = None
        if self._encoder.family != "modernbert":
            bias = self._tensor(f"{name}.{offset}", size)
        return Norm(self._tensor(f"{name}.{weight}", size), bias, self._spec.norm_eps)

    def _linear(
        self, names: Sequence[str], shape: tuple[int, int], bias: bool = True
    ) -> LinearWeight:
        """The matrices of these names, one below the other, each of a shape."""
        weights = tuple(f"{name}.weight" for name in names)
        for name in weights:
            self._check(name, shape)
        offsets = None
        if bias:
            parts = [self._tensor(f"{name}.bias", shape[:1]) for name in names]
            offsets = self._reader.joined(parts)
        stored = self._reader.stored(weights)
        if stored is not None and self._ops.load_linear is not None:
            return self._ops.load_linear(stored, offsets)
        matrix = self._reader.joined([self._tensor(name, shape) for name in weights])
        return self._ops.pack_linear(matrix, offsets)

    def _table(self, name: str, shape: tuple[int, int]) -> LinearWeight | AnyTensor:
        """A matrix whose rows are read."""
        self._check(name, shape)
        stored = self._reader.stored((name,))
        if stored is not None and self._ops.load_linear is not None:
            return self._ops.load_linear(stored, None)
        return self._tensor(name, shape)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        stored = self._files.tensors.get(name)
        if stored is None:
            raise ConfigError(f"the checkpoint has no tensor {name!r}, which its config needs")
        if tuple(stored.shape) != shape:
            raise ConfigError(
                f"tensor {name!r} has the shape {list(stored.shape)}, the config needs "
                f"{list(shape)}"
            )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> AnyTensor:
        self._check(name, shape)
        kind = self._files.tensors[name].dtype
        if kind not in BLOCK_KINDS:
            return self._reader.tensor(name)
        # Imported here: it needs torch. Without torch, matrices are loaded natively.
        from quickstep.model.formats.gguf_blocks import decode_blocks

        self._reader.rows(name, shape[0])
        decoded = decode_blocks(kind, self._reader.raw(name), shape)
        return decoded.dequantized().to(self._reader.dtype)


def _segments(ids: Integers, encoder: EncoderSpec) -> Integers:
    """[L]: 0 up to the first separator, and 1 after it if another one follows."""
    segments = np.zeros_like(ids)
    if encoder.separator_id is None:
        return segments
    places = np.flatnonzero(ids == encoder.separator_id)[:2]
    if len(places) == 2:
        segments[places[0] + 1 : places[1] + 1] = 1
    return segments


def _integers(values: Integers, like: AnyTensor) -> AnyTensor:
    """[T] int64 of the class of another tensor, on its device."""
    host = HostTensor(values, INT64)
    return host if isinstance(like, HostTensor) else host.to_torch().to(like.device)


def _floats(values: npt.NDArray[np.float64], like: AnyTensor) -> AnyTensor:
    """Numbers rounded to the dtype of another tensor, of its class and on its device."""
    host = HostTensor(values.astype(np.float32), FLOAT32)
    if isinstance(like, HostTensor):
        return host.to(like.dtype)
    return host.to_torch().to(like.device, like.dtype)


def _sum(x: AnyTensor, y: AnyTensor) -> AnyTensor:
    """[T, C], rounded once."""
    if isinstance(x, HostTensor):
        assert isinstance(y, HostTensor)
        return HostTensor(x.float().numpy() + y.float().numpy(), FLOAT32).to(x.dtype)
    return x + to_torch(y)
