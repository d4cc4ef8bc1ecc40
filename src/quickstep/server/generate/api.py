"""The protocol of a generating API, and fields that several APIs read in the same way.

    GeneratingApi.parse: bytes -> ParsedRequest, which names the Writer of its response

`endpoint` runs any API in the same way, streaming or not.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.request_types import SamplingFields


class LineResult(msgspec.Struct, frozen=True):
    """The JSON response to one line of a batch; `ignored` are the line's fields without effect."""

    body: object
    ignored: tuple[str, ...] = ()


class GeneratingApi(Protocol):
    """One generating API."""

    def parse(self, body: bytes, model: ServedModel, caller: str) -> ParsedRequest:
        """Validate a body of the API key `caller` ("" without keys). Raises RequestError."""


class MayReportProgress(Protocol):
    """A request that may ask for the progress of its prompt."""

    @property
    def stream(self) -> bool | None:
        """Whether the response is streamed."""

    @property
    def return_progress(self) -> bool | None:
        """Whether the progress is wanted."""


def reports_progress(fields: MayReportProgress, reader: FieldReader) -> bool:
    """Whether the engine reports how much of the prompt is computed: for a stream only."""
    if fields.return_progress and not fields.stream:
        reader.ignore("return_progress", "the response is not streamed")
    return bool(fields.return_progress and fields.stream)


def response_flags(fields: SamplingFields, model: ServedModel) -> dict[str, Any]:
    """`stream`, `stream_options` and `quickstep_timings` as fields of `ParsedRequest`.

    Raises RequestError.
    """
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    always = model.server.answers.always_usage
    return {
        "stream": bool(fields.stream),
        "include_usage": always or (options is not None and bool(options.include_usage)),
        "continuous_usage": always
        or (options is not None and bool(options.continuous_usage_stats)),
        "timings": bool(fields.quickstep_timings),
    }
