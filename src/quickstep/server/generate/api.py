"""The protocol of a generating API, and fields that several APIs read in the same way.

    GeneratingApi.parse: bytes -> ParsedRequest, which names the Writer of its response

`endpoint` runs any API in the same way, streaming or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from quickstep.errors import RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.fields.sampling_fields import SamplingFields
from quickstep.server.generate.generation import Generation, ParsedRequest
from quickstep.server.models.served_model import ServedModel
from quickstep.types import Delta

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class LineResult(msgspec.Struct, frozen=True):
    """The JSON response to one line of a batch; `ignored` are the line's fields without effect."""

    body: object
    ignored: tuple[str, ...] = ()


class GeneratingApi(Protocol):
    """One generating API."""

    def parse(self, body: bytes, model: ServedModel, caller: str) -> ParsedRequest:
        """Validate a body of the API key `caller` ("" without keys). Raises RequestError."""


class RequestObserver(Protocol):
    """Observes one request, from its arrival to its end."""

    def opened(self, generation: Generation) -> None:
        """The engine has accepted all prompts."""

    def observe(self, delta: Delta) -> None:
        """A delta is about to be sent."""

    def close(self, generation: Generation) -> None:
        """The request is over, however it ended. Idempotent."""


class PromptsObserver(Protocol):
    """Observes the prompts of one request that generates nothing: embeddings."""

    def accepted(self) -> None:
        """The engine has accepted a prompt."""

    def observe(self, delta: Delta) -> None:
        """A delta of a prompt; usually its end."""

    def close(self) -> None:
        """The request is over, however it ended."""


class Observers(Protocol):
    """Makes the observer of each request: the metrics, which are above every API."""

    def of_request(
        self, model: ServedModel, request: ParsedRequest, headers: Mapping[str, str] = NO_HEADERS
    ) -> RequestObserver:
        """For a request that arrives now; `headers` may have its W3C trace context."""

    def of_prompts(self, model: ServedModel, prompt_lens: Sequence[int]) -> PromptsObserver:
        """For prompts that are embedded, and arrive now."""


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
