"""What OpenAI's completions and chat have in common: their responses are a list of choices.

Requests: what a client requests in addition to plain text (scores, token ids, the best of several,
beam search) becomes parameters of the engine's sampling (`own_values`), `BeamSearchParams`, and a
`RequestedOutput` for the response.

Responses: `ChoicesWriter` is the `Writer` of both. A `Rendering` belongs to one request, since some
fields (`text_offset`) depend on earlier deltas; it writes the choices, `ChoicesWriter` the rest.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.engine.beam_search import BeamSearchParams
from quickstep.engine.interface import Vocabulary
from quickstep.errors import RequestError
from quickstep.server.fields.sampling_fields import SamplingFields, TextFormat
from quickstep.server.generate.generation import (
    Choice,
    ChoiceDelta,
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
    RequestMetrics,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from quickstep.server.options import bounded
from quickstep.types import Delta, SamplingParams, TokenLogprobs

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


class Rendering(Protocol):
    """Writes the choices of one request's response, in the types of its API."""

    def opening(self, choice: Choice) -> msgspec.Struct | None:
        """The choice that a stream sends before its first token, or None."""

    def prompt_fields(self) -> Mapping[str, Any]:
        """Fields of the response (of a stream, its first chunk) that describe the prompt."""

    def empty(self, choice: Choice) -> msgspec.Struct:
        """The choice of a stream's chunk that adds nothing to it."""

    def deltas(self, choice: Choice, delta: Delta) -> Sequence[msgspec.Struct]:
        """The choices of a stream's next chunks."""

    def ending(self, choice: Choice) -> msgspec.Struct:
        """The choice of a stream's chunk with the finish reason."""

    def collect(self, choice: Choice, delta: Delta) -> None:
        """Read a delta of a non-streaming response, which its choice has already."""

    def complete(self, choice: Choice, index: int) -> msgspec.Struct:
        """A finished choice, at `index` of the response."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning in all choices so far; None for texts without reasoning."""


class ChoicesApi(Protocol):
    """What differs between completions and chat."""

    @property
    def id_prefix(self) -> str:
        """Response ids start with it."""

    @property
    def response(self) -> Callable[..., msgspec.Struct]:
        """Makes a complete response of its fields."""

    @property
    def chunk(self) -> Callable[..., msgspec.Struct]:
        """Makes a stream's chunk of its fields."""

    @property
    def rendering(self) -> Callable[[Generation, Vocabulary], Rendering]:
        """Makes the rendering of one request."""


class ChoicesWriter:
    """A `Writer` of a `ChoicesApi`."""

    def __init__(
        self, api: ChoicesApi, model: ServedModel, generation: Generation, head: Head
    ) -> None:
        self._model = model
        self._generation = generation
        self._rendering = api.rendering(generation, model.engine.tokenizer)
        http_id = generation.request.request.request_id  # as in vLLM; "" for lines of batches
        constant = {
            "id": api.id_prefix + (http_id or uuid.uuid4().hex),
            "created": head.created,
            "model": generation.request.model,
            "system_fingerprint": head.fingerprint,
            "seed": generation.seed,
            **generation.request.echoed,
        }
        self._response = partial(api.response, **constant)
        self._new_chunk = partial(api.chunk, **constant)
        self._has_metrics = model.server.answers.request_metrics and len(generation.choices) == 1

    def opening(self) -> Iterator[bytes]:
        """The role of each choice, where there are roles."""
        for choice in self._generation.choices:
            opening = self._rendering.opening(choice)
            if opening is not None:
                fields = {} if choice.index else self._rendering.prompt_fields()
                yield self._chunk([opening], **fields)

    def delta(self, item: ChoiceDelta) -> list[bytes]:
        """The chunks of a delta, and its choice's end."""
        choice, frames = self._generation.choices[item.choice], []
        progress = item.delta.progress
        if progress is not None:
            num_prompt_tokens = len(self._generation.prompt_token_ids(choice))
            report = PromptProgressReport.of(progress, num_prompt_tokens)
            frames.append(self._chunk([self._rendering.empty(choice)], prompt_progress=report))
        for delta in self._rendering.deltas(choice, item.delta):
            frames.append(self._chunk([delta]))
        if item.delta.finish_reason is not None:
            frames.append(self._chunk([self._rendering.ending(choice)]))
        return frames

    def ending(self) -> Iterator[bytes]:
        """A chunk with usage and timings if the client requested them, then `[DONE]`."""
        request = self._generation.request
        timings = requested_timings(self._generation, self._model)
        if request.include_usage:
            usage = self._usage()
            yield self._chunk([], usage=usage, metrics=self._metrics(), quickstep=timings)
        elif timings is not UNSET:
            yield self._chunk([], quickstep=timings)
        yield DONE

    def failure(self, error: Exception) -> Iterator[bytes]:
        """The error as an event of the stream."""
        _, body = error_of(error)
        yield data_frame(body)
        yield DONE

    def collect(self, item: ChoiceDelta) -> None:
        """Read a delta; the generation has added it to its choice."""
        self._rendering.collect(self._generation.choices[item.choice], item.delta)

    def complete(self) -> msgspec.Struct:
        """The response of a finished generation."""
        return self._response(
            choices=[
                self._rendering.complete(choice, index)
                for index, choice in enumerate(self._generation.kept)
            ],
            usage=self._usage(),
            metrics=self._metrics(),
            quickstep=requested_timings(self._generation, self._model),
            **self._rendering.prompt_fields(),
        )

    def _usage(self) -> Usage:
        return Usage.of(self._generation.usage, self._rendering.num_reasoning_tokens)

    def _metrics(self) -> RequestMetrics | UnsetType:
        """How long the request took, if the operator enabled it and there is one choice."""
        timings = self._generation.choices[0].timings
        if not self._has_metrics or timings is None:
            return UNSET
        return RequestMetrics.of(timings)

    def _chunk(self, choices: list[msgspec.Struct], **fields: Any) -> bytes:
        """A chunk of one choice, or of none."""
        request = self._generation.request
        if request.continuous_usage:
            fields["usage"] = self._usage()
        elif request.include_usage:
            fields.setdefault("usage", None)
        return data_frame(self._new_chunk(choices=choices, **fields))


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
