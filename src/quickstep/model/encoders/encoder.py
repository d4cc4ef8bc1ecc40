"""An encoder's forward pass: every token of a text sees all others of it, in one step.

Called by the loader for specs with an `EncoderSpec`. There is no KV cache: a row of a step is a
complete text (`SchedulerConfig.complete_prompts`), and nothing of it is kept. Matrix products of
all rows run together over the op table, whose bits do not depend on other rows; attention, norms
and activations run text by text, on tensors whose shapes depend on that text only. So the same text
has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from quickstep.errors import ConfigError, EngineError
from quickstep.model.checkpoint.fingerprint import Fingerprinting
from quickstep.model.checkpoint.safetensors_files import TensorFiles
from quickstep.model.checkpoint.tensor_reader import Progress, TensorReader
from quickstep.model.decoder_spec import LayerSpec, ModelSpec
from quickstep.model.encoders.encoder_spec import EncoderSpec
from quickstep.model.formats.gguf_blocks import decode_blocks
from quickstep.model.formats.gguf_kinds import BLOCK_KINDS
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.model.rope import make_rope_table
from quickstep.ops.table import KVCache, LoRAMapping, OpTable
from quickstep.ops.tensors import AnyTensor, to_torch
from quickstep.ops.weights import LinearWeight

# Queries that attention computes at a time: a long text needs no more than so many rows of scores.
_QUERIES = 512
# Prefixes of an encoder's tensors; the first that the checkpoint uses counts.
_PREFIXES = {
    "bert": ("", "bert."),
    "roberta": ("", "roberta."),
    "modernbert": ("", "model."),
}


class Norm(msgspec.Struct, frozen=True):
    """A layer norm's weight [H], its bias [H] or None, and its epsilon."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """[L, H] -> [L, H]."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


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

    tokens: Tensor
    positions: Tensor | None
    segments: Tensor | None
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
        self._max_model_len, self._fingerprint = max_model_len, fingerprint
        device = weights.tokens.device
        tables = [make_rope_table(rope, max_model_len, device) for rope in spec.ropes]
        self._ropes = [(to_torch(table.cos), to_torch(table.sin)) for table in tables]

    @property
    def spec(self) -> ModelSpec:
        """The sizes."""
        return self._spec

    @property
    def kv_layout(self) -> KVLayout:
        """Nothing is kept of a token."""
        return KVLayout((), self._weights.tokens.dtype)

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
    def device(self) -> torch.device:
        """Where weights live."""
        return self._weights.tokens.device

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
        offsets = batch.layout.row_offsets
        lens = [end - start for start, end in pairwise(offsets)]
        if list(batch.layout.context_lens) != lens:
            raise EngineError("a row of an encoder is a part of a text")
        x = self._embedded(batch.token_ids, offsets)
        for layer, weights in zip(self._spec.layers, self._weights.layers, strict=True):
            x = self._layer(x, layer, weights, offsets)
        final = self._weights.final_norm
        return x if final is None else _by_text(final, offsets, x)

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """There are none. Raises EngineError."""
        raise EngineError("an encoder generates no tokens")

    def class_logits(self, hidden: AnyTensor) -> tuple[float, ...]:
        """The logits of the classes, from the hidden states [L, hidden] of one text."""
        weights, head = self._weights.classifier, self._encoder.head
        assert weights is not None and head is not None, "a model with a classification head"
        states = to_torch(hidden)
        pooled = states.mean(0, keepdim=True) if head.is_mean else states[:1].contiguous()
        x = self._ops.linear(pooled, weights.dense)
        x = functional.gelu(x) if self._encoder.family == "modernbert" else torch.tanh(x)
        if weights.norm is not None:
            x = weights.norm(x)
        logits: list[float] = self._ops.linear(x, weights.classes)[0].float().tolist()
        return tuple(logits)

    def _embedded(self, ids: Tensor, offsets: Sequence[int]) -> Tensor:
        weights, encoder = self._weights, self._encoder
        x = weights.tokens[ids]
        if weights.segments is not None:
            segments = [_segments(ids[a:b], encoder) for a, b in pairwise(offsets)]
            x = x + weights.segments[torch.cat(segments)]
        if weights.positions is not None:
            first = encoder.first_position
            rows = [weights.positions[first : first + b - a] for a, b in pairwise(offsets)]
            x = x + torch.cat(rows)
        return _by_text(weights.embedding_norm, offsets, x)

    def _layer(
        self, x: Tensor, layer: LayerSpec, weights: EncoderLayer, offsets: Sequence[int]
    ) -> Tensor:
        linear = self._ops.linear
        if self._encoder.family == "modernbert":  # norms before each part
            normed = x
            if weights.attention_norm is not None:
                normed = _by_text(weights.attention_norm, offsets, x)
            x = x + linear(self._attention(normed, layer, weights, offsets), weights.output)
            normed = _by_text(weights.mlp_norm, offsets, x)
            gated = _by_text(self._gated, offsets, linear(normed, weights.up))
            return x + linear(gated, weights.down)
        assert weights.attention_norm is not None, "BERT has a norm after each part"
        attended = linear(self._attention(x, layer, weights, offsets), weights.output)
        x = _by_text(weights.attention_norm, offsets, x + attended)
        activated = _by_text(self._activation, offsets, linear(x, weights.up))
        return _by_text(weights.mlp_norm, offsets, x + linear(activated, weights.down))

    def _attention(
        self, x: Tensor, layer: LayerSpec, weights: EncoderLayer, offsets: Sequence[int]
    ) -> Tensor:
        qkv = self._ops.linear(x, weights.qkv)

        def of_text(rows: Tensor) -> Tensor:
            spec = self._spec
            heads = rows.view(rows.shape[0], 3, spec.num_heads, spec.head_size)
            q, k, v = heads.permute(1, 2, 0, 3)
            if layer.rope is not None:
                cos, sin = (table[: rows.shape[0]] for table in self._ropes[layer.rope])
                q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            mixed = bidirectional_attention(q, k, v, spec.attention_scale, layer.window)
            return mixed.transpose(0, 1).reshape(rows.shape[0], -1)

        return _by_text(of_text, offsets, qkv)

    def _activation(self, x: Tensor) -> Tensor:
        match self._encoder.activation:
            case "gelu":
                return functional.gelu(x)
            case "gelu_tanh":
                return functional.gelu(x, approximate="tanh")
            case _:
                return functional.relu(x)

    def _gated(self, x: Tensor) -> Tensor:
        """[L, 2 I] -> [L, I]: the activated first half times the second one."""
        first, second = x.chunk(2, dim=-1)
        return self._activation(first) * second


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
) -> Tensor:
    """q, k, v [H, L, D] of one text -> [H, L, D]; in float32. With `window`, a query sees so many
    positions on each side of it.
    """
    keys, values = k.float().transpose(1, 2), v.float()
    places = torch.arange(q.shape[1], device=q.device)
    parts = []
    for start in range(0, q.shape[1], _QUERIES):
        scores = torch.matmul(q[:, start : start + _QUERIES].float() * scale, keys)
        if window is not None:
            distance = (places[start : start + _QUERIES, None] - places).abs()
            scores = scores.masked_fill(distance > window, float("-inf"))
        parts.append(torch.matmul(torch.softmax(scores, dim=-1), values))
    return torch.cat(parts, dim=1).to(q.dtype)


def load_encoder(
    files: TensorFiles,
    spec: ModelSpec,
    ops: OpTable,
    placement: tuple[torch.device, torch.dtype],
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
            positions = self._tensor(f"{start}position_embeddings.weight", table)
            size = (self._encoder.num_segments, hidden)
            segments = self._tensor(f"{start}token_type_embeddings.weight", size)
        name = "tok_embeddings" if modern else "word_embeddings"
        norm = self._norm(f"{start}norm") if modern else self._norm(f"{start}LayerNorm")
        read = self._modern_layer if modern else self._bert_layer
        return EncoderWeights(
            self._tensor(f"{start}{name}.weight", (vocab, hidden)),
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
        weight = torch.cat([self._tensor(f"{name}.weight", shape) for name in names])
        offsets = None
        if bias:
            offsets = torch.cat([self._tensor(f"{name}.bias", shape[:1]) for name in names])
        return self._ops.pack_linear(weight, offsets)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._files.tensors.get(name)
        if stored is None:
            raise ConfigError(f"the checkpoint has no tensor {name!r}, which its config needs")
        if tuple(stored.shape) != shape:
            raise ConfigError(
                f"tensor {name!r} has the shape {list(stored.shape)}, the config needs "
                f"{list(shape)}"
            )
        if stored.dtype not in BLOCK_KINDS:
            return to_torch(self._reader.tensor(name))
        self._reader.rows(name, shape[0])
        decoded = decode_blocks(stored.dtype, self._reader.raw(name), shape)
        return decoded.dequantized().to(self._reader.dtype)


def _by_text(compute: Callable[[Tensor], Tensor], offsets: Sequence[int], rows: Tensor) -> Tensor:
    """[T, ...] -> [T, ...], text by text: a text's shapes and places decide its bits."""
    texts: Iterator[Tensor] = (
        compute(rows[start:end].contiguous()) for start, end in pairwise(offsets)
    )
    return torch.cat(list(texts))


def _segments(ids: Tensor, encoder: EncoderSpec) -> Tensor:
    """[L]: 0 up to the first separator, and 1 after it if another one follows."""
    segments = torch.zeros_like(ids)
    if encoder.separator_id is None:
        return segments
    places = (ids == encoder.separator_id).nonzero()[:2, 0].tolist()
    if len(places) == 2:
        segments[places[0] + 1 : places[1] + 1] = 1
    return segments


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[H, L, D] with rotary positions: the halves of a head are pairs."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
