"""Fields that OpenAI knows and this server does not do: what passes as "no effect", and why.

A refused field passes only with a value that asks for nothing (`store: false`); anything else is a
400 that names it. The reference page of the API is printed from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.dataclass import dataclass
from quickstep.errors import RequestError

__all__ = [
    "ASSISTANT_REFUSED",
    "CHAT_REFUSED",
    "COMPLETION_REFUSED",
    "STREAM_OPTIONS_REFUSED",
    "Refusal",
    "refuse",
]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Values beside null that pass, since they ask for nothing, and why others do not."""

    passes: tuple[object, ...]
    why: str

    def allows(self, value: object) -> bool:
        """Whether `value` asks for nothing. Types count: 1 is not true."""
        if value is None:
            return True
        return any(type(value) is type(passing) and value == passing for passing in self.passes)


COMPLETION_REFUSED: Mapping[str, Refusal] = MappingProxyType({})

CHAT_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "audio": Refusal((), "the model gives text only"),
        "function_call": Refusal(("none",), "it is deprecated; send tool_choice"),
        "functions": Refusal(([],), "it is deprecated; send tools"),
        "modalities": Refusal((["text"],), "the model gives text only"),
        "moderation": Refusal((), "there is no moderation model"),
        "prediction": Refusal((), "predicted outputs are not supported"),
        "prompt_cache_options": Refusal((), "prefixes are cached without a lifetime"),
        "prompt_cache_retention": Refusal(("in_memory",), "prefixes are cached in memory only"),
        "service_tier": Refusal(("auto", "default"), "there is one service tier"),
        "store": Refusal((False,), "completions are not stored"),
        "verbosity": Refusal(("medium",), "the model has no verbosity setting"),
        "web_search_options": Refusal((), "the server makes no outbound requests"),
    }
)


STREAM_OPTIONS_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {"include_obfuscation": Refusal((False,), "chunks are not padded")}
)

# Clients send back what they were given, and that is null or empty.
ASSISTANT_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "refusal": Refusal(("",), "the model has no refusals"),
        "annotations": Refusal(([],), "the model gives text only"),
        "audio": Refusal((), "the model gives text only"),
        "function_call": Refusal((), "it is deprecated; send tool_calls"),
    }
)


def refuse(request: msgspec.Struct, refusals: Mapping[str, Refusal], path: str = "") -> None:
    """Raise RequestError for the first field of `request` that asks for what we do not do.

    `path` leads to `request` in the body, its last dot included.
    """
    values: dict[str, Any] = msgspec.structs.asdict(request)
    for name, refusal in refusals.items():
        if not refusal.allows(values[name]):
            place = f"{path}{name}"
            raise RequestError(f"{place} is not supported: {refusal.why}", param=place)
