"""How many Python functions a decode step calls, from plan to commit, without the event loop.

Calls are counted, not timed, so the numbers are the same on every machine. `make counts` compares
these and further counts with the bounds in tools/count_bounds.json.
"""

from __future__ import annotations

import msgspec
from count_calls import BOUNDS, Counts, calls_of_step


def test_a_decode_step_calls_no_more_functions_than_recorded() -> None:
    bounds = msgspec.json.decode(BOUNDS.read_bytes(), type=Counts)
    first, of_five = calls_of_step(1), calls_of_step(5)
    further = (of_five - first) / 4
    print(f"calls of a step with one row: {first:.1f}; of each further row: {further:.1f}")
    assert first <= bounds.step_calls
    assert further <= bounds.step_calls_per_row + 0.05
