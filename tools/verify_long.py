"""Search for mismatches with new seeds for some minutes: `make verify-long MINUTES=30`.

Runs `quickstep verify` and the property tests of one file in turns, and now and then random runs
of schedulers and of live engines, each with its own seed, and prints each command. Exit status 1 at
the first failure. A run ends after a twentieth of the time, at least two minutes: the property
tests of a few files would take all of it. `--seed` repeats an earlier search: the seeds count up
from it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pure", "cpu", "native", "serve")
PROPERTY = re.compile(r"^(@given|@rule|class \w+\(RuleBasedStateMachine\))", re.MULTILINE)
FORMATS: tuple[tuple[str, ...], ...] = (
    (),
    ("--quantization", "int8"),
    ("--kv-cache-dtype", "int8"),
    ("--kv-cache-dtype", "int4"),
    ("--quantization", "int4"),
    ("--dtype", "float32", "--block-size", "32"),
)
RANDOM_RUNS = ("tests/support/random_runs.py", "tests/support/random_engine_runs.py")
NOTHING_COLLECTED = 5  # pytest's exit status
LEAST_LIMIT_S = 120.0  # of a run

Run = Callable[[Sequence[str], float], int | None]


@dataclass
class Summary:
    """What was run; `failed` is the command that failed."""

    num_verified: int = 0
    tested: list[str] = field(default_factory=list)
    num_random: int = 0  # minutes of random runs
    num_unfinished: int = 0
    failed: tuple[str, ...] = ()


def property_tests(root: Path = ROOT) -> list[str]:
    """The test files with property tests, relative to the repository."""
    files = (path for folder in FOLDERS for path in (root / "tests" / folder).rglob("test_*.py"))
    found = (path for path in files if PROPERTY.search(path.read_text(encoding="utf-8")))
    return sorted(str(path.relative_to(root)) for path in found)


def commands(seed: int, files: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Endlessly, a verification and then the property tests of one file; all files in turn."""
    bin_folder = str(Path(sys.executable).parent)
    order: list[str] = []
    while True:
        for form in FORMATS:
            flags = ("--requests", "300", "--seed", str(seed), *form)
            yield (f"{bin_folder}/quickstep", "verify", *flags)
            seed += 1
            if not order:
                order = random.Random(seed).sample(files, len(files))
            name = order.pop()
            torch = ("--without-torch",) if name.startswith("tests/pure") else ()
            search = (
                "-m",
                "hypothesis",
                "--hypothesis-profile=search",
                f"--hypothesis-seed={seed}",
                "--timeout=1800",  # per test, which has a thousand examples in this profile
            )
            yield (sys.executable, "-m", "pytest", "-q", "-x", *torch, *search, name)
            seed += 1
        for script in RANDOM_RUNS:
            yield (sys.executable, script, "--minutes", "1", "--seed", str(seed))
            seed += 1


def run_command(command: Sequence[str], limit_s: float) -> int | None:
    """The exit status; None if the command was stopped after `limit_s`."""
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def search(
    seconds: float, seed: int, files: Sequence[str], run: Run, clock: Callable[[], float]
) -> Summary:
    """Run commands until the time is over or one fails."""
    summary, end, most_s = Summary(), clock() + seconds, max(LEAST_LIMIT_S, seconds / 20)
    for command in commands(seed, files):
        left = end - clock()
        if left <= 0:
            break
        print("$", *command, flush=True)
        status = run(command, min(left, most_s))
        if status is None:
            summary.num_unfinished += 1
        elif status and not (status == NOTHING_COLLECTED and "pytest" in command):
            summary.failed = tuple(command)
            break
        elif "verify" in command:
            summary.num_verified += 1
        elif "--minutes" in command:
            summary.num_random += 1
        else:
            summary.tested.append(command[-1])
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, and print a summary. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="seed of the first run (default: random)")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().getrandbits(31) if options.seed is None else options.seed
    print(f"first seed {seed}; repeat this search with --seed {seed}", flush=True)
    files = property_tests()
    summary = search(options.minutes * 60, seed, files, run_command, time.monotonic)
    distinct = len(set(summary.tested))
    print(
        f"{summary.num_verified} verifications of 300 requests, property tests of {distinct} of "
        f"{len(files)} files ({len(summary.tested)} runs), {summary.num_random} minutes of random "
        f"runs, {summary.num_unfinished} stopped by the time limit, first seed {seed}"
    )
    if summary.failed:
        print("FAILED; repeat it with:\n ", *summary.failed)
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
