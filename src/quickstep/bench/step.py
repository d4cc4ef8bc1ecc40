"""`quickstep bench step`: times of a decode step and a prefill, and the machine's limits.

Each repeat measures the memory bandwidth, decodes, measures the arithmetic peak, and prefills: the
speed of a CPU may change over time, so a limit is measured next to what is compared with it. A
GPU's limits are known before the engine opens, which captures graphs while it has no step. All
requests run on the live engine, with scheduling, sampling, detokenizing and streaming.

    decode    requests decode together; the time of a step is that between two tokens of one stream
    depth     the same after longer prompts, in turns with it: what a long context adds
    overhead  that time without the time in kernels: Python, small operations of torch, sampling,
              scheduling and streaming
    prefill   one new prompt at batch size 1, from submission to its first token
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quickstep.bench.limits import Limits
from quickstep.bench.measured_engine import (
    MeasuredEngine,
    RequestTimes,
    random_prompt,
    run_request,
)
from quickstep.bench.repeats import RoundDone, repeated
from quickstep.bench.work import decode_kv_bytes, prefill_flops
from quickstep.config import CacheConfig, EngineConfig
from quickstep.errors import ConfigError, EngineError
from quickstep.model.sizing import kv_head_bytes

_SLACK = 4  # steps in which some requests of the batch have not started or have ended


class StepOptions(msgspec.Struct, frozen=True):
    """The options of the command.

    Attributes:
        batch: Rows of a decode step.
        context: Tokens of every row's sequence, half-way through the measured steps.
        prefill: Tokens of the prompt.
        steps: Decode steps per repeat.
        repeats: Measured rounds; one more warms up and fills the prefix cache.
        seed: Seed of the prompts.
        depth: Like `context`, of a second measurement in each round; None for none.
    """

    batch: int = 1
    context: int = 512
    prefill: int = 512
    steps: int = 32
    repeats: int = 5
    seed: int = 0
    depth: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ConfigError(f"--steps is {self.steps}, it must be at least 2")

    @property
    def decode_prompt_len(self) -> int:
        """Prompt length of a decoding request."""
        return self._prompt_len(self.context)

    @property
    def deep_prompt_len(self) -> int | None:
        """The same at `depth`."""
        return None if self.depth is None else self._prompt_len(self.depth)

    def _prompt_len(self, context: int) -> int:
        return max(1, context - self.steps // 2)

    @property
    def num_outputs(self) -> int:
        """Output tokens of a decoding request."""
        return self.steps + _SLACK


class StepSample(msgspec.Struct, frozen=True):
    """The measurements of one repeat; `deep_decode_s` at `StepOptions.depth`."""

    decode_s: float
    overhead_s: float
    prefill_s: float
    read_bytes_per_s: float
    flops_per_s: float
    deep_decode_s: float | None = None


def sized_for_steps(config: EngineConfig, options: StepOptions) -> EngineConfig:
    """Size the engine for the batch, its blocks in all repeats, and the prompt in one step."""
    block_size = config.cache.block_size
    lengths = [options.decode_prompt_len + options.num_outputs]
    if options.deep_prompt_len is not None:
        lengths.append(options.deep_prompt_len + options.num_outputs)
    longest = max(*lengths, options.prefill + 1)
    decode_blocks = sum(-(-length // block_size) + 1 for length in lengths)
    prefill_blocks = -(-(options.prefill + 1) // block_size)
    # Twice the prefill, so that a new prompt evicts the last one, not the decoding prompts.
    num_blocks = options.batch * decode_blocks + 2 * prefill_blocks
    tokens = max(config.scheduler.max_num_batched_tokens, options.prefill)
    num_seqs = max(config.scheduler.max_num_seqs, options.batch)
    return replace(
        config,
        cache=_with_blocks(config.cache, num_blocks),
        scheduler=replace(config.scheduler, max_num_seqs=num_seqs, max_num_batched_tokens=tokens),
        max_model_len=config.max_model_len or longest,
    )


def _with_blocks(cache: CacheConfig, num_blocks: int) -> CacheConfig:
    is_given = cache.num_blocks is not None or cache.kv_cache_bytes is not None
    return cache if is_given else replace(cache, num_blocks=num_blocks)


async def measure_steps(
    measured: MeasuredEngine,
    limits: Limits,
    options: StepOptions,
    round_done: RoundDone | None = None,
) -> tuple[StepSample, ...]:
    """Measure a started engine; a sample per repeat."""
    rng = random.Random(options.seed)
    vocab_size = measured.model.vocab_size
    # The same in every repeat, so that the prefix cache has them from the second one on.
    prompts = _prompts(rng, vocab_size, options.decode_prompt_len, options.batch)
    deep_prompts: list[list[int]] = []
    if options.deep_prompt_len is not None:
        deep_prompts = _prompts(rng, vocab_size, options.deep_prompt_len, options.batch)

    async def decode(of: Sequence[Sequence[int]]) -> list[RequestTimes]:
        return await asyncio.gather(
            *(run_request(measured, prompt, options.num_outputs) for prompt in of)
        )

    async def sample(place: int) -> StepSample | None:
        read_bytes_per_s = limits.read_bytes_per_s()
        times = await decode(prompts)
        deep_times = await decode(deep_prompts)
        flops_per_s = limits.flops_per_s()
        prompt = random_prompt(rng, vocab_size, options.prefill)
        prefill = await run_request(measured, prompt, 1)
        if place == 0:  # it computed the prompts one after another, so they may not overlap
            await measured.engine.wait_until_captured()
            return None
        decode_s, overhead_s = decode_times(times)
        return StepSample(
            decode_s,
            overhead_s,
            prefill.time_to_first_token_s,
            read_bytes_per_s,
            flops_per_s,
            decode_times(deep_times)[0] if deep_times else None,
        )

    samples = await repeated(sample, options.repeats, round_done)
    return tuple([sample for sample in samples if sample is not None])


def _prompts(rng: random.Random, vocab_size: int, length: int, count: int) -> list[list[int]]:
    return [random_prompt(rng, vocab_size, length) for _ in range(count)]


def decode_times(times: Sequence[RequestTimes]) -> tuple[float, float]:
    """Medians of a step's time and of its time outside kernels, while all requests decode."""
    begin_s = max(timing.arrivals[0].at_s for timing in times)
    end_s = min(timing.arrivals[-1].at_s for timing in times)
    arrivals = [arrival for arrival in times[0].arrivals if begin_s <= arrival.at_s <= end_s]
    if len(arrivals) < 2:
        raise EngineError(
            "the requests of the batch never decoded together; give more --steps, or more KV blocks"
        )
    pairs = list(itertools.pairwise(arrivals))
    step_s = [(after.at_s - before.at_s) / after.num_tokens for before, after in pairs]
    kernel_s = [(after.kernel_s - before.kernel_s) / after.num_tokens for before, after in pairs]
    outside_s = [step - kernel for step, kernel in zip(step_s, kernel_s, strict=True)]
    return statistics.median(step_s), statistics.median(outside_s)


def figures(
    measured: MeasuredEngine, options: StepOptions, samples: Sequence[StepSample]
) -> dict[str, list[float]]:
    """The figures to print; each has a value per repeat."""
    head_size = measured.spec.kv_size.head_size
    head_bytes = kv_head_bytes(head_size, measured.dtype.itemsize, measured.kv_dtype)
    kv_bytes = decode_kv_bytes(measured.spec, head_bytes, options.context, options.batch)
    num_bytes = measured.weight_bytes_read(options.batch) + kv_bytes
    num_flops = prefill_flops(measured.spec, options.prefill)
    overhead = {"overhead_us": [1e6 * sample.overhead_s for sample in samples]}
    deep: dict[str, list[float]] = {}
    if options.depth is not None:
        deep_s = [sample.deep_decode_s or 0.0 for sample in samples]
        deep = {
            "depth_decode_ms": [1e3 * seconds for seconds in deep_s],
            "depth_ratio": [
                seconds / sample.decode_s for seconds, sample in zip(deep_s, samples, strict=True)
            ],
        }
    return {
        "decode_ms": [1e3 * sample.decode_s for sample in samples],
        "decode_tokens_per_s": [options.batch / sample.decode_s for sample in samples],
        "decode_bandwidth_share": [
            num_bytes / sample.decode_s / sample.read_bytes_per_s for sample in samples
        ],
        **(overhead if measured.counts_kernels else {}),
        **deep,
        "prefill_ms": [1e3 * sample.prefill_s for sample in samples],
        "prefill_tokens_per_s": [options.prefill / sample.prefill_s for sample in samples],
        "prefill_peak_share": [
            num_flops / sample.prefill_s / sample.flops_per_s for sample in samples
        ],
        "read_gb_per_s": [sample.read_bytes_per_s / 1e9 for sample in samples],
        "peak_tflops": [sample.flops_per_s / 1e12 for sample in samples],
    }
