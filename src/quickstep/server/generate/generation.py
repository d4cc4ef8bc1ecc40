"""The request that every API parses a body into, and its run on the engine.

An API parses a body into a frozen, bounded `ParsedRequest`; `open_generation` renders,
tokenises and submits its prompts; `Generation` merges the engine's streams into one sequence of
deltas. The engine never sees client dicts, an API never calls the engine.

Prompt p of P and sequence i of n become choice p * n + i, as OpenAI counts.

`check_end` separates ends that are an answer from those that are an error. A grammar that breaks a
limit late in its output, or fields that together forbid every token, are the client's fault: 400
with the field's name, in a stream as its error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
from msgspec import structs

from quickstep.core.sequence import sequence_seed
from quickstep.engine.beam_search import BeamSearchParams
from quickstep.engine.interface import ServedEngine, TokenStream, Vocabulary
from quickstep.engine.outputs import best_indices
from quickstep.engine.requests import part_id
from quickstep.errors import EngineError, RequestError
from quickstep.server.generate.beam_stream import BeamStream, open_beams
from quickstep.server.generate.prompts import (
    Prompt,
    check_num_tokens,
    prompts_ids,
)
from quickstep.server.http.errors import GenerationFailed
from quickstep.server.http.event_stream import SERVER_SENT_EVENTS
from quickstep.server.http.turns import leave_turn
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.options import RequestLimits
from quickstep.text.output_text import prompt_end
from quickstep.text.tool_calls.formats import ReasoningFormat, ToolCallFormat
from quickstep.types import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    SequenceTimings,
    TokenLogprobs,
)

_LIMITS = RequestLimits()
_QUEUED_DELTAS = 256
_PROMPTS_PER_TURN = 8  # submitted at once, before the event loop continues with other requests
_NAMES_OF_PROMPTS = ("prompt", "messages")  # the engine's and the chat template's
_MAY_FORBID_ALL = ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens", "grammar")


class OutputReading(msgspec.Struct, frozen=True):
    """The formats to look for in a message.

    `one_call`: further calls are dropped. `inside_reasoning`: the client has begun the reasoning.
    `parameters` has the schemas of the functions, by which some formats tell types apart.
    """

    tool_calls: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    one_call: bool = False
    inside_reasoning: bool = False
    parameters: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)


class RequestedOutput(msgspec.Struct, frozen=True):
    """What a response contains in addition to its text.

    Attributes:
        echo: The prompt comes before the text.
        logprobs: Alternatives per token of the text; None for no logprobs.
        prompt_logprobs: Alternatives per token of the prompt; None for no logprobs.
        token_ids: The token ids of prompt and text.
        tokens_as_ids: Logprobs name their tokens `token_id:7`.
        before: Text of the client that comes before a message's content.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    before: str = ""


class Truncation(msgspec.Struct, frozen=True):
    """So many of a prompt's last tokens are read, or of its first."""

    num_tokens: int
    keeps_first: bool = False

    def of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens that are read."""
        return token_ids[: self.num_tokens] if self.keeps_first else token_ids[-self.num_tokens :]


class ParsedRequest(msgspec.Struct, frozen=True):
    """What a client requested, whichever API it came through: the request to the engine, and how to
    answer it.

    Attributes:
        model: The name to answer with.
        request: What the engine gets, once for each of `prompts`. Its tenant is the client's own
            label until the endpoint puts the name of the API key in front; its id is that of the
            HTTP request, which begins the ids of the requests to the engine.
        output: What to parse out of the text in addition to content; None for nothing.
        grammar_field: The client's name of what became `sampling.grammar`.
        prompt_field: The client's name of what became `prompts`.
        echoed: Fields of the response that repeat what the client sent (`metadata`).
        requested_output: What completions and chat return in addition to the text.
        num_kept: Of the `sampling.n` sequences, how many are the answer: those with the highest
            mean logprob. None for all.
        beams: Beam search instead of sampling; `sampling.n` hypotheses are the answer.
        include_usage: One usage chunk ends the stream.
        continuous_usage: Every chunk carries the usage so far.
        timings: The response has the request's timings; None if the API has no place for them.
        truncation: How much of a prompt is read; None for all.
        ignored: Paths of the client's fields that have no effect.
        loosened: Keywords of the client's schemas that the grammar does not enforce.
        writer: Makes the writer of the response; every API sets it.
        stream_type: The media type of a streaming response.
        adapter: The adapter that the body selects ("" for none); None for that of `model`.
        timeout_reason: OpenAI's `finish_reason` of a choice that ended at `timeout_s`.
        in_background: It continues without its client; the writer is a `BackgroundWriter`.
    """

    model: str
    prompts: tuple[Prompt, ...]
    request: Request
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    output: OutputReading | None = None
    grammar_field: str = ""
    prompt_field: str = "prompt"
    echoed: Mapping[str, Any] = msgspec.field(default_factory=dict)
    requested_output: RequestedOutput = msgspec.field(default_factory=RequestedOutput)
    num_kept: int | None = None
    beams: BeamSearchParams | None = None
    timings: bool | None = None
    truncation: Truncation | None = None
    ignored: tuple[str, ...] = ()
    loosened: tuple[str, ...] = ()
    adapter: str | None = None
    writer: Callable[[Generation, Head], Writer] | None = None
    stream_type: str = SERVER_SENT_EVENTS
    timeout_reason: str = FinishReason.DEADLINE.openai
    in_background: bool = False

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen."""
        return self.request.sampling


class Head(msgspec.Struct, frozen=True):
    """What every response begins with: seconds since 1970, and the engine's fingerprint."""

    created: int
    fingerprint: str


class Writer(Protocol):
    """Writes the response to one request in the API's types: a stream's frames, or one object."""

    def opening(self) -> Iterable[bytes]:
        """The frames before the first token."""

    def delta(self, delta: Delta) -> Iterable[bytes]:
        """The frames of a delta, whose index is that of the choice."""

    def ending(self) -> Iterable[bytes]:
        """The frames after the last delta."""

    def failure(self, error: Exception) -> Iterable[bytes]:
        """The last frames of a stream that failed; its status was sent long ago."""

    def collect(self, delta: Delta) -> None:
        """Read a delta of a non-streaming response."""

    def complete(self) -> object:
        """The non-streaming response, for the JSON encoder."""


@runtime_checkable
class BackgroundWriter(Writer, Protocol):
    """Writes a response that continues without its client, as a stream."""

    @property
    def response_id(self) -> str:
        """By which clients find the response."""

    def snapshot(self) -> object:
        """The response so far, for the JSON encoder."""

    def cancellation(self) -> Iterable[bytes]:
        """The last frames of a response that was cancelled."""


class Choice(msgspec.Struct):
    """One choice, as its deltas add up. Owned by its Generation."""

    index: int
    seed: int
    text: list[str] = msgspec.field(default_factory=list)
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    timings: SequenceTimings | None = None
    prompt_logprobs: list[TokenLogprobs | None] = msgspec.field(default_factory=list)


class TokenCounts(msgspec.Struct, frozen=True):
    """Tokens of a request so far. A prompt counts once for its n choices."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class Generation:
    """A submitted request: its streams merged, its choices added up. Close it when done."""

    def __init__(self, request: ParsedRequest, streams: Sequence[TokenStream]) -> None:
        self.request = request
        self._streams = tuple(streams)
        self._n = request.sampling.n
        self._merging: AsyncGenerator[Delta, None] | None = None
        # The first delta, if it is waited for before the others are read.
        self.first: asyncio.Future[Delta | None] | None = None
        self.choices = tuple(
            Choice(prompt * self._n + index, sequence_seed(stream.seed, index))
            for prompt, stream in enumerate(self._streams)
            for index in range(self._n)
        )

    @property
    def seed(self) -> int | None:
        """The request's seed; None if its prompts have different ones (each choice has its own)."""
        seeds = {stream.seed for stream in self._streams}
        return seeds.pop() if len(seeds) == 1 else None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(stream.prompt_token_ids) for stream in self._streams)

    def prompt_token_ids(self, choice: Choice) -> Sequence[int]:
        """The prompt that a choice continues."""
        return self._streams[choice.index // self._n].prompt_token_ids

    def prompt_logprobs(self, choice: Choice) -> Sequence[TokenLogprobs | None]:
        """Those of the prompt that a choice continues; complete before its first delta."""
        return self.choices[choice.index // self._n * self._n].prompt_logprobs

    def finish_reason(self, choice: Choice) -> Any:
        """Why a choice ended, in OpenAI's terms; None while it runs."""
        reason = choice.finish_reason
        if reason is FinishReason.DEADLINE:
            return self.request.timeout_reason
        return None if reason is None else reason.openai

    @property
    def kept(self) -> tuple[Choice, ...]:
        """The choices that are the answer, once all have ended: of each prompt the best."""
        num_kept = self.request.num_kept
        if num_kept is None:
            return self.choices
        kept: list[Choice] = []
        for start in range(0, len(self.choices), self._n):
            sampled = self.choices[start : start + self._n]
            logprobs = [[logprob.logprob for logprob in choice.logprobs] for choice in sampled]
            kept += [sampled[index] for index in best_indices(logprobs, num_kept)]
        return tuple(kept)

    @property
    def usage(self) -> TokenCounts:
        """Tokens so far; the cached ones of a prompt are known once its first choice has ended."""
        return TokenCounts(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=sum(len(choice.token_ids) for choice in self.choices),
            num_cached_tokens=sum(map(self._num_cached_tokens, range(len(self._streams)))),
        )

    def _num_cached_tokens(self, prompt: int) -> int:
        stream, timings = self._streams[prompt], self.choices[prompt * self._n].timings
        if isinstance(stream, BeamStream):  # its hypotheses have no timings
            return stream.num_cached_tokens
        return 0 if timings is None else timings.num_cached_tokens

    @property
    def size(self) -> int:
        """About how large the answer is: tokens, each with the alternatives that are requested."""
        sampling = self.request.sampling
        outputs = sum(len(choice.token_ids) for choice in self.choices)
        prompts = sum(len(choice.prompt_logprobs) for choice in self.choices)
        per_prompt_token = 1 + (sampling.prompt_logprobs or 0)
        return outputs * (1 + (sampling.logprobs or 0)) + prompts * per_prompt_token

    @property
    def loosened(self) -> tuple[str, ...]:
        """Keywords of the client's schema that are enforced less strictly than written."""
        field = self.request.grammar_field
        keywords = {keyword for stream in self._streams for keyword in stream.ignored}
        keywords.update(self.request.loosened)
        return tuple(f"{field}.{keyword}" for keyword in sorted(keywords))

    def deltas(self) -> AsyncIterator[Delta]:
        """All deltas as they come, whose index is that of the choice; the reader gives each to
        `add`. Called once.
        """
        if len(self._streams) == 1 and not self._holds_deltas:
            return aiter(self._streams[0])
        self._merging = self._merged() if len(self._streams) > 1 else self._of_stream(0)
        return self._merging

    def add(self, delta: Delta) -> None:
        """Add a delta to its choice.

        Raises:
            EngineError: The choice failed.
            RequestError: What the request demands left the choice no token.
        """
        choice = self.choices[delta.index]
        choice.text.append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.end(delta)

    def end(self, delta: Delta) -> None:
        """Note how a choice ends. Idempotent; raises as `add`."""
        choice = self.choices[delta.index]
        choice.timings = delta.timings or choice.timings
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        check_end(delta, self.request.sampling, self.request.grammar_field)

    @property
    def _holds_deltas(self) -> bool:
        """Whether sequences wait for the prompt's scores, which come with the first of them."""
        return self.request.sampling.prompt_logprobs is not None and self._n > 1

    async def finish(self) -> None:
        """Wait for all choices."""
        async for delta in self.deltas():
            self.add(delta)

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        if self.first is not None:  # it may be running in the generator that is closed next
            self.first.cancel()
            await asyncio.gather(self.first, return_exceptions=True)
        if self._merging is not None:
            await self._merging.aclose()
        for stream in self._streams:
            await stream.aclose()

    async def _of_stream(self, prompt: int) -> AsyncGenerator[Delta, None]:
        first = prompt * self._n
        if not self._holds_deltas:
            async for delta in self._streams[prompt]:
                yield structs.replace(delta, index=first + delta.index)
            return
        held: list[Delta] = []
        num_missing = len(self._streams[prompt].prompt_token_ids)
        async for delta in self._streams[prompt]:
            num_missing -= len(delta.prompt_logprobs)
            if delta.index and num_missing:
                held.append(delta)
                continue
            yield structs.replace(delta, index=first + delta.index)
            if delta.finish_reason is not None and not delta.index:
                num_missing = 0
            while held and not num_missing:
                late = held.pop(0)
                yield structs.replace(late, index=first + late.index)

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        queue: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(_QUEUED_DELTAS)
        tasks = [
            asyncio.create_task(self._feed(prompt, queue)) for prompt in range(len(self._streams))
        ]
        try:
            open_streams = len(tasks)
            while open_streams:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    open_streams -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(self, prompt: int, queue: asyncio.Queue[Delta | BaseException | None]) -> None:
        try:
            async for item in self._of_stream(prompt):
                await queue.put(item)
            await queue.put(None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the task's top: the reader of the queue raises it
            await queue.put(error)


async def open_generation(
    engine: ServedEngine,
    request: ParsedRequest,
    limits: RequestLimits = _LIMITS,
    lanes: WorkLanes | None = None,
) -> Generation:
    """Tokenise and submit every prompt; returns when the engine has taken them all.

    Raises:
        RequestError: One of them is refused; then nothing stays submitted.
        EngineError: The engine takes no requests, or too many wait to be tokenised.
    """
    truncation = request.truncation
    longest = engine.max_model_len if truncation is None else None
    try:
        prompts = await prompts_ids(engine, request.prompts, lanes or WorkLanes(), longest)
    except RequestError as error:
        raise with_client_field(error, request.grammar_field, request.prompt_field) from None
    if truncation is not None:
        prompts = [truncation.of(token_ids) for token_ids in prompts]
    prepared = await _prepare(engine, request)
    check_num_tokens(prompts, request.sampling, engine.max_model_len, limits)
    requests = [
        structs.replace(request.request, prompt_token_ids=tuple(token_ids)) for token_ids in prompts
    ]
    streams: list[TokenStream] = []
    try:
        for index, one in enumerate(together(requests), start=1):
            streams.append(_submit(engine, one, request))
            if index == 1 and len(requests) > 1:
                await streams[0].accepted()
            if index % _PROMPTS_PER_TURN == 0:
                await asyncio.sleep(0)
        leave_turn()
        del prepared  # a compiled grammar, which the streams hold by now
        for stream in streams:
            await stream.accepted()
    except BaseException as error:
        for stream in streams:
            await stream.aclose()
        raise with_client_field(error, request.grammar_field, request.prompt_field) from None
    return Generation(request, streams)


def together(requests: Sequence[Request]) -> list[Request]:
    """The requests of one body, as the engine's queue takes all or none of them: the others may be
    submitted once the first one is accepted.
    """
    num_following = sum(request.sampling.n for request in requests[1:])
    first = structs.replace(requests[0], num_following=num_following)
    return [first, *(structs.replace(request, has_place=True) for request in requests[1:])]


def _submit(engine: ServedEngine, one: Request, request: ParsedRequest) -> TokenStream:
    if request.beams is not None:
        return open_beams(engine, one, request.beams)
    return engine.stream(structs.replace(one, request_id=part_id(one.request_id)))


async def _prepare(engine: ServedEngine, request: ParsedRequest) -> object:
    """Compile the grammar off the event loop; hold the result until the request is submitted.

    Raises:
        RequestError: The grammar is refused; the error names the client's field.
    """
    try:
        return await engine.prepare(request.request)
    except RequestError as error:
        raise with_client_field(error, request.grammar_field) from None


def opens_reasoning(output: OutputReading, tokenizer: Vocabulary, prompt: Sequence[int]) -> bool:
    """Whether the output begins inside the reasoning: some templates end in its opening tag."""
    reasoning = output.reasoning
    if reasoning is None or not reasoning.opening:
        return False
    if output.inside_reasoning:
        return True
    return prompt_end(tokenizer.decode, prompt).endswith(reasoning.opening)


def check_end(delta: Delta, sampling: SamplingParams, grammar_field: str) -> None:
    """Raise if the delta ends its sequence with an error.

    Raises:
        EngineError: The engine caused it.
        RequestError: The request caused it; its grammar came in `grammar_field`.
    """
    match delta.finish_reason:
        case FinishReason.ERROR:
            raise GenerationFailed(delta.error or "the model failed on this request")
        case FinishReason.SHED:
            raise RequestError(
                delta.error, param="ttft_deadline_ms", status=503, code="deadline_unreachable"
            )
        case FinishReason.SHUTDOWN:
            raise EngineError("the server is shutting down; send the request again")
        case FinishReason.REFUSED:
            error = RequestError(delta.error, param=_blamed(delta.error, sampling))
            raise with_client_field(error, grammar_field)


def with_client_field(
    error: BaseException, grammar_field: str, prompt_field: str = "prompt"
) -> BaseException:
    """A refused grammar or prompt under the name of the client's field; any other error as it
    is.
    """
    if not isinstance(error, RequestError):
        return error
    if error.param in _NAMES_OF_PROMPTS:
        error.param = prompt_field
    elif error.param == "grammar":
        message = str(error).removeprefix("the ").replace("grammar", grammar_field, 1)
        return RequestError(message, param=grammar_field, status=error.status, code=error.code)
    return error


def _blamed(why: str, sampling: SamplingParams) -> str | None:
    """The field at fault: the grammar if `why` names it, else the first that forbids tokens."""
    if why.startswith("the grammar"):
        return "grammar"
    return next((name for name in _MAY_FORBID_ALL if getattr(sampling, name)), None)
