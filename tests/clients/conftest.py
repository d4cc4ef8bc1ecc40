"""Servers for clients of other people: the real `quickstep serve` with the demo model, and a
scripted one. Both run in processes of their own with the packages of `.venv`, so that nothing a
client installs changes the server.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("QUICKSTEP_PYTHON", str(ROOT / ".venv/bin/python"))
SERVE = [
    *("-m", "quickstep", "serve", "demo", "--port", "0", "--threads", "1", "--num-blocks", "400"),
    *("--served-model-name", "demo", "gpt-4o-mini", "--drain-timeout-s", "0"),
    *("--tool-call-parser", "hermes"),
]
SCRIPTED = [str(ROOT / "tests/clients/scripted_server.py")]
ADDRESS = re.compile(r"^.*serving .* at (http\S+)/v1$", re.MULTILINE)
KEY = "secret-of-the-tests"

# Clients look for these: an address of another server or a proxy must not get the tests' requests,
# and tracing must not send them anywhere.
for variable in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "OLLAMA_HOST"):
    os.environ.pop(variable, None)
os.environ.update(
    {
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGCHAIN_TRACING_V2": "false",
        "LANGSMITH_TRACING": "false",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
)


@contextmanager
def serving(arguments: list[str], log: Path) -> Iterator[str]:
    """The address of a server, without `/v1`, which runs until the block ends."""
    with (
        log.open("w") as written,
        subprocess.Popen(
            [PYTHON, *arguments], stdin=subprocess.PIPE, stdout=written, stderr=written
        ) as process,
    ):
        try:
            yield address_in(log, process)
        finally:
            process.terminate()


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Waits for the line of the log that has the address; fails if the server ends before."""
    while not (found := ADDRESS.search(log.read_text())):
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            pytest.fail(f"the server ended: {log.read_text()}")
    return found.group(1)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo model."""
    with serving(SERVE, tmp_path_factory.mktemp("demo") / "log") as address:
        yield address


@pytest.fixture(scope="session")
def scripted_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scripts of `scripted_server.py`."""
    with serving(SCRIPTED, tmp_path_factory.mktemp("scripted") / "log") as address:
        yield address


@pytest.fixture(scope="session")
def locked_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scripts, for those who have the key."""
    arguments = [*SCRIPTED, "--api-key", KEY]
    with serving(arguments, tmp_path_factory.mktemp("locked") / "log") as address:
        yield address
