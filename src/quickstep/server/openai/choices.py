"""What OpenAI's completions and chat have in common: their responses are a list of choices.

Requests: what a client requests in addition to plain text (scores, token ids, the best of several,
beam search) becomes parameters of the engine's sampling (`own_values`), `BeamSearchParams`, and a
`RequestedOutput` for the response.

Responses: `ChatWriter` and `CompletionWriter` write the choices, an `Envelope` what surrounds them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.engine.beam_search import BeamSearchParams
from quickstep.engine.interface import Vocabulary
from quickstep.errors import RequestError
from quickstep.json_line import json_line
from quickstep.server.fields.sampling_fields import SamplingFields, TextFormat
from quickstep.server.generate.generation import (
    Choice,
    Generation,
    Head,
    RequestedOutput,
    Truncation,
)
from quickstep.server.generate.prompts import check_num_sequences
from quickstep.server.generate.sampling import (
    num_alternatives,
    token_ids_of,
)
from quickstep.server.generate.timings import requested_timings
from quickstep.server.http.errors import error_of
from quickstep.server.http.event_stream import DONE, data_frame
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.request_types import ChoiceFields
from quickstep.server.openai.response_types import (
    PromptProgressReport,
    RankedLogprob,
    ResponseMetrics,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from quickstep.server.options import bounded
from quickstep.types import PromptProgress, SamplingParams, TokenLogprobs

# Fields that a beam search honours; any other sampling field would have no effect on it.
_WITH_BEAMS = frozenset(
    {
        "model",
        "n",
        "temperature",
        "max_tokens",
        "ignore_eos",
        "skip_special_tokens",
        "seed",
        "user",
        "priority",
        "cache_salt",
        "retain_s",
        "timeout_s",
        "request_class",
        "ttft_deadline_ms",
        "speculation",
    }
)
_NO_EFFECT: tuple[object, ...] = (None, False, [], {}, "")
_DEFAULTS: Mapping[str, Any] = MappingProxyType(msgspec.structs.asdict(SamplingParams()))


def requested_output(
    fields: ChoiceFields, model: ServedModel, logprobs: int | None, echo: bool = False
) -> RequestedOutput:
    """What the response contains. Raises RequestError; `logprobs` is checked by the caller."""
    num_top = num_alternatives("prompt_logprobs", fields.prompt_logprobs, model)
    if num_top is not None and fields.stream:
        raise RequestError(
            "prompt_logprobs cannot be streamed; send stream: false, or echo with logprobs",
            param="prompt_logprobs",
        )
    return RequestedOutput(
        echo,
        logprobs,
        num_top,
        token_ids=bool(fields.return_token_ids),
        tokens_as_ids=bool(fields.return_tokens_as_token_ids),
    )


def own_values(
    fields: ChoiceFields,
    model: ServedModel,
    requested: RequestedOutput,
    num_prompts: int = 1,
    best_of: int | None = None,
) -> dict[str, Any]:
    """`n`, `logprobs` and `prompt_logprobs` of the engine's sampling. Raises RequestError.

    The best of several are selected by their logprobs, and an echoed prompt comes with its own.
    """
    n = 1 if fields.n is None else fields.n
    width = n if best_of is None else best_of
    if n < 1:
        raise RequestError(f"n is {n}, it must be at least 1", param="n")
    if width < n:
        raise RequestError(f"best_of is {width}, below n {n}", param="best_of")
    field = "n" if width == n else "best_of"
    bounded(field, width, model.server.limits.n)
    check_num_sequences(num_prompts, width, model.server.limits, field)
    picks = width > n and not fields.use_beam_search
    if picks and fields.stream:
        raise RequestError(
            f"best_of is {width}, above n {n}: the best are known at the end only; send stream: "
            "false",
            param="best_of",
        )
    echoed = requested.logprobs if requested.echo else None
    widths = [number for number in (requested.prompt_logprobs, echoed) if number is not None]
    if requested.echo and fields.max_tokens == 0:
        widths.append(0)
    own: dict[str, Any] = {
        "logprobs": 0 if picks and requested.logprobs is None else requested.logprobs,
        "prompt_logprobs": max(widths, default=None),
    }
    if picks:
        own["n"] = width
    if fields.logprob_token_ids:
        own["logprob_token_ids"] = _logprob_token_ids(fields, model, requested)
    return own


def _logprob_token_ids(
    fields: ChoiceFields, model: ServedModel, requested: RequestedOutput
) -> tuple[int, ...]:
    name, ids = "logprob_token_ids", fields.logprob_token_ids or ()
    if requested.logprobs is None:
        raise RequestError(f"{name} needs logprobs", param=name)
    if fields.use_beam_search:
        raise RequestError(f"{name} cannot go with use_beam_search", param=name)
    bounded(name, len(ids), model.server.limits.logprob_token_ids, "entries")
    return token_ids_of(name, ids, model.engine.tokenizer.vocab_size)


def truncation_of(
    fields: ChoiceFields, max_tokens: int | None, model: ServedModel
) -> Truncation | None:
    """How much of a prompt is read, None for all; -1 keeps as many tokens as fit together with the
    output. Raises RequestError.
    """
    num_tokens, longest = fields.truncate_prompt_tokens, model.engine.max_model_len
    if num_tokens is None:
        if fields.truncation_side is not None:
            name = "truncation_side"
            raise RequestError(f"{name} needs truncate_prompt_tokens", param=name)
        return None
    if num_tokens == -1:
        num_tokens = max(1, longest - max(1, max_tokens or 1))
    elif not 1 <= num_tokens <= longest:
        name = "truncate_prompt_tokens"
        raise RequestError(
            f"{name} is {num_tokens}, it must be -1 or between 1 and {longest}", param=name
        )
    return Truncation(num_tokens, keeps_first=fields.truncation_side == "right")


def beam_params(
    fields: ChoiceFields, model: ServedModel, sampling: SamplingParams, best_of: int | None = None
) -> BeamSearchParams | None:
    """The requested beam search, or None. Raises RequestError."""
    if not fields.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(fields, name) is not None:
                raise RequestError(f"{name} needs use_beam_search: true", param=name)
        return None
    for name in SamplingFields.__struct_fields__:
        value = getattr(fields, name)
        if name in _WITH_BEAMS or value in _NO_EFFECT or isinstance(value, TextFormat):
            continue
        if name not in _DEFAULTS or value != _DEFAULTS[name]:
            raise RequestError(
                f"{name} cannot go with use_beam_search, which ignores it", param=name
            )
    if sampling.grammar is not None:
        raise RequestError("use_beam_search cannot go with enforced calls", param="use_beam_search")
    return BeamSearchParams(
        beam_width=best_of or sampling.n,
        max_tokens=model.engine.max_model_len
        if sampling.max_tokens is None
        else sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        temperature=fields.temperature or 0.0,
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        early_stopping=bool(fields.early_stopping),
    )


class Envelope:
    """What surrounds the choices of a response, complete or in chunks: id, model, seed, usage.

    `new_response` and `new_chunk` make them of their fields. `num_reasoning_tokens` counts those of
    all choices so far; None for texts without reasoning.
    """

    def __init__(
        self,
        model: ServedModel,
        generation: Generation,
        head: Head,
        *,
        id_prefix: str,
        new_response: Callable[..., msgspec.Struct],
        new_chunk: Callable[..., msgspec.Struct],
        num_reasoning_tokens: Callable[[], int | None],
    ) -> None:
        self._model = model
        self._generation = generation
        self._num_reasoning_tokens = num_reasoning_tokens
        http_id = generation.request.request.request_id  # as in vLLM; "" for lines of batches
        constant = {
            "id": id_prefix + (http_id or uuid.uuid4().hex),
            "created": head.created,
            "model": generation.request.model,
            "system_fingerprint": head.fingerprint,
            "seed": generation.seed,
            **generation.request.echoed,
        }
        self._new_response = partial(new_response, **constant)
        self._new_chunk = partial(new_chunk, **constant)
        self.marks_drafts = generation.request.timings
        self._has_metrics = model.server.answers.request_metrics and len(generation.choices) == 1

    def chunk(self, choices: list[msgspec.Struct], **fields: Any) -> bytes:
        """The frame of a chunk of one choice, or of none."""
        request = self._generation.request
        if request.continuous_usage:
            fields["usage"] = self._usage()
        elif request.include_usage:
            fields.setdefault("usage", None)
        return b"data: " + json_line(self._new_chunk(choices=choices, **fields)) + b"\n\n"

    def progress(
        self, choice: Choice, progress: PromptProgress, new_choice: Callable[..., msgspec.Struct]
    ) -> bytes:
        """The frame of a chunk that adds nothing to its choice, with the progress of the prompt."""
        num_prompt_tokens = len(self._generation.prompt_token_ids(choice))
        report = PromptProgressReport.of(progress, num_prompt_tokens)
        empty = new_choice(index=choice.index, logprobs=None, finish_reason=None)
        return self.chunk([empty], prompt_progress=report)

    def ending(self) -> Iterator[bytes]:
        """A chunk with usage and timings if the client requested them, then `[DONE]`."""
        timings = requested_timings(self._generation, self._model)
        if self._generation.request.include_usage:
            usage = self._usage()
            yield self.chunk([], usage=usage, metrics=self._metrics(), quickstep=timings)
        elif timings is not UNSET:
            yield self.chunk([], quickstep=timings)
        yield DONE

    def response(
        self, new_choice: Callable[[Choice, int], msgspec.Struct], **fields: Any
    ) -> msgspec.Struct:
        """The response of a finished generation, of whose choices `new_choice` makes ours."""
        return self._new_response(
            choices=[
                new_choice(choice, index) for index, choice in enumerate(self._generation.kept)
            ],
            usage=self._usage(),
            metrics=self._metrics(),
            quickstep=requested_timings(self._generation, self._model),
            **fields,
        )

    def _usage(self) -> Usage:
        return Usage.of(self._generation.usage, self._num_reasoning_tokens())

    def _metrics(self) -> ResponseMetrics | UnsetType:
        """How long the request took, if the operator enabled it and there is one choice."""
        timings = self._generation.choices[0].timings
        if not self._has_metrics or timings is None:
            return UNSET
        return ResponseMetrics.of(timings)


def failure_frames(error: Exception) -> Iterator[bytes]:
    """The error as the last event of a stream."""
    _, body = error_of(error)
    yield data_frame(body)
    yield DONE


def token_logprob(
    tokenizer: Vocabulary, logprobs: TokenLogprobs, as_ids: bool = False
) -> TokenLogprob:
    """A token with its logprob and the likeliest alternatives, in OpenAI's shape. With `as_ids`,
    tokens are named by their ids.
    """
    top = [_top_logprob(tokenizer, *each, as_ids) for each in logprobs.top]
    chosen = _top_logprob(tokenizer, logprobs.token_id, logprobs.logprob, as_ids)
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def _top_logprob(
    tokenizer: Vocabulary, token_id: int, logprob: float, as_id: bool = False
) -> TopLogprob:
    """A token with its logprob, in OpenAI's shape."""
    name = (
        f"token_id:{token_id}" if as_id else tokenizer.decode([token_id], skip_special_tokens=False)
    )
    return TopLogprob(name, logprob, list(tokenizer.token_bytes(token_id)))


def ranked_logprobs(
    scores: Sequence[TokenLogprobs | None], num_top: int, tokenizer: Vocabulary
) -> list[dict[str, RankedLogprob] | None]:
    """vLLM's `prompt_logprobs`: per token an object by token id, null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> RankedLogprob:
        return RankedLogprob(logprob, rank, tokenizer.decode([token_id], skip_special_tokens=False))

    listed: list[dict[str, RankedLogprob] | None] = []
    for score in scores:
        if score is None:
            listed.append(None)
            continue
        chosen = {str(score.token_id): entry(score.token_id, score.logprob, score.rank)}
        top = {
            str(token_id): entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(score.top[:num_top], 1)
        }
        listed.append(chosen | top)
    return listed
