"""`python -m benchmarks.peers`: Quickstep and its peers, interleaved, on this machine.

Sets up what is missing under `--cache`, makes the checkpoints, loads the engines, then takes each
workload's repeats round all of them: first those at bf16, then those with integer codes, so that
24 GB hold a group (`--together` loads all at once). w4 and `footprint` run on the engines' servers
instead. Prints Markdown; the raw figures go to `--out` as JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.machine import describe_machine
from benchmarks.peers.checkpoints import VOCABULARY, make_checkpoint
from benchmarks.peers.contestants import (
    PRECISIONS,
    Contestant,
    DriverFailed,
    DriverProcess,
    contestants,
)
from benchmarks.peers.report import HEADLINES, figures, show_progress, table
from benchmarks.peers.served import footprint, under_arrivals
from benchmarks.peers.workloads import draw_requests, write_requests
from quickstep.bench.shapes import SHAPES

Results = dict[str, list[dict[str, float]]]

# They run on servers.
_SERVED = {"w4": under_arrivals, "footprint": footprint}


def main() -> int:
    """Run what was asked for; 1 if a driver failed."""
    args = _arguments()
    # a terminated run ends the processes that it started, as an interrupted one does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    args.cache.mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(args.shape, args.cache / "checkpoints", args.seed)
    found = contestants(args.engines, args.precisions, checkpoint, args.cache, args.threads)
    print(describe_machine())
    results: dict[str, Results] = {name: {} for name in args.workloads}
    num_started = 0
    for group in _groups(found, args.together):
        num_started += _in_process(group, results, args)
        for name in args.workloads:
            if name in _SERVED:
                served = _SERVED[name](group, args)
                print("\n" + table(name, served), flush=True)
                results[name] |= served
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1))
    return 0 if num_started == len(found) else 1


def _groups(found: list[Contestant], together: bool) -> list[list[Contestant]]:
    """Who is loaded at the same time."""
    if together:
        return [found]
    whole = [one for one in found if one.precision == "bf16"]
    codes = [one for one in found if one.precision != "bf16"]
    return [group for group in (whole, codes) if group]


def _in_process(
    group: list[Contestant], results: dict[str, Results], args: argparse.Namespace
) -> int:
    """The workloads that drivers run, into `results`; how many of the group could start."""
    names = [name for name in args.workloads if name not in _SERVED]
    if not names:
        return len(group)
    drivers: dict[Contestant, DriverProcess] = {}
    try:
        for contestant in group:
            _start(contestant, args.cache, drivers)
        for name in names:
            results[name] |= _workload(name, drivers, args)
    finally:
        for driver in drivers.values():
            driver.close()
    return len(drivers)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quickstep-peers")
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen2.5-0.5b")
    parser.add_argument("--engines", nargs="+", choices=[*PRECISIONS], default=[*PRECISIONS])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--workloads", nargs="+", choices=[*HEADLINES], default=["w1"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=64, help="of w2 and w4; half for w3")
    parser.add_argument("--rate", type=float, default=0.67, help="requests per second of w4")
    parser.add_argument("--together", action="store_true", help="all precisions in one group")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _start(contestant: Contestant, cache: Path, drivers: dict[Contestant, DriverProcess]) -> None:
    """Load one engine; a failure is printed and leaves it out."""
    driver = DriverProcess(contestant, cache / f"{contestant.name.replace(' ', '-')}.log")
    try:
        driver.wait_ready()
    except DriverFailed as error:
        driver.close()
        print(f"left out: {error}", file=sys.stderr)
        return
    drivers[contestant] = driver
    driver.hold()
    print(f"- {contestant.name}: ready after {driver.ready_s:.2f} s", flush=True)


def _workload(
    workload: str, drivers: dict[Contestant, DriverProcess], args: argparse.Namespace
) -> Results:
    """All repeats of one workload behind a short unmeasured round; prints the table."""
    results: Results = {contestant.name: [] for contestant in drivers}
    for repeat in range(-1, args.repeats):
        seed = args.seed * 1000 + repeat
        count = args.requests if repeat >= 0 else max(4, args.requests // 8)
        requests = draw_requests(workload, seed, VOCABULARY, rate=1.0, num_requests=count)
        path = write_requests(args.cache / "requests.json", requests)
        for contestant, driver in drivers.items():
            answer = driver.run(path)
            if repeat >= 0:
                found = figures(answer, [request.at_s for request in requests])
                found["rss_gb"] = answer["rss_bytes"] / 1e9
                results[contestant.name].append(found)
        show_progress(workload, repeat, results)
    print("\n" + table(workload, results), flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
