"""`quickstep bench latency` and `bench throughput`: complete requests on the live engine.

Prompts are random token ids and new in every repeat, so the prefix cache never hits; their lengths
are the same in every repeat. Outputs have exactly the configured length.
"""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
from msgspec.structs import replace

from quickstep.bench.lengths import RequestLengths, random_request
from quickstep.bench.measured_engine import (
    MeasuredEngine,
    RequestTimes,
    random_prompt,
    run_request,
)
from quickstep.bench.repeats import RoundDone, repeated
from quickstep.config import EngineConfig


class LatencyOptions(msgspec.Struct, frozen=True):
    """One stream: `repeats` measured requests of these lengths, after one for warm-up."""

    input_len: int = 512
    output_len: int = 128
    repeats: int = 5
    seed: int = 0


class ThroughputOptions(msgspec.Struct, frozen=True):
    """All requests at once; `max_len` caps prompt and output lengths."""

    num_requests: int = 64
    repeats: int = 3
    seed: int = 0
    max_len: int = 1024


def random_lengths(options: ThroughputOptions) -> tuple[RequestLengths, ...]:
    """Lognormal lengths that depend on the seed only."""
    rng = random.Random(options.seed)
    return tuple(random_request(rng, options.max_len) for _ in range(options.num_requests))


def sized_for(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """`config` with the length that the requests need, unless the user set one."""
    return replace(config, max_model_len=config.max_model_len or max_model_len)


async def measure_latency(
    measured: MeasuredEngine, options: LatencyOptions, round_done: RoundDone | None = None
) -> dict[str, list[float]]:
    """Measure a started engine; each figure has a value per repeat."""
    rng = random.Random(options.seed)

    async def one(place: int) -> RequestTimes:
        prompt = random_prompt(rng, measured.model.vocab_size, options.input_len)
        return await run_request(measured, prompt, options.output_len)

    times = await repeated(one, options.repeats, round_done)
    figures = {"ttft_ms": [1e3 * timing.time_to_first_token_s for timing in times]}
    if options.output_len > 1:
        figures["tpot_ms"] = [1e3 * timing.time_per_output_token_s for timing in times]
        figures["decode_tokens_per_s"] = [1 / timing.time_per_output_token_s for timing in times]
    figures["end_to_end_ms"] = [
        1e3 * (timing.arrivals[-1].at_s - timing.submitted_s) for timing in times
    ]
    return figures


async def measure_throughput(
    measured: MeasuredEngine, options: ThroughputOptions, round_done: RoundDone | None = None
) -> dict[str, list[float]]:
    """Measure a started engine; each figure has a value per repeat."""
    lengths = random_lengths(options)
    rng = random.Random(options.seed)

    async def one_round(place: int) -> float:
        if place == 0:
            await run_request(measured, random_prompt(rng, measured.model.vocab_size, 32), 8)
            return 0.0
        prompts = [
            random_prompt(rng, measured.model.vocab_size, length.num_inputs) for length in lengths
        ]
        started_s = time.perf_counter()
        await asyncio.gather(
            *(
                run_request(measured, prompt, one.num_outputs)
                for prompt, one in zip(prompts, lengths, strict=True)
            )
        )
        return time.perf_counter() - started_s

    seconds = await repeated(one_round, options.repeats, round_done)
    num_inputs = sum(length.num_inputs for length in lengths)
    num_outputs = sum(length.num_outputs for length in lengths)
    return {
        "wall_s": seconds,
        "output_tokens_per_s": [num_outputs / duration_s for duration_s in seconds],
        "total_tokens_per_s": [(num_inputs + num_outputs) / duration_s for duration_s in seconds],
        "requests_per_s": [len(lengths) / duration_s for duration_s in seconds],
    }
