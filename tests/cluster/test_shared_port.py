"""`quickstep serve --reuse-port`: two servers on one port, with the same two engines."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path

import pytest
from listening_engine import EngineCommand, listening, token_file
from serve_process import environment

from quickstep.cli.main import main

DEADLINE_S = 60
BODY = {
    "prompt": "def first(a):\n    return a\n",
    "temperature": 0.9,
    "seed": 3,
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}


class SharedPort:
    """A port that stays reserved, and a server's command for it."""

    def __init__(self, engines: Sequence[EngineCommand], token: Path) -> None:
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))  # without listening it gets no connections
        self.port = int(self._reserved.getsockname()[1])
        addresses = ",".join(str(engine.address) for engine in engines)
        self._command = [sys.executable, "-m", "quickstep", "serve", "demo", "--reuse-port"]
        self._command += ["--port", str(self.port), "--engines", addresses]
        self._command += ["--engine-token-file", str(token)]

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self._command, stderr=subprocess.PIPE, text=True, env=environment()
        )
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if " serving " in line:
                    break
            else:
                raise AssertionError(f"the server did not start: {''.join(lines)}")
            yield process
        finally:
            process.kill()
            process.wait()

    def connection_to(self, process: subprocess.Popen[str]) -> HTTPConnection:
        """A connection that the kernel has given to `process`."""
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
            assert health(connection)["status"] == "ok"
            if self._socket_name(connection) in open_files(process.pid):
                return connection
            connection.close()
        raise AssertionError("no connection came to this server")

    def _socket_name(self, connection: HTTPConnection) -> str:
        """The server's end, as the files of its process name it."""
        ends = f":{self.port:04X} 0100007F:{connection.sock.getsockname()[1]:04X} "
        lines = Path("/proc/net/tcp").read_text().splitlines()
        (line,) = (line for line in lines if ends in line)
        return f"socket:[{line.split()[9]}]"


def open_files(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.add(str(link.readlink()))
    return found


def health(connection: HTTPConnection) -> dict[str, object]:
    connection.request("GET", "/health")
    content = json.loads(connection.getresponse().read())
    assert isinstance(content, dict)
    return content


class Streaming:
    """A stream that has begun."""

    def __init__(self, connection: HTTPConnection) -> None:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(BODY), headers)
        self._response = connection.getresponse()
        assert self._response.status == 200
        self._lines = [self._response.readline()]

    def events(self) -> list[bytes]:
        """All of them, once the stream ends, or its connection does."""
        with suppress(IncompleteRead, OSError):
            self._lines += self._response.readlines()
        return [line.removeprefix(b"data: ").strip() for line in self._lines if line.strip()]

    def text(self) -> str:
        """The text of the complete stream."""
        events = self.events()
        assert events[-1] == b"[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPort]:
    token = token_file(tmp_path_factory.mktemp("token"))
    with listening("127.0.0.1:0", "127.0.0.1:0", token=token) as engines:
        yield SharedPort(engines, token)


def test_a_killed_server_takes_its_own_streams_only(shared: SharedPort) -> None:
    with shared.serving() as first, shared.serving() as second:
        quiet = Streaming(shared.connection_to(second)).text()
        lost = [Streaming(shared.connection_to(first)) for _ in range(2)]
        kept = [Streaming(shared.connection_to(second)) for _ in range(2)]
        first.send_signal(signal.SIGKILL)
        assert [stream.text() for stream in kept] == [quiet, quiet]
        for stream in lost:
            assert b"[DONE]" not in stream.events()
        connection = shared.connection_to(second)
        until_s = time.monotonic() + DEADLINE_S
        while health(connection)["num_used_blocks"]:  # of the engines, for all servers
            assert time.monotonic() < until_s, "the engines still compute for the killed server"


def test_a_port_is_not_shared_with_a_server_that_does_not_allow_it(
    shared: SharedPort, capsys: pytest.CaptureFixture[str]
) -> None:
    with shared.serving():
        assert main(["serve", "demo", "--port", str(shared.port)]) != 0
    assert "is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ("--port 8123", "--reuse-port needs --engines"),
        ("--port 0 --engines 127.0.0.1:1", "--reuse-port needs a --port"),
    ],
)
def test_what_cannot_share_a_port_is_refused(
    capsys: pytest.CaptureFixture[str], flags: str, refusal: str
) -> None:
    assert main(["serve", "demo", "--reuse-port", *flags.split()]) != 0
    assert refusal in capsys.readouterr().err
