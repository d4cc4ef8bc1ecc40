"""How many Python functions a decode step calls, from plan to commit, without the event loop.

Calls are counted, not timed, so the numbers are the same on every machine: features had made a
small step 1.2 to 1.6 times as long before anyone noticed. A commit that raises a bound says why;
one that lowers the count lowers the bound. `python tools/trace_request.py --calls` counts all of a
streamed request, and lists the functions (docs/design/0011-the-path-of-a-request.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from msgspec.structs import replace

from quickstep.config import EngineConfig
from quickstep.engine.assembly import open_engine
from quickstep.types import Request, SamplingParams

NUM_STEPS = 32
# (calls of a step with one row, calls of each further row)
PLAIN_BOUNDS = (89, 19.1)


class Calls:
    """The calls of this project's functions while it is on."""

    def __init__(self) -> None:
        self.num = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        self.num += event == "call" and "/quickstep/" in frame.f_code.co_filename


def calls_per_step(num_rows: int) -> float:
    engine = open_engine(EngineConfig())
    scheduler, runner = engine._scheduler, engine._executor._runner
    sampling = SamplingParams(max_tokens=2 * NUM_STEPS, ignore_eos=True, temperature=0.7)
    for number in range(num_rows):
        prompt = tuple(range(5 + number, 21 + number))
        scheduler.add(Request(f"r{number}", prompt, sampling, speculation=False), 0.0)
    calls, now = Calls(), 0.0
    for step in range(NUM_STEPS + 4):
        if step == 4:  # prompts are computed, steps are captured
            calls.num = 0
        with calls.counted():
            plan = scheduler.plan(now)
            assert plan is not None
            result = replace(runner.run(plan), seconds=1e-3)  # so that nothing depends on time
            now += 0.01
            scheduler.commit(plan, result, now)
    return calls.num / NUM_STEPS


def test_a_decode_step_calls_no_more_functions_than_recorded() -> None:
    alone, together = calls_per_step(1), calls_per_step(5)
    further = (together - alone) / 4
    print(f"calls of a step with one row: {alone:.1f}; of each further row: {further:.1f}")
    assert alone <= PLAIN_BOUNDS[0]
    assert further <= PLAIN_BOUNDS[1]
