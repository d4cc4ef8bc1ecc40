"""Plant faults in a copy of the tree, one after another, and see which tests find each.

`tools/planted_faults.toml` lists them by hand: a text that occurs once in a file, its replacement,
what a user would see, and the tests that should find it, the cheapest first. `make faults` runs
all of them, which takes about an hour on two cores; in `make test` a test checks that each text is
still there once.

A fault is found by the first test that fails with it and passes without it. Results are kept in
`build/faults` and printed as a table; `--resume` continues after an interruption.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).with_name("planted_faults.toml")
_PACKAGE = Path("src/quickstep")
_LIBRARY = _PACKAGE / "_native/libquickstep.so"
_CSRC = "csrc/"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?|\S+?)(?: - .*)?$", re.MULTILINE)
_BUILD = ("-DQUICKSTEP_THIS_MACHINE=ON", "-DQUICKSTEP_FOR_TESTS=ON")
_BUILD_S = 1200
_LIMIT_S = 180.0
_NOT_FOUND = "not found"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the data file; `file` is below `src/quickstep`, or starts with `csrc/`."""

    area: str
    file: str
    text: str
    replacement: str
    effect: str
    suites: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file, from the root of a tree."""
        return Path(self.file) if self.is_native else _PACKAGE / self.file

    @property
    def is_native(self) -> bool:
        """Whether the native library has to be built again."""
        return self.file.startswith(_CSRC)

    def planted(self, source: str) -> str:
        """The source with the fault. Raises ValueError unless the text is in it exactly once."""
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"{self.file} has the text {count} times, not once")
        return source.replace(self.text, self.replacement)


class Outcome(msgspec.Struct, frozen=True):
    """What one fault led to: the test that found it, or `_NOT_FOUND`, and the seconds of all tests
    that ran until then.
    """

    name: str
    found_by: str
    seconds: float

    @property
    def is_found(self) -> bool:
        """Whether a test found it."""
        return self.found_by != _NOT_FOUND


def read_faults(path: Path = FAULTS) -> dict[str, Fault]:
    """The faults by name, those that need no build first."""
    faults = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Fault])
    return dict(sorted(faults.items(), key=lambda item: item[1].is_native))


def tracked_files() -> list[str]:
    """The files that git tracks, as they are now."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


class Tree:
    """A copy of the files that git tracks, with an environment whose `quickstep` it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._python = path / ".venv/bin/python"

    def make(self, paths: Iterable[str]) -> None:
        """Copy the files, and what is built of them; other files of the copy stay."""
        for path in paths:
            target = self.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            source = ROOT / path
            if not target.exists() or target.read_bytes() != source.read_bytes():
                shutil.copy2(source, target)
        if not self._python.exists():
            venv.create(self.path / ".venv", with_pip=False, symlinks=True)
        # Only their own `.pth` files would import the installed `quickstep` instead of the copy.
        packages = [entry for entry in sys.path if Path(entry).name == "site-packages"]
        (place,) = (self.path / ".venv/lib").glob("python*/site-packages")
        (place / "tree.pth").write_text("\n".join([str(self.path / "src"), *packages]))

    def take_library(self, library: Path) -> None:
        """Use a library that is built already."""
        target = self.path / _LIBRARY
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a process that has it open keeps the old one
        shutil.copy2(library, target)

    def build(self, *options: str) -> str:
        """Build the library with options of CMake; returns "" or the end of what went wrong."""
        for command in (
            ["cmake", "-S", ".", "-B", "build/native", *options],
            ["cmake", "--build", "build/native", f"--parallel={os.cpu_count()}"],
        ):
            done = _run(command, self.path, _BUILD_S)
            if done.status != 0:
                return done.output[-2000:]
        return ""

    def test(
        self,
        tests: Sequence[str],
        limit_s: float,
        environ: Mapping[str, str] | None = None,
        stops: bool = True,
    ) -> Run:
        """Run tests, until the first one fails if it `stops` there."""
        options = ["-q", "-rfE", "-p", "no:cacheprovider", "-n", "0", *(["-x"] if stops else [])]
        command = [str(self._python), "-m", "pytest", *options, *tests]
        return _run(command, self.path, limit_s, environ)


class Run(msgspec.Struct, frozen=True):
    """A command that has ended; its status is None if it was ended for taking too long."""

    status: int | None
    output: str

    @property
    def failed_test(self) -> str:
        """The first test that failed, or the file that could not be imported."""
        found = _FAILED.search(self.output)
        return found[1] if found is not None else ""


def _run(
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    environ: Mapping[str, str] | None = None,
) -> Run:
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # tests have started processes of their own
        output, _ = process.communicate()
        return Run(None, output)
    return Run(process.returncode, output)


class Planting:
    """Two trees: one for faults, and a clean one that says what fails without them."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._planted = Tree(folder / "planted")
        self._clean = Tree(folder / "clean")
        self._limit_s = limit_s
        self._passes: dict[str, bool] = {}  # without a fault, by test

    def open(self, needs_build: bool) -> None:
        """Make the trees. Raises RuntimeError if the library cannot be built."""
        paths = tracked_files()
        for tree in (self._planted, self._clean):
            tree.make(paths)
        library = ROOT / _LIBRARY
        if needs_build:
            if failure := self._planted.build(*_BUILD):
                raise RuntimeError(f"the native library cannot be built: {failure}")
            library = self._planted.path / _LIBRARY
        else:
            self._planted.take_library(library)
        self._clean.take_library(library)

    def outcome(self, name: str, fault: Fault) -> Outcome:
        """Plant one fault, run its tests, and take it out again."""
        file = self._planted.path / fault.path
        source = file.read_text(encoding="utf-8")
        file.write_text(fault.planted(source), encoding="utf-8")
        try:
            if fault.is_native and (failure := self._planted.build(*_BUILD)):
                return Outcome(name, f"the compiler: {failure[-200:]}", 0.0)
            started_s = time.monotonic()
            found_by = next(self._findings(fault.suites), _NOT_FOUND)
            return Outcome(name, found_by, time.monotonic() - started_s)
        finally:
            file.write_text(source, encoding="utf-8")
            if fault.is_native:
                self._planted.take_library(self._clean.path / _LIBRARY)

    def _findings(self, suites: Sequence[str]) -> Iterator[str]:
        """Tests that fail with the fault alone."""
        for suite in suites:
            run = self._planted.test([f"tests/{suite}"], self._limit_s)
            if run.status == 0:
                continue
            test = run.failed_test or f"tests/{suite}"
            if self._passes_without(test):
                how = " (does not end)" if run.status is None else ""
                yield test.removeprefix("tests/") + how
            else:
                print(f"  {test} fails without a fault, too", flush=True)

    def _passes_without(self, test: str) -> bool:
        if test not in self._passes:
            self._passes[test] = self._clean.test([test], self._limit_s).status == 0
        return self._passes[test]


def table(faults: Mapping[str, Fault], outcomes: Iterable[Outcome]) -> str:
    """The results, by area, as Markdown."""
    known = [outcome for outcome in outcomes if outcome.name in faults]
    num_found = sum(outcome.is_found for outcome in known)
    lines = [
        f"{num_found} of {len(known)} faults are found.",
        "",
        "| area | fault | what a user would see | found by | s |",
        "|---|---|---|---|---:|",
    ]
    order = list(dict.fromkeys(fault.area for fault in faults.values()))
    for outcome in sorted(known, key=lambda outcome: order.index(faults[outcome.name].area)):
        fault = faults[outcome.name]
        found_by = outcome.found_by.replace("|", "\\|")
        found_by = f"`{found_by}`" if outcome.is_found else f"**{found_by}**"
        cells = (fault.area, outcome.name, fault.effect, found_by, f"{outcome.seconds:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every fault was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="faults to plant; all if there are none")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/faults", help="of the copies")
    parser.add_argument("--limit-s", type=float, default=_LIMIT_S, help="for one suite")
    parser.add_argument("--resume", action="store_true", help="skip those with a result")
    parser.add_argument("--table", type=Path, help="where the table is written, too")
    options = parser.parse_args(arguments)
    faults = read_faults()
    if unknown := [name for name in options.names if name not in faults]:
        parser.error(f"there is no fault {', '.join(unknown)}")
    results: Path = options.folder / "results.jsonl"
    options.folder.mkdir(parents=True, exist_ok=True)
    known: dict[str, Outcome] = {}
    if results.exists() and (options.resume or options.names):
        decoded = msgspec.json.Decoder(Outcome).decode_lines(results.read_bytes())
        known = {outcome.name: outcome for outcome in decoded}
    chosen = options.names or [name for name in faults if name not in known]
    planting = Planting(options.folder, options.limit_s)
    planting.open(any(faults[name].is_native for name in chosen))
    for name in chosen:
        outcome = known[name] = planting.outcome(name, faults[name])
        print(f"{name}: {outcome.found_by}, {outcome.seconds:.0f} s", flush=True)
        results.write_bytes(msgspec.json.Encoder().encode_lines(known.values()))
    text = table(faults, [known[name] for name in faults if name in known])
    print(f"\n{text}")
    if options.table is not None:
        options.table.write_text(text, encoding="utf-8")
    return 0 if all(outcome.is_found for outcome in known.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
