"""The JSON bodies and the queries of `/v1/files` and `/v1/batches`, as msgspec types."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["BatchQuery", "BatchRequest", "ExpiresAfter", "FileForm", "FileQuery"]

_LIFE_S = msgspec.Meta(ge=3600, le=2_592_000)  # an hour to 30 days, as OpenAI


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How long a file is kept after its creation."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, _LIFE_S]


class FileForm(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The fields of an upload's form in addition to the file."""

    purpose: str
    expires_after: ExpiresAfter | None = None


class FileQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /v1/files`."""

    purpose: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /v1/batches`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: str | None = None
