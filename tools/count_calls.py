"""Counts what a step and a streamed token cost, and compares with the recorded bounds.

    python tools/count_calls.py            `make counts`, a part of `make check`
    python tools/count_calls.py --write    record the counts of this checkout as the bounds

Python functions of this project that are called: by a decode step from plan to commit
(`calls_of_step`, also held by tests/native/test_call_counts.py), and by a streamed token in the
server's and the engine's process together (`tools/trace_request.py`). Instructions of the native
library in fixed steps, counted by callgrind at one level of the instruction set, one thread: the
same number in every run of one build. Without callgrind or AVX2 only the calls are compared.

Comprehensions are not counted. Calls of a token vary with how often the cost model learns, which is
when steps are long, and with how frames meet; instructions with the compiler and the machine's C
library. Their bounds have room for that: a slow or busy machine does not exceed them. No other
count depends on the machine. A commit that raises a bound says why; one that lowers a count lowers
the bound.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from msgspec.structs import replace
from trace_request import COMPREHENSIONS, num_calls

BOUNDS = Path(__file__).with_name("count_bounds.json")
NUM_STEPS = 32
_ISA = "avx2"
_NATIVE_ROWS = (1, 8)
_NATIVE_STEPS = 6
_VARYING_CALLS = 30  # of a token in both processes: 117 to 131 were counted on one machine
_VARYING_CALLS_PER_ROW = 15
_VARYING_INSTRUCTIONS = 1.02


class Counts(msgspec.Struct, frozen=True):
    """What is counted, or the most of it.

    Attributes:
        step_calls: Python calls of a decode step with one row.
        step_calls_per_row: Those of each further row.
        token_calls: Python calls of a streamed token, in both processes, at batch size 1.
        token_calls_per_row: Those of each further stream.
        native_instructions: Of the native library, in the steps of `run_native_steps`; None where
            they cannot be counted.
    """

    step_calls: float
    step_calls_per_row: float
    token_calls: float
    token_calls_per_row: float
    native_instructions: int | None


class Calls:
    """The calls of this project's functions while it is on."""

    def __init__(self) -> None:
        self.num = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count in this thread."""
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and "/quickstep/" in code.co_filename
        self.num += is_ours and code.co_name not in COMPREHENSIONS


def calls_of_step(num_rows: int) -> float:
    """Python calls of a decode step with so many rows, from plan to commit, without the event
    loop.
    """
    from quickstep.config import EngineConfig
    from quickstep.engine.assembly import open_engine
    from quickstep.types import Request, SamplingParams

    engine = open_engine(EngineConfig())
    scheduler, runner = engine._scheduler, engine._executor._runner  # type: ignore[attr-defined]
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


def run_native_steps() -> None:
    """A prompt and decode steps of the bundled model with few rows and with more, in one thread."""
    from quickstep.config import EngineConfig, LoadConfig
    from quickstep.engine.assembly import open_engine
    from quickstep.types import Request, SamplingParams

    sampling = SamplingParams(max_tokens=2 * _NATIVE_STEPS, ignore_eos=True, temperature=0.7)
    engine = open_engine(EngineConfig(load=LoadConfig(num_threads=1)))
    scheduler, runner = engine._scheduler, engine._executor._runner  # type: ignore[attr-defined]
    now = 0.0
    for num_rows in _NATIVE_ROWS:
        for number in range(num_rows):
            prompt = tuple(range(5 + number, 21 + number))
            request = Request(f"{num_rows}.{number}", prompt, sampling, speculation=False)
            scheduler.add(request, now)
        for _ in range(_NATIVE_STEPS):
            plan = scheduler.plan(now)
            assert plan is not None
            result, now = replace(runner.run(plan), seconds=1e-3), now + 0.01
            scheduler.commit(plan, result, now)
        for number in range(num_rows):
            scheduler.abort(f"{num_rows}.{number}", now)


def native_instructions(folder: Path) -> int | None:
    """Instructions of the native library in `run_native_steps`; None where they cannot be counted,
    which is printed.
    """
    if shutil.which("valgrind") is None:
        print("callgrind is not installed: native instructions are not counted")
        return None
    if _ISA not in Path("/proc/cpuinfo").read_text():
        print(f"this CPU has no {_ISA}: native instructions are not counted")
        return None
    out = folder / "callgrind.out"
    command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
    command += ["--compress-strings=no", "--compress-pos=no"]
    command += [sys.executable, __file__, "--native-steps"]
    env = {**os.environ, "QUICKSTEP_CPU_ISA": _ISA, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"callgrind failed:\n{done.stderr[-2000:]}")
    return instructions_of_library(out)


def instructions_of_library(out: Path) -> int:
    """The instructions of the native library's own functions in a file that callgrind wrote. Lines
    with a cost are `line count`; the one after `calls=` is that of the functions called.
    """
    total, is_library, is_of_call = 0, False, False
    with out.open(errors="replace") as lines:
        for line in lines:
            if line.startswith("ob="):
                is_library = "libquickstep" in line
            elif line.startswith("calls="):
                is_of_call = True
            elif line[:1].isdigit() or line[:1] in "+-*":
                if is_library and not is_of_call:
                    total += int(line.split()[1])
                is_of_call = False
    return total


def counted(folder: Path) -> Counts:
    """Count everything."""
    first, of_five = calls_of_step(1), calls_of_step(5)
    token, per_row = asyncio.run(num_calls(folder / "engine.txt"))
    return Counts(
        *map(_rounded_up, (first, (of_five - first) / 4, token, per_row)),
        native_instructions(folder),
    )


def _rounded_up(count: float) -> float:
    return math.ceil(10 * count - 1e-6) / 10


def main() -> int:
    """Compare the counts with their bounds; 1 if one is above its bound."""
    if "--native-steps" in sys.argv[1:]:
        run_native_steps()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        counts = counted(Path(folder))
    if "--write" in sys.argv[1:]:
        instructions = counts.native_instructions
        bounds = replace(
            counts,
            token_calls=counts.token_calls + _VARYING_CALLS,
            token_calls_per_row=counts.token_calls_per_row + _VARYING_CALLS_PER_ROW,
            native_instructions=None
            if instructions is None
            else round(_VARYING_INSTRUCTIONS * instructions),
        )
        content = msgspec.json.format(msgspec.json.encode(bounds), indent=2)
        BOUNDS.write_bytes(content + b"\n")
    bounds = msgspec.json.decode(BOUNDS.read_bytes(), type=Counts)
    num_above = 0
    for name in Counts.__struct_fields__:
        count, bound = getattr(counts, name), getattr(bounds, name)
        if count is None or bound is None:
            continue
        is_above = count > bound
        num_above += is_above
        print(f"{name:<22}{count:>14,}  of {bound:,}{'  above its bound' if is_above else ''}")
    return int(num_above > 0)


if __name__ == "__main__":
    sys.exit(main())
