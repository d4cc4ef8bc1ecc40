"""The JSON of the responses of rerank and score."""

from __future__ import annotations

from typing import Literal

import msgspec

from quickstep.server.openai.response_types import EmbeddingUsage
from quickstep.server.scores.request_types import TextDocument


class RerankResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document by its index in the request; from 0 to 1, or a cosine from -1 to 1."""

    index: int = msgspec.field()
    relevance_score: float = msgspec.field()
    document: TextDocument | None = None


class ApiVersion(msgspec.Struct, frozen=True):
    """Cohere's."""

    version: str


class RerankTokens(msgspec.Struct, frozen=True):
    """Tokens, by Cohere's names."""

    input_tokens: int
    output_tokens: int


class RerankMeta(msgspec.Struct, frozen=True):
    """Usage in Cohere's form."""

    api_version: ApiVersion
    tokens: RerankTokens


class RerankResponse(msgspec.Struct, frozen=True):
    """The best documents, the best first; equal scores in the order of the request."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: RerankMeta


class ScoreData(msgspec.Struct, frozen=True):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ClassifyData(msgspec.Struct, frozen=True):
    """The likeliest class of a text, and the probabilities of all in the order of the model."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyList(msgspec.Struct, frozen=True):
    """The classes, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyData]
    usage: EmbeddingUsage


class ScoreList(msgspec.Struct, frozen=True):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreData]
    usage: EmbeddingUsage
