"""Every program in `examples/` runs, with the bundled model and from the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import live_server

from quickstep.config import EngineConfig
from quickstep.engine.assembly import open_engine

EXAMPLES = Path(__file__).parents[3] / "examples"
WITH_A_SERVER = {"openai_client.py"}


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in WITH_A_SERVER)
)
def test_an_example_runs_with_the_bundled_model(name: str) -> None:
    assert run(name)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(open_engine(EngineConfig())) as server:
        yield f"{server.url}/v1"


def test_the_client_example_talks_to_a_server(url: str) -> None:
    assert "get_weather" in run("openai_client.py", "--url", url)


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({path.name})" in listed for path in EXAMPLES.glob("*.py"))
