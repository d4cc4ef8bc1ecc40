"""Steps recorded as CUDA graphs: a step is one copy of its inputs and one replay.

The GPU's counterpart of `runtime.capture`. A graph has a fixed number of rows, of tokens, and of
blocks per row; everything else of a step is data: token ids, positions, lengths, block tables,
adapters, and which tokens of prompts get logits. They are filled into one host buffer and copied at
once. A step uses the smallest graph that it fits into. Padding tokens belong to no row and write
their keys and values to the scratch block, the last one of the KV cache; every bit of the other
tokens is the same as op by op.

A graph is captured while the executor is idle (`capture_next`): first those of the common sizes,
the largest first, then others that steps have needed. Until then, and for longer prompts, a step
runs op by op (`EagerSteps`). All graphs share their memory, and the tensors of their results.

Opened by `runtime.capture`. What a graph is, the `GraphBackend` decides, so that the tests check
all of this on a CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder, MoEWeights
from quickstep.model.interface import ForwardBatch
from quickstep.ops.table import AdapterTable, KVCache, LoRAAdapter, PagedLayout, RowLengths
from quickstep.ops.tensors import SCALE_BYTES, AnyTensor, integers_on, torch_device
from quickstep.runtime.capture import EmittingToken, GraphOptions, adapters_of
from quickstep.runtime.eager_steps import EagerSteps, pack_rows, with_torch_kv
from quickstep.runtime.slots import Slot
from quickstep.runtime.step_inputs import InputBuffer, StepInputs, StepSize, is_pending
from quickstep.types import StepRow

__all__ = ["CudaGraphs", "GraphSteps", "can_record", "prompt_buckets", "row_buckets"]

_LOGGER = logging.getLogger(__name__)

_LEAST_CONTEXT = 4096  # tokens that the block tables of the smallest graphs hold
_CONTEXT_FACTOR = 4  # from one size of the block tables to the next
_LOGIT_BYTES = 256 << 20  # of all graphs together: steps with more drafts run op by op
_PROMPT_BUCKET = 64  # tokens between the sizes of steps with prompts


class CudaGraphs:
    """The `GraphBackend` of a GPU: `torch.cuda.CUDAGraph`s that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """`GraphBackend.capture`: run once, which compiles kernels, then record."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # another thread may call CUDA meanwhile: the engine's own does not, a library's may
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay

    def used_bytes(self) -> int:
        """`GraphBackend.used_bytes`."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        return int(total_bytes - free_bytes)


class _Graph(msgspec.Struct, frozen=True):
    """A captured step: where its inputs go, and what runs it."""

    inputs: StepInputs
    replay: Callable[[], None]


class _Results(msgspec.Struct, frozen=True):
    """What every graph writes, for the most tokens T and the most tokens with logits E."""

    hidden: Tensor  # [T, C]
    logits: Tensor  # [E, V] fp32
    sampled: Tensor  # [E] int64, the argmax, -1 where it is not finite
    aux_hidden: tuple[Tensor, ...]  # [T, C] each

    def write_(self, hidden: Tensor, logits: Tensor, aux_hidden: Sequence[Tensor]) -> None:
        """Copy the results of a step to the first rows."""
        num_tokens = hidden.shape[0]
        self.hidden[:num_tokens].copy_(hidden)
        self.logits[: logits.shape[0]].copy_(logits)
        for mine, one in zip(self.aux_hidden, aux_hidden, strict=True):
            mine[:num_tokens].copy_(one)


class _Prepared(msgspec.Struct, frozen=True):
    """A step to replay: its tokens, and which of them the logits of its graph belong to."""

    graph: _Graph
    num_tokens: int
    emitting: Sequence[int]


class GraphSteps:
    """`StepModel` of CUDA graphs, and of `EagerSteps` for all steps without one.

    `kv` has one block more than the pool, the scratch block.
    """

    def __init__(
        self,
        model: Decoder,
        kv: KVCache,
        block_size: int,
        adapters: Mapping[str, LoRAAdapter] | None,
        aux_layers: tuple[int, ...],
        options: GraphOptions,
    ) -> None:
        self._eager = EagerSteps(model, kv, block_size, adapters, aux_layers)
        self._model = model
        self._kv = with_torch_kv(kv)
        self._block_size = block_size
        self._adapters = {} if adapters is None else adapters
        self._aux_layers = aux_layers
        self._backend = options.backend
        self._num_slots = options.num_slots
        num_blocks = kv.keys[0].shape[0] - 1
        self._scratch_slot = num_blocks * block_size  # the first of the scratch block
        self._rows = row_buckets(options.num_slots)
        self._widths = _table_widths(model.max_model_len, block_size, num_blocks)
        self._device = torch_device(model.device)
        fitting = _LOGIT_BYTES // (4 * model.vocab_size)
        most_rows = self._rows[-1]
        self._most_emitting = max(most_rows, min(most_rows * options.max_width, fitting))
        self._prompt_tokens = prompt_buckets(options.max_prompt_tokens)
        self._most_tokens = max((self._most_emitting, *self._prompt_tokens))
        largest = StepSize(most_rows, self._most_emitting, self._widths[-1])
        prompts = [self._prompt_size(one) for one in self._prompt_tokens]
        most_elements = max(one.num_elements for one in (largest, *prompts))
        self._buffer = InputBuffer(most_elements, options.num_slots, self._device)
        self._max_width = options.max_width
        self._results: _Results | None = None
        self._graphs: dict[StepSize, _Graph] = {}
        self._retired: list[_Graph] = []  # they may still run, until the next capture has waited
        self._wanted = dict.fromkeys(self._common_sizes())
        self._lora: _LoRASlots | None = None
        self._prepared: _Prepared | None = None
        self._step_rows: Sequence[StepRow] = ()
        self._newest_logits: Tensor | None = None

    def _common_sizes(self) -> Iterator[StepSize]:
        """Captured without a step that needs them, the largest first."""
        yield from map(self._prompt_size, reversed(self._prompt_tokens))
        for num_rows in reversed(self._rows):
            for width in sorted({1, self._max_width}, reverse=True):
                if num_rows * width <= self._most_emitting:
                    yield StepSize(num_rows, num_rows * width, self._widths[0])

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self._step_rows = rows
        self._prepared = None
        if self._lora is not None:
            self._lora.forget(self._adapters)
        size = self._size_of(rows, slots)
        graph = None if size is None else self._graphs.get(size)
        if graph is None:
            if size is not None:
                self._wanted.setdefault(size)
            self._eager.prepare(rows, slots)
            self._take_pending_tokens(rows, slots)
            return
        packed = pack_rows(rows, slots, self._block_size, self._model.vocab_size)
        named = adapters_of(rows, self._adapters)
        groups = None
        if graph.inputs.size.has_lora:
            assert self._lora is not None
            groups = self._lora.groups(rows, named)
        self._buffer.fill(graph.inputs, packed, rows, slots, self._scratch_slot, groups)
        ends = packed.row_offsets.tolist()[1:]
        emitting: Sequence[int] = range(ends[-1])
        if graph.inputs.size.has_prompts:
            emitting = [end - 1 for row, end in zip(rows, ends, strict=True) if row.emits]
        self._prepared = _Prepared(graph, ends[-1], emitting)

    def _size_of(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> StepSize | None:
        """The smallest graph for the rows; None where there is none."""
        num_tokens, has_prompts = 0, False
        for row in rows:
            is_decode = row.emits and row.num_tokens == row.num_drafts + 1
            if row.parents or row.num_scored or (row.num_drafts and not is_decode):
                return None
            num_tokens += row.num_tokens
            has_prompts |= not is_decode
        num_blocks = max(slot.num_blocks for slot in slots)
        if has_prompts:
            size = None if any([row.num_drafts for row in rows]) else self._prompts_of(num_tokens)
        else:
            size = self._decode_of(len(rows), num_tokens, num_blocks)
        if size is None or size.table_width < num_blocks:
            return None
        if any([row.adapter for row in rows]):
            return replace(size, has_lora=True) if self._has_lora_table(rows) else None
        return size

    def _decode_of(self, num_rows: int, num_tokens: int, num_blocks: int) -> StepSize | None:
        """The size for decode rows."""
        num_rows_of = next((one for one in self._rows if one >= num_rows), None)
        table_width = next((one for one in self._widths if one >= num_blocks), None)
        if num_rows_of is None or table_width is None:
            return None
        width = -(-num_tokens // num_rows_of)
        if width > self._max_width or num_rows_of * width > self._most_emitting:
            return None
        return StepSize(num_rows_of, num_rows_of * width, table_width)

    def _prompts_of(self, num_tokens: int) -> StepSize | None:
        """The size for rows of which some compute prompts."""
        found = next((one for one in self._prompt_tokens if one >= num_tokens), None)
        return None if found is None else self._prompt_size(found)

    def _prompt_size(self, num_tokens: int) -> StepSize:
        """For as many rows as there can be, with the least contexts: longer ones need more memory
        for attention.
        """
        num_rows = min(self._rows[-1], num_tokens)
        return StepSize(num_rows, num_tokens, self._widths[0], has_prompts=True)

    def _has_lora_table(self, rows: Sequence[StepRow]) -> bool:
        """Make the table of adapters, or a larger one, whose graphs are captured again."""
        named = adapters_of(rows, self._adapters)
        if self._lora is None or not self._lora.fits(named):
            make = self._model.ops.adapter_table
            if make is None:
                return False
            of_all = list(self._adapters.values())
            self._lora = _LoRASlots(make(of_all, self._num_slots + 1), self._num_slots)
            self._retired += [one for size, one in self._graphs.items() if size.has_lora]
            self._graphs = {size: one for size, one in self._graphs.items() if not size.has_lora}
        return True

    def _take_pending_tokens(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """Input tokens that only the device knows, for a step op by op."""
        places, of_slots = [], []
        first = 0
        for row, slot in zip(rows, slots, strict=True):
            if is_pending(row, slot):
                places.append(first)
                of_slots.append(row.slot)
            first += row.num_tokens
        if places:
            last_tokens = self._buffer.last_tokens[self._index(of_slots)]
            self._eager.replace_tokens(self._index(places), last_tokens)

    @torch.inference_mode()
    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[Tensor, AnyTensor]:
        """`StepModel.run`."""
        if self._prepared is None:
            hidden, logits = self._eager.run(emitting, every_token, features)
            self._newest_logits = logits if isinstance(logits, Tensor) else None
            return hidden, logits
        assert features is None, "only models of drafts have features"
        prepared, results = self._prepared, self._results
        assert results is not None, "a graph was captured"
        inputs = prepared.graph.inputs
        self._buffer.send(inputs)
        prepared.graph.replay()
        hidden, logits = results.hidden[: prepared.num_tokens], results.logits
        num_emitting = len(prepared.emitting)
        chosen = self._chosen(emitting)
        if inputs.emitting is not None and not every_token:
            hidden = hidden[inputs.emitting[:num_emitting]]
        if chosen is None:
            return hidden, logits[:num_emitting]
        return hidden if every_token else hidden[chosen], logits[chosen]

    def _chosen(self, emitting: Sequence[EmittingToken]) -> Tensor | None:
        """Which of the logits of the graph these tokens have; None for all of them, in order: only
        a failed row emits nothing.
        """
        assert self._prepared is not None, "a graph runs"
        ends = list(accumulate(row.num_tokens for row in self._step_rows))
        tokens = [ends[row] - 1 - num_after for row, num_after in emitting]
        if tokens == list(self._prepared.emitting):
            return None
        place_of = {token: place for place, token in enumerate(self._prepared.emitting)}
        return self._index([place_of[token] for token in tokens])

    def _index(self, places: Sequence[int]) -> Tensor:
        """Places [n] on the device, which is not waited for."""
        return integers_on(self._device, places, torch.int64)

    @torch.inference_mode()
    def argmax(self, emitting: Sequence[EmittingToken]) -> Tensor:
        """The argmax [E] of each emitting token of the step that ran, -1 where it is not finite, on
        the device, which keeps them as the last tokens of their rows' slots. No row has drafts.
        Valid until the next step.
        """
        if self._prepared is not None and self._results is not None:
            chosen = self._chosen(emitting)
            sampled = self._results.sampled
            return sampled[: len(emitting)] if chosen is None else sampled[chosen]
        assert self._newest_logits is not None, "a step has run"
        return _sample_(self._newest_logits, self._slots_of(emitting), self._buffer.last_tokens)

    @torch.inference_mode()
    def keep_tokens(self, emitting: Sequence[EmittingToken], token_ids: Tensor) -> None:
        """Make tokens [E] on the device the last ones of their rows' slots. In place of a negative
        one, which ends its sequence, the next step reads token 0.
        """
        slots = self._slots_of(emitting)
        self._buffer.last_tokens.index_copy_(0, slots, token_ids.clamp(min=0))

    def _slots_of(self, emitting: Sequence[EmittingToken]) -> Tensor:
        return self._index([self._step_rows[row].slot for row, _ in emitting])

    def aux_hidden_states(self) -> tuple[Tensor, ...]:
        """`StepModel.aux_hidden_states`."""
        if self._prepared is None:
            return self._eager.aux_hidden_states()
        assert self._results is not None
        return tuple([one[: self._prepared.num_tokens] for one in self._results.aux_hidden])

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        return self._eager.logits(hidden, adapter)

    @torch.inference_mode()
    def capture_next(self) -> bool:
        """Capture one more graph; False if none is needed. A size that fails stays op by op."""
        size = next((one for one in self._wanted if one not in self._graphs), None)
        if size is None:
            return False
        del self._wanted[size]
        started_s, before_bytes = time.monotonic(), self._backend.used_bytes()
        self._graphs[size] = self._capture(size)
        self._retired.clear()
        grown_bytes = self._backend.used_bytes() - before_bytes
        _LOGGER.info(
            "captured a CUDA graph of %d rows, %d tokens%s, %d blocks a row: %.0f ms, %.0f MB",
            size.num_rows,
            size.num_tokens,
            " with prompts" if size.has_prompts else "",
            size.table_width,
            1e3 * (time.monotonic() - started_s),
            max(0, grown_bytes) / 1e6,
        )
        return True

    def stop_capturing(self) -> None:
        """Capture nothing more; what is captured stays."""
        self._wanted.clear()

    def _capture(self, size: StepSize) -> _Graph:
        inputs = self._buffer.inputs(size)
        self._buffer.fill_padding(inputs, self._scratch_slot)
        self._buffer.send(inputs)
        if self._results is None:
            self._results = self._new_results(self._compute(inputs))
        results = self._results

        def run() -> None:
            results.write_(*self._compute(inputs))
            logits = results.logits[: size.num_emitting]
            sampled = _sample_(logits, inputs.row_slots, self._buffer.last_tokens)
            results.sampled[: size.num_emitting].copy_(sampled)

        return _Graph(inputs, self._backend.capture(run))

    def _compute(self, inputs: StepInputs) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The forward pass over the tensors of `inputs`, and the logits of its emitting tokens."""
        layout = PagedLayout(
            inputs.positions,
            inputs.slot_mapping,
            (),
            (),
            inputs.block_tables,
            self._block_size,
            lengths=RowLengths(inputs.row_offsets),
        )
        emitting, lora, emitting_lora = inputs.emitting, None, None
        if inputs.size.has_lora:
            assert self._lora is not None
            lora = emitting_lora = self._lora.table.mapping(inputs.adapter_slots)
            if emitting is not None:
                emitting_lora = self._lora.table.mapping(inputs.adapter_slots[emitting])
        token_ids = inputs.all_ids.index_select(0, inputs.token_index)
        batch = ForwardBatch(token_ids, layout, None, lora)
        hidden, aux_hidden = self._model.forward_with_aux(batch, self._kv, self._aux_layers)
        emitted = hidden if emitting is None else hidden[emitting]
        logits = self._model.logits(emitted, emitting_lora)
        assert isinstance(logits, Tensor)
        return hidden, logits, aux_hidden

    def _new_results(self, computed: tuple[Tensor, Tensor, tuple[Tensor, ...]]) -> _Results:
        def empty(one: Tensor) -> Tensor:
            return one.new_empty(self._most_tokens, *one.shape[1:])

        hidden, logits, aux_hidden = computed
        sampled = torch.zeros(self._most_emitting, dtype=torch.int64, device=self._device)
        of_emitting = logits.new_empty(self._most_emitting, logits.shape[1])
        return _Results(empty(hidden), of_emitting, sampled, tuple(map(empty, aux_hidden)))


def can_record(model: object, kv: KVCache) -> bool:
    """Whether launches of the model depend on shapes only."""
    if not isinstance(model, Decoder) or not model.ops.reads_lengths:
        return False
    # computed one by one, experts read back how many tokens each of them gets
    mixtures = [layer.mlp for layer in model.weights.layers if isinstance(layer.mlp, MoEWeights)]
    if any([model.ops.experts is None or one.experts.data is None for one in mixtures]):
        return False
    keys = with_torch_kv(kv).keys[0]
    return keys.dtype != torch.int8 or keys.shape[3] % SCALE_BYTES == 0


def row_buckets(most: int) -> tuple[int, ...]:
    """Numbers of rows with a graph: 1, 2, 4, 8, and multiples of 8 up to `most` and beyond it."""
    if most < 1:
        raise EngineError(f"a step has {most} rows, graphs need at least 1")
    small = [one for one in (1, 2, 4) if one < most]
    return (*small, *range(8, most, 8), most)


def prompt_buckets(most: int) -> tuple[int, ...]:
    """Numbers of tokens of steps with prompts that have a graph, up to `most`."""
    return (*range(_PROMPT_BUCKET, most, _PROMPT_BUCKET), most) if most else ()


def _table_widths(max_model_len: int, block_size: int, num_blocks: int) -> tuple[int, ...]:
    """Blocks per row of the graphs' block tables, up to what the longest sequence needs."""
    longest = min(-(-max_model_len // block_size), num_blocks)
    widths = []
    context = _LEAST_CONTEXT
    while context // block_size < longest:
        widths.append(context // block_size)
        context *= _CONTEXT_FACTOR
    return (*widths, longest)


def _sample_(logits: Tensor, slots: Tensor, last_tokens: Tensor) -> Tensor:
    """The argmax [E] of logits [E, V], -1 where it is not finite; they become the last tokens of
    these slots [E]. Ties go to the lowest id; NaN counts as the largest value.
    """
    highest, token_ids = logits.max(1)
    last_tokens.index_copy_(0, slots, token_ids)
    return token_ids.masked_fill((highest - highest) != 0.0, -1)


class _LoRASlots:
    """Which adapter is in which place of a table; place 0 is none."""

    def __init__(self, table: AdapterTable, num_places: int) -> None:
        self.table = table
        self._num_places = num_places
        self._placed: dict[str, tuple[LoRAAdapter, int]] = {}

    def fits(self, adapters: Mapping[str, LoRAAdapter]) -> bool:
        """Whether the table has room for each of these."""
        return all(self.table.fits(adapter) for adapter in adapters.values())

    def groups(self, rows: Sequence[StepRow], named: Mapping[str, LoRAAdapter]) -> list[int]:
        """The place of each row's adapter; adapters that are not there yet are put there."""
        placed = self._placed
        for name, adapter in named.items():
            if name in placed:
                continue
            used = {place for _, place in placed.values()}
            place = next((one for one in range(1, self._num_places + 1) if one not in used), None)
            if place is None:
                place = placed.pop(next(one for one in placed if one not in named))[1]
            self.table.set_(place, adapter)
            placed[name] = adapter, place
        return [placed[row.adapter][1] if row.adapter else 0 for row in rows]

    def forget(self, loaded: Mapping[str, LoRAAdapter]) -> None:
        """Drop adapters that are no longer loaded, so that their memory is freed."""
        self._placed = {
            name: one for name, one in self._placed.items() if loaded.get(name) is one[0]
        }
