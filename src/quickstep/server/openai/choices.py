"""Answers that are a list of choices: what OpenAI's completions and chat have in common.

`ChoicesWriter` writes the answers of either. A `Rendering` belongs to one request, since some
fields (`text_offset`) depend on what came before; it writes the choices, this module the rest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.engine.stream import Delta
from quickstep.server.generate.adapter import Served
from quickstep.server.generate.generation import Choice, ChoiceDelta, Generation, Head
from quickstep.server.http.errors import error_of
from quickstep.server.http.event_stream import DONE, data_frame
from quickstep.server.openai.response_types import RequestMetrics, Usage

__all__ = ["ChoicesApi", "ChoicesWriter", "Rendering"]


class Rendering(Protocol):
    """Writes the choices of one request's response, in the types of its API."""

    def opening(self, choice: Choice) -> msgspec.Struct | None:
        """What a stream sends of a choice before its first token."""

    def prompt_fields(self) -> Mapping[str, Any]:
        """Fields of the response (of a stream, its first chunk) that describe the prompt."""

    def deltas(self, choice: Choice, delta: Delta) -> Sequence[msgspec.Struct]:
        """The choices of a stream's next chunks."""

    def ending(self, choice: Choice) -> msgspec.Struct:
        """The choice of a stream's chunk with the finish reason."""

    def complete(self, choice: Choice, index: int) -> msgspec.Struct:
        """A finished choice, at `index` of the response."""


class ChoicesApi(Protocol):
    """Completions or chat."""

    @property
    def id_prefix(self) -> str:
        """Response ids start with it."""

    @property
    def response(self) -> Callable[..., msgspec.Struct]:
        """Makes a complete response of its fields."""

    @property
    def chunk(self) -> Callable[..., msgspec.Struct]:
        """Makes a stream's chunk of its fields."""

    def rendering(self, generation: Generation, served: Served) -> Rendering:
        """The renderer of one request."""


class ChoicesWriter:
    """A `Writer` of a `ChoicesApi`."""

    def __init__(self, api: ChoicesApi, served: Served, generation: Generation, head: Head) -> None:
        self._generation = generation
        self._rendering = api.rendering(generation, served)
        constant = {
            "id": api.id_prefix + uuid.uuid4().hex,
            "created": head.created,
            "model": generation.request.model,
            "system_fingerprint": head.fingerprint,
            "seed": generation.seed,
            **generation.request.echoed,
        }
        self._response = partial(api.response, **constant)
        self._new_chunk = partial(api.chunk, **constant)
        self._tells_metrics = served.answers.request_metrics and len(generation.choices) == 1

    def opening(self) -> Iterator[bytes]:
        """The role of each choice, where there are roles."""
        for choice in self._generation.choices:
            opening = self._rendering.opening(choice)
            if opening is not None:
                fields = {} if choice.index else self._rendering.prompt_fields()
                yield self._chunk([opening], **fields)

    def delta(self, item: ChoiceDelta) -> Iterator[bytes]:
        """The chunks of a delta, and its choice's end."""
        choice = self._generation.choices[item.choice]
        for delta in self._rendering.deltas(choice, item.delta):
            yield self._chunk([delta])
        if item.delta.finish_reason is not None:
            yield self._chunk([self._rendering.ending(choice)])

    def ending(self) -> Iterator[bytes]:
        """The usage if the client wants it, then `[DONE]`."""
        if self._generation.request.include_usage:
            usage = Usage.of(self._generation.usage)
            yield self._chunk([], usage=usage, metrics=self._metrics())
        yield DONE

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as an event of the stream."""
        _, body = error_of(error)
        yield data_frame(body)
        yield DONE

    def note(self, item: ChoiceDelta) -> None:
        """Nothing to do: the choices keep what `whole` reads."""

    def whole(self) -> msgspec.Struct:
        """The response of a finished generation."""
        return self._response(
            choices=[
                self._rendering.complete(choice, index)
                for index, choice in enumerate(self._generation.kept)
            ],
            usage=Usage.of(self._generation.usage),
            metrics=self._metrics(),
            **self._rendering.prompt_fields(),
        )

    def _metrics(self) -> RequestMetrics | UnsetType:
        """How long the request took, where the operator wants it and there is one choice."""
        timings = self._generation.choices[0].timings
        if not self._tells_metrics or timings is None:
            return UNSET
        return RequestMetrics.of(timings)

    def _chunk(self, choices: list[msgspec.Struct], **fields: Any) -> bytes:
        """A chunk of one choice, or of none."""
        request = self._generation.request
        if request.continuous_usage:
            fields["usage"] = Usage.of(self._generation.usage)
        elif request.include_usage:
            fields.setdefault("usage", None)
        return data_frame(self._new_chunk(choices=choices, **fields))
