"""The JSON bodies and the queries of `/v1/files` and `/v1/batches`, as msgspec types."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from quickstep.server.fields.field_classes import effect

_LIFE_S = msgspec.Meta(ge=3600, le=2_592_000)  # an hour to 30 days, as OpenAI


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How long a file is kept after its creation."""

    anchor: Annotated[Literal["created_at"], effect("Only created_at is known.")]
    seconds: Annotated[int, effect("The file is forgotten this long after it was made."), _LIFE_S]


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

    input_file_id: Annotated[
        str, effect("The file of requests; 400 or 404 if this key has no such file.")
    ]
    endpoint: Annotated[str, effect("The route that answers every line.")]
    completion_window: Annotated[str, effect("After this time what is not answered is cancelled.")]
    metadata: Annotated[dict[str, str] | None, effect("The batch repeats it.")] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, effect("How long the files of answers are kept.")
    ] = None


class BatchQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The query of `GET /v1/batches`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: str | None = None
