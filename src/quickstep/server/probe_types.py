"""The JSON answers of the probes and of the API's own pages, as types; see `response_openai`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ["ApiDocument", "Health", "Pong", "Readiness", "Version"]


class Health(msgspec.Struct, frozen=True):
    """How the engine gets on; anything but `ok` comes with status 503."""

    status: Literal["ok", "stalled", "restarting", "failed"]
    engine: str
    failure: str | None
    num_restarts: int
    num_requests: int
    num_running: int
    num_waiting: int
    num_paused: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_steps: int
    seconds_without_progress: float


class Readiness(msgspec.Struct, frozen=True):
    """Whether new requests are welcome; false comes with status 503."""

    ready: bool


class Version(msgspec.Struct, frozen=True):
    """The version of Quickstep."""

    version: str


class Pong(msgspec.Struct, frozen=True):
    """Nothing: the process answers."""


class ApiDocument(msgspec.Struct, frozen=True):
    """This API in OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, Any]]
