"""`quickstep why` and `quickstep trace` with a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, live_server
from logged_engine import logged_engine

from quickstep.cli.main import main
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

OPTIONS = ServerOptions(api_keys=ApiKeys(["ann=secret-a"], ["root=secret-r"]), drain_s=0.0)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(logged_engine(), OPTIONS) as one:
        yield one


def test_why_prints_a_table_and_a_sentence(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "web-1", "--url", server.url, "--api-key", "secret-r"]) == 0
    printed = capsys.readouterr().out
    assert "web-1-ab#0" in printed
    assert "web-1-ab took 6.00 s, 4.0 times the 1.50 s" in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.strip()}
    assert rows["queue"] == ["queue", "3000.0", "0.0", "1500.0", "1500.0", "0.0", "3"]
    assert rows["without"][-1] == "1500.0"


def test_why_prints_json(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "web-1", "--json", "--url", server.url, "--api-key", "secret-r"]) == 0
    assert json.loads(capsys.readouterr().out)["request_id"] == "web-1"


def test_top_prints_steps_and_requests_once(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--url", server.url, "--api-key", "secret-r", "--every-s", "3600")
    assert main(["top", *flags]) == 0  # no terminal
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ended") and "steps/s" in lines[0]
    assert any(line.startswith("running ") and "predicted" in line for line in lines)
    assert any(line.split()[:2] == ["request", "phase"] for line in lines)


def test_top_refuses_a_bad_interval(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", server.url, "--every-s", "0"]) == 2
    assert "--every-s is 0, it must be from 0.1 to 3600" in capsys.readouterr().err


def test_trace_writes_a_file(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("QUICKSTEP_API_KEY", "root=secret-r")
    path = tmp_path / "out.json"
    assert main(["trace", "--url", server.url, "--last", "3s", "-o", str(path)]) == 0
    assert "4 steps, 1 sequences" in capsys.readouterr().err
    names = [event["name"] for event in json.loads(path.read_bytes())["traceEvents"]]
    assert "step 6" in names and "prefill other-9" in names and "step 1" not in names


def test_refusals_are_the_servers_sentence(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "web-1", "--url", server.url, "--api-key", "secret-a"]) == 1
    assert "needs an admin key" in capsys.readouterr().err
    assert main(["why", "nothing", "--url", server.url, "--api-key", "secret-r"]) == 1
    assert "'nothing' is not in the log" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--url", "http://127.0.0.1:9"]) == 1
    assert "does not respond" in capsys.readouterr().err
    assert main(["trace", "--url", "127.0.0.1:9"]) == 2
    assert "it must be like http://" in capsys.readouterr().err


def test_a_missing_or_wrong_key_is_named_as_the_command_takes_it(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("QUICKSTEP_API_KEY", raising=False)
    for command in (("why", "web-1"), ("trace",), ("chat", "--message", "hi"), ("bench", "serve")):
        assert main([*command, "--url", server.url]) in (1, 2)
        error = capsys.readouterr().err
        assert "wants a key: give --api-key, or set QUICKSTEP_API_KEY" in error
        assert main([*command, "--url", server.url, "--api-key", "x"]) in (1, 2)
        assert "does not know the key of --api-key" in capsys.readouterr().err
