"""Memory, computed before anything is loaded: weights, KV, activations, what is left.

Pure functions over a spec and the configuration; called by the engine's assembly and by the
planner. What does not fit is shrunk with a note, in this order: tokens of a step, KV blocks, then
context and resident sequences; if even the minimum does not fit, it raises one sentence.

Activations are an upper estimate: the tensors of a layer, scratch of the ops for each element at
its widest point, and three copies of the sampled logits in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from quickstep.config import CacheConfig, SchedulerConfig
from quickstep.errors import ConfigError, ModelTooLarge, size_text
from quickstep.model.checkpoint.tensor_schema import (
    LATENT_HEADS,
    layer_tensors,
    num_parameters,
    outer_tensors,
    shared_gate,
)
from quickstep.model.decoder_spec import LongContext, ModelSpec
from quickstep.model.quantization import find_scheme
from quickstep.model.rope_spec import RopeKind

GIB = 2**30
DEFAULT_KV_BYTES = 4 * GIB  # on a CPU, where memory belongs to other programs as well
_OUTER = ("embed_tokens.weight", "head")
_KV_DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
)
_SCALE_BYTES, _INT4_GROUP = 4, 32  # as in `ops.tensors`; a plan needs no NumPy
_MIN_CONTEXT = 256
_MIN_STEP_TOKENS = 64


# Graphs, fragments of the allocator, and what libraries allocate by themselves.
MEASURED_RESERVE_BYTES = 1 << 30


class ElementBytes(msgspec.Struct, frozen=True):
    """Bytes per element: of the model's dtype (activations, weights that are not quantized), and of
    the op table's scratch (`OpTable.scratch_bytes`). `quantization` is `--quantization`, `kv_dtype`
    is `CacheConfig.kv_dtype`; `weights` are the bytes of all weights of a checkpoint that is
    quantized already, `adapters` those of the adapters that are loaded at the start.
    """

    dtype: int
    scratch: int
    quantization: str | None = None
    kv_dtype: str = "auto"
    weights: int | None = None
    adapters: int = 0


class DraftSizes(msgspec.Struct, frozen=True):
    """What drafts need in addition: a draft model, an EAGLE or prediction layer, or Medusa heads.

    Attributes:
        spec: The draft model or the layer; None for Medusa heads, which have no KV.
        elements: Bytes per element; `weights` is set for heads.
        scratch_tokens: KV positions per sequence beyond those of the target.
        num_heads: Of Medusa.
    """

    spec: ModelSpec | None
    elements: ElementBytes
    scratch_tokens: int = 0
    num_heads: int = 0

    @property
    def num_parameters(self) -> int:
        """Weights, as a number of elements."""
        if self.spec is None:
            return self.weight_bytes // self.elements.dtype
        return num_parameters(self.spec)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        if self.elements.weights is not None:
            return self.elements.weights
        assert self.spec is not None, "the size of heads is given"
        return weights_of(self.spec, self.elements)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of its KV of one token."""
        if self.spec is None:
            return 0
        return kv_bytes_per_token(self.spec, self.elements.dtype, self.elements.kv_dtype)

    def kv_bytes(self, num_tokens: int, num_seqs: int) -> int:
        """Bytes of its KV next to a cache of so many tokens for so many sequences."""
        return (num_tokens + num_seqs * self.scratch_tokens) * self.kv_bytes_per_token

    def activation_bytes(self, max_num_batched_tokens: int, max_num_seqs: int) -> int:
        """See the function of this name. Heads reuse the target's memory."""
        if self.spec is None:
            return 0
        elements, sizes = self.elements, (max_num_batched_tokens, max_num_seqs)
        return activation_bytes(self.spec, elements.dtype, *sizes, elements.scratch)


class MemoryRow(msgspec.Struct, frozen=True):
    """One line of the table: what, how many bytes, and of what that is the product."""

    label: str
    num_bytes: int
    detail: str


class KVBlockSize(msgspec.Struct, frozen=True):
    """One KV block: its tokens, and their bytes in all layers."""

    num_tokens: int
    num_bytes: int


class StateMemory(msgspec.Struct, frozen=True):
    """Slots of sequences' states: how many, with so many records, and the bytes of each."""

    num_slots: int = 0
    num_records: int = 0
    slot_bytes: int = 0


NO_STATES = StateMemory()


class MemoryPlan(msgspec.Struct, frozen=True):
    """What fits. `notes` are the spec's, then one sentence for each thing that was shrunk.

    Attributes:
        num_blocks: KV blocks to allocate.
        max_model_len: Longest sequence, prompt and output.
        max_num_seqs: Resident sequences.
        max_num_batched_tokens: Tokens of a step.
        rows: weights, adapters and states if there are any, KV cache, those of all drafts,
            activations, spare; they add up to `memory_bytes`.
        long_context: How positions are scaled beyond the model's own limit.
        states: Of layers that keep a state of each sequence.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    rows: tuple[MemoryRow, ...]
    notes: tuple[str, ...]
    long_context: LongContext | None = None
    states: StateMemory = NO_STATES

    def table(self) -> str:
        """The rows as aligned text, in GiB."""
        width = max(len(row.label) for row in self.rows)
        return "\n".join(
            f"{row.label:<{width}}  {row.num_bytes / GIB:9.2f} GiB  {row.detail}".rstrip()
            for row in self.rows
        )


def weight_bytes(spec: ModelSpec, dtype_bytes: int, quantization: str | None = None) -> int:
    """Bytes of the weights in memory; a tied output projection is the embedding, held once."""
    scheme = find_scheme(quantization)
    if scheme is None or not spec.native:
        return num_parameters(spec) * dtype_bytes
    return tensor_bytes(spec, _tensors(spec), dtype_bytes, quantization)


def tensor_bytes(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    dtype_bytes: int,
    quantization: str | None,
) -> int:
    """Bytes of these tensors of a model in memory, of a checkpoint that is not quantized."""
    scheme = find_scheme(quantization)
    total = 0
    for name, shape in tensors:
        plain = (
            f"{spec.naming.router}.weight",
            f"{LATENT_HEADS}.weight",
            shared_gate(spec),
        )
        if scheme is None or len(shape) != 2 or name.endswith(plain):
            total += math.prod(shape) * dtype_bytes
            continue
        form = scheme.format_of(shape[-1], outer=name in _OUTER)
        total += form.num_bytes(shape)
    return total


def weights_of(spec: ModelSpec, elements: ElementBytes) -> int:
    """Bytes of the weights in memory: of a checkpoint that is quantized already, what it takes."""
    if elements.weights is not None:
        return elements.weights
    return weight_bytes(spec, elements.dtype, elements.quantization)


def elements_of_part(elements: ElementBytes, spec: ModelSpec, part: ModelSpec) -> ElementBytes:
    """Those of a part of a model. A quantized checkpoint is divided as its parameters are."""
    if elements.weights is None:
        return elements
    weights = -(-elements.weights * num_parameters(part) // num_parameters(spec))
    return replace(elements, weights=weights)


def _tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from outer_tensors(spec, "", "head").items()
    for index in range(spec.num_layers):
        yield from layer_tensors(spec, "", index).items()


def kv_head_bytes(head_size: int, dtype_bytes: int, kv_dtype: str = "auto") -> int:
    """Bytes of one token's key in one kv head, the scales of quantized ones included."""
    if kv_dtype == "int8":
        return head_size + _SCALE_BYTES
    if kv_dtype == "int4":
        return -(-head_size // 2) + _SCALE_BYTES * -(-head_size // _INT4_GROUP)
    return head_size * _KV_DTYPE_BYTES.get(kv_dtype, dtype_bytes)


def kv_bytes_per_token(spec: ModelSpec, dtype_bytes: int, kv_dtype: str = "auto") -> int:
    """Over groups of layers: 2 x layers x kv heads x bytes of a head, or half of it where values
    are the beginning of keys. Layers with a window need as much as others.
    """
    return sum(
        group.size.num_tensors
        * len(group.layers)
        * group.size.num_kv_heads
        * kv_head_bytes(group.size.head_size, dtype_bytes, kv_dtype)
        for group in spec.kv_groups
    )


def _states(
    spec: ModelSpec, cache: CacheConfig, num_seqs: int, num_records: int, left: int
) -> StateMemory:
    """The slots of states, in at most half of the bytes that are left."""
    slot_bytes = 4 * sum(size.num_elements(num_records) for size in spec.state_sizes)
    if not slot_bytes:
        return NO_STATES
    fitting = max(2, left // 2 // slot_bytes)
    return StateMemory(min(cache.state_slots or 2 * num_seqs + 2, fitting), num_records, slot_bytes)


def activation_bytes(
    spec: ModelSpec,
    dtype_bytes: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    scratch_bytes: int,
) -> int:
    """Upper estimate of a step's peak in addition to weights and KV.

    `scratch_bytes` are what the op table needs for each element at the widest point of a layer.
    """
    of_layers = [spec.of_layer(index) for index in range(spec.num_layers)]
    per_head = 2 if spec.attention_gate else 1
    heads = [
        (per_head * layer_spec.num_heads + 2 * layer_spec.num_kv_heads) * layer_spec.head_size
        for layer_spec in of_layers
    ]
    mixers = {layer.state_mixer for layer in spec.layers}
    widths = [mixer.num_inputs for mixer in mixers if mixer is not None]
    if spec.latent is not None:
        widths.append(spec.num_heads * spec.pair_size)  # queries over latents, and their results
    attention = max(*heads, *widths, 0)
    intermediate_size = max(layer_spec.intermediate_size for layer_spec in of_layers)
    widest = max(attention, 2 * intermediate_size)
    rows_of_experts = 0  # bytes
    if spec.moe is not None:
        # at worst every token is sent to the same experts; the rows of all of them are kept
        width = spec.hidden_size + spec.moe.intermediate_size
        rows_of_experts = spec.moe.experts_per_token * width * dtype_bytes
        widest = max(attention, 2 * spec.moe.intermediate_size, 2 * spec.hidden_size)
        if spec.moe.with_mlp or not all(layer.sparse for layer in spec.layers):
            widest = max(widest, 2 * intermediate_size)
    inputs = 0
    if spec.layer_inputs is not None:  # those of all layers, as they are found, made and added
        inputs = 4 * spec.num_layers * spec.layer_inputs.size * dtype_bytes
    if spec.altup is not None:  # streams as they are given, predicted, corrected and added to
        widest = max(widest, spec.altup.num_streams * spec.hidden_size)
        inputs += 4 * spec.altup.num_streams * spec.hidden_size * dtype_bytes
    per_token = (3 * spec.hidden_size + 2 * widest) * dtype_bytes + widest * scratch_bytes
    per_token += rows_of_experts + inputs
    emitting = min(max_num_seqs, max_num_batched_tokens)
    return max_num_batched_tokens * per_token + 3 * emitting * spec.vocab_size * 4


def plan_memory(
    spec: ModelSpec,
    elements: ElementBytes,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    memory_bytes: int,
    default_kv_bytes: int | None = DEFAULT_KV_BYTES,
    drafts: Sequence[DraftSizes] = (),
    max_drafts: int = 0,
) -> MemoryPlan:
    """Divide `memory_bytes` among weights, activations and KV. The spec allows the scheduler's
    `max_model_len` (`long_context.with_context` sees to that).

    Without `num_blocks` or `kv_cache_bytes` the KV cache gets what `max_num_seqs` sequences of
    `max_model_len` need, at most half of what weights and activations leave, and at most
    `default_kv_bytes` (None: no such limit, for a GPU) unless one sequence needs more. Each draft
    model has as many KV blocks, an EAGLE layer some more. States of sequences, with records of
    `max_drafts` tokens each, get at most half of what weights and activations leave.

    Raises:
        ConfigError: Weights, or weights and the least KV cache, do not fit.
    """
    notes = list(spec.notes)
    context = scheduler.max_model_len
    weights = weights_of(spec, elements) + elements.adapters
    weights += sum(draft.weight_bytes for draft in drafts)
    seqs = scheduler.max_num_seqs
    tokens, activations = _fit_step(spec, elements, scheduler, memory_bytes - weights, drafts)
    left = memory_bytes - weights - activations
    if tokens < scheduler.max_num_batched_tokens:
        notes.append(
            f"max_num_batched_tokens {scheduler.max_num_batched_tokens} became {tokens}, as "
            "activations would not fit"
        )
    states = _states(spec, cache, seqs, max_drafts, left)
    if states.num_slots:
        left -= states.num_slots * states.slot_bytes
        if states.num_slots <= seqs:
            fewer = max(1, states.num_slots - 1)
            notes.append(f"max_num_seqs {seqs} became {fewer}, as the states of no more fit")
            seqs = fewer
    per_token = kv_bytes_per_token(spec, elements.dtype, elements.kv_dtype)
    per_token += sum(draft.kv_bytes_per_token for draft in drafts)
    block_bytes = per_token * cache.block_size
    scratch = sum(draft.kv_bytes(0, seqs) for draft in drafts)
    # an encoder keeps nothing: its blocks only count tokens
    all_blocks = seqs * -(-context // cache.block_size)
    fitting = max(left - scratch, 0) // block_bytes if block_bytes else all_blocks
    least = -(-min(context, _MIN_CONTEXT) // cache.block_size)
    if fitting < least:
        needed = memory_bytes - left + scratch + least * block_bytes
        state_bytes = states.num_slots * states.slot_bytes
        of_states = f"states of sequences {size_text(state_bytes)}, " if state_bytes else ""
        raise ModelTooLarge(
            f"the model needs at least {size_text(needed)} (weights {size_text(weights)}, "
            f"{of_states}the rest activations and KV of {least * cache.block_size} tokens) and "
            f"{size_text(memory_bytes)} are available; use a smaller model or dtype, or lower "
            "--max-num-batched-tokens",
            needed,
        )
    num_blocks = _num_blocks(
        cache,
        scheduler,
        context,
        fitting,
        block_bytes=block_bytes,
        default_kv_bytes=default_kv_bytes,
    )
    requested = _requested_blocks(cache, block_bytes)
    if requested is not None and num_blocks < requested:
        notes.append(f"KV blocks {requested} became {num_blocks}, as more would not fit")
    if num_blocks * cache.block_size < context:
        longest = num_blocks * cache.block_size
        notes.append(f"max_model_len {context} became {longest}, as the KV cache holds no more")
        context = longest
    if spec.encoder is not None and tokens < context:
        notes.append(
            f"max_model_len {context} became {tokens}: a step computes a text completely, and has "
            "memory for so many tokens"
        )
        context = tokens
    if num_blocks < seqs:
        notes.append(f"max_num_seqs {seqs} became {num_blocks}, one per KV block")
        seqs = num_blocks
    notes.extend(_notes_on_positions(spec, context))
    plan = MemoryPlan(
        num_blocks, context, seqs, tokens, (), tuple(notes), spec.long_context, states
    )
    rows = _rows(plan, spec, elements, cache.block_size, memory_bytes, left, drafts)
    return replace(plan, rows=rows)


def _notes_on_positions(spec: ModelSpec, context: int) -> Iterator[str]:
    """What differs from transformers because a position has one rotation here (`rope.py`)."""
    for rope in dict.fromkeys(spec.ropes):
        if rope.needs_long_factors(context) and rope.short_factor != rope.long_factor:
            yield (
                f"longrope: max_model_len {context} is above the trained length of "
                f"{rope.trained_len}, so every prompt has the long factors and short prompts lose "
                f"accuracy; --max-model-len {rope.trained_len} avoids that"
            )
        if rope.kind is RopeKind.DYNAMIC and context > rope.trained_len:
            yield (
                f"dynamic NTK: a position after the trained length of {rope.trained_len} is scaled "
                "by its own length, as transformers decodes; it scales a longer prompt by the "
                f"prompt's length; --max-model-len {rope.trained_len} avoids the difference"
            )


def with_measured_activations(
    plan: MemoryPlan,
    measured_bytes: int,
    free_bytes: int,
    block: KVBlockSize,
    least: Callable[[int], int] | None = None,
) -> MemoryPlan:
    """The plan with the activations of a step that ran, and a tenth of them in reserve for graphs
    and fragments; `free_bytes` are free now. Fewer blocks, if all of them would not fit. `least`:
    of the blocks that fit on the devices of several ranks.
    """
    reserve = max(measured_bytes // 10, MEASURED_RESERVE_BYTES)
    activations = measured_bytes + reserve
    later = ("adapters", "draft weights", "draft KV cache")  # loaded after the KV cache
    free_bytes -= sum(row.num_bytes for row in plan.rows if row.label in later)
    fitting = max(1, (free_bytes - activations) // block.num_bytes)
    num_blocks = min(plan.num_blocks, fitting)
    if least is not None:
        num_blocks = least(num_blocks)
    notes = list(plan.notes)
    if num_blocks < plan.num_blocks:
        notes.append(
            f"KV blocks {plan.num_blocks} became {num_blocks}, as a step takes "
            f"{size_text(activations)}"
        )
    total = sum(row.num_bytes for row in plan.rows)
    rows = [row for row in plan.rows if row.label != "spare"]
    for index, row in enumerate(rows):
        if row.label == "activations":
            detail = f"{plan.max_num_batched_tokens} tokens a step, measured"
            rows[index] = MemoryRow(row.label, activations, detail)
        elif row.label == "KV cache":
            freed = (plan.num_blocks - num_blocks) * block.num_bytes
            rows[index] = MemoryRow(row.label, row.num_bytes - freed, row.detail)
    spare = total - sum(row.num_bytes for row in rows)
    rows.append(MemoryRow("spare", spare, f"of {size_text(total)}"))
    longest = min(plan.max_model_len, num_blocks * block.num_tokens)
    if longest < plan.max_model_len:
        notes.append(
            f"max_model_len {plan.max_model_len} became {longest}, as the KV cache holds no more"
        )
    return replace(
        plan,
        num_blocks=num_blocks,
        max_model_len=longest,
        max_num_seqs=min(plan.max_num_seqs, num_blocks),
        rows=tuple(rows),
        notes=tuple(notes),
    )


def _fit_step(
    spec: ModelSpec,
    elements: ElementBytes,
    scheduler: SchedulerConfig,
    available: int,
    drafts: Sequence[DraftSizes],
) -> tuple[int, int]:
    """A step's tokens, halved until half of the memory is left, and its activations (each draft
    model's memory is its own).
    """
    tokens, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    while True:
        used = activation_bytes(spec, elements.dtype, tokens, seqs, elements.scratch)
        used += sum(draft.activation_bytes(tokens, seqs) for draft in drafts)
        if used <= available // 2 or tokens // 2 < _MIN_STEP_TOKENS:
            return tokens, used
        tokens //= 2


def _requested_blocks(cache: CacheConfig, block_bytes: int) -> int | None:
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.kv_cache_bytes is None or not block_bytes:
        return None
    return cache.kv_cache_bytes // block_bytes


def _num_blocks(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    context: int,
    fitting: int,
    block_bytes: int,
    default_kv_bytes: int | None,
) -> int:
    """Blocks to allocate, of which `fitting` would fit."""
    requested = _requested_blocks(cache, block_bytes)
    if requested is not None:
        if requested < 1:
            raise ConfigError(
                f"--kv-cache-bytes is {cache.kv_cache_bytes}, one block takes {block_bytes} bytes"
            )
        return min(requested, fitting)
    one_sequence = -(-context // cache.block_size)
    all_sequences = one_sequence * scheduler.max_num_seqs
    if default_kv_bytes is None or not block_bytes:
        return min(all_sequences, fitting)
    modest = max(min(fitting // 2, default_kv_bytes // block_bytes), min(one_sequence, fitting))
    return min(all_sequences, modest)


def _rows(
    plan: MemoryPlan,
    spec: ModelSpec,
    elements: ElementBytes,
    block_size: int,
    memory_bytes: int,
    left: int,
    drafts: Sequence[DraftSizes],
) -> tuple[MemoryRow, ...]:
    """The rows of a plan that has none yet; `left` is what remains for KV and spare."""
    num_blocks, seqs = plan.num_blocks, plan.max_num_seqs
    weights = weights_of(spec, elements)
    per_token = kv_bytes_per_token(spec, elements.dtype, elements.kv_dtype)
    kv_bytes = num_blocks * block_size * per_token
    held = f"x {elements.quantization or f'{elements.dtype} bytes'}"
    if elements.weights is not None:
        held = "as the checkpoint has quantized them"
    detail = f"{num_parameters(spec) / 1e9:.3f} B parameters {held}"
    cache = f"{num_blocks} blocks x {block_size} tokens"
    rows = [MemoryRow("weights", weights, detail)]
    if elements.adapters:
        rows.append(MemoryRow("adapters", elements.adapters, "loaded at the start"))
        weights += elements.adapters
    if states := plan.states.num_slots * plan.states.slot_bytes:
        detail = f"{plan.states.num_slots} x {plan.states.slot_bytes} bytes"
        rows.append(MemoryRow("states", states, detail))
        weights += states
    rows += [
        MemoryRow("KV cache", kv_bytes, f"{cache} x {per_token} bytes"),
    ]
    if drafts:
        sizes_b = " + ".join(f"{draft.num_parameters / 1e9:.3f}" for draft in drafts)
        draft_weights = sum(draft.weight_bytes for draft in drafts)
        rows.append(MemoryRow("draft weights", draft_weights, f"{sizes_b} B parameters"))
        weights += draft_weights
    with_kv = [draft for draft in drafts if draft.kv_bytes_per_token]
    if with_kv:
        draft_kv_bytes = sum(draft.kv_bytes(num_blocks * block_size, seqs) for draft in with_kv)
        detail = f"{cache} x {' + '.join(str(draft.kv_bytes_per_token) for draft in with_kv)} bytes"
        scratch_tokens = sum(draft.scratch_tokens for draft in with_kv)
        if scratch_tokens:
            detail += f", {scratch_tokens} more for each of {seqs} sequences"
        rows.append(MemoryRow("draft KV cache", draft_kv_bytes, detail))
        kv_bytes += draft_kv_bytes
    activations = memory_bytes - weights - left
    rows += [
        MemoryRow("activations", activations, f"{plan.max_num_batched_tokens} tokens a step"),
        MemoryRow("spare", left - kv_bytes, f"of {size_text(memory_bytes)}"),
    ]
    return tuple(rows)
