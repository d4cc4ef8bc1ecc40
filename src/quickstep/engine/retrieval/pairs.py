"""The prompts of a query and a document, and their score; for the server's routes and `LLM.score`.

A model with `Scoring.TOKENS` is asked whether the document answers the query, and the score is
p(yes) / (p(yes) + p(no)) of the next token. The question is that of Qwen3-Reranker's model card;
the chat template writes it, or writes the pair itself where it has roles for that. The query comes
before the document, so that the pairs of a query share a cached prefix. With `Scoring.COSINE` query
and document are two prompts, each after the model's own text for its task. With `Scoring.CLASS` the
tokenizer joins them, and the only class of the model's head is the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from quickstep.engine.interface import Template
from quickstep.engine.retrieval.card import Retrieval, Scoring
from quickstep.errors import EngineError, PromptTooLong, RequestError
from quickstep.types import Delta, Pooling, SamplingParams, TokenLogprobs

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
# Names of tasks that mean the same, as the fields and the cards of different families call them.
_QUERY = ("query", "search_query", "retrieval.query")
_DOCUMENT = ("document", "search_document", "passage", "retrieval.passage")


class TextTokens(Protocol):
    """The tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, as the tokenizer joins them."""

    def least_tokens(self, text: str) -> int:
        """Tokens that a text has at least."""


class _Model(Protocol):
    """The engine."""

    @property
    def retrieval(self) -> Retrieval:
        """How it scores."""

    @property
    def tokenizer(self) -> TextTokens:
        """Its tokenizer."""

    @property
    def chat_template(self) -> Template | None:
        """Its template."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""


class Pairs(msgspec.Struct, frozen=True):
    """Queries and documents: one query goes with all documents, several with one each."""

    queries: Sequence[str]
    documents: Sequence[str]
    query_field: str
    document_field: str

    def check(self) -> None:
        """Raise RequestError if they are no pairs."""
        for name, texts in (
            (self.query_field, self.queries),
            (self.document_field, self.documents),
        ):
            if not texts:
                raise RequestError(f"{name} is an empty list", param=name)
        if len(self.queries) not in (1, len(self.documents)):
            raise RequestError(
                f"{self.query_field} has {len(self.queries)} texts and {self.document_field} "
                f"{len(self.documents)}; send one {self.query_field}, or as many",
                param=self.query_field,
            )

    def num_chars(self, scoring: Scoring) -> int:
        """Characters of all prompts together."""
        is_repeated = len(self.queries) == 1 and scoring is not Scoring.COSINE
        num_each = len(self.documents) if is_repeated else 1
        return sum(map(len, self.documents)) + num_each * sum(map(len, self.queries))


class TextLimits(msgspec.Struct, frozen=True):
    """How texts are shortened.

    Attributes:
        prompt_tokens: A prompt's; -1 for as many as the model takes, None to refuse longer ones.
        tokens_per_document: A document's.
    """

    prompt_tokens: int | None = None
    tokens_per_document: int | None = None

    def checked(self, longest: int) -> int | None:
        """The tokens of a prompt. Raises RequestError."""
        most = self.prompt_tokens
        if most is None or 1 <= most <= longest:
            return most
        if most == -1:
            return longest
        raise RequestError(
            f"truncate_prompt_tokens is {most}; it must be -1 or from 1 to {longest}",
            param="truncate_prompt_tokens",
        )


def prompt_of_task(retrieval: Retrieval, task: str | None) -> str:
    """The text before an input of a task, by the name that the model's card has for it; of the
    default task if it is None. Raises RequestError for a task that the card does not have.
    """
    prompts = retrieval.prompts
    if task is None:
        return prompts.get(retrieval.default_prompt, "")
    names = next((names for names in (_QUERY, _DOCUMENT) if task in names), ())
    for name in (task, *names):
        if name in prompts:
            return prompts[name]
    if prompts and names is _DOCUMENT:
        return ""  # cards name the tasks that have a text
    known = ", ".join(sorted(prompts)) or "none"
    raise RequestError(
        f"input_type is {task!r}; the model's card has texts for: {known}", param="input_type"
    )


def _document_writer(
    model: _Model, query: str, instruction: str | None
) -> Callable[[str], list[int]]:
    """From a document to the prompt of its score. Raises RequestError for scores, or an
    instruction, that the model does not have.
    """
    retrieval, encode = model.retrieval, model.tokenizer.encode
    if retrieval.scoring_refusal:
        raise RequestError(retrieval.scoring_refusal, param="model")
    if instruction is not None and retrieval.scoring is not Scoring.TOKENS:
        raise RequestError(
            "instruction goes with models that are asked about pairs; this one is not",
            param="instruction",
        )
    if retrieval.scoring is Scoring.CLASS:
        return lambda document: model.tokenizer.encode_pair(query, document)
    if retrieval.scoring is Scoring.COSINE:
        before = _text_before(model, _DOCUMENT)
        return lambda document: encode(before + document, True)
    template = model.chat_template
    if template is None:
        raise RequestError("the model has no chat template to ask it about pairs", param="model")
    messages = _paired if retrieval.reads_pairs else _judged
    instruction = instruction or retrieval.prompts.get(retrieval.default_prompt)

    def write(document: str) -> list[int]:
        text = template.render(
            messages(query, document, instruction), extra={"enable_thinking": False}
        )
        return encode(text, False)

    return write


def bounded_text(tokenizer: TextTokens, text: str, most: int) -> str:
    """As much of a text's beginning as must be tokenized to know its first `most` tokens, and
    whether there are more.
    """
    least = tokenizer.least_tokens(text) if len(text) > most else 0
    if least <= most + 1:
        return text
    bytes_per_token = len(text.encode("utf-8", "surrogatepass")) // (least - 1) + 1
    return text[: (most + 1) * bytes_per_token]


def cut_text(tokenizer: TextTokens, text: str, most: int) -> str:
    """The first `most` tokens of a text, in complete characters."""
    text = bounded_text(tokenizer, text, most)
    ids = tokenizer.encode(text, False)
    return text if len(ids) <= most else tokenizer.decode(ids[:most], False).rstrip("\ufffd")


def fitting_ids(
    tokenizer: TextTokens, write: Callable[[str], list[int]], text: str, most: int
) -> list[int]:
    """The prompt that `write` makes of as much of the text's beginning as fits `most` tokens.
    Raises RequestError if nothing of it does.
    """
    text = bounded_text(tokenizer, text, most)
    ids = write(text)
    num_kept = len(tokenizer.encode(text, False)) if len(ids) > most else 0
    while len(ids) > most:
        num_kept -= len(ids) - most
        if num_kept < 1:
            raise RequestError(
                f"truncate_prompt_tokens is {most}, which leaves no token of the text; raise it",
                param="truncate_prompt_tokens",
            )
        text = cut_text(tokenizer, text, num_kept)
        ids = write(text)
    return ids


def pair_sampling(retrieval: Retrieval) -> SamplingParams:
    """The parameters of the prompts of pairs."""
    if retrieval.scoring is not Scoring.TOKENS:
        return SamplingParams(max_tokens=1)  # of which nothing is sampled
    compared = (retrieval.true_token_id, retrieval.false_token_id)
    return SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, logprob_token_ids=compared
    )


def pair_pooling(retrieval: Retrieval) -> Pooling | None:
    """The pooling of the prompts of pairs; None where a token answers."""
    return None if retrieval.scoring is Scoring.TOKENS else retrieval.pooling


def pair_prompts(
    model: _Model, pairs: Pairs, instruction: str | None, limits: TextLimits
) -> list[list[int]]:
    """A prompt for each pair, or those of all queries and then those of all documents. Raises
    RequestError, which names the field at fault.
    """
    pairs.check()
    is_cosine = model.retrieval.scoring is Scoring.COSINE
    longest = model.max_model_len - (model.retrieval.scoring is Scoring.TOKENS)
    most = limits.checked(longest)
    prompts = []
    for query in pairs.queries:
        _check_text(model, query, longest, pairs.query_field)
        if is_cosine:
            ids = model.tokenizer.encode(_text_before(model, _QUERY) + query, True)
            _check_len(model, len(ids), longest, pairs.query_field)
            prompts.append(ids)
    write = _document_writer(model, pairs.queries[0], instruction)
    for index, document in enumerate(pairs.documents):
        if index and len(pairs.queries) > 1:
            write = _document_writer(model, pairs.queries[index], instruction)
        if limits.tokens_per_document is not None:
            document = cut_text(model.tokenizer, document, limits.tokens_per_document)
        if most is not None:
            prompts.append(fitting_ids(model.tokenizer, write, document, most))
            continue
        _check_text(model, document, longest, pairs.document_field)
        ids = write(document)
        _check_len(model, len(ids), longest, pairs.document_field)
        prompts.append(ids)
    return prompts


def pair_scores(retrieval: Retrieval, deltas: Sequence[Delta], pairs: Pairs) -> list[float]:
    """The scores, from the deltas with the answers to the prompts of `pair_prompts`."""
    if retrieval.scoring is Scoring.TOKENS:
        return [_token_score(retrieval, delta.logprobs) for delta in deltas]
    if retrieval.scoring is Scoring.CLASS:
        return [_sigmoid(logit) for delta in deltas for logit in delta.embedding or ()]
    vectors = [delta.embedding or () for delta in deltas]
    num_queries = len(pairs.queries)
    queries = vectors[:num_queries] * (len(pairs.documents) if num_queries == 1 else 1)
    return [
        math.fsum(a * b for a, b in zip(query, document, strict=True))
        for query, document in zip(queries, vectors[num_queries:], strict=True)
    ]


def _token_score(retrieval: Retrieval, logprobs: Sequence[TokenLogprobs]) -> float:
    """The probability of the one token against the other, from 0 to 1."""
    if not logprobs:
        raise EngineError("the model gave no logprobs for a pair")
    known = {**dict(logprobs[0].top), logprobs[0].token_id: logprobs[0].logprob}
    return _sigmoid(known[retrieval.true_token_id] - known[retrieval.false_token_id])


def class_probabilities(logits: Sequence[float]) -> tuple[float, ...]:
    """Of classes that exclude each other; of a single one, by itself."""
    if len(logits) == 1:
        return (_sigmoid(logits[0]),)
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def _sigmoid(logit: float) -> float:
    weight = math.exp(-abs(logit))  # of both signs without an overflow
    return (1.0 if logit >= 0 else weight) / (1.0 + weight)


def _check_text(model: _Model, text: str, longest: int, field: str) -> None:
    """Refuse a text before it is tokenized that cannot fit."""
    if len(text) > longest:
        _check_len(model, model.tokenizer.least_tokens(text), longest, field, at_least=True)


def _check_len(
    model: _Model, num_tokens: int, longest: int, field: str, at_least: bool = False
) -> None:
    if num_tokens > longest:
        context = model.max_model_len
        raise PromptTooLong(
            num_tokens, context, num_outputs=context - longest, at_least=at_least, param=field
        )


def _text_before(model: _Model, names: Sequence[str]) -> str:
    prompts = model.retrieval.prompts
    return next((prompts[name] for name in names if name in prompts), "")


def _paired(query: str, document: str, instruction: str | None) -> list[Mapping[str, Any]]:
    pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return [*([] if not instruction else [{"role": "system", "content": instruction}]), *pair]


def _judged(query: str, document: str, instruction: str | None) -> list[Mapping[str, Any]]:
    instruction = instruction or _INSTRUCTION
    question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": _JUDGE}, {"role": "user", "content": question}]
