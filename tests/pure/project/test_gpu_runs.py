"""`benchmarks.gpu`: stages are killed with their children, and what they printed is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import Processes, main
from benchmarks.gpu_report import Done, report
from benchmarks.gpu_runs import RUNS, Goal, Stage, stages

ROOT = Path(__file__).parents[3]
ONE_STAGE = """
from benchmarks import gpu
from benchmarks.gpu_runs import Stage
gpu.stages = lambda *_: iter([Stage("hangs", ("hangs", "there"), 60.0)])
gpu._PACKAGES = ()
gpu.main(["fast", "--device", "cpu"])
"""
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print('{"child":', child.pid, "}", flush=True)
print("what is wrong", file=sys.stderr, flush=True)
if sys.argv[1:]:
    open(sys.argv[1], "w").write(str(child.pid))
time.sleep(100)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules stages can run."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def is_running(pid: int) -> bool:
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 30.0
    while not condition() and time.monotonic() < deadline_s:
        os.sched_yield()
    return condition()


def ends(pid: int) -> bool:
    return wait_for(lambda: not is_running(pid))


def test_a_stage_that_takes_too_long_is_killed_with_its_children(
    modules: Path, tmp_path: Path
) -> None:
    (modules / "hangs.py").write_text(HANGS)
    processes = Processes(tmp_path, time.monotonic() + 60.0)
    done = processes.run(Stage("hangs", ("hangs",), 5.0))
    assert done.status == "took too long"
    (row,) = done.rows
    assert "what is wrong" in done.stderr
    assert "hangs.py" in done.stderr  # where each thread was
    assert ends(row["child"])


def test_a_run_that_is_ended_leaves_no_processes(modules: Path, tmp_path: Path) -> None:
    (modules / "hangs.py").write_text(HANGS)
    file = tmp_path / "child"
    program = ONE_STAGE.replace('"there"', repr(str(file)))
    paths = os.pathsep.join((str(ROOT), str(modules)))
    environment = {**os.environ, "PYTHONPATH": paths, "OUT": str(tmp_path / "out")}
    run = subprocess.Popen([sys.executable, "-c", program], env=environment)
    assert wait_for(lambda: file.exists() and file.read_text() != "")
    run.terminate()
    assert run.wait(30.0) == 128 + signal.SIGTERM
    assert ends(int(file.read_text()))


def test_a_stage_without_time_or_a_program_costs_nothing(tmp_path: Path) -> None:
    late = Processes(tmp_path, time.monotonic() + 1.0)
    assert late.run(Stage("late", ("json.tool",), 60.0)).status == "no time left"
    processes = Processes(tmp_path, time.monotonic() + 60.0)
    missing = Stage("missing", ("json.tool",), 60.0, under=("no-such-program",))
    assert processes.run(missing).status.startswith("not started")


def test_a_run_is_written_after_every_stage_and_resumed(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time, only the stage that failed runs again."""
    (modules / "counts.py").write_text(
        "import json, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1])\n"
        "file.write_text(file.read_text() + '.' if file.exists() else '.')\n"
        "print(json.dumps({'runs': len(file.read_text())}))\n"
        "sys.exit(len(file.read_text()) < int(sys.argv[2]))\n"
    )
    goal = Goal("runs", lambda of: of["twice"][-1]["runs"], 2)
    both = (
        Stage("once", ("counts", str(tmp_path / "once"), "1"), 30.0, group="both"),
        Stage("twice", ("counts", str(tmp_path / "twice"), "2"), 30.0, (goal,), group="both"),
    )
    monkeypatch.setattr(gpu, "stages", lambda *_: iter(both))
    monkeypatch.setattr(gpu, "_PACKAGES", ())
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert main(["correct", "--device", "cpu"]) == 1
    file = tmp_path / "out" / "gpu-correct-cpu.md"
    assert "failed with status 1" in file.read_text()
    assert "| twice | runs | 1 | >= 2 | miss |" in file.read_text()
    assert main(["correct", "--device", "cpu", "--resume"]) == 0
    assert "| twice | runs | 2 | >= 2 | hit |" in file.read_text()
    lines = file.with_suffix(".jsonl").read_text().splitlines()
    found = sorted((one["title"], one["status"]) for one in map(json.loads, lines))
    assert found == [("once", "passed"), ("twice", "failed with status 1"), ("twice", "passed")]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("run", RUNS)
def test_the_stages_of_a_run_have_titles_of_their_own(run: str, device: str) -> None:
    titles = [one.title for one in stages(run, device)]
    assert len(set(titles)) == len(titles)
    assert main([run, "--device", device, "--list"]) == 0


def test_a_stage_that_was_killed_has_the_figures_that_it_printed() -> None:
    goal = Goal("share", lambda of: of["steps"][0]["share"], 0.5, True, "%")
    stage = Stage("steps", ("steps",), 10.0, (goal,))
    done = Done("steps", ("steps",), "took too long", 10.0, '{"share": 0.75}\n{"sha')
    text = "\n".join(report("fast", "cpu", [stage], {"steps": done}))
    assert "| steps | share | 75.0% | >= 50.0% | hit |" in text
    unmeasured = "\n".join(report("fast", "cpu", [stage], {}))
    assert "| steps | share | not measured | >= 50.0% | miss |" in unmeasured


def test_only_the_standard_library_is_needed_to_say_what_is_missing() -> None:
    command = [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, sys.argv.pop(1));"]
    command[-1] += "from benchmarks.gpu import main; sys.exit(main())"
    ran = subprocess.run(
        [*command, str(ROOT), "correct", "--device", "cpu"], capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert "msgspec" in ran.stderr and "pip download" in ran.stderr
