"""`quickstep bench latency` and `bench throughput`: whole requests through the live engine.

Prompts are random token ids, new in every repeat, so the prefix cache has nothing of them; their
lengths are the same in every repeat. Outputs have exactly the length asked for.
"""

from __future__ import annotations

import asyncio
import random
import time

import msgspec
from msgspec.structs import replace

from quickstep.bench.lengths import RequestLengths, random_request
from quickstep.bench.lives import follow
from quickstep.bench.subject import Subject, random_prompt
from quickstep.config import EngineConfig

__all__ = [
    "LatencyOptions",
    "ThroughputOptions",
    "measure_latency",
    "measure_throughput",
    "random_lengths",
    "sized_for",
]


class LatencyOptions(msgspec.Struct, frozen=True):
    """One stream: `repeats` measured requests of these lengths; one more warms up."""

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
    """Lognormal lengths: a function of the seed."""
    rng = random.Random(options.seed)
    return tuple(random_request(rng, options.max_len) for _ in range(options.num_requests))


def sized_for(config: EngineConfig, max_model_len: int) -> EngineConfig:
    """The user's limit, or what the requests need."""
    return replace(config, max_model_len=config.max_model_len or max_model_len)


async def measure_latency(subject: Subject, options: LatencyOptions) -> dict[str, list[float]]:
    """A value per repeat; the engine has to be started."""
    rng = random.Random(options.seed)
    lives = []
    for _ in range(options.repeats + 1):
        prompt = random_prompt(rng, subject.model.vocab_size, options.input_len)
        lives.append(await follow(subject, prompt, options.output_len))
    measured = lives[1:]
    found = {"ttft_ms": [1e3 * life.time_to_first_token_s for life in measured]}
    if options.output_len > 1:
        found["tpot_ms"] = [1e3 * life.time_per_output_token_s for life in measured]
        found["decode_tokens_per_s"] = [1 / life.time_per_output_token_s for life in measured]
    found["end_to_end_ms"] = [1e3 * (life.marks[-1].at_s - life.submitted_s) for life in measured]
    return found


async def measure_throughput(
    subject: Subject, options: ThroughputOptions
) -> dict[str, list[float]]:
    """A value per repeat; the engine has to be started."""
    lengths = random_lengths(options)
    rng = random.Random(options.seed)
    await follow(subject, random_prompt(rng, subject.model.vocab_size, 32), 8)
    seconds = []
    for _ in range(options.repeats):
        prompts = [random_prompt(rng, subject.model.vocab_size, one.num_inputs) for one in lengths]
        started_s = time.perf_counter()
        await asyncio.gather(
            *(
                follow(subject, prompt, one.num_outputs)
                for prompt, one in zip(prompts, lengths, strict=True)
            )
        )
        seconds.append(time.perf_counter() - started_s)
    num_inputs = sum(one.num_inputs for one in lengths)
    num_outputs = sum(one.num_outputs for one in lengths)
    return {
        "wall_s": seconds,
        "output_tokens_per_s": [num_outputs / one for one in seconds],
        "total_tokens_per_s": [(num_inputs + num_outputs) / one for one in seconds],
        "requests_per_s": [len(lengths) / one for one in seconds],
    }
