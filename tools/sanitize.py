"""Run the tests of the native kernels with sanitizers: `make sanitize`.

`address` (AddressSanitizer and UndefinedBehaviorSanitizer) builds `csrc` for all levels of this
machine's CPU, in a copy of the tree, and runs `tests/native`: whatever reads or writes outside of a
tensor, or is undefined, is reported with its line. `thread` (ThreadSanitizer) runs the tests of the
thread pool. The build takes 15 minutes on one core, the tests a few times as long as usual.

Python itself is not instrumented; the sanitizer's library is preloaded. All tests run, though some
report something; exit status 1 if there is any report, or a test fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from plant_faults import ROOT, Tree, tracked_files

_LIMIT_S = 1800.0  # for one file of tests


class Sanitizer(msgspec.Struct, frozen=True):
    """Its runtime libraries, what it reads from the environment, an option for the build beyond its
    name, and which tests it is for.
    """

    libraries: tuple[str, ...]
    options: dict[str, str]
    build: str
    tests: tuple[str, ...]


# Leaks are not reported: Python and torch keep what they have until the process ends.
_KEPT = "halt_on_error=0:exitcode=0"
SANITIZERS = {
    "address": Sanitizer(
        ("libasan.so", "libubsan.so"),
        {
            "ASAN_OPTIONS": f"{_KEPT}:detect_leaks=0",
            "UBSAN_OPTIONS": "halt_on_error=0:print_stacktrace=1",
        },
        "-DQUICKSTEP_FOR_TESTS=ON",
        (
            "native/test_attention_sinks.py",
            "native/test_native_*.py",
            "native/test_packed_weights.py",
            "pure/runtime/test_proposers.py",
        ),
    ),
    "thread": Sanitizer(
        ("libtsan.so",),
        {"TSAN_OPTIONS": f"{_KEPT}:report_signal_unsafe=0:die_after_fork=0"},
        "-DQUICKSTEP_THIS_MACHINE=ON",  # one level and `portable`: the pool is the same
        ("native/test_native_pool.py",),
    ),
}


def library_of(name: str) -> str:
    """The path of a runtime library of the compiler. Raises RuntimeError if it is not there."""
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise RuntimeError(f"{compiler} has no {name}")
    return path


def environment(sanitizer: Sanitizer, reports: Path) -> dict[str, str]:
    """The environment of the tests. A report becomes a file in `reports`."""
    options = {
        name: f"{value}:log_path={reports / name.lower()}"
        for name, value in sanitizer.options.items()
    }
    preloaded = " ".join(map(library_of, sanitizer.libraries))
    return {**os.environ, **options, "LD_PRELOAD": preloaded, "PYTHONMALLOC": "malloc"}


def run(name: str, folder: Path, tests: Sequence[str]) -> int:
    """Build, and run the tests; returns the number of reports and of files that failed."""
    sanitizer, tree = SANITIZERS[name], Tree(folder / name)
    tree.make(tracked_files())
    if failure := tree.build(f"-DQUICKSTEP_SANITIZE={name}", sanitizer.build):
        raise RuntimeError(f"the native library cannot be built: {failure}")
    reports = folder / f"{name}-reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    environ, num_failed = environment(sanitizer, reports), 0
    chosen = tests or sanitizer.tests
    files = [path for pattern in chosen for path in sorted((ROOT / "tests").glob(pattern))]
    for path in files:
        known = set(reports.iterdir())
        done = tree.test([str(path.relative_to(ROOT))], _LIMIT_S, environ, stops=False)
        found = sorted(set(reports.iterdir()) - known)
        num_failed += done.status != 0
        print(f"{path.name}: status {done.status}, {len(found)} reports", flush=True)
        if done.status != 0:
            print(done.output[-4000:], flush=True)
        for report in found:
            print(report.read_text(errors="replace")[:8000], flush=True)
    num_reports = len(list(reports.iterdir()))
    print(f"{name}: {len(files)} files of tests, {num_failed} failed, {num_reports} reports")
    return num_failed + num_reports


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was reported."""
    parser = argparse.ArgumentParser(description="Run the native tests with sanitizers.")
    parser.add_argument("names", nargs="*", help="address, thread; both if there are none")
    parser.add_argument("--tests", nargs="*", default=(), help="below tests/, instead of the usual")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/sanitize", help="of the copies"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - SANITIZERS.keys():
        parser.error(f"there is no sanitizer {', '.join(sorted(unknown))}")
    folder: Path = options.folder.resolve()
    names = options.names or SANITIZERS
    return int(any([run(name, folder, options.tests) for name in names]))


if __name__ == "__main__":
    sys.exit(main())
