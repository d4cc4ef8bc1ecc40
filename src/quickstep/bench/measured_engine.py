"""The engine that a benchmark measures: opening it, running requests on it, timing its kernels.

A checkpoint is opened as in every other command. A shape gets random weights and an artificial
vocabulary in memory, through the same planning, packing and assembly.

The overhead of a step is its time without the time in kernels. Native kernels count their own time
(`OpTable.kernel_s`); for any other model, the time inside `forward` and `logits` is counted, which
includes torch's dispatch.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import tokenizers
import torch
from torch import Tensor

from quickstep.bench.work import expert_fraction
from quickstep.config import EngineConfig
from quickstep.engine.assembly import (
    LoadProgress,
    describe,
    load_weights,
    set_threads,
    wire_engine,
)
from quickstep.engine.engine import Engine
from quickstep.engine.loaded_model import LoadedModel
from quickstep.engine.machine import places_for
from quickstep.engine.memory_plan import measured_plan, plan_for
from quickstep.errors import EngineError
from quickstep.model.checkpoint.fingerprint import fingerprint_with_kv
from quickstep.model.checkpoint.placement import choose_device, choose_dtype
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.decoder_weights import (
    AttentionWeights,
    HybridWeights,
    LatentWeights,
    LayerWeights,
    MixerWeights,
    MLPWeights,
)
from quickstep.model.interface import ForwardBatch, KVLayout, Model
from quickstep.model.sizing import MemoryPlan, weight_bytes
from quickstep.model.spec import parse_spec, with_context
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.table import KVCache, LoRAMapping, OpTable
from quickstep.ops.tensors import AnyTensor, Device, torch_device, torch_dtype, use_device
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.sampling_params import SamplingParams
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import FinishReason

_NOT_COUNTED = "kernels are not timed (see --profile)"


class MeasuredEngine(msgspec.Struct, frozen=True):
    """An engine that is not started, its model, and a clock of its kernels.

    Attributes:
        kernels: The name of the kernels, such as `native-avx512`.
        kernel_s: Seconds spent in kernels so far; `kernel_how` says which calls are counted.
        num_threads: torch's number of threads, which the kernels use too.
        quantization: `LoadConfig.quantization`.
        kv_dtype: `CacheConfig.kv_dtype`.
    """

    engine: Engine
    spec: ModelSpec
    model: Model
    kernels: str
    kernel_s: Callable[[], float]
    kernel_how: str
    num_threads: int
    quantization: str | None = None
    kv_dtype: str = "auto"

    @property
    def counts_kernels(self) -> bool:
        """Whether `kernel_s` counts anything."""
        return self.kernel_how != _NOT_COUNTED

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return torch_dtype(self.model.kv_layout.dtype)

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of the matrix products in the layers: int8 for quantized weights."""
        return self.dtype if self.quantization is None else torch.int8

    def weight_bytes_read(self, batch: int) -> float:
        """Bytes of packed weights that a decode step of `batch` rows reads, each once."""
        if not isinstance(self.model, Decoder):
            return weight_bytes(self.spec, self.dtype.itemsize, self.quantization)
        weights = self.model.weights
        layers = sum(
            _bytes_read(layer, expert_fraction(self.spec, kind, batch))
            for layer, kind in zip(weights.layers, self.spec.layers, strict=True)
        )
        return layers + (0 if weights.lm_head is None else weights.lm_head.nbytes)


def open_checkpoint(config: EngineConfig, progress: LoadProgress | None = None) -> MeasuredEngine:
    """Open the checkpoint of `config`. Raises ConfigError."""
    started_s = time.monotonic()
    set_threads(config.load.num_threads)
    loaded = load_weights(config, progress)
    description = describe(loaded, time.monotonic() - started_s)
    return _assemble(config, loaded.spec, loaded.model, loaded.plan, description)


def open_shape(
    config: EngineConfig,
    name: str,
    shape: Mapping[str, object],
    seed: int,
    progress: LoadProgress | None = None,
) -> MeasuredEngine:
    """Make random weights for a shape (the content of a `config.json`). Raises ConfigError."""
    started_s = time.monotonic()
    set_threads(config.load.num_threads)
    spec = with_context(parse_spec(shape), config.max_model_len, config.allow_long_context)
    device = torch_device(choose_device(config.load.device))
    use_device(device)
    dtype = torch_dtype(choose_dtype(config.load.dtype, spec))
    isa = os.environ.get("QUICKSTEP_CPU_ISA")
    places = places_for(config.load.pin_threads)
    ops = resolve_ops(device, config.load.kernels, config.load.num_threads, isa, places)
    plan = plan_for(config, spec, dtype, device, ops.scratch_bytes)
    values = RandomValues(dtype, device, seed, config.load.quantization)
    model = random_model(spec, ops, values, plan.max_model_len, progress)
    description = LoadedModel(
        name=name,
        fingerprint=fingerprint_with_kv(model, model.kv_layout.stored_as(config.cache.kv_dtype)),
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        tokenizer=artificial_tokenizer(spec.vocab_size),
        load_s=time.monotonic() - started_s,
        memory_plan=plan,
    )
    return _assemble(config, spec, model, plan, description)


def artificial_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level vocabulary in which token i reads as i in hexadecimal, after a space."""
    vocabulary = {f"Ġ{token_id:x}": token_id for token_id in range(vocab_size)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(library)


def random_prompt(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Random token ids, so that two prompts have no block in common."""
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


class TokenArrival(msgspec.Struct, frozen=True):
    """Tokens that arrived together at `at_s`; the kernels had run for `kernel_s` by then."""

    at_s: float
    kernel_s: float
    num_tokens: int


class RequestTimes(msgspec.Struct, frozen=True):
    """When a finished request was submitted, and when its tokens arrived."""

    submitted_s: float
    arrivals: tuple[TokenArrival, ...]

    @property
    def time_to_first_token_s(self) -> float:
        """From submission to the first token."""
        return self.arrivals[0].at_s - self.submitted_s

    @property
    def time_per_output_token_s(self) -> float:
        """(end - first token) / (output tokens - 1); 0 for a single token."""
        num_gaps = self.num_tokens - 1
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / num_gaps if num_gaps else 0.0

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(arrival.num_tokens for arrival in self.arrivals)


async def run_request(
    measured: MeasuredEngine, prompt: Sequence[int], num_outputs: int
) -> RequestTimes:
    """Run a greedy request for exactly `num_outputs` tokens.

    Raises:
        EngineError: The request failed.
    """
    sampling = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    submitted_s = time.perf_counter()
    arrivals = []
    async with measured.engine.generate(prompt, sampling) as stream:
        async for delta in stream:
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineError(f"a request of the benchmark failed: {delta.error}")
            if delta.token_ids:
                arrivals.append(
                    TokenArrival(time.perf_counter(), measured.kernel_s(), len(delta.token_ids))
                )
    times = RequestTimes(submitted_s, tuple(arrivals))
    if times.num_tokens != num_outputs:
        raise EngineError(f"a request gave {times.num_tokens} tokens, {num_outputs} were expected")
    return times


def with_kernel_clock(
    model: Model, clock: Callable[[], float]
) -> tuple[Model, Callable[[], float], str]:
    """The model to run, a function that returns its kernel seconds so far, and what they count."""
    native_s = model.ops.kernel_s if isinstance(model, Decoder) else None
    if native_s is not None:
        return model, native_s, "native kernels"
    if model.device.type == "cuda" and model.ops.reads_lengths:
        # a clock inside the model would keep its steps from becoming CUDA graphs
        return model, lambda: 0.0, _NOT_COUNTED
    timed = TimedModel(model, clock)
    return timed, timed.busy_s, "model.forward and model.logits"


class TimedModel:
    """A `Model` that times its calls; on a GPU it waits for their end."""

    def __init__(self, model: Model, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._busy_s = 0.0

    def busy_s(self) -> float:
        """Seconds inside `forward` and `logits` so far."""
        return self._busy_s

    @property
    def kv_layout(self) -> KVLayout:
        """`Model.kv_layout`."""
        return self._model.kv_layout

    @property
    def ops(self) -> OpTable:
        """`Model.ops`."""
        return self._model.ops

    @property
    def vocab_size(self) -> int:
        """`Model.vocab_size`."""
        return self._model.vocab_size

    @property
    def max_model_len(self) -> int:
        """`Model.max_model_len`."""
        return self._model.max_model_len

    @property
    def device(self) -> torch.device | Device:
        """`Model.device`."""
        return self._model.device

    @property
    def fingerprint(self) -> str:
        """`Model.fingerprint`."""
        return self._model.fingerprint

    @property
    def exact(self) -> bool:
        """`Model.exact`."""
        return self._model.exact

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        """`Model.forward`."""
        started = self._clock()
        hidden = self._model.forward(batch, kv)
        self._count_since(started)
        return hidden

    def logits(self, hidden: AnyTensor, lora: LoRAMapping | None = None) -> AnyTensor:
        """`Model.logits`."""
        started = self._clock()
        logits = self._model.logits(hidden, lora)
        self._count_since(started)
        return logits

    def _count_since(self, started: float) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()
        self._busy_s += self._clock() - started


def _assemble(
    config: EngineConfig,
    spec: ModelSpec,
    model: Model,
    plan: MemoryPlan,
    description: LoadedModel,
) -> MeasuredEngine:
    kv_layout = model.kv_layout.stored_as(config.cache.kv_dtype)
    plan = measured_plan(config, model, kv_layout, plan)
    block_size = config.cache.block_size
    kv = allocate_kv(kv_layout, plan.num_blocks, block_size, model.device, plan.states)
    timed, kernel_s, kernel_how = with_kernel_clock(model, time.perf_counter)
    return MeasuredEngine(
        engine=wire_engine(config, timed, kv, plan, description),
        spec=spec,
        model=model,
        kernels=model.ops.name if isinstance(model, Decoder) else "transformers",
        kernel_s=kernel_s,
        kernel_how=kernel_how,
        num_threads=torch.get_num_threads(),
        quantization=config.load.quantization,
        kv_dtype=config.cache.kv_dtype,
    )


def _bytes_read(layer: LayerWeights, used_fraction: float) -> float:
    mixer, mlp = _mixer_bytes(layer.mixer), layer.mlp
    if mlp is None:
        return mixer
    if isinstance(mlp, MLPWeights):
        return mixer + mlp.gate_up.nbytes + mlp.down_proj.nbytes
    shared = 0 if mlp.shared is None else mlp.shared.gate_up.nbytes + mlp.shared.down_proj.nbytes
    return mixer + mlp.router.nbytes + used_fraction * mlp.experts.nbytes + shared


def _mixer_bytes(mixer: MixerWeights | None) -> int:
    if mixer is None:
        return 0
    if isinstance(mixer, HybridWeights):
        return _mixer_bytes(mixer.attention) + _mixer_bytes(mixer.state)
    if isinstance(mixer, AttentionWeights | LatentWeights):
        return mixer.nbytes
    return mixer.in_proj.nbytes + mixer.out_proj.nbytes
