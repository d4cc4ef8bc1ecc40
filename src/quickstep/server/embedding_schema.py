"""The body of `/v1/embeddings` and its answer: OpenAI's, with `pooling` and the like beyond it."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Embedding", "EmbeddingList", "EmbeddingRequest", "EmbeddingUsage"]


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Texts or token ids. A flat list in `input` is texts or one input's token ids.

    `dimensions` keeps the first ones and scales them to length 1 again, which models that were
    trained for it (Matryoshka) allow. `pooling` is how the hidden states become one vector; without
    it the model's card decides, else the last token's state.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: Literal["mean", "last"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None


class Embedding(msgspec.Struct, frozen=True):
    """A vector of length 1: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """The answer, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
