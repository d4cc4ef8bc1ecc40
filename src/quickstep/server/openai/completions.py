"""`/v1/completions`: text or token ids in, text out.

`Completions` parses a body, `CompletionWriter` writes one request's response: text, OpenAI's four
lists of logprobs, token ids, the prompt. It counts `text_offset`, and puts an echoed prompt into a
stream's first delta of each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TypeGuard

import msgspec
from msgspec import UNSET, UnsetType, structs

from quickstep.errors import PromptTooLong, RequestError
from quickstep.server.fields.field_reader import FieldReader
from quickstep.server.generate.api import reports_progress, response_flags
from quickstep.server.generate.generation import (
    Choice,
    Generation,
    Head,
    ParsedRequest,
)
from quickstep.server.generate.prompts import (
    InfillPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    infill_markers,
)
from quickstep.server.generate.sampling import (
    engine_request,
    label,
    num_alternatives,
    sampling_params,
    token_ids_of,
)
from quickstep.server.generate.structured import requested_grammar
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.choices import (
    Envelope,
    beam_params,
    failure_frames,
    own_values,
    ranked_logprobs,
    requested_output,
    truncation_of,
)
from quickstep.server.openai.request_types import CompletionRequest
from quickstep.server.openai.response_types import (
    Completion,
    CompletionChunk,
    RankedLogprob,
    TextChoice,
    TextChunkChoice,
    TextLogprobs,
)
from quickstep.server.options import bounded
from quickstep.types import Delta, TokenLogprobs

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completions:
    """The API of completions."""

    def parse(self, body: bytes, model: ServedModel, caller: str = "") -> ParsedRequest:
        """Validate a body. Raises RequestError."""
        reader = FieldReader(model.server.field_rules)
        fields = reader.decode(body, CompletionRequest)
        prompts = _prompts(fields, model)
        logprobs = num_alternatives("logprobs", fields.logprobs, model)
        requested = requested_output(fields, model, logprobs, bool(fields.echo))
        max_tokens = _DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
        grammar = requested_grammar(fields)
        own = own_values(fields, model, requested, len(prompts), fields.best_of)
        own["max_tokens"] = max_tokens
        if grammar is not None:
            own["grammar"] = grammar.grammar
        sampling = sampling_params(fields, model, own, {})
        beams = beam_params(fields, model, sampling, fields.best_of)
        return ParsedRequest(
            model=model.name_or_default(fields.model),
            prompts=prompts,
            request=structs.replace(
                engine_request(
                    fields,
                    sampling,
                    model.server.limits,
                    label("user", fields.user, model.server.limits),
                ),
                reports_progress=reports_progress(fields, reader),
            ),
            grammar_field="" if grammar is None else grammar.field,
            requested_output=requested,
            num_kept=None if beams or sampling.n == (fields.n or 1) else fields.n or 1,
            beams=beams,
            truncation=truncation_of(fields, max_tokens, model),
            adapter=None if fields.lora is None else model.adapters.mix(fields.lora),
            ignored=reader.ignored,
            writer=partial(CompletionWriter, model),
            **response_flags(fields, model),
        )


def _prompts(fields: CompletionRequest, model: ServedModel) -> tuple[Prompt, ...]:
    prompt = fields.prompt
    vocab_size = model.engine.tokenizer.vocab_size
    if isinstance(prompt, str):
        return _texts([prompt], fields, model)
    if not prompt:
        raise RequestError("prompt is an empty list", param="prompt")
    if isinstance(prompt[0], int) and fields.truncate_prompt_tokens is None:
        _check_length(len(prompt), fields, model)
    if _are_ids(prompt):
        return _ids([token_ids_of("prompt", prompt, vocab_size)], fields)
    bounded("prompt", len(prompt), model.server.limits.prompts, "entries")
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [token_ids_of("prompt", item, vocab_size) for item in prompt if isinstance(item, list)]
    if len(texts) == len(prompt):
        return _texts(texts, fields, model)
    if len(ids) == len(prompt):
        return _ids(ids, fields)
    raise RequestError("prompt mixes texts, token ids and lists of token ids", param="prompt")


def _texts(
    texts: Sequence[str], fields: CompletionRequest, model: ServedModel
) -> tuple[TextPrompt | InfillPrompt, ...]:
    special = fields.add_special_tokens is not False
    suffix = fields.suffix
    if not suffix:
        return tuple(TextPrompt(text, special) for text in texts)
    markers = infill_markers(model.engine.tokenizer)
    if fields.echo:
        raise RequestError("echo cannot go with suffix", param="echo")
    return tuple(InfillPrompt(text, suffix, markers, special) for text in texts)


def _ids(prompts: Sequence[tuple[int, ...]], fields: CompletionRequest) -> tuple[TokenPrompt, ...]:
    if fields.suffix:
        raise RequestError("suffix needs a prompt that is text, not token ids", param="suffix")
    return tuple(map(TokenPrompt, prompts))


def _check_length(num_tokens: int, fields: CompletionRequest, model: ServedModel) -> None:
    """Raise PromptTooLong before anything looks at a million ids."""
    num_outputs = 0 if fields.echo and fields.max_tokens == 0 else 1
    if num_tokens + num_outputs > model.engine.max_model_len:
        raise PromptTooLong(num_tokens, model.engine.max_model_len, num_outputs=num_outputs)


def _are_ids(prompt: Sequence[str | int | list[int]]) -> TypeGuard[Sequence[int]]:
    return set(map(type, prompt)) == {int}


class CompletionWriter:
    """The `Writer` of one request. `text_offset` depends on earlier deltas."""

    def __init__(self, model: ServedModel, generation: Generation, head: Head) -> None:
        self._generation = generation
        self._tokenizer = model.engine.tokenizer
        self._envelope = Envelope(
            model,
            generation,
            head,
            id_prefix="cmpl-",
            new_response=partial(Completion, object="text_completion"),
            new_chunk=partial(CompletionChunk, object="text_completion"),
            num_reasoning_tokens=lambda: None,
        )
        self._requested = generation.request.requested_output
        self._skips_special = generation.request.sampling.skip_special_tokens
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def opening(self) -> Iterator[bytes]:
        """A stream of completions begins with its first text."""
        return iter(())

    def delta(self, delta: Delta) -> list[bytes]:
        """The new text, and its end."""
        choice = self._generation.choices[delta.index]
        frames: list[bytes] = []
        if delta.progress is not None:
            new_choice = partial(TextChunkChoice, text="")
            frames.append(self._envelope.progress(choice, delta.progress, new_choice))
        chunk = self._new_text(choice, delta)
        if chunk is not None:
            frames.append(self._envelope.chunk([chunk]))
        if delta.finish_reason is not None:
            frames.append(self._envelope.chunk([self._end(choice)]))
        return frames

    def _new_text(self, choice: Choice, delta: Delta) -> TextChunkChoice | None:
        """New text, with the new tokens' logprobs; the prompt first, once it is scored."""
        if delta.finish_reason is None and not delta.token_ids and not delta.text:
            return None
        shows_tokens = self._requested.logprobs is not None or self._requested.token_ids
        is_first = choice.index not in self._begun
        with_prompt = is_first and (self._requested.echo or self._requested.token_ids)
        if not delta.text and not with_prompt and not (shows_tokens and delta.token_ids):
            return None
        self._begun.add(choice.index)
        text, logprobs = self._text(choice, delta.text, delta.logprobs, is_first)
        return TextChunkChoice(
            index=choice.index,
            text=text,
            logprobs=logprobs,
            token_ids=self._token_ids(delta.token_ids),
            prompt_token_ids=self._prompt_token_ids(choice) if is_first else UNSET,
            finish_reason=None,
            draft=True if delta.is_draft and self._envelope.marks_drafts else UNSET,
        )

    def ending(self) -> Iterator[bytes]:
        """Usage and timings if the client requested them, then `[DONE]`."""
        return self._envelope.ending()

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as an event of the stream."""
        return failure_frames(error)

    def _end(self, choice: Choice) -> TextChunkChoice:
        """The finish reason, without text."""
        return TextChunkChoice(
            index=choice.index,
            text="",
            logprobs=None,
            token_ids=self._token_ids(()),
            finish_reason=self._generation.finish_reason(choice),
            stop_reason=choice.stop_reason,
            seed=choice.seed,
        )

    def collect(self, delta: Delta) -> None:
        """A choice has its text already."""

    def complete(self) -> msgspec.Struct:
        """The complete texts."""
        return self._envelope.response(self._complete)

    def _complete(self, choice: Choice, index: int) -> TextChoice:
        text, logprobs = self._text(choice, "".join(choice.text), choice.logprobs, is_first=True)
        ranked: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET
        num_top = self._requested.prompt_logprobs
        if num_top is not None:
            scores = self._generation.prompt_logprobs(choice)
            ranked = ranked_logprobs(scores, num_top, self._tokenizer)
        return TextChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            token_ids=self._token_ids(choice.token_ids),
            prompt_token_ids=self._prompt_token_ids(choice),
            prompt_logprobs=ranked,
            finish_reason=self._generation.finish_reason(choice),
            stop_reason=choice.stop_reason,
            seed=choice.seed,
        )

    def _text(
        self, choice: Choice, text: str, logprobs: Iterable[TokenLogprobs], is_first: bool
    ) -> tuple[str, TextLogprobs | None]:
        """The text, the echoed prompt before it if it is the first, and the tokens' logprobs."""
        listed = None if self._requested.logprobs is None else TextLogprobs([], [], [], [])
        if is_first and self._requested.echo:
            text = self._prompt_text(choice) + text
            self._list_prompt(choice, text, listed)
        if listed is not None:
            self._list_tokens(choice.index, logprobs, listed)
        return text, listed

    def _token_ids(self, token_ids: Sequence[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._requested.token_ids else UNSET

    def _prompt_token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return self._token_ids(self._generation.prompt_token_ids(choice))

    def _prompt_text(self, choice: Choice) -> str:
        """The client's own text, or the decoded token ids."""
        request = self._generation.request
        prompt = request.prompts[choice.index // request.sampling.n]
        if isinstance(prompt, TextPrompt):
            return prompt.text
        if isinstance(prompt, InfillPrompt):
            return prompt.before
        ids = self._generation.prompt_token_ids(choice)
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)

    def _list_prompt(self, choice: Choice, text: str, listed: TextLogprobs | None) -> None:
        """List the prompt's tokens; the first has no score, and offsets continue after the last."""
        if listed is None:
            return
        scores = self._generation.prompt_logprobs(choice)
        token_ids = self._generation.prompt_token_ids(choice)
        offset = 0
        # a deadline may have passed before the complete prompt was scored
        for token_id, score in zip(token_ids, scores, strict=False):
            token = self._tokenizer.decode([token_id], skip_special_tokens=False)
            listed.tokens.append(self._token(token_id))
            listed.token_logprobs.append(None if score is None else score.logprob)
            top = None if score is None else self._alternatives(score, self._requested.logprobs)
            listed.top_logprobs.append(top)
            listed.text_offset.append(offset)
            offset += self._length_in(text, token_id, token, offset)
        self._offsets[choice.index] = len(self._prompt_text(choice))

    def _length_in(self, text: str, token_id: int, token: str, offset: int) -> int:
        """Characters that a token has in `text`: none if it is only special, without the space
        that the start of a text loses.
        """
        if self._tokenizer.is_special(token_id) and not text.startswith(token, offset):
            return 0
        length = _num_characters(self._tokenizer.token_bytes(token_id))
        loses_space = offset == 0 and token.startswith(" ") and not text.startswith(" ")
        return length - loses_space

    def _list_tokens(
        self, index: int, logprobs: Iterable[TokenLogprobs], listed: TextLogprobs
    ) -> None:
        offset = self._offsets.get(index, 0)
        for item in logprobs:
            listed.tokens.append(self._token(item.token_id))
            listed.token_logprobs.append(item.logprob)
            listed.top_logprobs.append(self._alternatives(item, len(item.top)))
            listed.text_offset.append(offset)
            if not (self._skips_special and self._tokenizer.is_special(item.token_id)):
                offset += _num_characters(self._tokenizer.token_bytes(item.token_id))
        self._offsets[index] = offset

    def _alternatives(self, item: TokenLogprobs, num_top: int | None) -> dict[str, float]:
        """The token and the alternatives; of two with the same text, the likelier is listed."""
        alternatives = {self._token(item.token_id): item.logprob}
        for token_id, logprob in item.top[:num_top]:
            alternatives.setdefault(self._token(token_id), logprob)
        return alternatives

    def _token(self, token_id: int) -> str:
        if self._requested.tokens_as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def _num_characters(content: bytes) -> int:
    """Characters that begin in these bytes of UTF-8: a token may hold the rest of one only."""
    return sum(byte & 0xC0 != 0x80 for byte in content)
