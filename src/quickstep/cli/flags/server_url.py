"""The flags of commands that talk to a running server, and how they do."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any

from quickstep.cli.launch_ahead import KEY_VARIABLE
from quickstep.errors import ConfigError, EngineError, RequestError

_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 3600.0


def add_server_url(
    parser: argparse.ArgumentParser,
    url: str | None = "http://127.0.0.1:8000",
    what: str = "the server, of quickstep serve (default: %(default)s)",
    key: str = "one of its admin keys",
) -> None:
    """Register `--url` and `--api-key`."""
    parser.add_argument("--url", default=url, help=what)
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"{key} (default: the environment variable {KEY_VARIABLE})",
    )


def key_of(args: argparse.Namespace) -> str:
    """The key of `--api-key` or the environment, "" for none."""
    return args.api_key or os.environ.get(KEY_VARIABLE, "").rpartition("=")[2]


def get(args: argparse.Namespace, path: str) -> bytes:
    """The body of a response.

    Raises:
        ConfigError: `--url` is no URL of a server.
        EngineError: The server does not respond, or refuses.
    """
    with _opened(args, path, None, _TIMEOUT_S) as response:
        return response.read()


def post_events(
    args: argparse.Namespace, path: str, body: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream.

    Raises:
        ConfigError: `--url` is no URL of a server.
        RequestError: The server refuses the request.
        EngineError: The server does not respond, or the stream breaks off.
    """
    with _opened(args, path, json.dumps(body).encode(), _ANSWER_TIMEOUT_S) as response:
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                event = json.loads(data)
                if "error" in event:
                    raise EngineError(str(event["error"].get("message", event["error"])))
                yield event


@contextmanager
def _opened(
    args: argparse.Namespace, path: str, body: bytes | None, timeout_s: float
) -> Iterator[HTTPResponse]:
    """The response to a GET, or to a POST of a body. Errors as of `post_events`."""
    url: str = args.url
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--url is {url!r}, it must be like http://127.0.0.1:8000")
    key = key_of(args)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    if body is not None:
        headers["content-type"] = "application/json"
    base = url.rstrip("/").removesuffix("/v1")  # clients of OpenAI's API have it in their URLs
    request = urllib.request.Request(base + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            yield response
    except urllib.error.HTTPError as error:
        kind = RequestError if body is not None and 400 <= error.code < 500 else EngineError
        raise kind(_message(error, has_key=bool(key))) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineError(f"the server at {url} does not respond: {reason}") from None


def _message(error: urllib.error.HTTPError, has_key: bool) -> str:
    """The server's own sentence, except about keys: a command gives them in another way."""
    if error.code == 401 and not has_key:
        return f"the server wants a key: give --api-key, or set {KEY_VARIABLE}"
    if error.code == 401:
        return f"the server does not know the key of --api-key or {KEY_VARIABLE}"
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"the server answers {error.code} {error.reason}"
