"""Answers that are a list of choices: what OpenAI's completions and chat have in common.

`ChoicesSurface` makes a surface of either. A `Rendering` belongs to one request, since some
fields (`text_offset`) count along; it writes one choice, here stands what is around it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from quickstep.engine.stream import Delta
from quickstep.server.generate.adapter import Asked, Head, Served
from quickstep.server.generate.generation import Choice, ChoiceDelta, Generation, GenerationRequest
from quickstep.server.http.errors import error_of
from quickstep.server.http.event_stream import DONE, data_frame
from quickstep.server.openai.response_types import RequestMetrics

__all__ = ["ChoiceSurface", "ChoicesSurface", "Rendering"]


_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Rendering(Protocol):
    """One request's answer in the surface's words."""

    def opening(self) -> Mapping[str, Any] | None:
        """What a stream says of each choice before its first token, without `index`."""

    def beside(self) -> Mapping[str, Any]:
        """What stands beside the choices, in a stream in the opening chunk."""

    def news(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """A stream's words for a delta, each without `index` and `finish_reason`."""

    def ending(self) -> dict[str, Any]:
        """A stream's empty word beside the finish reason."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A finished choice, without `index` and `finish_reason`."""

    def finish_reason(self, choice: Choice) -> str | None:
        """Why the choice ended, once its end has been rendered."""


class ChoiceSurface(Protocol):
    """Completions or chat."""

    @property
    def id_prefix(self) -> str:
        """Response ids start with it."""

    @property
    def object_name(self) -> str:
        """The `object` of a whole response."""

    @property
    def chunk_object_name(self) -> str:
        """The `object` of a stream's chunk."""

    def parse(self, body: bytes, served: Served) -> GenerationRequest:
        """Validate. Raises RequestError."""

    def rendering(self, generation: Generation, served: Served) -> Rendering:
        """The renderer of one request."""


class ChoicesSurface:
    """A `Surface` of a `ChoiceSurface`."""

    def __init__(self, surface: ChoiceSurface) -> None:
        self._surface = surface

    def parse(self, body: bytes, served: Served, caller: str) -> Asked:
        """Validate. Raises RequestError."""
        request = self._surface.parse(body, served)
        return Asked(request, partial(_ChoicesWriter, self._surface, served))


class _ChoicesWriter:
    def __init__(
        self, surface: ChoiceSurface, served: Served, generation: Generation, head: Head
    ) -> None:
        self._surface = surface
        self._generation = generation
        self._rendering = surface.rendering(generation, served)
        self._head = {
            "id": surface.id_prefix + uuid.uuid4().hex,
            "created": head.created,
            "model": generation.request.model,
            "system_fingerprint": head.fingerprint,
        }
        self._tells_metrics = served.answers.request_metrics and len(generation.choices) == 1
        self._tail = {"seed": generation.seed, **generation.request.echoed}

    def opening(self) -> Iterator[bytes]:
        """The role of each choice, where there are roles."""
        said = self._rendering.opening()
        if said is not None:
            for choice in self._generation.choices:
                word = {"index": choice.index, **said, "finish_reason": None}
                beside = {} if choice.index else self._rendering.beside()
                yield self._chunk(word, beside)

    def news(self, item: ChoiceDelta) -> Iterator[bytes]:
        """The news of a delta, and its choice's end."""
        choice = self._generation.choices[item.choice]
        for said in self._rendering.news(choice, item.delta):
            yield self._chunk({"index": choice.index, **said, "finish_reason": None})
        if item.delta.finish_reason is not None:
            reason = self._rendering.finish_reason(choice)
            why = {"finish_reason": reason, "stop_reason": choice.stop_reason}
            ending = {**self._rendering.ending(), **why, "seed": choice.seed}
            yield self._chunk({"index": choice.index, **ending})

    def ending(self) -> Iterator[bytes]:
        """The usage if it was asked for, then `[DONE]`."""
        if self._generation.request.include_usage:
            usage = {"usage": self._generation.usage.as_json()}
            yield self._chunk(None, {**usage, **self._metrics()})
        yield DONE

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as an event of the stream."""
        _, body = error_of(error)
        yield data_frame(body)
        yield DONE

    def note(self, item: ChoiceDelta) -> None:
        """Nothing: the choices keep what `whole` reads."""

    def whole(self) -> dict[str, Any]:
        """The response of a finished generation."""
        choices = [
            {
                "index": index,
                **self._rendering.whole(choice),
                "finish_reason": self._rendering.finish_reason(choice),
                "stop_reason": choice.stop_reason,
                "seed": choice.seed,
            }
            for index, choice in enumerate(self._generation.kept)
        ]
        return {
            **self._head,
            "object": self._surface.object_name,
            "choices": choices,
            "usage": self._generation.usage.as_json(),
            **self._metrics(),
            **self._rendering.beside(),
            **self._tail,
        }

    def _metrics(self) -> dict[str, Any]:
        """How long the request took, where the operator wants it and one choice is the answer."""
        timings = self._generation.choices[0].timings
        if not self._tells_metrics or timings is None:
            return {}
        return {"metrics": RequestMetrics.of(timings)}

    def _chunk(self, said: dict[str, Any] | None, beside: Mapping[str, Any] = _NOTHING) -> bytes:
        """A chunk of one choice, or of none."""
        request = self._generation.request
        chunk = {
            **self._head,
            "object": self._surface.chunk_object_name,
            "choices": [] if said is None else [said],
            **self._tail,
        }
        if request.continuous_usage:
            chunk["usage"] = self._generation.usage.as_json()
        elif request.include_usage:
            chunk["usage"] = None
        return data_frame({**chunk, **beside})
