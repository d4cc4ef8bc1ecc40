"""`/v1/completions`: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from quickstep.engine.stream import Delta
from quickstep.errors import RequestError
from quickstep.server.engine_face import Vocabulary
from quickstep.server.generation import (
    Choice,
    Generation,
    GenerationRequest,
    TextPrompt,
    TokenPrompt,
)
from quickstep.server.refused import COMPLETION_REFUSED, refuse
from quickstep.server.sampling import bounded, deadline_of, label, sampling_params, token_ids_of
from quickstep.server.schemas import CompletionRequest, decode
from quickstep.server.structured import asked_grammar
from quickstep.server.surface import Served, stream_flags
from quickstep.types import TokenLogprobs

__all__ = ["Completions"]

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completions:
    """The completions surface."""

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def parse(self, body: bytes, served: Served) -> GenerationRequest:
        """Validate a body. Raises RequestError."""
        fields = decode(body, CompletionRequest)
        model = served.model(fields.model)
        refuse(fields, COMPLETION_REFUSED)
        if fields.best_of is not None and fields.best_of != (fields.n or 1):
            raise RequestError(
                f"best_of is {fields.best_of}, only n ({fields.n or 1}) is supported",
                param="best_of",
            )
        bounded("logprobs", fields.logprobs or 0, served.limits.logprobs)
        max_tokens = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        asked = asked_grammar(fields)
        own: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": fields.logprobs}
        if asked is not None:
            own["grammar"] = asked.grammar
        sampling = sampling_params(fields, served, own, {})
        return GenerationRequest(
            model=model,
            prompts=_prompts(fields, served),
            sampling=sampling,
            priority=fields.priority or 0,
            deadline_s=deadline_of(fields),
            tenant=label("user", fields.user, served.limits),
            cache_salt=label("cache_salt", fields.cache_salt, served.limits),
            grammar_field="" if asked is None else asked.field,
            **stream_flags(fields),
        )

    def rendering(self, generation: Generation, served: Served) -> CompletionRendering:
        """The renderer of one request."""
        with_logprobs = generation.request.sampling.logprobs is not None
        return CompletionRendering(served.engine.tokenizer, with_logprobs)


def _prompts(fields: CompletionRequest, served: Served) -> tuple[TextPrompt | TokenPrompt, ...]:
    prompt = fields.prompt
    vocab_size = served.engine.tokenizer.vocab_size
    special = fields.add_special_tokens is not False
    if isinstance(prompt, str):
        return (TextPrompt(prompt, special),)
    if not prompt:
        raise RequestError("prompt is an empty list", param="prompt")
    if _are_ids(prompt):
        return (TokenPrompt(token_ids_of("prompt", prompt, vocab_size)),)
    bounded("prompt", len(prompt), served.limits.prompts, "entries")
    texts = [TextPrompt(item, special) for item in prompt if isinstance(item, str)]
    ids = [
        TokenPrompt(token_ids_of("prompt", item, vocab_size))
        for item in prompt
        if isinstance(item, list)
    ]
    if len(texts) == len(prompt):
        return tuple(texts)
    if len(ids) == len(prompt):
        return tuple(ids)
    raise RequestError("prompt mixes texts, token ids and lists of token ids", param="prompt")


def _are_ids(prompt: Sequence[str | int | list[int]]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(item, int) for item in prompt)


class CompletionRendering:
    """Choices as `{"text", "logprobs"}`."""

    def __init__(self, tokenizer: Vocabulary, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._offsets: dict[int, int] = {}

    def opening(self) -> None:
        """A stream of completions begins with its first text."""

    def news(self, choice: Choice, delta: Delta) -> dict[str, Any] | None:
        """New text, with the new tokens' logprobs."""
        if not delta.text and not (self._with_logprobs and delta.token_ids):
            return None
        return self._choice(choice.index, delta.text, delta.logprobs)

    def ending(self) -> dict[str, Any]:
        """No text."""
        return {"text": "", "logprobs": None}

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The whole text."""
        return self._choice(choice.index, "".join(choice.text), choice.logprobs)

    def finish_reason(self, choice: Choice) -> str | None:
        """In OpenAI's words."""
        return choice.finish_reason.openai if choice.finish_reason else None

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        listed = self._listed(index, logprobs) if self._with_logprobs else None
        return {"text": text, "logprobs": listed}

    def _listed(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """OpenAI's four parallel lists. Texts that two alternatives share keep the likelier."""
        listed: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        offset = self._offsets.get(index, 0)
        for item in logprobs:
            token = self._token(item.token_id)
            alternatives = {token: item.logprob}
            for token_id, logprob in item.top:
                alternatives.setdefault(self._token(token_id), logprob)
            listed["tokens"].append(token)
            listed["token_logprobs"].append(item.logprob)
            listed["top_logprobs"].append(alternatives)
            listed["text_offset"].append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return listed

    def _token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
