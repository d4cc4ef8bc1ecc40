"""`python -m benchmarks.gpu RUN`: what works on this GPU, how fast it is, and next to what.

RUN is `correct`, `fast` or `compared` (`benchmarks.gpu_runs`): nine minutes each, useful without
the others. Every stage is a group of processes with a time limit, so that one that hangs or crashes
costs nothing else; the most important are first. After every stage, a Markdown report and a file
with a JSON line for each stage are written to the folder that `OUT` names, else to
`benchmarks/results`. With `--resume`, stages that passed before are not run again.

`--device cpu` runs the same stages on small shapes, to see that they work.

Only the standard library is imported here: on a machine that lacks packages, this says which.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

from benchmarks.gpu_report import Done, report
from benchmarks.gpu_runs import RUNS, Stage, stages

_ROOT = Path(__file__).parent.parent
_RESULTS = Path(__file__).parent / "results"
_TOTAL_S = 530.0
_LEAST_S = 5.0  # a stage is not started with less
_MOST_AT_ONCE = 12  # stages of a group
_MOST_CHARACTERS = 400_000  # kept of what a stage printed
_PACKAGES = (
    *("torch", "triton", "numpy", "msgspec", "llguidance", "tokenizers", "safetensors"),
    *("huggingface_hub", "jinja2", "yaml", "rich", "uvloop", "prometheus_client", "transformers"),
    *("pytest", "pytest_timeout", "hypothesis"),
)
_HOW_TO_BRING = """\
Where there is a network:    pip download --no-deps -d wheels msgspec llguidance
on the machine with the GPU: pip install --no-index --no-deps --target site wheels/*
                             export PYTHONPATH=site"""
_CUDA_TOOLS = "/usr/local/cuda/bin"


class Processes:
    """The processes of stages; each stage is a group of its own. Owned by `main`."""

    def __init__(self, folder: Path, end_s: float) -> None:
        self._folder = folder
        self._end_s = end_s
        self._groups: set[int] = set()
        self._changed = threading.Lock()
        self._is_over = False

    def run(self, stage: Stage) -> Done:
        """Run a stage; at its limit, everything that it started is killed."""
        started_s, command = time.monotonic(), stage.command("python")
        limit_s = min(stage.limit_s, self._end_s - started_s)
        if limit_s < _LEAST_S:
            return Done(stage.title, command, "no time left", 0.0)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdout", "stderr")]
            junit = Path(folder) / "junit.xml"
            own_s = limit_s - max(_LEAST_S, 0.15 * limit_s)
            argv = [
                argument.format(out=self._folder, junit=junit, seconds=f"{own_s:.0f}")
                for argument in stage.command(sys.executable)
            ]
            try:
                with files[0].open("wb") as stdout, files[1].open("wb") as stderr:
                    status = self._run(argv, stage, limit_s, stdout.fileno(), stderr.fileno())
            except OSError as error:
                return Done(stage.title, command, f"not started: {error}", 0.0)
            texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
            if junit.exists():
                _add_junit(junit, self._folder / "junit.xml", self._changed)
        texts = [text[-_MOST_CHARACTERS:] for text in texts]
        return Done(stage.title, command, status, time.monotonic() - started_s, *texts)

    def _run(self, argv: list[str], stage: Stage, limit_s: float, out: int, err: int) -> str:
        process = self._start(argv, stage, out, err)
        if process is None:
            return "no time left"
        try:
            code = process.wait(limit_s)
            return "passed" if code == 0 else f"failed with status {code}"
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # Python prints the stacks of its threads
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            return "took too long"
        finally:
            _kill(process.pid)
            process.wait()
            with self._changed:
                self._groups.discard(process.pid)

    def _start(
        self, argv: list[str], stage: Stage, out: int, err: int
    ) -> subprocess.Popen[bytes] | None:
        paths = [str(_ROOT / "src"), str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PATH": os.pathsep.join((os.environ.get("PATH", os.defpath), _CUDA_TOOLS)),
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            **dict(stage.environment),
        }
        with self._changed:
            if self._is_over:
                return None
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=_ROOT,
                env=environment,
                start_new_session=True,
            )
            self._groups.add(process.pid)
            return process

    def kill(self) -> None:
        """Kill what runs; nothing is started any more."""
        with self._changed:
            self._is_over = True
            for group in self._groups:
                _kill(group)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages of a run and write the results. Returns 1 if one did not pass."""
    args = _parse(argv)
    every = list(stages(args.run, args.device))
    chosen = [
        stage
        for stage in every
        if args.only is None or any(text in stage.title for text in args.only)
    ]
    if args.list:
        for stage in chosen:
            print(f"{stage.title} ({stage.limit_s:.0f} s): {' '.join(stage.command('python'))}")
        return 0
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"missing packages: {', '.join(missing)}\n{_HOW_TO_BRING}", file=sys.stderr)
    if not chosen or not {"torch", "msgspec"}.isdisjoint(missing):
        print("nothing can be run", file=sys.stderr)
        return 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    folder = args.out or Path(os.environ.get("OUT") or _RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / f"{args.name or f'gpu-{args.run}-{args.device}'}.jsonl"
    if args.resume is None and args.only is None:  # everything anew
        lines.unlink(missing_ok=True)
        (folder / "junit.xml").unlink(missing_ok=True)
    if isinstance(args.resume, Path) and not lines.exists():
        shutil.copyfile(args.resume, lines)
    finished = _read(lines)
    passed = set()
    if args.resume is not None:
        passed = {title for title, done in finished.items() if done.status == "passed"}
    processes = Processes(folder, time.monotonic() + args.seconds)
    signal.signal(signal.SIGTERM, _stop)
    try:
        for stage, done in _run_all(
            [stage for stage in chosen if stage.title not in passed], processes
        ):
            finished[stage.title] = done
            print(f"{stage.title}: {done.status}, {done.seconds:.0f} s", flush=True)
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(done)) + "\n")
            text = "\n".join(report(args.run, args.device, every, finished))
            lines.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
            if stage.is_needed and done.status != "passed":
                print(done.stderr[-2000:], file=sys.stderr)
                break
    finally:
        processes.kill()
    print(f"{lines.with_suffix('.md')}: written")
    is_passed = [
        stage.title in finished and finished[stage.title].status == "passed" for stage in chosen
    ]
    return 0 if all(is_passed) else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Correctness and speed on one GPU, in runs of nine minutes.",
    )
    parser.add_argument("run", choices=RUNS, metavar="RUN", help=", ".join(RUNS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=_TOTAL_S, help="for all stages together")
    parser.add_argument("--out", type=Path, metavar="DIR", help="instead of the folder in OUT")
    parser.add_argument("--name", help="of the files, without a suffix (default: gpu-RUN-DEVICE)")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="stages with one of these in their titles"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        type=Path,
        const=True,
        metavar="FILE",
        help="skip stages that passed before, according to the JSON lines there, or those of FILE",
    )
    parser.add_argument("--list", action="store_true", help="print the stages and run none")
    return parser.parse_args(argv)


def _run_all(chosen: Sequence[Stage], processes: Processes) -> Iterator[tuple[Stage, Done]]:
    """One after another, those of a group at once."""
    most = min(_MOST_AT_ONCE, max(1, (os.cpu_count() or 1) - 2))
    for _, group in groupby(chosen, lambda stage: stage.group or stage.title):
        pool = ThreadPoolExecutor(most)
        try:
            running = {pool.submit(processes.run, stage): stage for stage in group}
            for future in as_completed(running):
                yield running[future], future.result()
        except BaseException:
            processes.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _read(lines: Path) -> dict[str, Done]:
    """The last result of each stage, by title."""
    if not lines.exists():
        return {}
    found = [Done(**json.loads(line)) for line in lines.read_text(encoding="utf-8").splitlines()]
    return {done.title: done for done in found}


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _add_junit(source: Path, target: Path, guard: threading.Lock) -> None:
    """Add the test suites of one file to those of another."""
    with guard:
        root = (
            ElementTree.parse(target).getroot()
            if target.exists()
            else ElementTree.Element("testsuites")
        )
        try:
            root.extend(ElementTree.parse(source).getroot().iter("testsuite"))
        except ElementTree.ParseError:  # pytest was killed while it wrote
            return
        ElementTree.ElementTree(root).write(target, encoding="utf-8", xml_declaration=True)


if __name__ == "__main__":
    sys.exit(main())
