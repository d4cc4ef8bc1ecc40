"""Steps recorded as CUDA graphs: a step is one copy of its inputs and one replay.

The GPU's counterpart of `runtime.steps.captured`. A graph has a fixed number of rows, of tokens,
and of blocks per row; everything else of a step is data: token ids, positions, lengths, block
tables, adapters, and which tokens of prompts get logits. They are filled into one host buffer and
copied at once. A step uses the smallest captured graph that it fits into. Padding tokens belong to
no row and write their keys and values to the scratch block, the last one of the KV cache; every bit
of the other tokens is the same as op by op.

Graphs are captured while the executor is idle (`capture_next`), those of the common sizes before
the engine serves. The size that a step needs and does not have comes next. A step that no graph
holds, and a longer prompt, runs op by op (`EagerSteps`). All graphs share their memory, and the
tensors of their results.

Opened by `runtime.steps.opening`. What a graph is, the `GraphBackend` decides, so that the tests
check all of this on a CPU.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from quickstep.errors import EngineError
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_weights import MoEWeights
from quickstep.model.interface import ForwardBatch
from quickstep.ops.table import AdapterTable, KVCache, LoRAAdapter, PagedLayout, RowLengths
from quickstep.ops.tensors import SCALE_BYTES, AnyTensor, integers_on, is_int4, torch_device
from quickstep.ops.triton.sampling.argmax import argmax_
from quickstep.runtime.slots import Slot
from quickstep.runtime.steps.eager import EagerSteps, pack_rows, with_torch_kv
from quickstep.runtime.steps.inputs import (
    InputBuffer,
    StepInputs,
    StepNeeds,
    StepSize,
    is_pending,
)
from quickstep.runtime.steps.step_model import EmittingToken, GraphOptions, adapters_of
from quickstep.types import StepRow

if TYPE_CHECKING:
    from quickstep.runtime.sampling.device_sampler import DeviceSampler
    from quickstep.runtime.sampling.recorded_sampling import RecordedSampling

_LOGGER = logging.getLogger(__name__)

_LEAST_CONTEXT = 4096  # tokens that the block tables of the smallest graphs hold
_CONTEXT_FACTOR = 4  # from one size of the block tables to the next
_LOGIT_BYTES = 256 << 20  # of all graphs together: steps with more drafts run op by op
_PROMPT_BUCKET = 64  # tokens between the sizes of steps with prompts
_FEW_ROWS = 8  # sizes of as many rows are captured first
# A step of as many tokens takes as long as one of a single token: it reads the weights. A step does
# not use a graph of more tokens if it has less than half of them.
_FREE_TOKENS = 64
_LEAST_FREE_BYTES = 512 << 20  # no graph is captured with less, so that steps op by op still run


class CudaGraphs:
    """The `GraphBackend` of a GPU: `torch.cuda.CUDAGraph`s that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """`GraphBackend.capture`: run once, which compiles kernels, then record.

        Not through `torch.cuda.graph`, which empties the allocator's caches: steps under load would
        pay for each capture.
        """
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # tensors that it frees would call CUDA while the stream is captured
        try:
            with torch.cuda.stream(self._stream):
                # another thread may call CUDA meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def free_bytes(self) -> int:
        """`GraphBackend.free_bytes`."""
        return int(torch.cuda.mem_get_info(self._device)[0])


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
        prompts = [self._prompt_size(size) for size in self._prompt_tokens]
        most_elements = max(step_size.num_elements for step_size in (largest, *prompts))
        self._buffer = InputBuffer(most_elements, options.num_slots, self._device)
        self._max_width = options.max_width
        self._results: _Results | None = None
        self._graphs: dict[StepSize, _Graph] = {}
        self._retired: list[_Graph] = []  # they may still run, until the next capture has waited
        self._common = tuple(self._common_sizes())
        self._wanted = OrderedDict.fromkeys(self._common)
        self._is_capturing = True
        self.num_missed = 0  # steps that ran op by op for want of a graph, since the last capture
        self._lora: _LoRASlots | None = None
        self._sampler: DeviceSampler | None = None
        self._sampling: RecordedSampling | None = None
        self._prepared: _Prepared | None = None
        self._step_rows: Sequence[StepRow] = ()
        self._newest_logits: Tensor | None = None

    def record_sampling(self, sampler: DeviceSampler) -> None:
        """Capture the sampling of rows as well, as far as `RecordedSampling` has it. Idempotent."""
        self._sampler = sampler

    def _common_sizes(self) -> Iterator[StepSize]:
        """Captured without a step that needs them, in this order: few rows, then the largest first,
        whose memory the others use too; for longer contexts, which need wider block tables, two
        sizes that hold the others.
        """
        few = [size for size in self._rows if size <= _FEW_ROWS]
        for num_rows in (*few, *reversed(self._rows[len(few) :])):
            for width in sorted({1, self._max_width}):
                if num_rows * width <= self._most_emitting:
                    yield StepSize(num_rows, num_rows * width, self._widths[0])
        yield from map(self._prompt_size, reversed(self._prompt_tokens))
        for table_width in self._widths[1:]:
            for num_rows in {few[-1]: None, self._rows[-1]: None}:
                yield StepSize(num_rows, num_rows, table_width)

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """`StepModel.prepare`."""
        self._step_rows = rows
        self._prepared = None
        if self._lora is not None:
            self._lora.forget(self._adapters)
        needs = self._needs_of(rows, slots)
        graph = None if needs is None else self._graph_for(needs)
        if graph is None:
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

    def _needs_of(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> StepNeeds | None:
        """What a graph for the rows must hold; None where there is no such graph."""
        num_tokens, has_prompts = 0, False
        for row in rows:
            is_decode = row.emits and row.num_tokens == row.num_drafts + 1
            if row.parents or row.num_scored or (row.num_drafts and not is_decode):
                return None
            num_tokens += row.num_tokens
            has_prompts |= not is_decode
        named = adapters_of(rows, self._adapters)
        if named and not self._has_lora_table(named):
            return None
        return StepNeeds(
            len(rows),
            num_tokens,
            max([slot.num_blocks for slot in slots]),
            bool(named),
            has_prompts,
            any([row.num_drafts for row in rows]),
        )

    def _graph_for(self, needs: StepNeeds) -> _Graph | None:
        """The graph of the size for these rows; until that is captured, the smallest one that holds
        them.
        """
        size = self._size_for(needs)
        if size is not None and (graph := self._graphs.get(size)) is not None:
            return graph
        if size is not None and self._is_capturing:
            self._wanted[size] = None
            self._wanted.move_to_end(size, last=False)
        most_tokens = max(_FREE_TOKENS, 2 * needs.num_tokens)
        holding = [
            graph
            for graph in self._graphs
            if graph.num_tokens <= most_tokens and graph.holds(needs)
        ]
        if holding:
            return self._graphs[min(holding, key=_work)]
        self.num_missed += size in self._wanted
        return None

    def _size_for(self, needs: StepNeeds) -> StepSize | None:
        """The size to capture for these rows; None where there is none."""
        if needs.has_prompts:
            size = None if needs.has_drafts else self._prompts_of(needs.num_tokens)
        else:
            size = self._decode_of(needs.num_rows, needs.num_tokens, needs.num_blocks)
        if size is None or size.table_width < needs.num_blocks:
            return None
        return replace(size, has_lora=needs.has_lora) if needs.has_lora else size

    def _decode_of(self, num_rows: int, num_tokens: int, num_blocks: int) -> StepSize | None:
        """The size for decode rows."""
        num_rows_of = next((size for size in self._rows if size >= num_rows), None)
        table_width = next((width for width in self._widths if width >= num_blocks), None)
        if num_rows_of is None or table_width is None:
            return None
        width = -(-num_tokens // num_rows_of)
        if width > self._max_width or num_rows_of * width > self._most_emitting:
            return None
        return StepSize(num_rows_of, num_rows_of * width, table_width)

    def _prompts_of(self, num_tokens: int) -> StepSize | None:
        """The size for rows of which some compute prompts."""
        found = next((size for size in self._prompt_tokens if size >= num_tokens), None)
        return None if found is None else self._prompt_size(found)

    def _prompt_size(self, num_tokens: int) -> StepSize:
        """For as many rows as there can be, with the least contexts: longer ones need more memory
        for attention.
        """
        num_rows = min(self._rows[-1], num_tokens)
        return StepSize(num_rows, num_tokens, self._widths[0], has_prompts=True)

    def _has_lora_table(self, named: Mapping[str, LoRAAdapter]) -> bool:
        """Make the table of adapters, or a larger one, whose graphs are captured again."""
        if self._lora is None or not self._lora.fits(named):
            make = self._model.ops.adapter_table
            if make is None:
                return False
            of_all = list(self._adapters.values())
            self._lora = _LoRASlots(make(of_all, self._num_slots + 1), self._num_slots)
            self._retired += [one for size, one in self._graphs.items() if size.has_lora]
            self._graphs = {size: one for size, one in self._graphs.items() if not size.has_lora}
            if self._is_capturing:
                self._wanted |= {replace(size, has_lora=True): None for size in self._common}
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
        rows = self._logits_rows(emitting)
        is_all = rows == list(range(len(self._prepared.emitting)))
        return None if is_all else self._index(rows)

    def _logits_rows(self, emitting: Sequence[EmittingToken]) -> list[int]:
        """The rows of the graph's logits that these tokens have."""
        assert self._prepared is not None, "a graph runs"
        ends = list(accumulate([row.num_tokens for row in self._step_rows]))
        tokens = [ends[row] - 1 - num_after for row, num_after in emitting]
        if not self._prepared.graph.inputs.size.has_prompts:
            return tokens
        place_of = {token: place for place, token in enumerate(self._prepared.emitting)}
        return [place_of[token] for token in tokens]

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
        slots = self._slots_of(emitting)
        token_ids = torch.empty_like(slots)
        return argmax_(self._newest_logits, slots, self._buffer.last_tokens, token_ids)

    @torch.inference_mode()
    def sample(self, emitting: Sequence[EmittingToken], slots: Sequence[Slot]) -> Tensor | None:
        """As `argmax`, sampled as their sequences say; `slots` are those of the rows. Negative
        tokens are those of `ops.triton.sampling.sample`. None where that is not captured.
        """
        sampling = self._sampling
        if self._prepared is None or sampling is None or not sampling.holds(slots):
            return None
        rows = [self._step_rows[row] for row, _ in emitting]
        places = [row.slot for row in rows]
        positions = [row.output_position for row in rows]
        token_ids = sampling.sample(slots, places, positions, self._logits_rows(emitting))
        self.num_missed += token_ids is None and sampling.wants_capture
        return token_ids

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
        return tuple([hidden[: self._prepared.num_tokens] for hidden in self._results.aux_hidden])

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`StepModel.move_kv`."""
        self._eager.move_kv(pairs)

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """`StepModel.logits`."""
        return self._eager.logits(hidden, adapter)

    def capture_next(self) -> bool:
        """Capture one more graph; False if none is needed. A size that fails stays op by op."""
        self.num_missed = 0
        if self._lora is None and self._adapters and self._is_capturing:
            self._has_lora_table(self._adapters)
        if not self.wants_capture:
            return False
        free_bytes = self._backend.free_bytes()
        if free_bytes < _LEAST_FREE_BYTES:
            _LOGGER.warning(
                "no further CUDA graphs than %d: %.0f MB of memory are free",
                self.num_captured,
                free_bytes / 1e6,
            )
            self.stop_capturing()
            return False
        if self._results is not None and self._wants_sampling:
            self._capture_sampling(self._results.logits)
            return True
        size, _ = self._wanted.popitem(last=False)
        started_s = time.monotonic()
        self._graphs[size] = self._capture(size)
        self._retired.clear()
        _LOGGER.debug(
            "captured a CUDA graph of %d rows, %d tokens%s%s, %d blocks a row: %.0f ms, %.0f MB",
            size.num_rows,
            size.num_tokens,
            " with prompts" if size.has_prompts else "",
            " with adapters" if size.has_lora else "",
            size.table_width,
            1e3 * (time.monotonic() - started_s),
            max(0, free_bytes - self._backend.free_bytes()) / 1e6,
        )
        return True

    @property
    def num_captured(self) -> int:
        """Graphs that steps can use."""
        return len(self._graphs)

    @property
    def wants_capture(self) -> bool:
        """Whether `capture_next` has something to capture."""
        return bool(self._wanted) or (self._results is not None and self._wants_sampling)

    @property
    def _wants_sampling(self) -> bool:
        if self._sampling is None:
            return self._sampler is not None and self._is_capturing
        return self._sampling.wants_capture

    def stop_capturing(self) -> None:
        """Capture nothing more; what is captured stays."""
        self._is_capturing = False
        self._wanted.clear()
        if self._sampling is not None:
            self._sampling.stop_capturing()

    @torch.inference_mode()
    def _capture_sampling(self, logits: Tensor) -> None:
        if self._sampling is None:
            assert self._sampler is not None, "sampling is wanted"
            last_tokens = self._buffer.last_tokens
            self._sampling = self._sampler.recorded(logits, last_tokens, self._rows, self._backend)
        self._sampling.capture_next()

    @torch.inference_mode()
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
            sampled = results.sampled[: size.num_emitting]
            argmax_(logits, inputs.row_slots, self._buffer.last_tokens, sampled)

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


def _work(size: StepSize) -> tuple[int, ...]:
    """Orders sizes by the time that their steps take."""
    rows = size.num_emitting, size.num_rows
    return size.has_lora, size.num_tokens, size.table_width, *rows, size.has_prompts


def can_record(model: object, kv: KVCache) -> bool:
    """Whether launches of the model depend on shapes only."""
    if not isinstance(model, Decoder) or not model.ops.reads_lengths:
        return False
    # computed one by one, experts read back how many tokens each of them gets
    mixtures = [layer.mlp for layer in model.weights.layers if isinstance(layer.mlp, MoEWeights)]
    if any([model.ops.experts is None or mixture.experts.data is None for mixture in mixtures]):
        return False
    keys = with_torch_kv(kv).keys[0]
    if is_int4(keys.dtype):
        return False
    return keys.dtype != torch.int8 or keys.shape[3] % SCALE_BYTES == 0


def row_buckets(most: int) -> tuple[int, ...]:
    """Numbers of rows with a graph: 1, 2, 4, 8, and multiples of 8 up to `most` and beyond it."""
    if most < 1:
        raise EngineError(f"a step has {most} rows, graphs need at least 1")
    small = [size for size in (1, 2, 4) if size < most]
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
            place = next(
                (number for number in range(1, self._num_places + 1) if number not in used), None
            )
            if place is None:
                place = placed.pop(next(other for other in placed if other not in named))[1]
            self.table.set_(place, adapter)
            placed[name] = adapter, place
        return [placed[row.adapter][1] if row.adapter else 0 for row in rows]

    def forget(self, loaded: Mapping[str, LoRAAdapter]) -> None:
        """Drop adapters that are no longer loaded, so that their memory is freed."""
        self._placed = {
            name: one for name, one in self._placed.items() if loaded.get(name) is one[0]
        }
