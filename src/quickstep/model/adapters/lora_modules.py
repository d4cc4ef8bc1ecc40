"""Where LoRA applies in a decoder: its matrices, by number, and their parts, by name.

A decoder multiplies queries, keys and values in one matrix, gate and up in another. A checkpoint
names them one by one, so each name is a range of the outputs of a numbered matrix. The numbers are
those of the layers' matrices, the embedding, the output projection, and the experts' matrices.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import (
    EXPERT_LATENTS,
    STATE_MIXER,
    delta_projections,
    gate_up_parts,
    qkv_parts,
    shared_gate,
)
from quickstep.model.chosen_rows import row_orders, tiled_columns
from quickstep.model.decoder_spec import (
    FUSED_DELTA,
    GGUF_DELTA,
    GatedDelta,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    StateMixer,
    TensorNaming,
)
from quickstep.model.decoder_weights import (
    AttentionWeights,
    DecoderWeights,
    HybridWeights,
    MixerWeights,
    MLPWeights,
    StateMixerWeights,
)
from quickstep.ops.table import LoRAPart, OpTable
from quickstep.ops.tensors import (
    AnyTensor,
    Array,
    Device,
    HostTensor,
    as_float64,
    host_dtype,
    to_torch,
    torch_device,
)
from quickstep.ops.weights import LinearWeight

if TYPE_CHECKING:
    import torch


LM_HEAD = "lm_head"
EMBEDDING = "embed_tokens"


class Projection(enum.IntEnum):
    """The matrices of a layer that an adapter can change; those of experts have more numbers."""

    QKV = 0
    O_PROJ = 1
    GATE_UP = 2
    DOWN_PROJ = 3
    ROUTER = 4
    Q_B = 5  # queries from their latent (`LatentSpec.query_rank`)
    STATE_IN = 6  # of a state mixer
    STATE_OUT = 7
    SHARED_GATE = 8  # of the expert of all tokens, whose matrices are GATE_UP and DOWN_PROJ
    LATENT_IN = 9  # what experts read, of `MoESpec.latent_size`
    LATENT_OUT = 10


class LoRAModule(msgspec.Struct, frozen=True):
    """A linear layer of the checkpoint, or the embedding: `num_outputs` outputs from `first_output`
    on of the decoder's matrix `number`. The inputs of the embedding are the vocabulary. `rows`: the
    order of its outputs in that matrix, `columns` that of its inputs; () for their own.
    """

    number: int
    first_output: int
    num_outputs: int
    num_inputs: int
    is_embedding: bool = False
    rows: tuple[range, ...] = ()
    columns: tuple[range, ...] = ()


def num_modules(spec: ModelSpec) -> int:
    """How many matrices an adapter can change."""
    if spec.moe is None:
        return lm_head_number(spec) + 1
    return expert_number(spec, spec.num_layers, 0, Projection.GATE_UP)


def module_number(layer: int, projection: Projection) -> int:
    """The number of a matrix of a layer."""
    return layer * len(Projection) + projection


def embedding_number(spec: ModelSpec) -> int:
    """The number of the embedding."""
    return spec.num_layers * len(Projection)


def lm_head_number(spec: ModelSpec) -> int:
    """The number of the output projection, also where it is the embedding."""
    return embedding_number(spec) + 1


def expert_number(spec: ModelSpec, layer: int, expert: int, projection: Projection) -> int:
    """The number of an expert's matrix: `GATE_UP` or `DOWN_PROJ`."""
    assert spec.moe is not None
    of_layer = 2 * expert + (projection is Projection.DOWN_PROJ)
    return lm_head_number(spec) + 1 + 2 * layer * spec.moe.num_experts + of_layer


def is_expert(spec: ModelSpec, module: LoRAModule) -> bool:
    """Whether it is in the mixture of experts of a layer: an expert's, that of the expert of all
    tokens, or the router.
    """
    if module.number >= embedding_number(spec):
        return module.number > lm_head_number(spec)
    of_mixture = (
        *(Projection.ROUTER, Projection.SHARED_GATE),
        *(Projection.LATENT_IN, Projection.LATENT_OUT),
    )
    return module.number % len(Projection) in of_mixture or is_shared(spec, module.number)


def is_shared(spec: ModelSpec, number: int) -> bool:
    """Whether the matrix of a layer is that of the expert of all tokens."""
    layer, projection = divmod(number, len(Projection))
    if spec.moe is None or spec.moe.with_mlp or not spec.layers[layer].sparse:
        return False
    return projection in (Projection.GATE_UP, Projection.DOWN_PROJ)


def has_bias(spec: ModelSpec, module: LoRAModule) -> bool:
    """Whether the layer has a bias in the base model."""
    if module.number >= embedding_number(spec):
        return False
    projection = Projection(module.number % len(Projection))
    latents = (Projection.LATENT_IN, Projection.LATENT_OUT)
    if projection in (Projection.SHARED_GATE, *latents) or is_shared(spec, module.number):
        return False
    if projection is Projection.ROUTER:
        return spec.moe is not None and spec.moe.biases
    if projection in (Projection.STATE_IN, Projection.STATE_OUT):
        mixer = spec.layers[module.number // len(Projection)].state_mixer
        return mixer is not None and not isinstance(mixer, GatedDelta) and mixer.bias
    attention = {Projection.QKV: spec.qkv_bias, Projection.O_PROJ: spec.output_bias}
    return attention.get(projection, spec.mlp_bias)


def base_biases(
    spec: ModelSpec, weights: DecoderWeights, ops: OpTable, first_layer: int = 0
) -> dict[int, Array]:
    """The biases [N] of the attention and dense MLP of every layer, by number of the matrix; the
    weights are those of `first_layer` on.

    Packed weights contain their biases, so each is the product of the matrix with zeros. It runs on
    the model's threads: not while a step runs.
    """
    matrices: dict[int, LinearWeight] = {}
    for number, layer in enumerate(weights.layers, first_layer):
        for mixer in _mixers(layer.mixer):
            if isinstance(mixer, AttentionWeights):
                into, out = _numbers(number, Projection.QKV, Projection.O_PROJ)
                matrices |= {into: mixer.qkv} if spec.qkv_bias else {}
                matrices |= {out: mixer.o_proj} if spec.output_bias else {}
            elif isinstance(mixer, StateMixerWeights):
                into, out = _numbers(number, Projection.STATE_IN, Projection.STATE_OUT)
                if has_bias(spec, LoRAModule(into, 0, 0, 0)):
                    matrices |= {into: mixer.in_proj, out: mixer.out_proj}
        if spec.mlp_bias and isinstance(layer.mlp, MLPWeights):
            matrices[module_number(number, Projection.GATE_UP)] = layer.mlp.gate_up
            matrices[module_number(number, Projection.DOWN_PROJ)] = layer.mlp.down_proj
    found = {}
    for number, matrix in matrices.items():
        bias = ops.linear(_zeros(weights, matrix.num_inputs), matrix)
        found[number] = as_float64(bias)[0].astype(np.float32)
    return found


def _mixers(mixer: MixerWeights | None) -> tuple[MixerWeights | None, ...]:
    return (mixer.attention, mixer.state) if isinstance(mixer, HybridWeights) else (mixer,)


def _numbers(layer: int, into: Projection, out: Projection) -> tuple[int, int]:
    return module_number(layer, into), module_number(layer, out)


def _zeros(weights: DecoderWeights, num_inputs: int) -> Any:
    """[1, num_inputs] of the kind and dtype of the model's activations."""
    norm = weights.final_norm
    dtype = host_dtype(norm.dtype)
    assert dtype is not None
    zeros = HostTensor(np.zeros((1, num_inputs), dtype.storage), dtype)
    return zeros if isinstance(norm, HostTensor) else to_torch(zeros).to(norm.device)


def adapter_bytes(spec: ModelSpec, rank: int, itemsize: int, targets: Collection[str] = ()) -> int:
    """Bytes of an adapter of this rank, with elements of `itemsize` bytes: on the attention and
    dense MLP of every layer, or on the linear layers whose last name is one of `targets`.

    Raises:
        ConfigError: The model has no layer of one of these names.
    """
    modules = lora_modules(spec)
    if targets:
        known = {name.rpartition(".")[2] for name in modules}
        for target in targets:
            if target not in known:
                raise ConfigError(
                    f"the model has no linear layer {target}; known are {', '.join(sorted(known))}"
                )
        chosen = [one for name, one in modules.items() if name.rpartition(".")[2] in targets]
    else:
        chosen = [
            module
            for module in modules.values()
            if module.number < embedding_number(spec) and not is_expert(spec, module)
        ]
    scale_bytes = 4 if itemsize == 1 else 0  # int8 has a scale per rank
    sizes = (itemsize * (module.num_inputs + module.num_outputs) + scale_bytes for module in chosen)
    return rank * sum(sizes)


def lora_modules(spec: ModelSpec) -> dict[str, LoRAModule]:
    """All that an adapter can change by name: `layers.0.self_attn.q_proj`, `embed_tokens`,
    `lm_head`. Experts that a checkpoint holds in one tensor are not among them.
    """
    hidden, vocab_size = spec.hidden_size, spec.vocab_size
    is_tiled = spec.naming.tiled_values
    spec = replace(spec, naming=_of_adapters(spec.naming))
    naming, orders, in_order = spec.naming, row_orders(spec), ((), 0)
    found: dict[str, LoRAModule] = {}
    for layer, kind in enumerate(spec.layers):
        for projection, parts, num_inputs in _dense_modules(spec.of_layer(layer), kind):
            first = 0
            for name, num_outputs in parts:
                rows, _ = orders.get(name.rpartition(".")[2], in_order)
                place = module_number(layer, projection), first, num_outputs, num_inputs
                module = LoRAModule(*place, rows=rows)
                if is_tiled and name == f"{STATE_MIXER}out_proj":
                    assert isinstance(kind.state_mixer, GatedDelta)
                    module = replace(module, columns=tiled_columns(kind.state_mixer))
                found[f"layers.{layer}.{name}"] = module
                first += num_outputs
        if kind.sparse and not naming.fused_experts:
            found |= _expert_modules(spec, layer)
        if kind.sparse and spec.moe is not None and spec.moe.shared_width:
            found |= _shared_modules(spec, spec.moe, layer)
    found[EMBEDDING] = LoRAModule(embedding_number(spec), 0, hidden, vocab_size, is_embedding=True)
    found[LM_HEAD] = LoRAModule(lm_head_number(spec), 0, vocab_size, hidden)
    return {own_name(name, naming): module for name, module in found.items()}


def expert_parameters(spec: ModelSpec) -> dict[str, tuple[LoRAModule, ...]]:
    """The parameters of experts, of all experts of a layer each, by name
    (`layers.0.mlp.experts.gate_up_proj`), as modules of transformers 5 have them: the part of each
    expert. Without a gate there are none.
    """
    moe = spec.moe
    if moe is None or not spec.gated:
        return {}
    width, size = moe.intermediate_size, moe.latent_size or spec.hidden_size
    orders = (range(0, 2 * width, 2), range(1, 2 * width, 2))
    is_interleaved = spec.naming.fused_experts and not spec.naming.gate_above_up
    found: dict[str, tuple[LoRAModule, ...]] = {}
    for layer in (number for number, kind in enumerate(spec.layers) if kind.sparse):
        gate_up = tuple(
            LoRAModule(
                expert_number(spec, layer, expert, Projection.GATE_UP),
                *(0, 2 * width, size),
                rows=orders if is_interleaved else (),
            )
            for expert in range(moe.num_experts)
        )
        down = tuple(
            LoRAModule(expert_number(spec, layer, expert, Projection.DOWN_PROJ), 0, size, width)
            for expert in range(moe.num_experts)
        )
        own = own_name(f"layers.{layer}.{spec.naming.experts}", spec.naming)
        # the block has its name in files, and `mlp` in transformers 5
        for name in {own, own.replace(".block_sparse_moe.", ".mlp.")}:
            found |= {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down}
    return found


def _of_adapters(naming: TensorNaming) -> TensorNaming:
    """Adapters of a GGUF file are those of the checkpoint that it was converted from."""
    delta = FUSED_DELTA if naming.delta == GGUF_DELTA else naming.delta
    return replace(naming, delta=delta, tiled_values=False)


# A matrix of a layer, what it consists of by name with the numbers of outputs, and of inputs.
_Modules = tuple[Projection, list[tuple[str, int]], int]


def _dense_modules(spec: ModelSpec, layer: LayerSpec) -> Iterator[_Modules]:
    """The matrices of a layer but the experts."""
    if layer.has_attention:
        yield from _attention_modules(spec, layer)
    if layer.state_mixer is not None:
        yield from _state_modules(spec, layer.state_mixer)
    is_mixture = layer.sparse and not (spec.moe is not None and spec.moe.with_mlp)
    if is_mixture or not layer.has_feed_forward:
        return
    hidden, width = spec.hidden_size, spec.intermediate_size
    gate_up = [("mlp.gate_proj", width), ("mlp.up_proj", width)]
    if spec.naming.fused_gate_up:
        gate_up = [("mlp.gate_up_proj", 2 * width)]
    yield Projection.GATE_UP, gate_up if spec.gated else [("mlp.up_proj", width)], hidden
    yield Projection.DOWN_PROJ, [("mlp.down_proj", hidden)], width


def _attention_modules(spec: ModelSpec, layer: LayerSpec) -> Iterator[_Modules]:
    if spec.latent is not None:
        yield from _latent_modules(spec, spec.latent)
        return
    hidden = spec.hidden_size
    queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    widths = (2 * queries if spec.attention_gate else queries, keys, keys)
    names = [f"self_attn.{name}" for name in qkv_parts(layer)]
    qkv = list(zip(names, widths, strict=False))
    if spec.naming.fused_qkv:
        qkv = [("self_attn.qkv_proj", queries + 2 * keys)]
    yield Projection.QKV, qkv, hidden
    yield Projection.O_PROJ, [("self_attn.o_proj", hidden)], queries


def _state_modules(spec: ModelSpec, mixer: StateMixer) -> Iterator[_Modules]:
    hidden, parts = spec.hidden_size, [("in_proj", mixer.num_inputs)]
    if isinstance(mixer, GatedDelta):
        parts = list(delta_projections(mixer, spec.naming))
    yield Projection.STATE_IN, [(f"{STATE_MIXER}{name}", count) for name, count in parts], hidden
    yield Projection.STATE_OUT, [(f"{STATE_MIXER}out_proj", hidden)], mixer.num_outputs


def own_name(name: str, naming: TensorNaming) -> str:
    """A module's name in checkpoints of the architecture, by its standard name."""
    prefix = f".{naming.prefixes[0]}"
    own = f"{prefix}{name}."
    for part, standard in naming.renames:
        own = own.replace(standard, part)
    return own.removeprefix(prefix).strip(".")


def _latent_modules(spec: ModelSpec, latent: LatentSpec) -> Iterator[_Modules]:
    """Without the keys and values of heads, which are no product that is computed."""
    queries, hidden = spec.num_heads * spec.head_size, spec.hidden_size
    first = ("self_attn.q_proj", queries)
    if latent.query_rank is not None:
        first = ("self_attn.q_a_proj", latent.query_rank)
        yield Projection.Q_B, [("self_attn.q_b_proj", queries)], latent.query_rank
    kept = ("self_attn.kv_a_proj_with_mqa", latent.kept_size)
    yield Projection.QKV, [first, kept], hidden
    values = spec.num_heads * latent.value_size
    yield Projection.O_PROJ, [("self_attn.o_proj", hidden)], values


def _expert_modules(spec: ModelSpec, layer: int) -> dict[str, LoRAModule]:
    """The router and the experts of a sparse layer, by name."""
    assert spec.moe is not None
    hidden, width, naming = spec.hidden_size, spec.moe.intermediate_size, spec.naming
    size = spec.moe.latent_size or hidden
    router = module_number(layer, Projection.ROUTER)
    found = {f"layers.{layer}.{naming.router}": LoRAModule(router, 0, spec.moe.num_experts, hidden)}
    if spec.moe.latent_size is not None:
        into, out = _numbers(layer, Projection.LATENT_IN, Projection.LATENT_OUT)
        found[f"layers.{layer}.{EXPERT_LATENTS[0]}"] = LoRAModule(into, 0, size, hidden)
        found[f"layers.{layer}.{EXPERT_LATENTS[1]}"] = LoRAModule(out, 0, hidden, size)
    gate, up, down = naming.expert_parts
    for expert in range(spec.moe.num_experts):
        gate_up, down_proj = (
            expert_number(spec, layer, expert, projection)
            for projection in (Projection.GATE_UP, Projection.DOWN_PROJ)
        )
        name = f"layers.{layer}.{naming.experts}.{expert}"
        if spec.gated:
            found[f"{name}.{gate}"] = LoRAModule(gate_up, 0, width, size)
        first_up = width if spec.gated else 0
        found[f"{name}.{up}"] = LoRAModule(gate_up, first_up, width, size)
        found[f"{name}.{down}"] = LoRAModule(down_proj, 0, size, width)
    return found


def _shared_modules(spec: ModelSpec, moe: MoESpec, layer: int) -> dict[str, LoRAModule]:
    """The expert of all tokens of a sparse layer, and its gate."""
    hidden, width, name = spec.hidden_size, moe.shared_width, spec.naming.shared_expert
    gate_up, down_proj, gate = (
        module_number(layer, projection)
        for projection in (Projection.GATE_UP, Projection.DOWN_PROJ, Projection.SHARED_GATE)
    )
    parts = gate_up_parts(spec)
    size = (2 * width if spec.gated else width) // len(parts)
    found = {f"{name}.down_proj": LoRAModule(down_proj, 0, hidden, width)}
    for index, part in enumerate(parts):
        found[f"{name}.{part}"] = LoRAModule(gate_up, index * size, size, hidden)
    if moe.shared_gate:
        found[shared_gate(spec).removesuffix(".weight")] = LoRAModule(gate, 0, 1, hidden)
    return {f"layers.{layer}.{module}": place for module, place in found.items()}


def on_device(
    modules: Sequence[Sequence[LoRAPart]], device: torch.device | Device
) -> Sequence[Sequence[LoRAPart]]:
    """The same matrices on a model's device; unchanged on a CPU."""
    if device.type == "cpu":
        return modules
    place = torch_device(device) if isinstance(device, Device) else device

    def moved(tensor: AnyTensor | None) -> AnyTensor | None:
        return None if tensor is None else to_torch(tensor).to(place)

    def moved_part(part: LoRAPart) -> LoRAPart:
        b, scales, bias = map(moved, (part.b, part.rank_scales, part.bias))
        return replace(part, a=to_torch(part.a).to(place), b=b, rank_scales=scales, bias=bias)

    return [list(map(moved_part, parts)) for parts in modules]
