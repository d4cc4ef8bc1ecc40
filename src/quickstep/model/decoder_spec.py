"""What a decoder is, read from `config.json`: plain frozen data, no torch.

`spec.read_spec` is called once at start-up; sizing, the tensor schema, the loader and the decoder
all work from the `ModelSpec` it returns. An architecture is an entry of `architectures.py`; a
feature is a field here, honoured in `layers/`. A config key that is neither honoured nor known
to be harmless is an error: nothing in a config is silently ignored.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quickstep.model.encoders.encoder_spec import EncoderSpec
from quickstep.model.rope_spec import RopeSpec


class NormPlacement(enum.Enum):
    """The place of a sub-block's norms: before it, after it, or on both sides. Parallel: one norm
    before attention and MLP, which both read it, and whose outputs are added.
    """

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"
    PARALLEL = "parallel"


class QKNorm(enum.Enum):
    """The norm on queries and keys before the rotation: none, per head (with one weight, or one of
    each head, or without a weight, in the layers with a rotation), or over all heads.
    """

    NONE = "none"
    HEAD = "head"
    FULL = "full"
    EACH_HEAD = "each_head"
    UNWEIGHTED = "unweighted"


class MoESpec(msgspec.Struct, frozen=True):
    """Routing of a mixture of experts.

    Attributes:
        num_experts: Experts a layer holds.
        experts_per_token: Experts that each token is sent to.
        intermediate_size: Width of one expert.
        normalise: Scale the chosen experts' weights so that they add up to 1: a softmax over the
            chosen only is the same (gpt-oss).
        biases: The router and both projections of an expert have a bias.
        sigmoid: An expert's share is the sigmoid of its score, not a softmax over all of them.
        selection_bias: Experts are chosen by their share and a number of their own.
        num_groups, groups_per_token: Experts of so many groups, of as many as there are, are chosen
            among (`ops.table.RoutingRule`).
        counted_per_group: Groups are chosen by the sum of so many best experts: 1 or 2.
        weight_scale: Multiplies the experts' weights.
        shared_width: Width of an expert that every token has in addition; 0 for none.
        shared_gate: That expert's output is multiplied by the sigmoid of a product of the token.
        latent_size: Elements of what experts read and return, between two products of the token's;
            None for the hidden size (Nemotron 3 Super).
        weighs_inputs: An expert's weight multiplies what it reads (Llama 4).
        with_mlp: A layer has the MLP as well, and norms of its own for both and for the router;
            the router's weights have a factor of each expert (Gemma 4).
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalise: bool
    biases: bool = False
    sigmoid: bool = False
    selection_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    weight_scale: float = 1.0
    shared_width: int = 0
    counted_per_group: int = 2
    with_mlp: bool = False
    shared_gate: bool = False
    weighs_inputs: bool = False
    latent_size: int | None = None


class StateSize(msgspec.Struct, frozen=True):
    """What a layer keeps of a sequence, however long that is: float32 numbers.

    Attributes:
        num_channels: Of its convolution.
        num_taps: Tokens before the next one whose channels the convolution reads.
        num_matrix: Numbers of its recurrent state.
        num_gates: Numbers of a token that the recurrence reads in addition to its channels.
    """

    num_channels: int
    num_taps: int
    num_matrix: int = 0
    num_gates: int = 0

    @property
    def num_record(self) -> int:
        """Numbers of a token from which the state after it is computed: those of a draft are kept
        until it is accepted.
        """
        return self.num_channels + self.num_gates

    def num_elements(self, num_records: int) -> int:
        """The taps, the recurrent state and so many records."""
        state = self.num_taps * self.num_channels + self.num_matrix
        return state + num_records * self.num_record


class ShortConv(msgspec.Struct, frozen=True, tag=True):
    """The mixer of LFM2: a convolution of each channel over the last `width` tokens, between two
    gates that are computed from the token.

    Attributes:
        num_channels: The hidden size.
        width: Tokens that the convolution sees, its own included.
        bias: Both projections and the convolution have one.
    """

    num_channels: int
    width: int
    bias: bool = False

    @property
    def num_inputs(self) -> int:
        """Elements of a token that the mixer reads."""
        return 3 * self.num_channels

    @property
    def num_outputs(self) -> int:
        """Elements of a token that it returns."""
        return self.num_channels

    @property
    def kept(self) -> StateSize:
        """The gated inputs of the tokens before."""
        return StateSize(self.num_channels, self.width - 1)


class GatedDelta(msgspec.Struct, frozen=True, tag=True):
    """Gated DeltaNet (arXiv:2412.06464), as in Qwen3-Next and Qwen3.5.

    A value head's state is a matrix from keys to values, which decays and is corrected towards the
    value of each token's key. Value heads share key heads in turn, in groups of equal size.

    Attributes:
        width: Tokens that the convolution over queries, keys and values sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    width: int

    @property
    def num_values(self) -> int:
        """Elements of a token's values, over all heads."""
        return self.num_value_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Elements of queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_values

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Elements of queries, keys and values, of the gates of outputs, and of two more gates."""
        return self.num_channels, self.num_values, self.num_value_heads, self.num_value_heads

    @property
    def num_inputs(self) -> int:
        """Elements of a token that the mixer reads."""
        return sum(self.parts)

    @property
    def num_outputs(self) -> int:
        """Elements of a token that it returns."""
        return self.num_values

    @property
    def kept(self) -> StateSize:
        """The convolution's inputs of the tokens before, and a matrix for each value head."""
        heads = self.num_value_heads
        matrix = heads * self.key_size * self.value_size
        return StateSize(self.num_channels, self.width - 1, matrix, 2 * heads)


class Mamba2(msgspec.Struct, frozen=True, tag=True):
    """Mamba-2 (arXiv:2405.21060), as in Granite 4 and Bamba.

    A head's state is a matrix from keys B to values, which decays by the token's time step. Heads
    share keys and queries C in turn, in groups of equal size.

    Attributes:
        state_size: Elements of a key.
        width: Tokens that the convolution over values, keys and queries sees.
        bias: The projections have one.
        conv_bias: The convolution has one.
        has_norm: The outputs of a group are normed.
        least_step, most_step: Limits of the time step.
        norms_first: They are normed before the gates multiply them.
        factors: Of the gates, values, keys, queries and time steps that a token's inputs are.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    width: int
    bias: bool = False
    conv_bias: bool = True
    has_norm: bool = True
    least_step: float = 0.0
    most_step: float = math.inf
    factors: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    norms_first: bool = False

    @property
    def num_outputs(self) -> int:
        """Elements of a token that it returns: its values, over all heads."""
        return self.num_heads * self.head_size

    @property
    def num_channels(self) -> int:
        """Elements of values, keys and queries."""
        return self.num_outputs + 2 * self.num_groups * self.state_size

    @property
    def num_inputs(self) -> int:
        """Elements of a token that the mixer reads: gates, channels, time steps."""
        return self.num_outputs + self.num_channels + self.num_heads

    @property
    def kept(self) -> StateSize:
        """The convolution's inputs of the tokens before, and a matrix for each head."""
        matrix = self.num_outputs * self.state_size
        return StateSize(self.num_channels, self.width - 1, matrix, self.num_heads)


StateMixer = ShortConv | GatedDelta | Mamba2


class LayerSpec(msgspec.Struct, frozen=True):
    """What distinguishes one layer from another.

    Attributes:
        window: A query sees this many positions, its own included; None sees all.
        rope: Index into `ModelSpec.ropes`; None leaves positions out (NoPE).
        sparse: The feed-forward part is the mixture of experts.
        state_mixer: What it has in place of attention; None for attention.
        query_rope: As `rope`, for queries; None turns them as keys.
        head_size, num_kv_heads, width: Where they are not the model's; None for those.
        kv_from: The layer whose keys and values it reads, having none of its own.
        values_are_keys: One projection makes keys and values.
        with_attention: It has attention next to its `state_mixer`; their outputs are added.
        has_mixer, has_feed_forward: It has such a part, and a norm of its own for it. A layer with
            one of them has one norm (Nemotron-H).
        chunk: A query sees the positions of its own chunk of so many; None sees all.
        gate_cutoff: The MLP's gates count from their mean plus so many of their standard
            deviations, and those below are 0; None leaves them.
    """

    window: int | None
    rope: int | None
    sparse: bool
    state_mixer: StateMixer | None = None
    query_rope: int | None = None
    head_size: int | None = None
    num_kv_heads: int | None = None
    width: int | None = None
    kv_from: int | None = None
    values_are_keys: bool = False
    with_attention: bool = False
    has_mixer: bool = True
    has_feed_forward: bool = True
    chunk: int | None = None
    gate_cutoff: float | None = None

    @property
    def has_attention(self) -> bool:
        """Whether tokens attend to each other."""
        return self.with_attention or (self.has_mixer and self.state_mixer is None)

    @property
    def is_complete(self) -> bool:
        """Whether it has a mixer and a feed-forward part."""
        return self.has_mixer and self.has_feed_forward


class KVSize(msgspec.Struct, frozen=True):
    """What a token adds to the cache of a layer: K and V of `num_kv_heads` heads each.

    Without `has_values` there is no V: it is the beginning of each K (`LatentSpec`).
    """

    num_kv_heads: int
    head_size: int
    has_values: bool = True

    @property
    def num_tensors(self) -> int:
        """K and V, or K."""
        return 1 + self.has_values


class LatentSpec(msgspec.Struct, frozen=True):
    """Attention over latents: of a token one vector is kept, of which each head's keys and values
    are products (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        rank: Elements of the vector (`kv_lora_rank`).
        rope_size: Rotated elements of a key, the same for all heads, kept after the vector
            (`qk_rope_head_dim`).
        nope_size: The other elements of a head's key (`qk_nope_head_dim`).
        value_size: Elements of a head's value (`v_head_dim`).
        query_rank: Elements of the vector of which queries are products (`q_lora_rank`); None for
            queries that are products of the hidden state.
        interleaved: Pairs of neighbours are rotated, not halves.
        num_indexed: Of more positions than so many, the model's indexer chooses those that are
            attended to (DeepSeek V3.2), which is not computed; None without an indexer.
    """

    rank: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int | None
    interleaved: bool = True
    num_indexed: int | None = None

    @property
    def kept_size(self) -> int:
        """Elements that the cache keeps of a token."""
        return self.rank + self.rope_size


class KVGroup(msgspec.Struct, frozen=True):
    """The layers that keep as much of a token as each other, in ascending order."""

    layers: tuple[int, ...]
    size: KVSize


def kv_groups(sizes: Sequence[KVSize | None]) -> tuple[KVGroup, ...]:
    """The layers by what they keep of a token; None for a layer that keeps nothing."""
    layers: dict[KVSize, list[int]] = {}
    for layer, size in enumerate(sizes):
        if size is not None:
            layers.setdefault(size, []).append(layer)
    return tuple(KVGroup(tuple(members), size) for size, members in layers.items())


# Queries, keys and values, gates of outputs, and two more gates: each by itself, as Qwen3-Next has
# them, and as its GGUF files do.
DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
FUSED_DELTA = ("in_proj_qkvz", "in_proj_ba")
GGUF_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_ba")


class TensorNaming(msgspec.Struct, frozen=True):
    """How a checkpoint names its tensors, where architectures differ.

    Attributes:
        prefixes: Possible prefixes of the decoder; the first that the checkpoint uses counts.
        heads: Possible names of the output projection.
        fused_qkv: `qkv_proj` holds queries, keys and values.
        fused_gate_up: `gate_up_proj` holds gate and up.
        router: The router's name within a layer.
        experts: The experts' name within a layer.
        expert_parts: gate, up and down within one expert.
        selection_bias: The name of `MoESpec.selection_bias` within a layer.
        shared_expert: The name of the expert of all tokens within a layer.
        fused_experts: One tensor holds a projection of all experts (`model.formats.fused_experts`).
        gate_above_up: In such a tensor, an expert's gate is above its up; otherwise their rows are
            in turn.
        wrapped: The decoder is the text part of a larger model: what is outside of its prefix is
            of the other parts.
        bias_row: `selection_bias` is stored as one row [1, E].
        renames: Parts of the files' tensor names, and what they are in the standard names.
        ignored_module: A module of a layer that is not computed.
        delta: The projections of `GatedDelta`, in the order in which they are one matrix. Of the
            rows of `in_proj_qkvz` and `in_proj_ba` each key head has its part.
        tiled_values: Of value heads, files have the first of each key head, then the second, ...
        stored_rates: Files have the rates of decay, `A`, and not their logarithms, `A_log`.
    """

    prefixes: tuple[str, ...] = ("model.",)
    heads: tuple[str, ...] = ("lm_head.weight",)
    fused_qkv: bool = False
    fused_gate_up: bool = False
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused_experts: bool = False
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    shared_expert: str = "mlp.shared_experts"
    wrapped: bool = False
    bias_row: bool = False
    gate_above_up: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    ignored_module: str | None = None
    delta: tuple[str, ...] = DELTA_PROJECTIONS
    tiled_values: bool = False
    stored_rates: bool = False


STANDARD_NAMING = TensorNaming()


class LayerInputs(msgspec.Struct, frozen=True):
    """What each layer gets of a token in addition to the stream (Gemma 4, Gemma 3n): a row of a
    table, and a projection of the embedding.

    Attributes:
        size: Elements for each layer.
        vocab_size: Rows of the table; tokens that it lacks have the first.
    """

    size: int
    vocab_size: int


class AltUp(msgspec.Struct, frozen=True):
    """Several residual streams of a token (Alternating Updates, arXiv:2301.13310): a layer predicts
    all of them, computes one, and corrects the others by what that differs (Gemma 3n).

    Attributes:
        num_streams: S.
        active: The stream that layers compute, from 0.
        scaled: The active stream has a factor of each element where a layer's input is added.
        laurel_rank: Elements between the two products of a learned augmented residual (LAuReL,
            arXiv:2411.07501), which is added to attention's output.
    """

    num_streams: int
    active: int
    scaled: bool
    laurel_rank: int


class Multipliers(msgspec.Struct, frozen=True):
    """Factors of the parts of every layer (Falcon-H1).

    Attributes:
        attention_input, state_input: Of what attention and the state mixer read.
        attention, state, mlp: Of what these and the MLP return.
        gate: Of the MLP's gate.
    """

    attention_input: float = 1.0
    attention: float = 1.0
    state_input: float = 1.0
    state: float = 1.0
    gate: float = 1.0
    mlp: float = 1.0


class LongContext(msgspec.Struct, frozen=True):
    """How positions beyond a model's limit are scaled, in the terms of `rope_scaling`.

    Attributes:
        rope_type: The method.
        factor: The longest sequence divided by the model's limit.
        original_max_position_embeddings: The model's limit in tokens.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int


class ModelSpec(msgspec.Struct, frozen=True):
    """A decoder-only language model.

    Attributes:
        architecture: The `architectures` entry of the config, `LlamaForCausalLM`.
        native: Run by `decoder.py`; False runs through `encoders`, or the `transformers` fallback.
        encoder: What an encoder has in addition; None for a decoder.
        num_layers, num_heads, num_kv_heads, head_size, hidden_size, intermediate_size, vocab_size:
            The usual sizes; `num_heads` H, `num_kv_heads` K, `head_size` D, `vocab_size` V.
        max_model_len: Longest sequence that the positions allow, RoPE scaling included.
        dtype: The checkpoint's dtype by name, "" if the config has none.
        activation: `silu`, `gelu`, `gelu_tanh` or `clamped_swiglu`, between gate and up.
        norm_offset: Added to every norm's weight (Gemma: 1).
        qkv_bias, output_bias, mlp_bias: Which projections have a bias.
        attention_scale: Multiplies q·k.
        sinks: Each query head has a learned logit in its softmax that no value belongs to.
        attention_softcap, logit_softcap: cap * tanh(x / cap); None for none.
        embedding_multiplier, residual_multiplier: Scale the embeddings and each sub-block's output.
        logit_divisor: Divides the logits.
        tied: The output projection is the embedding.
        has_head: There is an output projection; without one texts are only embedded, and `tied` is
            true.
        parameter_count: Known count of parameters; None derives it from the tensor schema.
        notes: What the reader of the config left out and the user should know, a sentence each.
        long_context: How positions are scaled beyond the checkpoint's limit; None if they are not.
        attention_gate: What attention returns is multiplied by the sigmoid of a gate for each
            element, which the query projection computes, too.
        latent: Attention over latents; `head_size` is that of a query, and `num_kv_heads` is 1.
        value_norm: Values are normed, without a weight, before they are kept.
        layer_scalars: A number of each layer multiplies its output.
        layer_inputs: What each layer gets of its own; None for nothing.
        layer_norm: Norms subtract the mean (LayerNorm); with `norm_bias`, those of the stream add a
            bias.
        gated: The MLP has a gate; otherwise its activation is of up itself.
        head_bias: The output projection has a bias.
        multipliers: Factors of the parts of a layer.
        altup: Several residual streams; None for one.
        num_prediction_layers: Layers after the last one by the config, for drafts (`model.mtp`);
            the files may lack them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    attention_scale: float
    dtype: str = ""
    native: bool = True
    activation: str = "silu"
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_offset: float = 0.0
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_divisor: float = 1.0
    tied: bool = False
    has_head: bool = True
    moe: MoESpec | None = None
    naming: TensorNaming = STANDARD_NAMING
    parameter_count: int | None = None
    notes: tuple[str, ...] = ()
    long_context: LongContext | None = None
    attention_gate: bool = False
    encoder: EncoderSpec | None = None
    latent: LatentSpec | None = None
    value_norm: bool = False
    layer_scalars: bool = False
    layer_inputs: LayerInputs | None = None
    layer_norm: bool = False
    norm_bias: bool = False
    gated: bool = True
    head_bias: bool = False
    num_prediction_layers: int = 0
    multipliers: Multipliers = Multipliers()
    altup: AltUp | None = None

    @property
    def kv_size(self) -> KVSize:
        """What attention keeps of a token in one layer."""
        if self.latent is not None:
            return KVSize(1, self.latent.kept_size, has_values=False)
        return KVSize(self.num_kv_heads, self.head_size)

    @property
    def value_size(self) -> int:
        """Elements of a head's value."""
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def pair_size(self) -> int:
        """Products of a query head and a position: of q·k, and of the weighted sum of values."""
        if self.latent is not None:
            return self.latent.kept_size + self.latent.rank
        return 2 * self.head_size

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers by what they keep of a token, but for those without attention and those that
        read another layer's keys; none in an encoder, whose texts are computed in one step.
        """
        if self.encoder is not None:
            return ()
        return kv_groups(
            [
                self.of_layer(i).kv_size if layer.has_attention and layer.kv_from is None else None
                for i, layer in enumerate(self.layers)
            ]
        )

    @property
    def state_sizes(self) -> tuple[StateSize, ...]:
        """What each layer with a state keeps of a sequence, in ascending order."""
        mixers = [layer.state_mixer for layer in self.layers]
        return tuple([mixer.kept for mixer in mixers if mixer is not None])

    def of_layer(self, index: int) -> ModelSpec:
        """The model with the sizes of one layer."""
        layer = self.layers[index]
        sizes = {
            "head_size": layer.head_size,
            "num_kv_heads": layer.num_kv_heads,
            "intermediate_size": layer.width,
        }
        given = {name: size for name, size in sizes.items() if size is not None}
        return replace(self, **given) if given else self

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the model's sizes and their own keys, and nothing but the stream
        goes from one to the next.
        """
        own_sizes = any(self.of_layer(index) is not self for index in range(self.num_layers))
        shares = any(layer.kv_from is not None for layer in self.layers)
        parts = any(not layer.is_complete for layer in self.layers)
        more = self.layer_inputs is not None or self.altup is not None
        return not (own_sizes or shares or parts or more)
