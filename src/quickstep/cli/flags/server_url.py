"""The flags of commands that read from a running server, and how they read."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException

from quickstep.cli.launch_ahead import KEY_VARIABLE
from quickstep.errors import ConfigError, EngineError

__all__ = ["add_server_url", "get"]

_TIMEOUT_S = 60.0


def add_server_url(parser: argparse.ArgumentParser) -> None:
    """Register `--url` and `--api-key`."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the server, of quickstep serve (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"one of its admin keys (default: the environment variable {KEY_VARIABLE})",
    )


def get(args: argparse.Namespace, path: str) -> bytes:
    """The body of a response.

    Raises:
        ConfigError: `--url` is no URL of a server.
        EngineError: The server does not respond, or refuses.
    """
    url: str = args.url
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--url is {url!r}, it must be like http://127.0.0.1:8000")
    key = args.api_key or os.environ.get(KEY_VARIABLE, "").rpartition("=")[2]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        raise EngineError(_message(error)) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"the server at {url} does not respond: {reason}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """The server's own sentence."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"the server answers {error.code} {error.reason}"
