"""`/v1/completions`: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeGuard

from quickstep.errors import RequestError
from quickstep.server.generate.adapter import Served, stream_flags
from quickstep.server.generate.generation import (
    Generation,
    InfillPrompt,
    ParsedRequest,
    TextPrompt,
    TokenPrompt,
)
from quickstep.server.generate.prompts import Prompt, infill_markers
from quickstep.server.generate.sampling import (
    bounded,
    deadline_of,
    label,
    num_alternatives,
    sampling_params,
    token_ids_of,
)
from quickstep.server.generate.structured import requested_grammar
from quickstep.server.openai.choices import ChoicesWriter
from quickstep.server.openai.completion_choice import CompletionRendering
from quickstep.server.openai.request_types import CompletionRequest
from quickstep.server.openai.requested_output import (
    beam_params,
    own_values,
    requested_output,
    truncation_of,
)
from quickstep.server.openai.response_types import Completion, CompletionChunk
from quickstep.server.schema.field_reader import FieldReader
from quickstep.types import Request

__all__ = ["Completions"]

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completions:
    """The adapter of completions."""

    id_prefix = "cmpl-"
    response = partial(Completion, object="text_completion")
    chunk = partial(CompletionChunk, object="text_completion")

    def parse(self, body: bytes, served: Served, caller: str = "") -> ParsedRequest:
        """Validate a body. Raises RequestError."""
        reader = FieldReader(served.field_rules)
        fields = reader.decode(body, CompletionRequest)
        model = served.model(fields.model)
        prompts = _prompts(fields, served)
        logprobs = num_alternatives("logprobs", fields.logprobs, served)
        shown = requested_output(fields, served, logprobs, bool(fields.echo))
        max_tokens = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        asked = requested_grammar(fields)
        own = own_values(fields, served, shown, len(prompts), fields.best_of)
        own["max_tokens"] = max_tokens
        if asked is not None:
            own["grammar"] = asked.grammar
        sampling = sampling_params(fields, served, own, {})
        beams = beam_params(fields, served, sampling, fields.best_of)
        return ParsedRequest(
            model=model,
            prompts=prompts,
            request=Request(
                sampling=sampling,
                priority=fields.priority or 0,
                timeout_s=deadline_of(fields),
                tenant=label("user", fields.user, served.limits),
                cache_salt=label("cache_salt", fields.cache_salt, served.limits),
            ),
            grammar_field="" if asked is None else asked.field,
            shown=shown,
            num_kept=None if beams or sampling.n == (fields.n or 1) else fields.n or 1,
            beams=beams,
            truncate_prompt_tokens=truncation_of(
                fields.truncate_prompt_tokens, "truncate_prompt_tokens", max_tokens, served
            ),
            ignored=reader.ignored,
            writer=partial(ChoicesWriter, self, served),
            **stream_flags(fields, served),
        )

    def rendering(self, generation: Generation, served: Served) -> CompletionRendering:
        """The renderer of one request."""
        return CompletionRendering(generation, served.engine.tokenizer)


def _prompts(fields: CompletionRequest, served: Served) -> tuple[Prompt, ...]:
    prompt = fields.prompt
    vocab_size = served.engine.tokenizer.vocab_size
    if isinstance(prompt, str):
        return _texts([prompt], fields, served)
    if not prompt:
        raise RequestError("prompt is an empty list", param="prompt")
    if _are_ids(prompt):
        return _ids([token_ids_of("prompt", prompt, vocab_size)], fields)
    bounded("prompt", len(prompt), served.limits.prompts, "entries")
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [token_ids_of("prompt", item, vocab_size) for item in prompt if isinstance(item, list)]
    if len(texts) == len(prompt):
        return _texts(texts, fields, served)
    if len(ids) == len(prompt):
        return _ids(ids, fields)
    raise RequestError("prompt mixes texts, token ids and lists of token ids", param="prompt")


def _texts(
    texts: Sequence[str], fields: CompletionRequest, served: Served
) -> tuple[TextPrompt | InfillPrompt, ...]:
    special = fields.add_special_tokens is not False
    suffix = fields.suffix
    if not suffix:
        return tuple(TextPrompt(text, special) for text in texts)
    markers = infill_markers(served.engine.tokenizer)
    if fields.echo:
        raise RequestError("echo cannot go with suffix, which stands behind the text", param="echo")
    return tuple(InfillPrompt(text, suffix, markers, special) for text in texts)


def _ids(prompts: Sequence[tuple[int, ...]], fields: CompletionRequest) -> tuple[TokenPrompt, ...]:
    if fields.suffix:
        raise RequestError("suffix needs a prompt that is text, not token ids", param="suffix")
    return tuple(map(TokenPrompt, prompts))


def _are_ids(prompt: Sequence[str | int | list[int]]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(item, int) for item in prompt)
