"""A process launched ahead ends with its owner's connection, taken or not; what launches one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quickstep.cli.launch_ahead import launch_ahead
from quickstep.cli.main import main
from quickstep.engine.remote.launch import Launched, launch
from quickstep.errors import EngineError

# a worker: it has its end of the connection, and waits until the other one closes
_WORKER = (
    sys.executable,
    "-c",
    "import socket, sys; end = socket.socket(fileno=int(sys.argv[1])); "
    "end.sendall(b'up'); end.recv(1); sys.exit(3)",
)


def test_a_launched_process_speaks_over_its_connection_and_leaves_with_it():
    launched = launch(_WORKER)
    assert launched.connection.recv(2) == b"up"
    launched.connection.close()
    assert launched.process.wait(30) == 3


# a worker that sends its environment
_TELLS = (
    sys.executable,
    "-c",
    "import json, os, socket, sys; end = socket.socket(fileno=int(sys.argv[1])); "
    "end.sendall(json.dumps(dict(os.environ)).encode()); end.close()",
)
_ROUTES = """
routes:
  small: [{upstream: "http://127.0.0.1:1/v1", model: m, key_env: FLOW_KEY}]
  large:
    - upstream: http://127.0.0.1:1/v1
      model: m
      "key_env": 'BLOCK_KEY'
    - {upstream: "http://127.0.0.1:2/v1", model: m, key_env: HF_TOKEN}
"""


@pytest.mark.parametrize("form", ["--config={}", "--config {}"])
def test_a_worker_gets_no_secret_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
):
    file = tmp_path / "config.yaml"
    file.write_text(_ROUTES)
    monkeypatch.setattr("quickstep.engine.remote.launch.launch.__defaults__", (_TELLS, (), ()))
    secrets = ("QUICKSTEP_API_KEY", "QUICKSTEP_ENGINE_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS")
    for name in (*secrets, "FLOW_KEY", "BLOCK_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, f"value of {name}")
    launched = launch_ahead(["serve", "demo", *form.format(file).split()])
    assert launched is not None
    content = b""
    while chunk := launched.connection.recv(1 << 16):
        content += chunk
    launched.end()
    environ = json.loads(content)
    assert environ["HF_TOKEN"] == "value of HF_TOKEN", "the engine may download"
    assert not {*secrets, "FLOW_KEY", "BLOCK_KEY"} & environ.keys()


def test_ending_it_twice_is_ending_it():
    launched = launch(_WORKER)
    launched.end()
    launched.end()
    assert launched.process.returncode is not None


def test_a_command_that_does_not_exist_is_an_engine_error():
    with pytest.raises(EngineError, match="cannot be started"):
        launch(("/no/such/command",))


def test_only_a_command_line_that_will_serve_is_launched_for():
    assert launch_ahead(["serve", "--help"]) is None
    assert launch_ahead(["serve", "model", "-h"]) is None
    assert launch_ahead(["generate", "serve"]) is None
    assert launch_ahead([]) is None


def test_a_command_line_that_cannot_be_used_leaves_no_worker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    workers = []

    def launched(words: list[str]) -> Launched:
        workers.append(launch(_WORKER))
        return workers[-1]

    monkeypatch.setattr("quickstep.cli.main.launch_ahead", launched)
    assert main(["serve", "--ports", "1"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err
    [worker] = workers
    assert worker.process.returncode is not None
