"""llama.cpp's own `/completion`: its schema in, its answer out, streamed or whole.

Several prompts, or several completions of one, are answered with a list; a stream tells them
apart by `index`. A stream has no `[DONE]`: the word with `stop: true` is the last of its index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from quickstep.server.generate.adapter import Served
from quickstep.server.generate.engine_interface import Vocabulary
from quickstep.server.generate.generation import (
    Choice,
    ChoiceDelta,
    Generation,
    Head,
    ParsedRequest,
)
from quickstep.server.generate.sampling import bounded
from quickstep.server.http.errors import error_of
from quickstep.server.http.event_stream import data_frame
from quickstep.server.llama_cpp.request import SAMPLERS, llama_request
from quickstep.server.llama_cpp.request_types import LlamaCompletionRequest
from quickstep.server.llama_cpp.response_types import (
    LlamaChunk,
    LlamaCompletion,
    LlamaTimings,
    LlamaToken,
    LlamaTopToken,
)
from quickstep.server.schema.field_reader import FieldReader
from quickstep.types import FinishReason, SamplingParams, TokenLogprobs

__all__ = ["LlamaCpp", "generation_settings"]

_NO_SLOT = -1  # the scheduler's slots are its own business


class LlamaCpp:
    """The API."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock

    def parse(self, body: bytes, served: Served, caller: str) -> ParsedRequest:
        """Validate. Raises RequestError."""
        reader = FieldReader(served.field_rules)
        fields = reader.decode(body, LlamaCompletionRequest)
        bounded("response_fields", len(fields.response_fields or ()), 64, "entries")
        return replace(
            llama_request(fields, served),
            ignored=reader.ignored,
            writer=partial(_LlamaWriter, fields, served, self._clock),
        )


class _LlamaWriter:
    def __init__(
        self,
        fields: LlamaCompletionRequest,
        served: Served,
        clock: Callable[[], float],
        generation: Generation,
        head: Head,
    ) -> None:
        self._fields = fields
        self._served = served
        self._tokenizer: Vocabulary = served.engine.tokenizer
        self._generation = generation
        self._clock = clock
        self._started_s = clock()
        self._first_s: dict[int, float] = {}

    def opening(self) -> Iterator[bytes]:
        """Nothing."""
        return iter(())

    def delta(self, item: ChoiceDelta) -> Iterator[bytes]:
        """New text and tokens, then the end of a completion."""
        self.note(item)
        choice, delta = self._generation.choices[item.choice], item.delta
        if delta.text or delta.token_ids:
            yield data_frame(
                LlamaChunk(
                    index=choice.index,
                    content=delta.text,
                    tokens=list(delta.token_ids),
                    stop=False,
                    id_slot=_NO_SLOT,
                    tokens_predicted=len(choice.token_ids),
                    tokens_evaluated=len(self._prompt(choice)),
                    timings=self._timings(choice) if self._fields.timings_per_token else UNSET,
                    completion_probabilities=self._probabilities(delta.logprobs),
                )
            )
        if delta.finish_reason is not None:
            yield data_frame(self._shown(self._completion(choice, content="", tokens=[])))

    def ending(self) -> Iterator[bytes]:
        """Nothing."""
        return iter(())

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as an event of the stream."""
        _, body = error_of(error)
        yield data_frame(body)

    def note(self, item: ChoiceDelta) -> None:
        """When the first token came."""
        self._first_s.setdefault(item.choice, self._clock())

    def whole(self) -> object:
        """The completion, or the list of them."""
        shown = []
        for choice in self._generation.choices:
            tokens = list(choice.token_ids) if self._fields.return_tokens else []
            completion = self._completion(choice, "".join(choice.text), tokens)
            shown.append(self._shown(completion))
        return shown[0] if len(shown) == 1 else shown

    def _prompt(self, choice: Choice) -> Sequence[int]:
        return self._generation.prompt_token_ids(choice)

    def _completion(self, choice: Choice, content: str, tokens: list[int]) -> LlamaCompletion:
        text = "".join(choice.text)
        prompt = self._prompt(choice)
        in_stream = self._generation.request.stream
        return LlamaCompletion(
            index=choice.index,
            content=content,
            tokens=tokens,
            id_slot=_NO_SLOT,
            stop=True,
            model=self._generation.request.model,
            tokens_predicted=len(choice.token_ids),
            tokens_evaluated=len(prompt),
            generation_settings={
                **generation_settings(self._generation.request.sampling),
                "seed": choice.seed,
                "stream": in_stream,
                "n_ctx": self._served.engine.max_model_len,
            },
            prompt=self._tokenizer.decode(prompt, skip_special_tokens=False),
            has_new_line="\n" in text,
            truncated=choice.finish_reason is FinishReason.CONTEXT_LIMIT,
            stop_type=_stop_type(choice.finish_reason),
            stopping_word=self._stopping_word(choice, text),
            tokens_cached=choice.timings.num_cached_tokens if choice.timings else 0,
            timings=self._timings(choice),
            completion_probabilities=(UNSET if in_stream else self._probabilities(choice.logprobs)),
        )

    def _shown(self, completion: LlamaCompletion) -> object:
        """All of it, or the fields that were asked for; `a/b` is a field of a field."""
        paths = self._fields.response_fields
        if not paths:
            return completion
        whole = msgspec.to_builtins(completion)
        found: dict[str, Any] = {}
        for path in paths:
            place: Any = whole
            for name in path.split("/"):
                place = place.get(name, UNSET) if isinstance(place, dict) else UNSET
            if place is not UNSET:
                found[path] = place
        return found

    def _stopping_word(self, choice: Choice, text: str) -> str:
        """The stop string that ended it: what the tokens say behind the text."""
        if choice.finish_reason is not FinishReason.STOP_STRING:
            return ""
        said = self._tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        for stop in self._generation.request.sampling.stop:
            if said.startswith(stop, len(text)):
                return stop
        return ""

    def _timings(self, choice: Choice) -> LlamaTimings:
        """The engine's own once it has ended, until then what the clock says here."""
        num_prompt, num_predicted = len(self._prompt(choice)), len(choice.token_ids)
        timings = choice.timings
        if timings is None or timings.first_token_s is None:
            first_s = self._first_s.get(choice.index, self._clock())
            prompt_s, predicted_s = first_s - self._started_s, self._clock() - first_s
            num_cached = 0
        else:
            prompt_s = timings.prefill_s
            predicted_s = timings.finished_s - timings.first_token_s
            num_cached = timings.num_cached_tokens
        num_computed = num_prompt - num_cached
        return LlamaTimings(
            cache_n=num_cached,
            prompt_n=num_computed,
            prompt_ms=prompt_s * 1e3,
            prompt_per_token_ms=_ratio(prompt_s * 1e3, num_computed),
            prompt_per_second=_ratio(num_computed, prompt_s),
            predicted_n=num_predicted,
            predicted_ms=predicted_s * 1e3,
            predicted_per_token_ms=_ratio(predicted_s * 1e3, num_predicted),
            predicted_per_second=_ratio(num_predicted, predicted_s),
        )

    def _probabilities(self, logprobs: Sequence[TokenLogprobs]) -> list[LlamaToken] | UnsetType:
        if not self._fields.n_probs:
            return UNSET
        return [
            LlamaToken(
                *self._named(item.token_id),
                item.logprob,
                [LlamaTopToken(*self._named(each), logprob) for each, logprob in item.top],
            )
            for item in logprobs
        ]

    def _named(self, token_id: int) -> tuple[int, str, list[int]]:
        data = self._tokenizer.token_bytes(token_id)
        return token_id, data.decode(errors="replace"), list(data)


def generation_settings(sampling: SamplingParams) -> dict[str, Any]:
    """What holds, under llama.cpp's names."""
    num_tokens = -1 if sampling.max_tokens is None else sampling.max_tokens
    return {
        "n_predict": num_tokens,
        "max_tokens": num_tokens,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "xtc_probability": sampling.xtc_probability,
        "xtc_threshold": sampling.xtc_threshold,
        "repeat_last_n": -1,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry_multiplier,
        "dry_base": sampling.dry_base,
        "dry_allowed_length": sampling.dry_allowed_length,
        "dry_penalty_last_n": sampling.dry_range or -1,
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "mirostat": 0,
        "stop": list(sampling.stop),
        "n_keep": -1,
        "n_discard": 0,
        "ignore_eos": sampling.ignore_eos,
        "logit_bias": [
            {"token": token_id, "bias": bias} for token_id, bias in sampling.logit_bias.items()
        ],
        "n_probs": sampling.logprobs or 0,
        "min_keep": 0,
        "grammar": "" if sampling.grammar is None else sampling.grammar.text,
        "samplers": list(SAMPLERS),
        "lora": [],
    }


def _stop_type(reason: FinishReason | None) -> Literal["none", "eos", "limit", "word"]:
    if reason in (FinishReason.EOS, FinishReason.STOP_TOKEN):
        return "eos"
    if reason is FinishReason.STOP_STRING:
        return "word"
    return "none" if reason in (None, FinishReason.ABORTED) else "limit"


def _ratio(value: float, of: float) -> float:
    """0 where there is nothing to divide by: JSON has no infinity."""
    return value / of if of > 0 else 0.0
