"""Claude Code and Codex, the command-line agents, in an empty home and without a login.

The demo model answers their long prompts, the second time from the prefix cache; a scripted engine
has them edit a file with their own tools.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SCRIPTED, serving

PROGRAMS = ROOT / ".venv-clients/agents/node_modules/.bin"
# Their prompts have up to 30,000 tokens of the demo model, which knows 2,048 positions.
LONG = [
    *("-m", "quickstep", "serve", "demo", "--port", "0", "--drain-timeout-s", "0"),
    *("--max-model-len", "65536", "--allow-long-context", "--kv-cache-memory-bytes", "512MiB"),
    "--access-log",
]
ANSWERED = re.compile(r"quickstep.access:\s?\S+ (GET|HEAD|POST) (\S+) (\d+|-) ")
TIMEOUT_S = 500
pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)
# A program, its settings, and the answer and the usage that it prints.
Agent = Callable[[str, Path, str, str], tuple[str, dict[str, Any]]]


Server = tuple[str, Path]  # its address and its log


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, with a context for the agents' prompts."""
    log = tmp_path_factory.mktemp("model") / "log"
    with serving(LONG, log) as address:
        yield address, log


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The scripts of `scripted_server.py`."""
    log = tmp_path_factory.mktemp("scripts") / "log"
    with serving(SCRIPTED, log) as address:
        yield address, log


def check_answered(log: Path) -> None:
    """Fails if a request was refused."""
    answered = ANSWERED.findall(log.read_text())
    assert any(method == "POST" for method, _, _ in answered)
    assert [line for line in answered if line[2] != "200"] == []


def run(command: list[str], folder: Path, **settings: str) -> str:
    """The output of a program in `folder`, whose `home` has its settings. Fails if it fails."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        command,
        cwd=work,
        env=environment | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def claude_code(url: str, folder: Path, model: str, prompt: str) -> tuple[str, dict[str, Any]]:
    command = [str(PROGRAMS / "claude"), "-p", prompt, "--model", model]
    command += ["--output-format", "json", "--permission-mode", "acceptEdits"]
    output = run(
        command,
        folder,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_OUTPUT_TOKENS="200",
        DISABLE_AUTOUPDATER="1",
    )
    result = json.loads(output)
    assert not result["is_error"], result
    usage = result["usage"]
    return result["result"], {"cached": usage["cache_read_input_tokens"], **usage}


def codex(url: str, folder: Path, model: str, prompt: str) -> tuple[str, dict[str, Any]]:
    settings = folder / "home" / ".codex"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "config.toml").write_text(
        f'model = "{model}"\nmodel_provider = "quickstep"\n'
        '[model_providers.quickstep]\nname = "quickstep"\nwire_api = "responses"\n'
        f'base_url = "{url}/v1"\n'
    )
    command = [str(PROGRAMS / "codex"), "exec", "--skip-git-repo-check", "--json"]
    command += ["--dangerously-bypass-approvals-and-sandbox", prompt]
    events = [json.loads(line) for line in run(command, folder).splitlines()]
    (completed,) = (event for event in events if event["type"] == "turn.completed")
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    usage = completed["usage"]
    return texts[-1], {"cached": usage["cached_input_tokens"], **usage}


AGENTS = [claude_code, codex]


@pytest.mark.parametrize("agent", AGENTS)
def test_a_model_answers_and_reads_the_prefix_from_its_cache(
    agent: Agent, model: Server, tmp_path: Path
) -> None:
    url, log = model
    agent(url, tmp_path, "demo", "Say hello.")
    answer, usage = agent(url, tmp_path, "demo", "Say hello again.")
    assert answer
    assert usage["cached"] > 5000
    check_answered(log)


@pytest.mark.parametrize("agent", AGENTS)
def test_it_edits_a_file_with_its_tools(agent: Agent, scripts: Server, tmp_path: Path) -> None:
    url, log = scripts
    file = tmp_path / "work" / "settings.py"
    file.parent.mkdir()
    file.write_text("limit = 10\nother = 5\n")
    answer, _ = agent(url, tmp_path, "fake", f"replace 10 by 20 in {file}")
    assert file.read_text() == "limit = 20\nother = 5\n"
    assert answer == "It is done."
    check_answered(log)
