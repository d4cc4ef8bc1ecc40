"""From a checkpoint directory to a `Model`: check every tensor, then read and pack layer by layer.

Called once by the engine's assembly. Never opens a pickle, never runs code of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from quickstep.config import LoadConfig
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.fingerprint import Fingerprinting
from quickstep.model.checkpoint.placement import (
    choose_device,
    choose_dtype,
)
from quickstep.model.checkpoint.source import Checkpoint, reading_checkpoint
from quickstep.model.checkpoint.tensor_reader import (
    Progress,
    TensorReader,
    TensorSource,
)
from quickstep.model.checkpoint.tensor_schema import (
    ALTUP,
    EXPERT_FACTORS,
    EXPERT_LATENTS,
    LATENT_HEADS,
    LAYER_INPUTS,
    LAYER_SCALAR,
    MIXTURE_NORMS,
    ROUTER_SCALE,
    STATE_MIXER,
    altup_parts,
    bias_of,
    decay_rates,
    delta_projections,
    gate_up_parts,
    layer_norms,
    qkv_parts,
    shared_gate,
)
from quickstep.model.checkpoint.weights import (
    CheckpointWeights,
    DecoderNames,
    open_checkpoint_files,
    open_weights,
)
from quickstep.model.chosen_rows import NumRows, ReorderedRows, row_orders
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import (
    AltUp,
    LatentSpec,
    LayerSpec,
    Mamba2,
    ModelSpec,
    QKNorm,
    ShortConv,
    StateMixer,
)
from quickstep.model.decoder_weights import (
    AltUpWeights,
    AttentionWeights,
    DecoderWeights,
    GatedDeltaWeights,
    HybridWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    Mamba2Weights,
    MixerWeights,
    MixtureNorms,
    MLPWeights,
    ModelInputWeights,
    MoEWeights,
    ShortConvLayerWeights,
    StateMixerWeights,
    StreamWeights,
)
from quickstep.model.formats.detect import open_quantized_reader
from quickstep.model.interface import Model
from quickstep.model.quantization import find_scheme
from quickstep.model.quantize import QuantizingSource
from quickstep.model.rope import make_rope_table
from quickstep.model.sharding import Shard, ShardedSource
from quickstep.model.spec import read_config
from quickstep.model.stages import Stage
from quickstep.ops.table import (
    DeltaWeights,
    ExpertWeights,
    MambaWeights,
    OpTable,
    ShortConvWeights,
)
from quickstep.ops.tensors import (
    CPU,
    FLOAT32,
    AnyTensor,
    DType,
    HostTensor,
    negative_exponential,
    torch_device,
    torch_dtype,
    transposed,
)
from quickstep.ops.torch_import import complete_torch, require_torch
from quickstep.ops.weights import LinearWeight, QuantizedWeight

if TYPE_CHECKING:
    import torch

    from quickstep.ops.tensors import Device

_COMPLETE, _ONE_STAGE = Shard(), Stage()


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ops: OpTable,
    load: LoadConfig,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    on_host: bool = False,
    shard: Shard = _COMPLETE,
    stage: Stage = _ONE_STAGE,
    *,
    weights: CheckpointWeights | None = None,
    fingerprint: str | None = None,
) -> Model:
    """Load the weights of a checkpoint for an op table.

    `progress(done_bytes, total_bytes)` is called as bytes are read. `max_model_len` sizes the
    position tables (and chooses longrope's factors); None is the limit of the spec.
    `on_host`: tensors without torch, if `reason_for_torch` is None. `shard`: which part of every
    matrix; `ops` then has the ranks that have the others. `stage`: which layers. `weights`: of the
    spec, if they have been opened. `fingerprint`: that of the model, if it is known
    (`fingerprint_settings`).

    Raises:
        ConfigError: Tensors are missing, unexpected, misshapen or corrupt.
    """
    with reading_checkpoint(checkpoint.path):
        settings = fingerprint_settings(checkpoint, spec, ops, load, max_model_len)
        config, files = read_config(checkpoint.path), open_checkpoint_files(checkpoint.path)
        computing = Fingerprinting(config, files, settings, fingerprint)
        place = max_model_len, on_host, shard, stage
        return _load_model(checkpoint, spec, ops, load, progress, *place, weights, computing)


def fingerprint_settings(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ops: OpTable,
    load: LoadConfig,
    max_model_len: int | None = None,
) -> tuple[str, ...]:
    """What a model's fingerprint depends on besides the checkpoint. Raises ConfigError."""
    dtype = choose_dtype(load.dtype, spec, open_checkpoint_files(checkpoint.path))
    max_model_len = min(max_model_len or spec.max_model_len, spec.max_model_len)
    longer = any(rope.needs_long_factors(max_model_len) for rope in spec.ropes)
    positions = "long factors" if longer else ""
    if spec.long_context is not None:
        positions = f"{positions}{spec.long_context.rope_type} x {spec.long_context.factor!r}"
    return str(dtype), ops.name, positions, load.quantization or ""


def _load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    ops: OpTable,
    load: LoadConfig,
    progress: Progress | None,
    max_model_len: int | None,
    on_host: bool,
    shard: Shard,
    stage: Stage,
    weights: CheckpointWeights | None,
    fingerprint: Fingerprinting,
) -> Model:
    device = choose_device(load.device)
    max_model_len = min(max_model_len or spec.max_model_len, spec.max_model_len)
    files = open_checkpoint_files(checkpoint.path)
    dtype = choose_dtype(load.dtype, spec, files)
    if spec.encoder is not None:
        # Imported here: decoders do not need it.
        from quickstep.model.encoders.encoder import load_encoder

        if load.quantization is not None:
            raise ConfigError(
                f"--quantization is {load.quantization}, but {spec.architecture} is an encoder, "
                "whose weights stay as they are; leave the option out"
            )
        where, kind = (device, dtype) if on_host else (torch_device(device), torch_dtype(dtype))
        sizes = (where, kind), max_model_len
        return load_encoder(files, spec, ops, *sizes, fingerprint, progress)
    if not spec.native:
        # Imported here: transformers is optional, and takes seconds to import.
        require_torch(f"{spec.architecture}, which runs through transformers,")
        complete_torch()
        from quickstep.model.fallback.model import load_fallback

        if load.quantization is not None:
            raise ConfigError(
                f"--quantization is {load.quantization}, but {spec.architecture} runs through "
                "transformers, where weights stay as they are; leave the option out"
            )
        placement = (torch_device(device), torch_dtype(dtype))
        return load_fallback(checkpoint, spec, ops, placement, max_model_len, fingerprint.result())
    if spec.latent is not None and ops.latent is None:
        raise ConfigError(
            f"{spec.architecture} has attention over latents, which the kernels {ops.name!r} do "
            "not compute; choose --device cpu, or --kernels reference, which is slow"
        )
    weights = weights or open_weights(checkpoint.path, spec)
    spec = _without_chunks(weights.spec, max_model_len, ops)
    check_requantization(weights, load.quantization)

    def report(num_bytes: int, total_bytes: int) -> None:
        fingerprint.begin()
        if progress is not None:
            progress(num_bytes, total_bytes)

    stored = _open_source(weights, *_places(dtype, device, on_host), load.quantization, report)
    if orders := row_orders(spec):
        stored = ReorderedRows(stored, orders)
    num_rows: NumRows | None = None
    if shard.size > 1:
        stored = sharded = ShardedSource(stored, spec, weights.names, shard)
        num_rows = sharded.num_rows
    source = quantizing(stored, load.quantization, weights.names, ops)
    names, part = weights.loaded_names(), (shard, stage, num_rows)
    return build_decoder(spec, ops, source, names, max_model_len, fingerprint.result, *part)


def _without_chunks(spec: ModelSpec, max_model_len: int, ops: OpTable) -> ModelSpec:
    """The spec without chunks of attention that no sequence is longer than. Raises ConfigError
    where the ops compute no others.
    """
    layers = tuple(
        [
            replace(layer, chunk=None) if (layer.chunk or 0) >= max_model_len else layer
            for layer in spec.layers
        ]
    )
    chunk = next((layer.chunk for layer in layers if layer.chunk is not None), None)
    if chunk is not None and not ops.has_chunks:
        raise ConfigError(
            f"{spec.architecture} attends in chunks of {chunk} tokens, which the kernels "
            f"{ops.name!r} do not compute; set --max-model-len to {chunk}, or choose --device cpu"
        )
    return replace(spec, layers=layers)


def _places(
    dtype: DType, device: Device, on_host: bool
) -> tuple[DType | torch.dtype, torch.device | Device]:
    """Of which kind tensors are, and where."""
    return (dtype, device) if on_host else (torch_dtype(dtype), torch_device(device))


def open_part(
    weights: CheckpointWeights, like: AnyTensor, load: LoadConfig, ops: OpTable
) -> TensorSource:
    """The tensors of a part of a checkpoint, in the dtype and at the place of a tensor of the model
    that is loaded already.
    """
    stored = _open_source(weights, like.dtype, like.device, load.quantization, None)
    if orders := row_orders(weights.spec):
        stored = ReorderedRows(stored, orders)
    return quantizing(stored, load.quantization, weights.names, ops)


def pack_layer(spec: ModelSpec, ops: OpTable, source: TensorSource, start: str) -> LayerWeights:
    """Pack the only layer of a spec, whose tensors' names begin with `start`."""
    return _Packing(spec, ops, source, _ONE_STAGE).layer(start, spec.layers[0])


def without_layers(checkpoint: Checkpoint, model: Decoder, load: LoadConfig) -> Decoder:
    """The complete embedding and output projection of a model that several processes have, in this
    one: what an EAGLE layer and Medusa heads read of their target. Raises ConfigError.
    """
    norm, ops = model.weights.final_norm, replace(model.ops, ranks=None)
    on_host = isinstance(norm, HostTensor)
    with reading_checkpoint(checkpoint.path):
        weights = open_weights(checkpoint.path, model.spec)
        device, dtype = (
            choose_device(load.device),
            choose_dtype(load.dtype, model.spec, weights.files),
        )
        stored = _open_source(weights, *_places(dtype, device, on_host), load.quantization, None)
        source = quantizing(stored, load.quantization, weights.names, ops)
        outer = _Packing(model.spec, ops, source, Stage()).outer(weights.loaded_names())
    complete = DecoderWeights(outer[0], (), norm, outer[1])
    return Decoder(model.spec, complete, (), ops, model.max_model_len, model.fingerprint)


def reason_for_torch(ops: OpTable, load: LoadConfig, kv_dtype: str = "auto") -> str:
    """Why a native checkpoint can be loaded or run with torch only; "" if torch is not needed.

    Without torch, each matrix goes from its file into packed memory in one native call, and the
    steps of the model are captured.
    """
    if choose_device(load.device) != CPU:
        return f"--device {load.device}"
    if ops.load_linear is None or ops.steps is None:
        return "running without the native kernels"
    if load.quantization == "fp8":
        return "--quantization fp8"
    if kv_dtype == "fp8":
        return "--kv-cache-dtype fp8"
    return ""


def check_kv_dtype(kv_dtype: str, device: Device) -> None:
    """Refuse what the device has no kernels for. ConfigError."""
    if kv_dtype == "int4" and device != CPU:
        raise ConfigError(
            f"--kv-cache-dtype int4 has kernels for CPUs only, the device is {device.type}; use "
            "int8 or fp8"
        )


def check_requantization(weights: CheckpointWeights, quantization: str | None) -> None:
    """Refuse `--quantization` for weights in quantized values: rounding twice would only lose.
    ConfigError.
    """
    if quantization is not None and weights.storage is not None and weights.quantized:
        raise ConfigError(
            f"--quantization is {quantization}, but the checkpoint is quantized already "
            f"({weights.storage.name}); leave the option out, or load the unquantized checkpoint"
        )


def quantized_weight_bytes(
    path: Path, spec: ModelSpec, quantization: str | None, dtype_bytes: int, *, natively: bool
) -> int | None:
    """`CheckpointWeights.quantized_bytes` of a native decoder's files, by their headers. Raises
    ConfigError if they are broken, or `quantization` would quantize them again.
    """
    weights = open_weights(path, spec)
    check_requantization(weights, quantization)
    return weights.quantized_bytes(dtype_bytes, quantization, natively=natively)


def _open_source(
    weights: CheckpointWeights,
    dtype: DType | torch.dtype,
    device: torch.device | Device,
    quantization: str | None,
    progress: Progress | None,
) -> TensorSource:
    """The tensors of the files, which the weights were checked against; `quantization` is what
    `quantizing` will round them to.
    """
    total_bytes = sum(weights.files.tensors[name].nbytes for name in weights.stored)
    reader = TensorReader(weights.files, dtype, device, total_bytes, progress)
    if weights.experts is not None:
        # Imported here: few checkpoints need it.
        from quickstep.model.formats.fused_experts_source import FusedExpertsSource

        is_rounded = quantization is not None
        return FusedExpertsSource(reader, weights.experts, is_rounded=is_rounded)
    if weights.storage is None:
        return reader
    return open_quantized_reader(
        reader, weights.storage, weights.shapes, weights.config, weights.spec
    )


def quantizing(
    source: TensorSource, quantization: str | None, names: DecoderNames, ops: OpTable
) -> TensorSource:
    """`source`, with matrices quantized as in `--quantization`."""
    scheme = find_scheme(quantization)
    if scheme is None:
        return source
    return QuantizingSource(source, scheme, frozenset((names.embed_tokens, names.lm_head)), ops)


def build_decoder(
    spec: ModelSpec,
    ops: OpTable,
    source: TensorSource,
    names: DecoderNames,
    max_model_len: int,
    fingerprint: Callable[[], str],
    shard: Shard = _COMPLETE,
    stage: Stage = _ONE_STAGE,
    num_rows: NumRows | None = None,
) -> Decoder:
    """Pack the tensors of `source`, layer by layer, for a spec that they fit.

    `fingerprint` is called when they are packed. `num_rows`: see `_Packing`.
    """
    weights = _Packing(spec, ops, source, stage, num_rows).decoder(names)
    device = weights.final_norm.device
    ropes = tuple(make_rope_table(rope, max_model_len, device) for rope in spec.ropes)
    return Decoder(spec, weights, ropes, ops, max_model_len, fingerprint(), shard, stage=stage)


class _Packing:
    """Reads tensors in the order of the schema and packs them for the op table. `num_rows` are
    those of the complete matrices, where the reader has a rank's part of them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: OpTable,
        reader: TensorSource,
        stage: Stage,
        num_rows: NumRows | None = None,
    ) -> None:
        self._spec = spec
        self._num_rows = num_rows
        self._stage = stage
        self._ops = ops
        self._reader = reader

    def decoder(self, names: DecoderNames) -> DecoderWeights:
        embedding, projection = self.outer(names)
        layers = tuple(self._layers(names.prefix))
        final_norm = self._reader.tensor(f"{names.prefix}norm.weight")
        has_inputs = self._spec.layer_inputs is not None
        inputs = self._inputs_of_model(names.prefix) if has_inputs else None
        final_bias = None
        if self._spec.norm_bias:
            final_bias = self._reader.tensor(f"{names.prefix}norm.bias")
        outer = (embedding, layers, final_norm, projection, inputs, final_bias)
        return DecoderWeights(*outer, self._streams(names.prefix))

    def outer(
        self, names: DecoderNames
    ) -> tuple[AnyTensor | LinearWeight | None, LinearWeight | None]:
        """Embedding and output projection, where the stage has them."""
        stage = self._stage
        if not (stage.is_first or stage.is_last):
            return None, None
        if not names.head_stored:
            packed = self._matrix((names.embed_tokens,), self._head_bias(names.lm_head))
            return packed if stage.is_first else None, packed if stage.is_last else None
        return (
            self._embedding(names.embed_tokens) if stage.is_first else None,
            self._matrix((names.lm_head,), self._head_bias(names.lm_head))
            if stage.is_last
            else None,
        )

    def _head_bias(self, name: str) -> AnyTensor | None:
        return self._reader.tensor(bias_of(name)) if self._spec.head_bias else None

    def _embedding(self, name: str) -> AnyTensor | LinearWeight:
        """An embedding that is no projection, packed where that needs no second copy of it or it is
        in quantized values.
        """
        if self._ops.load_linear is not None:
            return self._matrix((name,))
        embedding = self._reader.linear((name,))
        return self._pack(embedding) if isinstance(embedding, QuantizedWeight) else embedding

    def _layers(self, prefix: str) -> Iterator[LayerWeights]:
        for index in self._stage.layers(self._spec):
            yield self.layer(f"{prefix}layers.{index}.", self._spec.layers[index])

    def layer(self, start: str, layer: LayerSpec) -> LayerWeights:
        """One layer, whose tensors' names begin with `start`."""

        def norm(name: str | None) -> AnyTensor | None:
            return None if name is None else self._reader.tensor(f"{start}{name}.weight")

        def bias(name: str | None) -> AnyTensor | None:
            has_bias = name is not None and self._spec.norm_bias
            return self._reader.tensor(f"{start}{name}.bias") if has_bias else None

        names = layer_norms(self._spec, layer)
        return LayerWeights(
            mixer=self._mixer(start, layer),
            mlp=self._feed_forward(start, layer),
            input_layernorm=norm(names.input_layernorm),
            post_attention_layernorm=norm(names.post_attention_layernorm),
            pre_feedforward_layernorm=norm(names.pre_feedforward_layernorm),
            post_feedforward_layernorm=norm(names.post_feedforward_layernorm),
            inputs=None if self._spec.layer_inputs is None else self._inputs_of_layer(start),
            scalar=self._scalar(f"{start}{LAYER_SCALAR}") if self._spec.layer_scalars else None,
            input_bias=bias(names.input_layernorm),
            feedforward_bias=bias(names.pre_feedforward_layernorm),
            altup=None if self._spec.altup is None else self._altup(start, self._spec.altup),
        )

    def _feed_forward(self, start: str, layer: LayerSpec) -> MLPWeights | MoEWeights | None:
        if not layer.has_feed_forward:
            return None
        return self._experts(start) if layer.sparse else self._dense(f"{start}mlp.")

    def _mixer(self, start: str, layer: LayerSpec) -> MixerWeights | None:
        if layer.state_mixer is None:
            return self._attention_of(start, layer) if layer.has_attention else None
        state = self._state_mixer(start + STATE_MIXER, layer.state_mixer)
        if not layer.with_attention:
            return state
        return HybridWeights(self._attention(f"{start}self_attn.", layer), state)

    def _attention_of(self, start: str, layer: LayerSpec) -> AttentionWeights | LatentWeights:
        if self._spec.latent is not None:
            return self._latent_attention(f"{start}self_attn.", self._spec.latent)
        return self._attention(f"{start}self_attn.", layer)

    def _state_mixer(self, start: str, mixer: StateMixer) -> StateMixerWeights:
        taps = self._reader.tensor(f"{start}conv1d.weight").float()
        taps = transposed(taps.view(taps.shape[0], taps.shape[2]))
        if isinstance(mixer, ShortConv):
            bias = self._reader.tensor(f"{start}conv1d.bias").float() if mixer.bias else None
            return ShortConvLayerWeights(
                self._linear(start, ("in_proj",), mixer.bias),
                ShortConvWeights(taps, bias),
                self._linear(start, ("out_proj",), mixer.bias),
            )
        rates = self._reader.tensor(f"{start}{decay_rates(self._spec.naming)}").float()
        if not self._spec.naming.stored_rates:
            rates = negative_exponential(rates)
        steps = self._reader.tensor(f"{start}dt_bias").float()
        if isinstance(mixer, Mamba2):
            return self._mamba(start, mixer, _with_factors(taps, mixer), rates, steps)
        delta = DeltaWeights(
            taps=taps,
            rates=rates,
            biases=steps,
            norm=self._reader.tensor(f"{start}norm.weight").float(),
            num_key_heads=mixer.num_key_heads,
            key_size=mixer.key_size,
            eps=self._spec.norm_eps,
            tiled=self._spec.naming.tiled_values,
        )
        projections = tuple(name for name, _ in delta_projections(mixer, self._spec.naming))
        return GatedDeltaWeights(
            self._linear(start, projections, False),
            delta,
            self._linear(start, ("out_proj",), False),
        )

    def _mamba(
        self, start: str, mixer: Mamba2, taps: AnyTensor, rates: AnyTensor, steps: AnyTensor
    ) -> Mamba2Weights:
        read, conv_bias, norm = self._reader.tensor, None, None
        if mixer.conv_bias:
            conv_bias = read(f"{start}conv1d.bias").float()
        if mixer.has_norm:
            norm = read(f"{start}norm.weight").float()
        weights = MambaWeights(
            taps=taps,
            conv_bias=conv_bias,
            rates=rates,
            biases=steps,
            skips=read(f"{start}D").float(),
            norm=norm,
            num_groups=mixer.num_groups,
            state_size=mixer.state_size,
            eps=self._spec.norm_eps,
            least_step=mixer.least_step,
            most_step=mixer.most_step,
            gate_factor=mixer.factors[0],
            step_factor=mixer.factors[4],
            norms_first=mixer.norms_first,
        )
        return Mamba2Weights(
            self._linear(start, ("in_proj",), mixer.bias),
            weights,
            self._linear(start, ("out_proj",), mixer.bias),
        )

    def _scalar(self, name: str) -> float:
        return float(self._reader.tensor(name).float().numpy()[0])

    def _inputs_of_layer(self, start: str) -> LayerInputWeights:
        return LayerInputWeights(
            self._linear(start, (LAYER_INPUTS.gate,), bias=False),
            self._linear(start, (LAYER_INPUTS.output,), bias=False),
            self._reader.tensor(f"{start}{LAYER_INPUTS.output_norm}.weight"),
        )

    def _inputs_of_model(self, prefix: str) -> ModelInputWeights:
        return ModelInputWeights(
            self._embedding(f"{prefix}{LAYER_INPUTS.table}.weight"),
            self._linear(prefix, (LAYER_INPUTS.projection,), bias=False),
            self._reader.tensor(f"{prefix}{LAYER_INPUTS.norm}.weight"),
        )

    def _altup(self, start: str, altup: AltUp) -> AltUpWeights:
        read, (left, right) = self._reader.tensor, ALTUP.laurel
        return AltUpWeights(
            # never quantized: a few outputs that everything else depends on
            router=self._router(f"{start}{ALTUP.router}.weight", None),
            router_norm=read(f"{start}{ALTUP.router_norm}.weight"),
            prediction=read(f"{start}{ALTUP.prediction}.weight").float(),
            correction=read(f"{start}{ALTUP.correction}.weight").float(),
            scale=read(f"{start}{ALTUP.scale}") if altup.scaled else None,
            laurel_left=self._linear(start, (left,), bias=False),
            laurel_right=self._linear(start, (right,), bias=False),
            laurel_norm=read(f"{start}{ALTUP.laurel_norm}.weight"),
        )

    def _streams(self, prefix: str) -> StreamWeights | None:
        altup = self._spec.altup
        if altup is None:
            return None
        joined = altup_parts(altup, ALTUP.joined)
        return StreamWeights(
            self._linear(prefix, altup_parts(altup, ALTUP.spread), bias=False),
            tuple([self._linear(prefix, (name,), bias=False) for name in joined]),
        )

    def _attention(self, start: str, layer: LayerSpec) -> AttentionWeights:
        spec = self._spec
        parts = ("qkv_proj",) if spec.naming.fused_qkv else qkv_parts(layer)
        has_keys = layer.kv_from is None
        q_norm, k_norm = self._qk_norms(start, layer)
        return AttentionWeights(
            qkv=self._linear(start, parts, spec.qkv_bias),
            o_proj=self._linear(start, ("o_proj",), spec.output_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=self._reader.tensor(f"{start}sinks").float() if spec.sinks else None,
            v_norm=_ones_like(q_norm) if spec.value_norm and has_keys else None,
        )

    def _qk_norms(self, start: str, layer: LayerSpec) -> tuple[AnyTensor | None, AnyTensor | None]:
        spec, read = self._spec, self._reader.tensor
        if spec.qk_norm is QKNorm.NONE:
            return None, None
        if spec.qk_norm is QKNorm.UNWEIGHTED:
            norm = read(f"{start.removesuffix('self_attn.')}input_layernorm.weight")
            ones = _ones_like(norm[: spec.head_size]) if layer.rope is not None else None
            return ones, ones
        keys = read(f"{start}k_norm.weight") if layer.kv_from is None else None
        return read(f"{start}q_norm.weight"), keys

    def _latent_attention(self, start: str, latent: LatentSpec) -> LatentWeights:
        ops = self._ops.latent
        assert ops is not None, "checked before the files are read"
        is_direct = latent.query_rank is None
        first = "q_proj" if is_direct else "q_a_proj"
        keys, values = _by_heads(self._reader.tensor(f"{start}{LATENT_HEADS}.weight"), latent)
        return LatentWeights(
            qkv_a=self._linear(start, (first, "kv_a_proj_with_mqa"), bias=False),
            q_a_layernorm=(
                None if is_direct else self._reader.tensor(f"{start}q_a_layernorm.weight")
            ),
            q_b=None if is_direct else self._linear(start, ("q_b_proj",), bias=False),
            kv_a_layernorm=self._reader.tensor(f"{start}kv_a_layernorm.weight"),
            k_b=ops.pack_heads(keys),
            v_b=ops.pack_heads(values),
            o_proj=self._linear(start, ("o_proj",), bias=False),
        )

    def _dense(self, start: str) -> MLPWeights:
        parts, bias = gate_up_parts(self._spec), self._spec.mlp_bias
        return MLPWeights(
            self._linear(start, parts, bias), self._linear(start, ("down_proj",), bias)
        )

    def _experts(self, start: str) -> MoEWeights:
        naming, moe = self._spec.naming, self._spec.moe
        assert moe is not None
        gate, up, down = naming.expert_parts
        gates = (gate,) if naming.fused_experts else (gate, up)
        gates = gates if self._spec.gated else (up,)
        bias = self._reader.tensor(f"{start}{naming.router}.bias") if moe.biases else None
        # never quantized: the choice of a token's experts depends on small differences
        router = self._router(f"{start}{naming.router}.weight", bias)
        gate_ups, downs = [], []
        for index in range(moe.num_experts):
            expert = f"{start}{naming.experts}.{index}."
            gate_ups.append(self._linear(expert, gates, moe.biases))
            downs.append(self._linear(expert, (down,), moe.biases))
        matrices, pack = (tuple(gate_ups), tuple(downs)), self._ops.pack_experts
        data = None if pack is None else pack(*matrices)
        selection_bias, shared = None, None
        if moe.selection_bias:
            selection_bias = self._reader.tensor(f"{start}{naming.selection_bias}").float()
            selection_bias = selection_bias.view(moe.num_experts)
        if moe.shared_width:
            shared = MLPWeights(
                self._linear(f"{start}{naming.shared_expert}.", gate_up_parts(self._spec), False),
                self._linear(f"{start}{naming.shared_expert}.", ("down_proj",), False),
            )
        packed_gate = None
        if moe.shared_gate:  # never quantized: one output
            of_shared = self._reader.tensor(f"{start}{shared_gate(self._spec)}")
            packed_gate = self._ops.pack_linear(of_shared, None)
        of_experts = ExpertWeights(*matrices, data, moe.weighs_inputs)
        latents = None
        if moe.latent_size is not None:
            into, out = (
                self._linear(start, (name,), self._spec.mlp_bias) for name in EXPERT_LATENTS
            )
            latents = into, out
        experts = MoEWeights(
            router,
            of_experts,
            selection_bias,
            shared,
            shared_gate=packed_gate,
            latents=latents,
        )
        return self._with_mlp(start, experts) if moe.with_mlp else experts

    def _with_mlp(self, start: str, experts: MoEWeights) -> MoEWeights:
        names = (ROUTER_SCALE, *(f"{name}.weight" for name in MIXTURE_NORMS))
        return replace(
            experts,
            mlp=self._dense(f"{start}mlp."),
            norms=MixtureNorms(*(self._reader.tensor(f"{start}{name}") for name in names)),
            factors=self._reader.tensor(f"{start}{EXPERT_FACTORS}").float(),
        )

    def _router(self, name: str, bias: AnyTensor | None) -> LinearWeight:
        load = self._ops.load_linear
        stored = None if load is None else self._reader.stored((name,), floating=True)
        if load is None or stored is None:
            return self._ops.pack_linear(self._reader.tensor(name), bias)
        return load(stored, bias)

    def _linear(self, start: str, parts: tuple[str, ...], bias: bool) -> LinearWeight:
        offsets = None
        if bias:
            offsets = self._reader.stacked(tuple(f"{start}{part}.bias" for part in parts))
        return self._matrix(tuple(f"{start}{part}.weight" for part in parts), offsets)

    def _matrix(self, names: tuple[str, ...], bias: AnyTensor | None = None) -> LinearWeight:
        """A packed matrix, straight from its files where that is possible."""
        load = self._ops.load_linear
        stored = None if load is None else self._reader.stored(names)
        if load is None or stored is None:
            num_rows = None if self._num_rows is None else self._num_rows(names)
            return self._pack(self._reader.linear(names), bias, num_rows)
        return load(stored, bias)

    def _pack(
        self,
        weight: AnyTensor | QuantizedWeight,
        bias: AnyTensor | None = None,
        num_rows: int | None = None,
    ) -> LinearWeight:
        if isinstance(weight, QuantizedWeight):
            return self._ops.pack_quantized(weight, bias)
        if num_rows is not None and self._ops.pack_part is not None:
            return self._ops.pack_part(weight, bias, num_rows)
        return self._ops.pack_linear(weight, bias)


def _with_factors(taps: AnyTensor, mixer: Mamba2) -> AnyTensor:
    """taps [width, C], float32, times the factors of values, keys and queries."""
    num_keys = mixer.num_groups * mixer.state_size
    factors = np.repeat(
        np.array(mixer.factors[1:4], np.float32), (mixer.num_outputs, num_keys, num_keys)
    )
    if isinstance(taps, HostTensor):
        return HostTensor(taps.numpy() * factors, taps.dtype)
    import torch

    return taps * torch.from_numpy(factors).to(taps.device)


def _by_heads(weight: AnyTensor, latent: LatentSpec) -> tuple[AnyTensor, AnyTensor]:
    """`kv_b_proj` [H (nope + value), rank] as [H, rank, nope] and [H, value, rank]."""
    shape = (-1, latent.nope_size + latent.value_size, latent.rank)
    if isinstance(weight, HostTensor):
        heads = weight.numpy().reshape(shape)
        keys = heads[:, : latent.nope_size].swapaxes(1, 2)
        parts = (np.ascontiguousarray(part) for part in (keys, heads[:, latent.nope_size :]))
        return HostTensor(next(parts), weight.dtype), HostTensor(next(parts), weight.dtype)
    of_heads = weight.view(shape)
    keys_of_heads = of_heads[:, : latent.nope_size].transpose(1, 2)
    return keys_of_heads.contiguous(), of_heads[:, latent.nope_size :].contiguous()


def _ones_like(weight: AnyTensor | None) -> AnyTensor:
    assert weight is not None, "values are normed where queries are"
    if isinstance(weight, HostTensor):
        ones = HostTensor(np.ones(tuple(weight.shape), np.float32), FLOAT32)
        return ones.to(weight.dtype)
    return weight.new_ones(weight.shape)
