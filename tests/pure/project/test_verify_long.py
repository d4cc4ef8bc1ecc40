"""The long search: fresh seeds, each printed, and an end at the first failure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = ["tests/pure/test_one.py", "tests/cpu/test_two.py", "tests/native/test_three.py"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verify_long", ROOT / "tools/verify_long.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["verify_long"] = module
    spec.loader.exec_module(module)
    return module


class Machine:
    """Runs take ten seconds of a counted clock; statuses by the number of the run."""

    def __init__(self, statuses: dict[int, int] | None = None) -> None:
        self.now = 0.0
        self.ran: list[tuple[str, ...]] = []
        self.statuses = statuses or {}

    def clock(self) -> float:
        return self.now

    def run(self, command: tuple[str, ...], limit_s: float) -> int | None:
        self.ran.append(command)
        self.now += min(10.0, limit_s)
        return self.statuses.get(len(self.ran), 0) if limit_s >= 10.0 else None


def seed_of(command: tuple[str, ...]) -> int:
    if "--seed" in command:
        return int(command[command.index("--seed") + 1])
    return int(next(one for one in command if "hypothesis-seed" in one).partition("=")[2])


def test_it_ends_with_the_time_and_every_run_has_a_seed_of_its_own(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()
    summary = tool.search(145.0, 7, FILES, machine.run, machine.clock)
    assert [seed_of(command) for command in machine.ran] == list(range(7, 22))
    assert (summary.num_verified, summary.num_unfinished, summary.failed) == (6, 1, ())
    assert sorted(summary.tested) == sorted(FILES * 2)
    shown = capsys.readouterr().out
    assert all(" ".join(command) in shown for command in machine.ran)
    again = Machine()
    tool.search(145.0, 7, FILES, again.run, again.clock)
    assert again.ran == machine.ran


def test_a_long_run_leaves_time_to_the_others(tool: ModuleType) -> None:
    machine, limits = Machine(), list[float]()

    def run(command: tuple[str, ...], limit_s: float) -> None:
        limits.append(limit_s)
        machine.now += limit_s

    assert tool.search(600.0, 3, FILES, run, machine.clock).num_unfinished == 5
    assert limits == [120.0] * 5
    limits.clear()
    tool.search(6000.0, 3, FILES, run, machine.clock)
    assert limits == [300.0] * 20


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_first_failure_ends_it_and_names_its_command(tool: ModuleType, number: int) -> None:
    machine = Machine({number: 1})
    summary = tool.search(500.0, 3, FILES, machine.run, machine.clock)
    assert len(machine.ran) == number
    assert summary.failed == machine.ran[-1]


def test_a_file_whose_tests_are_not_collected_is_no_failure(tool: ModuleType) -> None:
    machine = Machine({2: tool.NOTHING_COLLECTED})
    assert not tool.search(40.0, 3, FILES, machine.run, machine.clock).failed
    machine = Machine({1: tool.NOTHING_COLLECTED})
    assert tool.search(40.0, 3, FILES, machine.run, machine.clock).failed


def test_the_exit_status_and_the_summary_show_a_failure(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for status in (0, 1):
        machine = Machine({3: status})
        monkeypatch.setattr(tool, "run_command", machine.run)
        monkeypatch.setattr(tool.time, "monotonic", machine.clock)
        assert tool.main(["--minutes", "1", "--seed", "5"]) == status
        shown = capsys.readouterr().out
        assert "--seed 5" in shown
        assert ("FAILED" in shown) == bool(status)


def test_the_property_tests_are_found(tool: ModuleType) -> None:
    files = tool.property_tests()
    assert "tests/pure/core/test_scheduler_machine.py" in files
    assert "tests/native/test_native_sampling.py" in files
    assert all((ROOT / name).is_file() for name in files)


def test_a_command_that_is_not_over_in_time_is_ended(tool: ModuleType) -> None:
    forever = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert tool.run_command([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == 3
    assert tool.run_command(forever, 0.2) is None
