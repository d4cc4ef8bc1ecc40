"""Fields that OpenAI knows and this server does not do: what passes as "no effect", and why.

A refused field passes only with a value that asks for nothing (`store: false`); anything else is a
400 that names it. The reference page of the API is printed from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from quickstep.errors import RequestError

__all__ = ["CHAT_REFUSED", "COMPLETION_REFUSED", "Refusal", "refuse"]


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
        "reasoning_effort": Refusal(("none",), "the model has no reasoning mode"),
        "service_tier": Refusal(("auto", "default"), "there is one service tier"),
        "store": Refusal((False,), "completions are not stored"),
        "verbosity": Refusal(("medium",), "the model has no verbosity setting"),
        "web_search_options": Refusal((), "the server makes no outbound requests"),
    }
)


def refuse(request: msgspec.Struct, refusals: Mapping[str, Refusal]) -> None:
    """Raise RequestError for the first field of `request` that asks for what we do not do."""
    values: dict[str, Any] = msgspec.structs.asdict(request)
    for name, refusal in refusals.items():
        if not refusal.allows(values[name]):
            raise RequestError(f"{name} is not supported: {refusal.why}", param=name)
