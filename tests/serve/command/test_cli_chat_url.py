"""`quickstep chat --url`: a conversation with a running server."""

from __future__ import annotations

import io
import os
import select
import sys
import termios
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from live_server import LiveServer, live_server

from quickstep.cli.main import main
from quickstep.cli.screen import without_echo

ANSWER = "Hello world, this is a test.\n"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def server(engine: FakeEngine) -> Iterator[LiveServer]:
    with live_server(engine) as one:
        yield one


@pytest.mark.parametrize("end", ["", "/", "/v1"])
def test_one_message_is_answered(
    server: LiveServer, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", server.url + end, "--message", "hi"]) == 0
    assert capsys.readouterr().out == ANSWER


def test_a_pipe_has_a_conversation_and_reset_clears_it(
    server: LiveServer,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/reset\none\n/quit\nmore\n"))
    before = len(engine.submitted)
    assert main(["chat", "--url", server.url, "--system", "be brief"]) == 0
    assert capsys.readouterr().out == ANSWER * 3
    first, second, third = [len(one.prompt) for one in engine.submitted[before:]]
    assert first == third < second


def test_flags_of_sampling_reach_the_server_and_the_others_are_its_own(
    server: LiveServer, engine: FakeEngine
) -> None:
    flags = ("--temperature", "0.5", "--top-k", "7", "--stop", "x", "--seed", "5")
    assert main(["chat", "--url", server.url, "--message", "hi", *flags, "--max-tokens", "9"]) == 0
    sampling = engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 5)
    assert (sampling.stop, sampling.max_tokens, sampling.top_p) == (("x",), 9, 1.0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--threads", "2"), "--threads is for a model that is loaded here"),
        (("--model", "other"), "the model 'other' does not exist"),
        (("--temperature", "-1"), "temperature is -1"),
    ],
)
def test_what_the_server_cannot_do_is_one_sentence(
    server: LiveServer, flags: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", server.url, "--message", "hi", *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_a_key_without_a_server_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--api-key", "k", "--message", "hi"]) == 2
    assert "give --url too" in capsys.readouterr().err


def test_what_is_typed_while_a_model_loads_is_kept_and_not_shown() -> None:
    terminal, user = os.openpty()
    with os.fdopen(user) as stream:
        with without_echo(stream):
            os.write(terminal, b"typed early\n")
            assert select.select([stream], [], [], 30)[0]
        os.write(terminal, b"later\n")
        assert [stream.readline(), stream.readline()] == ["typed early\n", "later\n"]
        assert os.read(terminal, 100) == b"later\r\n"  # what the terminal shows
        assert termios.tcgetattr(stream)[3] & termios.ECHO
    os.close(terminal)
