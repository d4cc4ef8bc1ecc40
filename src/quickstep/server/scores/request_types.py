"""The JSON bodies of rerank and score, as msgspec types: the complete schema."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from quickstep.server.fields.field_classes import effect, refused
from quickstep.server.fields.shared_fields import (
    Account,
    AnswerTimeout,
    CacheSalt,
    InputTruncation,
    ModelName,
    Priority,
)

_Instruction = Annotated[
    str | None,
    effect(
        "What counts as an answer, for models that are asked about pairs; the model's own, or that "
        "of a web search, if not given."
    ),
]
_Truncation = Annotated[
    int | None,
    effect(
        "Shortens a document at its end until its prompt has so many tokens; -1 for as many as "
        "the model takes. A longer prompt is refused if not given."
    ),
]
_MaxTokensPerDoc = Annotated[
    Annotated[int, msgspec.Meta(ge=1)] | None,
    effect("Reads so many of a document's first tokens."),
]


class TextDocument(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A document, or a query, as an object."""

    text: Annotated[str, effect("The text.")]


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A query and the documents to sort by how well they answer it."""

    query: Annotated[str | TextDocument, effect("What the documents are compared with.")]
    documents: Annotated[
        list[str | TextDocument], effect("The documents; results name them by their index.")
    ]
    model: ModelName = None
    top_n: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        effect("Returns the best ones only; all if 0 or not given."),
    ] = None
    return_documents: Annotated[
        bool | None,
        effect("Adds the texts to the results; true if not given."),
    ] = None
    instruction: _Instruction = None
    max_tokens_per_doc: _MaxTokensPerDoc = None
    truncate_prompt_tokens: _Truncation = None
    user: Account = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout_s: AnswerTimeout = None
    rank_fields: Annotated[Any, refused("documents have one field, the text")] = None
    max_chunks_per_doc: Annotated[
        Any, refused("a document is read in one piece; max_tokens_per_doc bounds it")
    ] = None


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Texts for a model with a classification head."""

    input: Annotated[str | list[str], effect("A text or several.")]
    model: ModelName = None
    truncate_prompt_tokens: InputTruncation = None
    user: Account = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout_s: AnswerTimeout = None


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Pairs of texts: one `text_1` with each of `text_2`, or two lists of the same length."""

    text_1: Annotated[str | list[str], effect("A query, or one for each document.")]
    text_2: Annotated[str | list[str], effect("A document or several.")]
    model: ModelName = None
    instruction: _Instruction = None
    max_tokens_per_doc: _MaxTokensPerDoc = None
    truncate_prompt_tokens: _Truncation = None
    user: Account = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout_s: AnswerTimeout = None
