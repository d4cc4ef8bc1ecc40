"""The engine's own time between steps, measured on a running engine with requests of its own.

`quickstep calibrate` calls it after the step times are known. Waves of requests keep the engine
busy with few and with many rows; how long a step and its delivery take apart from the model is
`EngineOverhead.of_steps` of the step log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from quickstep.core.overhead import EngineOverhead
from quickstep.types import Request, SamplingParams

if TYPE_CHECKING:
    from quickstep.engine.engine import Engine

_NUM_INPUTS = 16
_MOST_OUTPUTS, _LEAST_OUTPUTS = 48, 4
_WAVES = (1, 4, 16, 64)  # requests at the same time


async def measure_overhead(
    engine: Engine,
    max_num_seqs: int,
    vocab_size: int,
    step_s: float,
    seconds: float,
    clock: Callable[[], float],
) -> EngineOverhead:
    """Run a new engine for about `seconds`, of which a usual step takes `step_s`, and stop it."""
    rng = Random(0)
    waves = [size for size in _WAVES if size <= max_num_seqs]
    num_outputs = round(seconds / (len(waves) * max(step_s, 1e-6)))
    num_outputs = min(_MOST_OUTPUTS, max(_LEAST_OUTPUTS, num_outputs))
    sampling = SamplingParams(max_tokens=num_outputs, ignore_eos=True)

    async def one(name: str) -> None:
        prompt = tuple(rng.randrange(vocab_size) for _ in range(_NUM_INPUTS))
        async for _ in engine.stream(Request(name, prompt, sampling, speculation=False)):
            pass

    await engine.start()
    until_s, number = clock() + seconds, 0
    while not number or clock() < until_s:
        for size in waves:
            await asyncio.gather(*(one(f"overhead-{number}-{place}") for place in range(size)))
            number += 1
    steps = engine.step_log.steps
    await engine.stop()
    return EngineOverhead.of_steps(steps)
