"""The first frames of a TCP connection: both ends have the same build and know the same token.

    server's process   ── Hello(protocol, token) ──>   listening engine
                       <── Welcome or HelloRefused ──

An engine decodes nothing but a small `Hello` of a peer whose token it has not compared. The token
is compared in constant time; it comes from a file or the environment, and is in no log. The
messages after it have no versions, so two builds that differ refuse each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from collections.abc import MutableMapping
from pathlib import Path

import msgspec

import quickstep
from quickstep.engine.remote.connection import read_frame, write
from quickstep.engine.remote.opening import WireMessage, framed
from quickstep.errors import ConfigError, EngineError

TOKEN_VARIABLE = "QUICKSTEP_ENGINE_TOKEN"
_MAX_BYTES = 4096  # of a frame
_TIMEOUT_S = 2.0
_MIN_TOKEN_CHARS = 16
_MAX_TOKEN_CHARS = 1024


class NoHello(EngineError):
    """A peer closed its connection without a byte, as a probe of the port does."""


class Hello(WireMessage, frozen=True):
    """The first message of a connection; its fields never change."""

    protocol: str
    token: str


class Welcome(WireMessage, frozen=True):
    """The engine takes messages now."""


class HelloRefused(WireMessage, frozen=True):
    """The engine closes the connection."""

    reason: str


_HELLO = msgspec.msgpack.Decoder(list[Hello])
_ANSWER = msgspec.msgpack.Decoder(list[Welcome | HelloRefused])


def protocol() -> str:
    """The version and a digest of this build's sources; takes about 50 ms."""
    root = Path(quickstep.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return f"{quickstep.__version__} ({digest.hexdigest()[:12]})"


def read_token(path: Path | None, environ: MutableMapping[str, str]) -> str:
    """The token of `--engine-token-file`, or of the environment variable, which is removed: child
    processes do not need it.

    Raises:
        ConfigError: There is none, it is too short, or other users can read the file.
    """
    variable = environ.pop(TOKEN_VARIABLE, "")
    if path is None:
        source, token = TOKEN_VARIABLE, variable
        if not token:
            raise ConfigError(
                "engines and servers that connect need a token in common: give "
                f"--engine-token-file FILE, or set {TOKEN_VARIABLE}"
            )
    else:
        source, token = str(path), _read_private(path)
    token = token.strip()
    if not (_MIN_TOKEN_CHARS <= len(token) <= _MAX_TOKEN_CHARS and token.isascii()):
        raise ConfigError(
            f"the token of {source} must have {_MIN_TOKEN_CHARS} to {_MAX_TOKEN_CHARS} ASCII "
            "characters; `openssl rand -hex 32` makes one"
        )
    return token


def _read_private(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & 0o077:
                raise ConfigError(
                    f"{path} has the mode {mode:o}: other users can read the token; chmod 600"
                )
            return file.read(_MAX_TOKEN_CHARS + 2)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--engine-token-file {path} cannot be read: {why}") from None


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, hello: Hello
) -> None:
    """Send `hello` to a listening engine and wait for its answer.

    Raises:
        ConfigError: The engine refused it.
        EngineError: `peer` is no engine, or does not answer in time.
    """
    try:
        write(writer, framed([hello]))
        async with asyncio.timeout(_TIMEOUT_S):
            (answer,) = _ANSWER.decode(await read_frame(reader, _MAX_BYTES, peer))
    except (ValueError, msgspec.DecodeError, asyncio.IncompleteReadError, OSError) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else "no valid answer"
        raise EngineError(f"{peer} does not greet as an engine does: {why}") from None
    if isinstance(answer, HelloRefused):
        raise ConfigError(f"{peer} refused this server: {answer.reason}")


async def receive_hello(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str, expected: Hello
) -> None:
    """Wait for the hello of a server, compare it with ours, and answer.

    Raises:
        NoHello: `peer` closed the connection without a byte.
        EngineError: `peer` sent another one, something else, or nothing in time.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            (hello,) = _HELLO.decode(await read_frame(reader, _MAX_BYTES, peer))
    except (ValueError, msgspec.DecodeError, asyncio.IncompleteReadError, OSError) as error:
        closed = isinstance(error, asyncio.IncompleteReadError) and not error.partial
        raise (NoHello if closed else EngineError)(f"{peer} sent no hello") from None
    reason = ""
    if not hmac.compare_digest(hello.token.encode(), expected.token.encode()):
        reason = "the token is another one"
    elif hello.protocol != expected.protocol:
        reason = (
            f"the server is the build {hello.protocol}, the engine {expected.protocol}; install "
            "the same one on both hosts"
        )
    write(writer, framed([HelloRefused(reason) if reason else Welcome()]))
    if reason:
        raise EngineError(f"{peer} was refused: {reason}")
