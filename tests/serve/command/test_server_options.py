"""What the operator sets: TLS, deadlines, unknown fields, logs; each through the whole server."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, FakeStream
from live_server import DEADLINE_S, LiveServer, live_server, until
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from quickstep.engine.logs import JsonLines
from quickstep.errors import ConfigError, RequestError
from quickstep.server.app import create_app
from quickstep.server.http.tls import check_tls
from quickstep.server.options import ConnectionOptions, Deadlines, ServerOptions, TlsOptions
from quickstep.server.usage.api_keys import ApiKey, ApiKeys
from quickstep.server.usage.limits import KeyLimits
from quickstep.types import Request


class TimedEngine(FakeEngine):
    """Remembers the deadline that it was given."""

    deadline_s: float | None = None

    def stream(self, request: Request) -> FakeStream:
        self.deadline_s = request.timeout_s
        return super().stream(request)


def post(
    path: str, body: Any, options: ServerOptions, engine: FakeEngine | None = None
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(engine or FakeEngine(), options)) as client:
            return await client.post(path, json=body)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("deadlines", "expected"),
    [(Deadlines(), None), (Deadlines(default_s=7), 7), (Deadlines(max_s=9), 9)],
)
def test_a_request_without_a_timeout_gets_the_operators(
    deadlines: Deadlines, expected: float | None
) -> None:
    engine = TimedEngine()
    post(COMPLETIONS, {"prompt": "a"}, ServerOptions(deadlines=deadlines), engine)
    assert engine.deadline_s == expected


def test_a_timeout_beyond_the_operators_is_refused() -> None:
    deadlines = Deadlines(default_s=5, max_s=10)
    assert deadlines.of(10) == 10
    with pytest.raises(RequestError, match="timeout_s is 11, the limit is 10") as caught:
        deadlines.of(11)
    assert caught.value.param == "timeout_s"


def test_a_requests_own_timeout_goes_to_the_engine_within_the_operators_limit() -> None:
    engine = TimedEngine()
    options = ServerOptions(deadlines=Deadlines(default_s=5, max_s=10))
    asked = {"prompt": "a", "timeout_s": 8}
    assert post(COMPLETIONS, asked, options, engine).status_code == 200
    assert engine.deadline_s == 8
    refused = post(COMPLETIONS, {"prompt": "a", "timeout_s": 11}, options)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout_s")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Deadlines(default_s=0), "--default-timeout-s is 0"),
        (lambda: Deadlines(max_s=float("nan")), "--max-timeout-s is nan"),
        (lambda: Deadlines(default_s=3, max_s=2), "--max-timeout-s allows 2"),
        (lambda: ConnectionOptions(upload_s=-1), "--upload-timeout-s is -1"),
        (lambda: ConnectionOptions(comment_every_s=-1), "--stream-comment-s is -1"),
        (lambda: TlsOptions(keyfile="k"), "--ssl-keyfile needs --ssl-certfile"),
        (lambda: ServerOptions(root_path="llm"), "--root-path is 'llm'"),
        (lambda: ServerOptions(root_path="/llm/"), "--root-path is '/llm/'"),
    ],
)
def test_unusable_options_are_configuration_errors(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsOptions:
    path = tmp_path_factory.mktemp("tls")
    cert, key = path / "cert.pem", path / "key.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    argv += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(argv, check=True, capture_output=True)
    return TlsOptions(str(cert), str(key))


def test_https_is_served_with_the_certificate(certificate: TlsOptions) -> None:
    options = ServerOptions(tls=certificate)
    check_tls(certificate)
    context = ssl.create_default_context(cafile=certificate.certfile)
    with live_server(FakeEngine(), options) as server:
        url = f"https://127.0.0.1:{server.port}"
        with httpx.Client(verify=context, base_url=url) as client:
            answer = client.post(CHAT, json={"messages": MESSAGES})
            assert answer.json()["choices"][0]["message"]["content"].startswith("Hello")
            streamed = client.post(CHAT, json={"messages": MESSAGES, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert client.get("/health", headers={"x": "y" * 40_000}).status_code == 431
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")  # nobody signed for it
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")


def test_with_ca_certs_a_client_needs_a_certificate(certificate: TlsOptions) -> None:
    assert certificate.certfile is not None
    options = ServerOptions(
        tls=TlsOptions(certificate.certfile, certificate.keyfile, certificate.certfile)
    )
    check_tls(options.tls)
    with live_server(FakeEngine(), options) as server:
        url = f"https://127.0.0.1:{server.port}/health"
        context = ssl.create_default_context(cafile=certificate.certfile)
        with httpx.Client(verify=context) as client, pytest.raises(httpx.TransportError):
            client.get(url)
        context = ssl.create_default_context(cafile=certificate.certfile)
        context.load_cert_chain(certificate.certfile, certificate.keyfile)
        with httpx.Client(verify=context) as client:
            assert client.get(url).status_code == 200


def test_files_that_are_no_certificate_are_configuration_errors(
    certificate: TlsOptions, tmp_path: Path
) -> None:
    nothing = tmp_path / "nothing"
    nothing.write_text("x")
    for options in (
        TlsOptions(str(nothing), certificate.keyfile),
        TlsOptions(certificate.certfile, str(nothing)),
        TlsOptions(str(tmp_path / "missing")),
        TlsOptions(certificate.certfile, certificate.keyfile, str(nothing)),
    ):
        with pytest.raises(ConfigError, match="read"):
            check_tls(options)


def test_the_access_log_has_a_line_per_request_that_no_client_can_break(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        app = create_app(FakeEngine(), ServerOptions(access_log=True))
        async with client_of(app) as client:
            await client.get("/nowhere%0A%1b[31m", headers={"x-request-id": "mine"})
            await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})

    with caplog.at_level(logging.INFO, "quickstep.access"):
        asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.name == "quickstep.access"]
    assert len(lines) == 2
    assert "GET /nowhere\\n\\x1b[31m 404" in lines[0]
    assert lines[0].endswith("key=- id=mine")
    assert f"POST {COMPLETIONS} 200" in lines[1]


def test_a_json_log_has_one_object_per_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        trace = (type(error), error, error.__traceback__)
    record = logging.LogRecord("a.b", logging.ERROR, "f", 1, "said %s\n", ("ü",), trace)
    line = JsonLines().format(record)
    assert "\n" not in line
    known = json.loads(line)
    assert (known["level"], known["logger"], known["message"]) == ("ERROR", "a.b", "said ü\n")
    assert "ValueError: two\nlines" in known["error"]
    assert known["time"].endswith("+00:00")


def tls_client(server: LiveServer, certfile: str | None) -> httpx.Client:
    context = ssl.create_default_context(cafile=certfile)
    return httpx.Client(verify=context, base_url=f"https://127.0.0.1:{server.port}")


def test_a_connection_counts_and_has_a_limit_of_time_before_its_handshake(
    certificate: TlsOptions, caplog: pytest.LogCaptureFixture
) -> None:
    connections = ConnectionOptions(max_connections=4, header_s=0.2)
    with live_server(
        FakeEngine(), ServerOptions(tls=certificate, connections=connections)
    ) as server:
        address = ("127.0.0.1", server.port)
        silent = [socket.create_connection(address) for _ in range(8)]
        for one in silent:  # the last five are cut at once, and the others in time
            one.settimeout(DEADLINE_S)
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
            one.close()
        with tls_client(server, certificate.certfile) as client:
            assert client.get("/health").status_code == 200
    assert "the address 127.0.0.1 has its share of --max-connections" in caplog.text


def test_http_to_https_and_the_reverse_are_in_the_log(
    certificate: TlsOptions, caplog: pytest.LogCaptureFixture
) -> None:
    with live_server(FakeEngine(), ServerOptions(tls=certificate)) as server:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")
        until(lambda: "a client speaks http to this https port" in caplog.text)
    with live_server(FakeEngine()) as server:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://127.0.0.1:{server.port}/health", verify=False)
        until(lambda: "a client speaks https to this http port" in caplog.text)


def test_sighup_reads_keys_and_certificate_again(
    certificate: TlsOptions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert certificate.certfile is not None and certificate.keyfile is not None
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(Path(certificate.certfile).read_bytes())
    key.write_bytes(Path(certificate.keyfile).read_bytes())
    entries: list[str | ApiKey] = [ApiKey("ann", "old", limits=KeyLimits(requests_per_minute=99))]
    api_keys = ApiKeys(entries, read=lambda: (entries, ()))
    options = ServerOptions(tls=TlsOptions(str(cert), str(key)), api_keys=api_keys)
    with live_server(FakeEngine(), options) as server:

        def statuses() -> list[int]:
            with tls_client(server, certificate.certfile) as client:
                headers = ({"x-api-key": "old"}, {"x-api-key": "new"})
                return [client.get("/v1/models", headers=header).status_code for header in headers]

        def hang_up() -> None:
            before = caplog.text.count("read keys and certificates again")
            server.server.want_reload(signal.SIGHUP, None)
            until(lambda: caplog.text.count("read keys and certificates again") > before)

        caplog.set_level("INFO")
        assert statuses() == [200, 401]
        entries[:] = [ApiKey("ann", "new", limits=KeyLimits(requests_per_minute=1))]
        hang_up()
        assert statuses() == [401, 200]
        with tls_client(server, certificate.certfile) as client:
            answers = [
                client.post(CHAT, json={"messages": MESSAGES}, headers={"x-api-key": "new"})
                for _ in range(2)
            ]
        assert [answer.status_code for answer in answers] == [200, 429]
        entries.clear()
        cert.write_text("none")
        hang_up()
        assert statuses() == [401, 200], "what cannot be used leaves all as it was"
        assert "the API keys stay as they were" in caplog.text
        assert "the certificate stays as it was" in caplog.text


@pytest.mark.parametrize("path", ["/file", "/json"])
def test_any_answer_that_is_not_read_is_cut(path: str, tmp_path: Path) -> None:
    """A file, a long JSON answer: whoever writes it, the limit is the connection's."""
    file = tmp_path / "file"
    file.write_bytes(b"x" * 30_000_000)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        answer = FileResponse(file) if path == "/file" else Response(file.read_bytes())
        await answer(scope, receive, send)

    connections = ConnectionOptions(slow_reader_s=0.2, max_connections=4)
    options = ServerOptions(connections=connections)
    with (
        patch("quickstep.server.run.app_of_models", lambda models, options: app),
        live_server(FakeEngine(), options) as server,
    ):
        address = ("127.0.0.1", server.port)
        unread = [socket.create_connection(address) for _ in range(2)]
        for one in unread:
            one.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        connected = server.server.server_state.connections
        until(lambda: len(connected) == 2)
        until(lambda: not connected)
        for one in unread:
            one.close()
