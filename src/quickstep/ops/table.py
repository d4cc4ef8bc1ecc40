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
    from quickstep.ops.weights import LinearWeight, QuantizedWeight, StoredMatrix


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


class KVCache(msgspec.Struct, frozen=True):
    """Per layer one K and one V tensor, [B, S, K, W]: W is D, or more for quantized values with
    their scale (`ops.tensors`). Layers may differ in K and W, never in B and S. Owned by the
    runner; zeroed at allocation, so that masked positions never hold NaN.
    """

    keys: tuple[AnyTensor, ...]
    values: tuple[AnyTensor, ...]

    def by_shape(self) -> tuple[tuple[AnyTensor, ...], ...]:
        """The tensors, those of one shape together."""
        found: dict[tuple[int, ...], list[AnyTensor]] = {}
        for tensor in (*self.keys, *self.values):
            found.setdefault(tuple(tensor.shape), []).append(tensor)
        return tuple(map(tuple, found.values()))


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


class LoRAAdapter(msgspec.Struct, frozen=True):
    """An adapter in the layout of the implementation that made it (`OpTable.pack_lora`).

    Only that implementation reads `data`; `nbytes` counts it.
    """

    data: object
    nbytes: int


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


class ExpertWeights(msgspec.Struct, frozen=True):
    """The experts of a layer: gate_up hidden -> 2 * width, gate first; down_proj width -> hidden.

    `data` is of the implementation that made it (`OpTable.pack_experts`); None where the experts
    are computed one by one.
    """

    gate_up: tuple[LinearWeight, ...]
    down_proj: tuple[LinearWeight, ...]
    data: object | None = None

    @property
    def nbytes(self) -> int:
        """Of all matrices."""
        return sum(one.nbytes for one in (*self.gate_up, *self.down_proj))


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


class AttentionParams(msgspec.Struct, frozen=True):
    """What distinguishes one layer's attention from another's.

    Attributes:
        scale: Multiplies q·k.
        window: A query at position p sees keys p - window < j <= p; None sees all.
        softcap: logits = softcap * tanh(logits / softcap); None for none (Gemma 2).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


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


class Quantize(Protocol):
    """`OpTable.quantize`."""

    def __call__(
        self,
        weight: Tensor,
        bits: int,
        group_size: int | None,
        has_zeros: bool,
        has_sub_scales: bool = False,
    ) -> QuantizedWeight:
        """Quantized values of a weight [N, C]; group size None for one group per row."""


class ExpertsOp(Protocol):
    """`OpTable.experts`."""

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        activation: str,
        lora: ExpertLoRA | None,
    ) -> Tensor:
        """x [T, C] and its tokens' experts -> [T, C]."""


class OpTable(msgspec.Struct, frozen=True):
    """One implementation per op, fixed for the life of a model.

    Activations are tensors of torch. Weights and KV caches are `AnyTensor`s: `HostTensor`s in a
    process without torch, where steps are captured. `logits` also takes the hidden states of a
    captured step, which are `HostTensor`s, and returns the same class.

    Attributes:
        name: Kernel set, part of `system_fingerprint`: `reference`, `native-avx512`.
        pack_linear: (weight [N, C], bias [N] | None) -> LinearWeight. Called once at load.
        pack_quantized: (QuantizedWeight, bias [N] | None) -> LinearWeight, for activations of any
            dtype; `linear` then quantizes them as well, per token and group of the weight.
        quantize: On-the-fly rounding, row by row. Called once at load.
        linear: (x [T, C], LinearWeight) -> [T, N] in x's dtype; fp32 accumulation in one order.
        pack_lora: (the `LoRAPart`s of each of a model's matrices) -> LoRAAdapter.
        add_lora_: (y [T, N], x [T, C], number of the matrix, LoRAMapping) -> None: to y, which
            `linear` made of x, adds scale * B (A x) + bias of each token's adapter, in place, or
            writes A x + bias of a complete matrix. A x is fp32, each sum in one order; y is rounded
            once more. Other tokens are not touched. x may be token ids [T], of which `embedding`
            made y.
        embedding: (token_ids [T], weight [V, C] or LinearWeight, dtype) -> [T, C]: rows of the
            weight. `dtype` is the weight's own where it has one, else what its rows are rounded to.
        rms_norm: (x [T, C], weight [C], eps, offset) -> [T, C]: x / rms(x) * (weight + offset),
            computed in fp32, rounded once (Gemma's offset is 1.0). Also for QK norm on [T, H, D].
        add_rms_norm: (x, residual, weight, eps, offset) -> (normed, x + residual).
        rotary: (x [T, H, D], cos [T, D_rot / 2], sin [T, D_rot / 2], interleaved) -> [T, H, D];
            rotates the first D_rot of D, halves convention unless interleaved; fp32 inside.
        write_kv: (k [T, K, D], v [T, K, D], k_cache, v_cache, slot_mapping [T]) -> None, in place;
            rounded to the caches' dtype, int8 per token and head, fp8 at most 448.
        rotary_write_kv: (q [T, H, D], k, v [T, K, D], cos, sin, interleaved, k_cache, v_cache,
            slot_mapping) -> q [T, H, D]: `rotary` of q and k and `write_kv` in one launch, with
            their bits. None where they are called one after another.
        paged_attention: (q [T, H, D], k_cache [B, S, K, W], v_cache, PagedLayout, AttentionParams,
            sinks [H] float32 or None) -> [T, H, D]; causal, GQA without copies, KV walked in tiles
            at absolute positions. A sink is one more logit in the denominator of each of its
            head's queries, without a value (arXiv:2309.17453, gpt-oss); it is neither
            scaled nor capped, and -inf is none.
        plan_attention: (PagedLayout, dtype of the queries, H, a layer's k_cache) -> the layout with
            what `paged_attention` of all layers reads, computed once. None where there is nothing.
        scratch_bytes: Temporary bytes per element at a layer's widest point: the planner's bound.
        move_kv: (KVCache, pairs of flat KV indices) -> None: in all layers, copies the first slot
            of each pair to the second, pair after pair. A slot outside the cache is an error.
        gated_activation: (gate_up [T, 2 * N], kind) -> [T, N]: act(first half) * second half; kind
            is `silu`, `gelu`, `gelu_tanh` or `clamped_swiglu`, which changes that half as well.
        gated_linear: (x [T, C], LinearWeight of gates and ups, kind) -> [T, N / 2]:
            `gated_activation` of `linear`, with its bits. None where they are called one after
            another.
        logits: (hidden [E, C], LinearWeight, divisor, softcap or None, None or the number of the
            matrix and the LoRAMapping of the E) -> [E, V] fp32: the product, with its adapters,
            widened, divided, then softcap * tanh(logits / softcap) in fp64.
        samples_on_device: Triton kernels sample and score tokens where the logits are
            (`ops.triton.sampling.sample`); a call of them then costs more than a row of it.
        kernel_s: Seconds that the kernels have run so far, without the time between them; None
            where they are not counted. Benchmarks take the difference of two readings.
        load_linear: (StoredMatrix, bias [N] | None) -> LinearWeight: the same as reading the matrix
            and packing it, without a copy of it in between. None if unsupported.
        pack_experts: (gate_up of each expert, down_proj of each) -> `ExpertWeights.data`, which may
            be None. Called once at load. None if unsupported.
        route: (a router's outputs [T, E], A, whether the weights of a token add up to 1) ->
            Routing: a softmax in fp64, its A largest elements, ties to the lower number, and their
            weights rounded to the outputs' dtype. A token with NaN or inf has NaN weights. None
            where `ops.reference.experts` computes it.
        experts: (x [T, C], Routing, `ExpertWeights` with data, kind of activation, adapters or
            None) -> [T, C]: the products of a token's experts, weighted, added in fp32 in ascending
            order of the experts, and rounded once. None where `ops.reference.experts` computes them
            one by one.
        steps: Makes captured steps and samples tokens; None where only single ops run.
        reads_lengths: Whether launches depend on shapes only, as lengths, blocks and adapters are
            read from memory: one recorded launch then fits all of them (`runtime.steps.graphs`).
        adapter_table: (adapters that must fit, number of places) -> AdapterTable; None where
            adapters cannot be recorded.
    """

    name: str
    pack_linear: Callable[[AnyTensor, AnyTensor | None], LinearWeight]
    pack_quantized: Callable[[QuantizedWeight, AnyTensor | None], LinearWeight]
    quantize: Quantize
    linear: Callable[[Tensor, LinearWeight], Tensor]
    pack_lora: Callable[[Sequence[Sequence[LoRAPart]]], LoRAAdapter]
    add_lora_: Callable[[Tensor, Tensor, int, LoRAMapping], None]
    embedding: Callable[[Tensor, AnyTensor | LinearWeight, DType | torch.dtype], Tensor]
    rms_norm: Callable[[Tensor, AnyTensor, float, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, AnyTensor, float, float], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    write_kv: Callable[[Tensor, Tensor, AnyTensor, AnyTensor, Tensor], None]
    paged_attention: Callable[
        [Tensor, AnyTensor, AnyTensor, PagedLayout, AttentionParams, AnyTensor | None], Tensor
    ]
    move_kv: Callable[[KVCache, Sequence[tuple[int, int]]], None]
    gated_activation: Callable[[Tensor, str], Tensor]
    logits: Callable[
        [AnyTensor, LinearWeight, float, float | None, tuple[int, LoRAMapping] | None], AnyTensor
    ]
    scratch_bytes: int
    samples_on_device: bool = False
    kernel_s: Callable[[], float] | None = None
    load_linear: Callable[[StoredMatrix, AnyTensor | None], LinearWeight] | None = None
    pack_experts: (
        Callable[[tuple[LinearWeight, ...], tuple[LinearWeight, ...]], object | None] | None
    ) = None
    route: Callable[[Tensor, int, bool], Routing] | None = None
    experts: ExpertsOp | None = None
    gated_linear: Callable[[Tensor, LinearWeight, str], Tensor] | None = None
    rotary_write_kv: (
        Callable[
            [Tensor, Tensor, Tensor, Tensor, Tensor, bool, AnyTensor, AnyTensor, Tensor], Tensor
        ]
        | None
    ) = None
    plan_attention: Callable[[PagedLayout, torch.dtype, int, AnyTensor], PagedLayout] | None = None
    steps: NativeSteps | None = None
    reads_lengths: bool = False
    adapter_table: Callable[[Sequence[LoRAAdapter], int], AdapterTable] | None = None
    ranks: Ranks | None = None
