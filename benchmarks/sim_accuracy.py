"""`python -m benchmarks.sim_accuracy`: the simulator against the live engine, on this machine.

`quickstep calibrate` measures the step times and the engine's own time between steps. The engine
then serves a full load, from which it learns more and this program the capacity. Then Poisson
arrivals at 30, 60 and 85 % of it are served and recorded, and the simulator gets the same arrivals
and what was stored before: it has seen nothing of these runs. Prints the live and simulated
percentiles of TTFT, TPOT, E2E, and the throughput, with their errors. About four minutes with the
default `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec.structs import replace

from benchmarks.machine import describe_machine
from quickstep.cli.main import main as quickstep
from quickstep.config import EngineConfig, LoadConfig, RecordingConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.overhead import EngineOverhead, WithOverhead
from quickstep.core.recordings.replay import open_replay, read_recording
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.engine.step_times.cost_fits import StoredFit
from quickstep.sim.simulate import simulate
from quickstep.sim.traces import recorded_traffic
from quickstep.types import Request, SamplingParams, SequenceTimings, StepRecord

_LOADS = (0.30, 0.60, 0.85)
_PARTS = (0.50, 0.90, 0.99)
_IDS = range(300, 1300)


def requests(seed: int, count: int) -> list[Request]:
    """Prompts of 20 to 200 tokens without shared prefixes, outputs of 16 to 96."""
    rng = Random(seed)
    return [
        Request(
            f"{seed}-{number}",
            tuple(rng.choices(_IDS, k=rng.randint(20, 200))),
            SamplingParams(max_tokens=rng.randint(16, 96), ignore_eos=True, seed=number),
        )
        for number in range(count)
    ]


async def serve(engine: Engine, of: Sequence[Request], times: Sequence[float]) -> float:
    """Send requests at these times; returns how long it took."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def one(request: Request, at_s: float) -> None:
        await asyncio.sleep(start_s + at_s - loop.time())
        async for _ in engine.stream(request):
            pass

    await asyncio.gather(*(one(request, at_s) for request, at_s in zip(of, times, strict=True)))
    return loop.time() - start_s


def run(
    model: str, of: Sequence[Request], times: Sequence[float], path: Path | None
) -> tuple[float, tuple[SequenceTimings, ...], tuple[StepRecord, ...]]:
    """Serve with a new engine, which continues from the stored fit: how long it took, timings."""

    async def served() -> tuple[float, tuple[SequenceTimings, ...], tuple[StepRecord, ...]]:
        recording = None if path is None else RecordingConfig(str(path))
        config = EngineConfig(LoadConfig(model), memory_bytes=2 << 30, recording=recording)
        engine = open_engine(config)
        await engine.start()
        seconds = await serve(engine, of, times)
        log = engine.step_log
        await engine.stop()
        return seconds, tuple(sequence.timings for sequence in log.sequences), log.steps

    return asyncio.run(served())


def values(of: Sequence[SequenceTimings]) -> dict[str, list[float]]:
    """Sorted milliseconds of each quantity."""
    found: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "E2E": []}
    for timings in of:
        if timings.first_token_s is None or timings.num_output_tokens < 2:
            continue
        decode_s = timings.finished_s - timings.first_token_s
        found["TTFT"].append(1e3 * (timings.first_token_s - timings.arrival_s))
        found["TPOT"].append(1e3 * decode_s / (timings.num_output_tokens - 1))
        found["E2E"].append(1e3 * (timings.finished_s - timings.arrival_s))
    return {name: sorted(numbers) for name, numbers in found.items()}


def rate(of: Sequence[SequenceTimings]) -> float:
    """Output tokens per second, from the first arrival to the last end."""
    seconds = max(timings.finished_s for timings in of) - min(timings.arrival_s for timings in of)
    return sum(timings.num_output_tokens for timings in of) / seconds


def compare(
    load: float, live: Sequence[SequenceTimings], path: Path, overhead: EngineOverhead
) -> None:
    """Simulate a recording, and print a table's rows."""
    with path.open("rb") as file:
        recording = read_recording(file)
    fit = recording.engine.fit
    assert fit is not None, "the first run stored its fit"
    costs = WithOverhead(LinearCostModel.of_fit(fit), overhead)
    with path.open("rb") as file:
        arrivals = recorded_traffic(file)
    outcome = simulate(arrivals, open_replay(recording.engine), costs)
    simulated = [ending.timings for ending in outcome.endings]
    here, there = values(live), values(simulated)
    for name in here:
        cells = []
        for part in _PARTS:
            one, other = (
                of[min(len(of) - 1, int(part * len(of)))] for of in (here[name], there[name])
            )
            cells.append(f"{one:.2f} / {other:.2f} ({other / one - 1:+.1%})")
        print(f"| {load:.0%} | {name} ms | {' | '.join(cells)} |", flush=True)
    one, other = rate(live), rate(simulated)
    print(f"| {load:.0%} | tokens/s | {one:.0f} / {other:.0f} ({other / one - 1:+.1%}) | | |")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    args = parser.parse_args()
    print(f"{describe_machine()}; {args.model}, {args.seconds:g} s of each load")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUICKSTEP_CACHE_DIR"] = folder
        assert quickstep(("calibrate", args.model, "--memory-bytes", "2GiB")) == 0
        (stored,) = Path(folder).glob("cost_fits/*.json")
        overhead = msgspec.json.decode(stored.read_bytes(), type=StoredFit).overhead
        assert overhead is not None, "the calibration measures it"
        run(args.model, requests(0, 20), [0.0] * 20, None)  # pages and caches
        full = requests(1, max(40, round(4 * args.seconds)))
        seconds, _, _ = run(args.model, full, [0.0] * len(full), None)
        capacity = len(full) / seconds
        print(
            f"capacity {capacity:.3g} requests/s; overhead {1e6 * overhead.step_s:.0f} us a step "
            f"and {1e6 * overhead.row_s:.0f} us a row\n"
        )
        print("| load | | p50 live / simulated | p90 | p99 |\n|---|---|---|---|---|")
        for number, load in enumerate(_LOADS):
            rng, at_s, times = Random(number), 0.0, list[float]()
            while (at_s := at_s + rng.expovariate(load * capacity)) < args.seconds:
                times.append(at_s)
            path = Path(folder) / f"{number}.jsonl"
            of = [
                replace(request, request_id=f"{number}-{request.request_id}")
                for request in requests(2 + number, len(times))
            ]
            _, live, _ = run(args.model, of, times, path)
            compare(load, live, path, overhead)


if __name__ == "__main__":
    main()
