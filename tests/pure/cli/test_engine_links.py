"""What a server with `--engines` and an engine with `--listen` accept: addresses, token, flags."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from quickstep.cli import engine, serve
from quickstep.cli.flags.engine import engine_config
from quickstep.cli.flags.parsing import Parser
from quickstep.cli.launch_ahead import launch_ahead
from quickstep.cli.serve import _connectors, _replicas
from quickstep.engine.remote.hello import TOKEN_VARIABLE, read_token
from quickstep.engine.remote.host import EngineAddress
from quickstep.engine.remote.listener import bind
from quickstep.errors import ConfigError

TOKEN = "0123456789abcdef"
ENGINES = "10.0.0.5:8100,10.0.0.6:8100"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = Parser(prog="quickstep")
    subparsers = parser.add_subparsers()
    for command in (serve, engine):
        command.add_parser(subparsers)
    return parser.parse_args(arguments)


@pytest.mark.parametrize("text", ["10.0.0.5:8100", "[::1]:8100", "gpu-1.local:0"])
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    assert str(EngineAddress.parse(text, "--listen")) == text


@pytest.mark.parametrize("text", ["8100", ":8100", "host:", "host:x", "host:65536", "::1:8100", ""])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        EngineAddress.parse(text, "--listen")


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = EngineAddress("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"cannot listen on {address}: the port is in use"):
            bind(address, "--listen")


def test_a_token_comes_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    for mode in (0o644, 0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"has the mode {mode:o}"):
            read_token(path, {})
    path.chmod(0o600)
    assert read_token(path, {}) == TOKEN
    environ = {TOKEN_VARIABLE: TOKEN}
    assert read_token(None, environ) == TOKEN
    assert environ == {}, "child processes do not get it"


@pytest.mark.parametrize("token", ["short", "x" * 1025, "ü" * 16])
def test_a_bad_token_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ConfigError, match="16 to 1024 ASCII") as caught:
        read_token(None, {TOKEN_VARIABLE: token})
    assert token not in str(caught.value)


def test_no_token_is_an_error_that_says_how_to_give_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--engine-token-file FILE"):
        read_token(None, {})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(tmp_path / "none", {})


def test_a_server_with_engines_launches_none_and_has_one_replica_for_each() -> None:
    assert launch_ahead(["serve", "demo", "--engines", ENGINES]) is None
    assert launch_ahead(["serve", "demo", f"--engines={ENGINES}"]) is None
    args = parsed("serve", "demo", "--engines", ENGINES, "--router", "prefix", "--seed", "3")
    replicas, _ = _replicas(args, replace(engine_config(args, "demo"), seed=3))
    assert replicas.num_replicas == 2
    assert replicas.router.value == "prefix"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--num-blocks", "64"), "--num-blocks"),
        (("--dtype", "float32"), "--dtype"),
        (("--max-model-len", "64"), "--max-model-len"),
        (("--max-waiting", "7"), "--max-waiting"),
        (("--speculative-method", "off"), "--speculative-config"),
        (("--data-parallel-size", "2"), "--data-parallel-size"),
        (("--prefill", "1", "--decode", "1"), "--prefill"),
    ],
)
def test_flags_of_an_engine_are_refused_by_a_server_with_engines(
    flags: tuple[str, ...], named: str
) -> None:
    args = parsed("serve", "demo", "--engines", ENGINES, *flags)
    with pytest.raises(ConfigError, match=named):
        _replicas(args, engine_config(args, "demo"))
    if named not in ("--data-parallel-size", "--prefill"):
        parsed("engine", "demo", *flags)


def test_an_engine_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(ConfigError, match=r"--engines names 10\.0\.0\.5:8100 twice"):
        _connectors(parsed("serve", "demo", "--engines", "10.0.0.5:8100,10.0.0.5:8100"))
