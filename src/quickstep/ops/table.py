"""The op table: what a model may call, whichever implementation runs it.

A model receives one `OpTable`, resolved once at load (`ops.resolve`), and calls nothing else that
computes over rows. The PyTorch reference in `ops/reference/` is each op's definition; native and
Triton implementations agree with it (`tests/op_checks/cases.py`) and with themselves for every
batch: the bits of a row never depend on the other rows.

Letters: T tokens, R rows, E emitting rows, H query heads, K kv heads, D head size, B blocks,
S block size, V vocabulary, N output features, C input features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quickstep.ops.native.steps import NativeSteps
    from quickstep.ops.tensors import AnyTensor, DType, TensorT
    from quickstep.ops.weights import (
        HeadWeight,
        LinearWeight,
        PackedForm,
        QuantizedWeight,
        StoredMatrix,
    )


class AttentionWork(msgspec.Struct, frozen=True):
    """What the programs of Triton's attention compute in a step, for all its layers.

    An item is a block of a row's tokens and a split of the keys (`ops.triton.attention`). Items are
    in order of the distance of their split from the last one that the block sees, so that a layer
    with a window has the first ones.

    Attributes:
        items: [I, 8] int32: row, first token, number of tokens, position of the first one, split
            (-1 for all of them, negative for none if rows are not complete), and of a row's tail
            the place in `RowLengths.tail_slots` and the first position.
        ends: [distances] int32, how many items have a distance or a smaller one.
        tokens_per_item: Tokens of a block, at most.
        has_complete_rows: Whether a row of several tokens has one item for all splits of a block.
    """

    items: Tensor
    ends: Tensor
    tokens_per_item: int
    has_complete_rows: bool


class RowLengths(msgspec.Struct, frozen=True):
    """The lengths of a step's rows on its device, for kernels that read them from memory.

    Attributes:
        row_offsets: [R + 1] int32, `PagedLayout.row_offsets`. Tokens from the last offset on are
            padding: their results are never read.
        tail_offsets: [R + 1] int32, where the rows' tails are in `tail_slots`; None if there are
            none.
        tail_slots: int64, `PagedLayout.tails` one after another; None if there are none.
        work: Of attention, once it is planned (`OpTable.plan_attention`).
    """

    row_offsets: Tensor
    tail_offsets: Tensor | None = None
    tail_slots: Tensor | None = None
    work: AttentionWork | None = None

    @staticmethod
    def of(
        row_offsets: Sequence[int], tails: Sequence[Sequence[int]], device: torch.device
    ) -> RowLengths:
        """Those of a layout's `row_offsets` and `tails`, copied to a device."""
        # Imported here: a server reads this module, and computes nothing.
        import torch

        from quickstep.ops.tensors import integers_on

        offsets = integers_on(device, row_offsets, torch.int32)
        if not tails:
            return RowLengths(offsets)
        tail_offsets = list(accumulate(map(len, tails), initial=0))
        return RowLengths(
            offsets,
            integers_on(device, tail_offsets, torch.int32),
            integers_on(device, list(chain.from_iterable(tails)), torch.int64),
        )


class PagedLayout(msgspec.Struct, frozen=True):
    """Where a step's tokens are: rows packed one after another, KV in paged blocks.

    In a step that is recorded for rows of any length (`OpTable.reads_lengths`), `row_offsets` and
    `context_lens` are empty, `lengths` has the former, and each token's position is its place.

    Attributes:
        positions: [T] int64, each token's position in its sequence.
        slot_mapping: [T] int64, the flat KV index block_id * S + offset each token is written to.
        row_offsets: R + 1 Python ints; row r holds tokens row_offsets[r]:row_offsets[r + 1].
        context_lens: R Python ints; tokens of the sequence once this step is written (row end).
        block_tables: [R, max blocks] int32, the row's blocks in order; padding is 0.
        block_size: S.
        tails: For each row, flat KV indices of its last positions, where these are not in its
            blocks; () for a row without any, and for a step without such rows. A token of a tree of
            drafts is a row of its own: its ancestors are elsewhere than their positions say.
        lengths: The same on the device; None where no kernel reads them from memory.
    """

    positions: Tensor
    slot_mapping: Tensor
    row_offsets: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: Tensor
    block_size: int
    tails: tuple[tuple[int, ...], ...] = ()
    lengths: RowLengths | None = None


class StateRows(msgspec.Struct, frozen=True):
    """What a step's rows do with the states of layers that keep one, in numbered slots.

    A row begins with the state of its source; what is left after its last token that is no draft
    goes to its target, with what later rows need of the drafts: they replay those that were
    accepted. In a step that is recorded, all of it is read when the step runs, and these are empty.

    Attributes:
        row_offsets: R + 1, `PagedLayout.row_offsets`.
        sources: R slots; -1 for the beginning of a sequence.
        targets: R slots; one may be the row's source.
        num_replayed: R counts of tokens recorded in the source that come before the row's first.
        num_drafts: R counts of the row's last tokens.
        saves: Row, number of its tokens (replayed ones included) and slot: where the state after
            these goes, too.
    """

    row_offsets: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    num_replayed: tuple[int, ...] = ()
    num_drafts: tuple[int, ...] = ()
    saves: tuple[tuple[int, int, int], ...] = ()


class ShortConvWeights(msgspec.Struct, frozen=True):
    """A convolution over the last tokens: taps [width, C], the oldest first, and bias [C] or None,
    both float32.
    """

    taps: AnyTensor
    bias: AnyTensor | None = None


class DeltaWeights(msgspec.Struct, frozen=True):
    """What Gated DeltaNet has in addition to its projections, in float32.

    Attributes:
        taps: [width, channels] of the convolution over queries, keys and values.
        rates: [value heads], negative: a state's decay in a token of time step 1.
        biases: [value heads], of the time step.
        norm: [value size], of the outputs.
        num_key_heads, key_size, eps: Of its keys, and of the norm.
        tiled: Outputs are of the first value head of each key head, then of the second, ...;
            otherwise those of a key head follow each other.
    """

    taps: AnyTensor
    rates: AnyTensor
    biases: AnyTensor
    norm: AnyTensor
    num_key_heads: int
    key_size: int
    eps: float
    tiled: bool = False

    @property
    def shared_stride(self) -> int:
        """Places between the outputs of value heads that share a key head."""
        return self.num_key_heads if self.tiled else 1


class MambaWeights(msgspec.Struct, frozen=True):
    """What Mamba-2 has in addition to its projections, in float32.

    Attributes:
        taps: [width, channels] of the convolution over values, keys and queries.
        conv_bias: [channels], or None.
        rates: [heads], negative: a state's decay in a time step of 1.
        biases: [heads], of the time step.
        skips: [heads]: of a value, what is added to its output.
        norm: [heads * P], of the outputs of each group; None for no norm.
        num_groups, state_size, eps: Of its keys, and of the norm.
        least_step, most_step: Limits of the time step.
        gate_factor, step_factor: Of the gates and of the time steps among the inputs.
        norms_first: Outputs are normed before the gates multiply them.
    """

    taps: AnyTensor
    conv_bias: AnyTensor | None
    rates: AnyTensor
    biases: AnyTensor
    skips: AnyTensor
    norm: AnyTensor | None
    num_groups: int
    state_size: int
    eps: float
    least_step: float
    most_step: float
    gate_factor: float = 1.0
    step_factor: float = 1.0
    norms_first: bool = False

    @property
    def head_size(self) -> int:
        """P."""
        channels, num_keys = int(self.taps.shape[1]), self.num_groups * self.state_size
        return (channels - 2 * num_keys) // int(self.rates.shape[0])


class KVCache(msgspec.Struct, frozen=True):
    """Per layer one K and one V tensor, [B, S, K, W]: W is D, or more for quantized values with
    their scale (`ops.tensors`); or both in pairs (`ops.kv_pairs`). Layers may differ in K and W,
    never in B and S. V is None where it is the beginning of each K. Owned by the runner; zeroed at
    allocation, so that masked positions never hold NaN.

    `states` are of the layers that keep a state of each sequence, [slots, elements] float32 each
    (`model.decoder_spec.StateSize`).
    """

    keys: tuple[AnyTensor, ...]
    values: tuple[AnyTensor | None, ...]
    states: tuple[AnyTensor, ...] = ()

    @property
    def tensors(self) -> tuple[AnyTensor, ...]:
        """K of each layer, then V of those that have one."""
        return (*self.keys, *(tensor for tensor in self.values if tensor is not None))

    def by_shape(self) -> tuple[tuple[tuple[AnyTensor, ...], tuple[AnyTensor, ...]], ...]:
        """Keys, and their values where they have any, of the layers whose keys have one shape."""
        found: dict[tuple[int, ...], tuple[list[AnyTensor], list[AnyTensor]]] = {}
        for keys, values in zip(self.keys, self.values, strict=True):
            same = found.setdefault(tuple(keys.shape), ([], []))
            same[0].append(keys)
            if values is not None:
                same[1].append(values)
        return tuple((tuple(keys), tuple(values)) for keys, values in found.values())


class LoRAPart(msgspec.Struct, frozen=True):
    """A change of some outputs of a linear layer: y[first:first + n] += scale * B A x + bias.

    Without B it is a complete matrix in place of the base's: y[first:first + n] = A x + bias. Of an
    embedding, x is a token id, and A x the token's column of A.

    Attributes:
        a: [rank, C]; of an embedding transposed, [V, rank], so that a token has a row. In the dtype
            of the layer's activations, or int8.
        b: [n, rank], in the dtype of `a`; None of a complete matrix, whose rank is n.
        first_output: `first`; above 0 in a matrix that holds several projections.
        scale: lora_alpha / rank, or lora_alpha / sqrt(rank) of rsLoRA.
        is_embedding: Whether it changes an embedding.
        rank_scales: [rank] float32 of int8 weights, times `scale`: the product of the scales of
            A's row and B's column. None of other weights.
        bias: [n] float32; None for 0. A part that only adds a bias has the rank 0.
    """

    a: AnyTensor
    b: AnyTensor | None
    first_output: int
    scale: float
    is_embedding: bool = False
    rank_scales: AnyTensor | None = None
    bias: AnyTensor | None = None

    @property
    def rank(self) -> int:
        """Rows of A, or columns of that of an embedding."""
        return int(self.a.shape[1 if self.is_embedding else 0])

    @property
    def num_inputs(self) -> int:
        """C, or V of an embedding."""
        return int(self.a.shape[0 if self.is_embedding else 1])

    @property
    def num_outputs(self) -> int:
        """The n outputs that are changed."""
        return self.rank if self.b is None else int(self.b.shape[0])

    @property
    def tensors(self) -> tuple[AnyTensor, ...]:
        """All that there are."""
        found = (self.a, self.b, self.rank_scales, self.bias)
        return tuple(tensor for tensor in found if tensor is not None)


class LoRAAdapter(msgspec.Struct, frozen=True, weakref=True):
    """An adapter in the layout of the implementation that made it (`OpTable.pack_lora`).

    Only that implementation reads `data`; `nbytes` counts it. `number` names it in other processes
    that hold a part of it; 0 where there are none.
    """

    data: object
    nbytes: int
    number: int = 0


class LoRAMapping(msgspec.Struct, frozen=True):
    """Which tokens of a step, or of its emitting tokens, use which adapter.

    `groups` are an adapter and its tokens, [n] int64, ascending; a token is in one group at most.
    The mapping of an `AdapterTable` has `items` instead, which only its implementation reads.
    """

    groups: tuple[tuple[LoRAAdapter, AnyTensor], ...]
    items: object = None


class AdapterTable(Protocol):
    """Adapters at numbered places of the device's memory, which recorded launches read; place 0 is
    none.
    """

    def fits(self, adapter: LoRAAdapter) -> bool:
        """Whether it is large enough for this adapter."""

    def set_(self, place: int, adapter: LoRAAdapter) -> None:
        """Put an adapter at a place, in the order of the device's work. The caller keeps it."""

    def mapping(self, places: Tensor) -> LoRAMapping:
        """The mapping of tokens whose adapters are at `places` [T] int64, whatever these hold."""


class ExpertLoRA(msgspec.Struct, frozen=True):
    """Adapters of a mixture of experts: expert e's matrices are `first_module + 2 e` (gate_up) and
    `first_module + 2 e + 1` (down_proj).
    """

    mapping: LoRAMapping
    first_module: int


# Activations of experts that have no gate, and one matrix before it.
WITHOUT_GATE = ("relu", "relu2")


class ExpertWeights(msgspec.Struct, frozen=True):
    """The experts of a layer: gate_up hidden -> 2 * width, gate first, or up only, hidden -> width,
    with an activation that has no gate; down_proj width -> hidden.

    `data` is of the implementation that made it (`OpTable.pack_experts`); None where the experts
    are computed one by one. `weighs_inputs`: what an expert reads is multiplied by its weight, and
    not what it returns (Llama 4).
    """

    gate_up: tuple[LinearWeight, ...]
    down_proj: tuple[LinearWeight, ...]
    data: object | None = None
    weighs_inputs: bool = False

    @property
    def nbytes(self) -> int:
        """Of all matrices."""
        return sum(matrix.nbytes for matrix in (*self.gate_up, *self.down_proj))


class RoutingRule(msgspec.Struct, frozen=True):
    """How a router chooses the experts of a token.

    Attributes:
        per_token: A, the number of chosen experts.
        normalise: The weights of a token add up to `scale`.
        sigmoid: An expert's share is the sigmoid of its score; otherwise a softmax over all.
        num_groups: Experts are in so many groups of equal size, by number.
        groups_per_token: Only experts of so many groups are chosen: those whose
            `counted_per_group` best experts have the largest sums.
        scale: Multiplies the weights.
        counted_per_group: 1 or 2.
    """

    per_token: int
    normalise: bool
    sigmoid: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    counted_per_group: int = 2

    @property
    def is_plain(self) -> bool:
        """Whether it is the softmax and nothing else."""
        return not self.sigmoid and self.num_groups == 1 and self.scale == 1.0


class Routing(msgspec.Struct, frozen=True):
    """The A experts of each token, the best first.

    Attributes:
        chosen: [T, A] int64, the numbers of different experts.
        weights: [T, A] float32.
        plan: Of the implementation that made it, for its own `OpTable.experts`; None where it has
            nothing to add.
    """

    chosen: Tensor
    weights: Tensor
    plan: object | None = None


class ExpertParts(msgspec.Struct, frozen=True):
    """Ranks that each compute some outputs of every matrix of every expert.

    Attributes:
        ranks: The others; all of them make the same calls.
        own: This rank's columns of an expert's activations.
    """

    ranks: Ranks
    own: range


class AttentionParams(msgspec.Struct, frozen=True):
    """What distinguishes one layer's attention from another's.

    Attributes:
        scale: Multiplies q·k.
        window: A query at position p sees keys p - window < j <= p; None sees all.
        chunk: A query sees those of its own `chunk` positions, which begin at multiples of that;
            None sees all.
        softcap: logits = softcap * tanh(logits / softcap); None for none (Gemma 2).
        value_size: Of a cache without V: so many first elements of a key are its value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    value_size: int | None = None
    chunk: int | None = None

    @property
    def kernel_window(self) -> int:
        """As `qs_attention` has window and chunk."""
        return self.window or -(self.chunk or 0)


class Ranks(Protocol):
    """The processes that compute a model together, each some outputs of every matrix.

    Every rank makes the same calls in the same order. They only copy, so that the bits are those of
    one process.
    """

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for the others."""

    def gather(self, x: TensorT, own: range, num_columns: int) -> TensorT:
        """x [T, n], the columns `own` of all -> [T, num_columns]."""

    def gather_logits(self, x: TensorT, own: range, vocab_size: int) -> TensorT:
        """x [E, n], the columns `own` of all -> [E, vocab_size], which only rank 0 may read."""

    def local_ids(self, token_ids: Tensor, own: range, vocab_size: int) -> Tensor:
        """Token ids [T] by their place in the rows `own` of an embedding; 0 for the others'."""

    def gather_rows(self, x: Tensor, token_ids: Tensor, own: range) -> Tensor:
        """x [T, C], right where the token's id is in `own` -> [T, C], right everywhere."""


class PackLinearOp(Protocol):
    """Weight [N, C] and bias [N] in the layout of the implementation. Called once at load."""

    def __call__(self, weight: AnyTensor, bias: AnyTensor | None, /) -> LinearWeight: ...


class PackPartOp(Protocol):
    """`PackLinearOp` of some outputs of a matrix that has `num_outputs` in all: they get the bits
    that the complete matrix gives them.
    """

    def __call__(
        self, weight: AnyTensor, bias: AnyTensor | None, num_outputs: int, /
    ) -> LinearWeight: ...


class PackQuantizedOp(Protocol):
    """`PackLinearOp` of a quantized weight, for activations of any dtype; `LinearOp` then quantizes
    them as well, per token and group of the weight.
    """

    def __call__(self, weight: QuantizedWeight, bias: AnyTensor | None, /) -> LinearWeight: ...


class QuantizeOp(Protocol):
    """On-the-fly rounding of a weight [N, C], row by row; group size None for one group per row.
    Called once at load.
    """

    def __call__(
        self,
        weight: Tensor,
        bits: int,
        group_size: int | None,
        has_zeros: bool,
        has_sub_scales: bool = False,
    ) -> QuantizedWeight: ...


class LoadLinearOp(Protocol):
    """The same as reading the matrix and packing it with its bias [N], without a copy of it."""

    def __call__(self, matrix: StoredMatrix, bias: AnyTensor | None, /) -> LinearWeight: ...


class PackedFiles(Protocol):
    """Packed weights as parts of files, so that a later start maps what an earlier one packed."""

    @property
    def layout(self) -> str:
        """Names what decides the bytes: equal weights have equal bytes in equal layouts."""

    @property
    def page_bytes(self) -> int:
        """Each part begins at a multiple of it in the file."""

    def form(self, weight: LinearWeight, /) -> PackedForm:
        """How a weight is packed, and its checksum."""

    def parts(self, weight: LinearWeight, /) -> list[memoryview]:
        """The bytes of its parts, which are there as long as the weight."""

    def map(self, form: PackedForm, file: int, offset: int, /) -> LinearWeight | None:
        """The weight whose parts are in an open file from `offset` on, one after another; None if
        it cannot be mapped, or its bytes have another checksum. The file must keep its bytes as
        long as the weight is used.
        """


class LinearOp(Protocol):
    """x [T, C] -> [T, N] in x's dtype; fp32 accumulation in one order."""

    def __call__(self, x: Tensor, weight: LinearWeight, /) -> Tensor: ...


class PackLoRAOp(Protocol):
    """An adapter of the `LoRAPart`s of each of a model's matrices."""

    def __call__(self, parts: Sequence[Sequence[LoRAPart]], /) -> LoRAAdapter: ...


class AddLoRAOp(Protocol):
    """To y [T, N], which `LinearOp` made of x [T, C] with matrix `number`, adds
    scale * B (A x) + bias of each token's adapter, in place, or writes A x + bias of a complete
    matrix. A x is fp32, each sum in one order; y is rounded once more. Other tokens are not
    touched. x may be token ids [T], of which `EmbeddingOp` made y.
    """

    def __call__(self, y: Tensor, x: Tensor, number: int, mapping: LoRAMapping, /) -> None: ...


class EmbeddingOp(Protocol):
    """token_ids [T] -> [T, C]: rows of the weight [V, C]. `dtype` is the weight's own where it has
    one, else what its rows are rounded to.
    """

    def __call__(
        self, token_ids: Tensor, weight: AnyTensor | LinearWeight, dtype: DType | torch.dtype, /
    ) -> Tensor: ...


class RMSNormOp(Protocol):
    """x [T, C] -> [T, C]: x / rms(x) * (weight + offset), computed in fp32, rounded once (Gemma's
    offset is 1.0). Also for QK norm on [T, H, D].
    """

    def __call__(self, x: Tensor, weight: AnyTensor, eps: float, offset: float, /) -> Tensor: ...


class LayerNormOp(Protocol):
    """x [T, C] -> [T, C]: (x - mean) / sqrt(variance + eps) * (weight + offset) + bias, computed in
    fp32, rounded once; without a bias where it is None. Of [T, H, D], the weight is [H, D].
    """

    def __call__(
        self, x: Tensor, weight: AnyTensor, bias: AnyTensor | None, eps: float, offset: float, /
    ) -> Tensor: ...


class TextAttentionOp(Protocol):
    """q, k, v [T, H, D] of texts that begin at `offsets`, one more than there are texts, ->
    [T, H, D]: every token of a text sees all others of it, or those up to `window` places away.
    Computed in fp32, rounded once; a text's bits do not depend on the others.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Sequence[int],
        scale: float,
        window: int | None,
        /,
    ) -> Tensor: ...


class AddLayerNormOp(Protocol):
    """(normed, x + residual), as `LayerNormOp` of the sum [T, C]."""

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: AnyTensor,
        bias: AnyTensor | None,
        eps: float,
        offset: float,
        /,
    ) -> tuple[Tensor, Tensor]: ...


class ActivationOp(Protocol):
    """x [T, N] -> [T, N]: act(x), times `factor` [T, N] where there is one, computed in fp32,
    rounded once. Kind is `silu`, `gelu`, `gelu_tanh`, `relu` or `relu2`, its square.
    """

    def __call__(self, x: Tensor, factor: Tensor | None, kind: str, /) -> Tensor: ...


class AddRMSNormOp(Protocol):
    """(normed, x + residual), as `RMSNormOp` of the sum."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: AnyTensor, eps: float, offset: float, /
    ) -> tuple[Tensor, Tensor]: ...


class RotaryOp(Protocol):
    """x [T, H, D] with cos, sin [T, D_rot / 2] -> [T, H, D]; rotates the first D_rot of D, halves
    convention unless interleaved; fp32 inside.
    """

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, /) -> Tensor: ...


class WriteKVOp(Protocol):
    """k, v [T, K, D] to the slots [T] of the caches, in place; rounded to the caches' dtype, int8
    per token and head, int4 per 32 elements of them, fp8 at most 448. v and its cache are None
    where values are in the keys.
    """

    def __call__(
        self,
        k: Tensor,
        v: Tensor | None,
        k_cache: AnyTensor,
        v_cache: AnyTensor | None,
        slots: Tensor,
        /,
    ) -> None: ...


class RotaryWriteKVOp(Protocol):
    """`RotaryOp` of q [T, H, D] and k [T, K, D], and `WriteKVOp`, in one launch with their bits;
    returns q.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        k_cache: AnyTensor,
        v_cache: AnyTensor,
        slots: Tensor,
        /,
    ) -> Tensor: ...


class PagedAttentionOp(Protocol):
    """q [T, H, D] over caches [B, S, K, W] -> [T, H, D]; causal, GQA without copies, KV walked in
    tiles at absolute positions. A sink is one more logit in the denominator of each of its head's
    queries, without a value (arXiv:2309.17453, gpt-oss); sinks [H] are float32, neither scaled nor
    capped, and -inf is none. Without v_cache, values are the first `params.value_size` elements of
    the keys, and so wide is the result.
    """

    def __call__(
        self,
        q: Tensor,
        k_cache: AnyTensor,
        v_cache: AnyTensor | None,
        layout: PagedLayout,
        params: AttentionParams,
        sinks: AnyTensor | None,
        /,
    ) -> Tensor: ...


class PlanAttentionOp(Protocol):
    """The layout with what `PagedAttentionOp` of all layers reads, computed once, for queries of a
    dtype with H heads and a layer's k_cache.
    """

    def __call__(
        self, layout: PagedLayout, dtype: torch.dtype, num_heads: int, k_cache: AnyTensor, /
    ) -> PagedLayout: ...


class MoveKVOp(Protocol):
    """In all layers, copies the first slot of each pair of flat KV indices to the second, pair
    after pair. A slot outside the cache is an error.
    """

    def __call__(self, kv: KVCache, moves: Sequence[tuple[int, int]], /) -> None: ...


class GatedActivationOp(Protocol):
    """gate_up [T, 2 * N] -> [T, N]: act(first half) * second half; kind is `silu`, `gelu`,
    `gelu_tanh` or `clamped_swiglu`, which changes the second half as well.
    """

    def __call__(self, gate_up: Tensor, kind: str, /) -> Tensor: ...


class GatedLinearOp(Protocol):
    """`GatedActivationOp` of `LinearOp` with gates and ups [N]: x [T, C] -> [T, N / 2], the same
    bits.
    """

    def __call__(self, x: Tensor, weight: LinearWeight, kind: str, /) -> Tensor: ...


class LogitsOp(Protocol):
    """hidden [E, C] -> [E, V] fp32: the product, with its adapters (the number of the matrix, and
    the mapping of the E), widened, divided, then softcap * tanh(logits / softcap) in fp64. Also
    takes the hidden states of a captured step, which are `HostTensor`s, and returns their class.
    """

    def __call__(
        self,
        hidden: AnyTensor,
        weight: LinearWeight,
        divisor: float,
        softcap: float | None,
        adapters: tuple[int, LoRAMapping] | None,
        /,
    ) -> AnyTensor: ...


class PackExpertsOp(Protocol):
    """`ExpertWeights.data` of each expert's gate_up and down_proj; it may be None. Called once at
    load.
    """

    def __call__(
        self, gate_up: tuple[LinearWeight, ...], down_proj: tuple[LinearWeight, ...], /
    ) -> object | None: ...


class RouteOp(Protocol):
    """A router's outputs [T, E], a rule, and what is added to the shares for the choice only, [E]
    float32: shares in fp64, the A largest, ties to the lower number, and their weights. Those of a
    softmax are rounded to the outputs' dtype. A token with a NaN, or with inf for a softmax, has
    NaN weights. `factors` [E] float32 multiply an expert's weights in the end.
    """

    def __call__(
        self,
        scores: Tensor,
        rule: RoutingRule,
        selection_bias: AnyTensor | None,
        factors: AnyTensor | None = None,
        /,
    ) -> Routing: ...


class ExpertsOp(Protocol):
    """x [T, C] and its tokens' experts, with data, -> [T, C]: the products of a token's experts,
    weighted, added in fp32 in ascending order of the experts, and rounded once. With parts, a
    rank's columns of [T, C].
    """

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        activation: str,
        lora: ExpertLoRA | None,
        parts: ExpertParts | None,
        /,
    ) -> Tensor: ...


class GateOp(Protocol):
    """x [T, N] and gates [T, G] -> [T, N]: x * sigmoid(gate), a gate for each of G equal parts."""

    def __call__(self, x: Tensor, gates: Tensor, /) -> Tensor: ...


class ShortConvOp(Protocol):
    """x [T, 3 * C], gates of the inputs, gates of the outputs and values, -> [T, C]; gated inputs
    are rounded to x's dtype, the rest is fp32 and rounded once. `states` is changed in place. A
    token's record is its gated input.
    """

    def __call__(
        self, x: Tensor, weights: ShortConvWeights, states: AnyTensor, rows: StateRows, /
    ) -> Tensor: ...


class GatedDeltaOp(Protocol):
    """Gated DeltaNet (arXiv:2412.06464), token by token. x [T, C] is queries and keys, values,
    gates of the outputs z, and of each value head two gates b and a -> [T, value heads * E].

    Queries, keys and values go through the convolution and SiLU; queries and keys are divided by
    their norms, queries by sqrt(D) too. S [D, E] of a value head becomes
    exp(rate * softplus(a + bias)) S, then S + k (sigmoid(b) (v - S'k))'; its output S'q is normed
    and multiplied by silu(z). `states` is changed in place. A token's record is the convolution's
    inputs, b and a.
    """

    def __call__(
        self, x: Tensor, weights: DeltaWeights, states: AnyTensor, rows: StateRows, /
    ) -> Tensor: ...


class Mamba2Op(Protocol):
    """Mamba-2 (arXiv:2405.21060), token by token. x [T, C] is gates z [heads, P], values
    [heads, P], keys B and queries C [groups, N], and time steps [heads] -> [T, heads * P].

    Values, keys and queries go through the convolution and SiLU. With t = softplus(step + bias),
    within limits, S [N, P] of a head becomes exp(rate * t) S + B (t value)'; its output
    S'C + skip * value is multiplied by silu(z) and normed over a group's heads, in this order or
    the other one, and rounded once.
    `states` is changed in place. A token's record is the convolution's inputs and time steps.
    """

    def __call__(
        self, x: Tensor, weights: MambaWeights, states: AnyTensor, rows: StateRows, /
    ) -> Tensor: ...


class PackHeadsOp(Protocol):
    """A weight [H, N, C], a matrix of each head, in the layout of the implementation. Called once
    at load.
    """

    def __call__(self, weight: AnyTensor, /) -> HeadWeight: ...


class LatentKeysOp(Protocol):
    """x [T, L + D_rot] -> [T, 1, L + D_rot]: `RMSNormOp` of the first L with a weight [L] and an
    eps, `RotaryOp` of the rest with cos, sin [T, D_rot / 2].
    """

    def __call__(
        self,
        x: Tensor,
        weight: AnyTensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        /,
    ) -> Tensor: ...


class LatentQueriesOp(Protocol):
    """q [T, H, C + D_rot] and a weight [H, L, C] -> [T, H, L + D_rot]: `LatentValuesOp` of the
    first C of each head, `RotaryOp` of the rest.
    """

    def __call__(
        self, q: Tensor, weight: HeadWeight, cos: Tensor, sin: Tensor, interleaved: bool, /
    ) -> Tensor: ...


class LatentValuesOp(Protocol):
    """x [T, H, C] and a weight [H, N, C] -> [T, H, N]: `LinearOp` of each head by itself."""

    def __call__(self, x: Tensor, weight: HeadWeight, /) -> Tensor: ...


class LatentOps(msgspec.Struct, frozen=True):
    """What attention over latents computes in addition to the other ops, L the latent's size."""

    pack_heads: PackHeadsOp
    keys: LatentKeysOp
    queries: LatentQueriesOp
    values: LatentValuesOp


class SpreadStreamsOp(Protocol):
    """x [T, N] and others [T, (S - 1) * N] -> [T, S * N]: x, and each of the others with the
    magnitude of x (`MatchMagnitudeOp`).
    """

    def __call__(self, x: Tensor, others: Tensor, /) -> Tensor: ...


class MixStreamsOp(Protocol):
    """x [T, S * N], scores [T, S] and a weight [S * S, S], float32 -> [T, S * N]: stream i plus the
    sum over j of c[i * S + j] times stream j, c = weight tanh(scores); and the active stream of it
    [T, N].
    """

    def __call__(
        self, x: Tensor, scores: Tensor, weight: AnyTensor, active: int, /
    ) -> tuple[Tensor, Tensor]: ...


class CorrectStreamsOp(Protocol):
    """x [T, S * N], delta [T, N], scores [T, S], a weight [S, S], float32 -> [T, S * N]: stream i
    plus 1 + c[i] times what delta differs from the active stream, c = weight tanh(scores); and the
    active stream of it [T, N], times a scale [N] where there is one.
    """

    def __call__(
        self,
        x: Tensor,
        delta: Tensor,
        scores: Tensor,
        weight: AnyTensor,
        scale: AnyTensor | None,
        active: int,
        /,
    ) -> tuple[Tensor, Tensor]: ...


class AddToStreamsOp(Protocol):
    """x [T, S * N] and delta [T, N] -> [T, S * N]: delta added to all streams but the first."""

    def __call__(self, x: Tensor, delta: Tensor, /) -> Tensor: ...


class MatchMagnitudeOp(Protocol):
    """x, like, total [T, N] -> [T, N]: x * sqrt(mean(like^2) / max(mean(x^2), 1e-5)), plus total
    unless that is None.
    """

    def __call__(self, x: Tensor, like: Tensor, total: Tensor | None, /) -> Tensor: ...


class CutGatesOp(Protocol):
    """gate_up [T, 2 * N] -> [T, 2 * N]: a token's gates counted from their mean plus so many of
    their standard deviations, and 0 for those below it.
    """

    def __call__(self, gate_up: Tensor, num_deviations: float, /) -> Tensor: ...


class StreamOps(msgspec.Struct, frozen=True):
    """What layers of several residual streams compute in addition (AltUp, arXiv:2301.13310), S
    streams one after another in a row.
    """

    spread: SpreadStreamsOp
    mix: MixStreamsOp
    correct: CorrectStreamsOp
    add: AddToStreamsOp
    match: MatchMagnitudeOp
    cut: CutGatesOp


class RowIdsOp(Protocol):
    """ids [T] of a vocabulary -> [T]: 0 in place of those that a table of so many rows lacks."""

    def __call__(self, ids: Tensor, num_rows: int, vocab_size: int, /) -> Tensor: ...


class AdapterTableOp(Protocol):
    """A table of so many places, in which each of these adapters fits."""

    def __call__(self, adapters: Sequence[LoRAAdapter], num_places: int, /) -> AdapterTable: ...


class OpTable(msgspec.Struct, frozen=True):
    """One implementation per op, fixed for the life of a model; each op says what it computes.

    Activations are tensors of torch. Weights and KV caches are `AnyTensor`s: `HostTensor`s in a
    process without torch, where steps are captured. An op that is None is not in the kernel set:
    its caller calls the ops of which it is made, or the reference.

    Attributes:
        name: Kernel set, part of `system_fingerprint`: `reference`, `native-avx512`.
        scratch_bytes: Temporary bytes per element at a layer's widest point: the planner's bound.
        samples_on_device: Triton kernels sample and score tokens where the logits are
            (`ops.triton.sampling.sample`); a call of them then costs more than a row of it.
        kernel_s: Seconds that the kernels have run so far, without the time between them; None
            where they are not counted. Benchmarks take the difference of two readings.
        experts, route: None where `ops.reference.experts` computes them.
        gate, short_conv, gated_delta, mamba: None where `ops.reference.states` computes them.
        streams: None where `ops.reference.streams` computes them.
        row_ids: None where torch computes it; captured steps record it.
        layer_norm, add_layer_norm, activation: None where `ops.reference.elementary` computes them.
        text_attention: None where `ops.reference.text_attention` computes it.
        adapter_table: None where adapters cannot be recorded.
        packed_files: None where packed weights are not kept in files.
        pack_part: None where the bits of an output do not depend on how many others there are.
        steps: Makes captured steps and samples tokens; None where only single ops run.
        latent: None where there are no kernels of attention over latents.
        reads_lengths: Whether launches depend on shapes only, as lengths, blocks and adapters are
            read from memory: one recorded launch then fits all of them (`runtime.steps.graphs`).
        has_chunks: Whether attention may be in chunks (`AttentionParams.chunk`).
        kv_in_pairs: Whether a cache of bfloat16 is read faster in pairs (`ops.kv_pairs`).
    """

    name: str
    pack_linear: PackLinearOp
    pack_quantized: PackQuantizedOp
    quantize: QuantizeOp
    linear: LinearOp
    pack_lora: PackLoRAOp
    add_lora_: AddLoRAOp
    embedding: EmbeddingOp
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    rotary: RotaryOp
    write_kv: WriteKVOp
    paged_attention: PagedAttentionOp
    move_kv: MoveKVOp
    gated_activation: GatedActivationOp
    logits: LogitsOp
    scratch_bytes: int
    samples_on_device: bool = False
    kernel_s: Callable[[], float] | None = None
    load_linear: LoadLinearOp | None = None
    packed_files: PackedFiles | None = None
    pack_part: PackPartOp | None = None
    pack_experts: PackExpertsOp | None = None
    route: RouteOp | None = None
    experts: ExpertsOp | None = None
    gated_linear: GatedLinearOp | None = None
    rotary_write_kv: RotaryWriteKVOp | None = None
    plan_attention: PlanAttentionOp | None = None
    steps: NativeSteps | None = None
    reads_lengths: bool = False
    has_chunks: bool = True
    kv_in_pairs: bool = False
    adapter_table: AdapterTableOp | None = None
    ranks: Ranks | None = None
    gate: GateOp | None = None
    short_conv: ShortConvOp | None = None
    gated_delta: GatedDeltaOp | None = None
    mamba: Mamba2Op | None = None
    latent: LatentOps | None = None
    layer_norm: LayerNormOp | None = None
    add_layer_norm: AddLayerNormOp | None = None
    activation: ActivationOp | None = None
    text_attention: TextAttentionOp | None = None
    streams: StreamOps | None = None
    row_ids: RowIdsOp | None = None
