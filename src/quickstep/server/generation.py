"""The internal request that every surface turns into, and its run on the engine.

A surface parses a body into a frozen, bounded `GenerationRequest`; `open_generation` renders,
tokenises and submits its prompts; `Generation` merges the engine's streams into one sequence of
`ChoiceDelta`. The engine never sees client dicts, a surface never sees the engine.

Prompt p of P and sequence i of n become choice p * n + i, as OpenAI counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from quickstep.core.sequence import sequence_seed
from quickstep.engine.stream import Delta
from quickstep.engine.tool_calls.formats import ReasoningFormat, ToolCallFormat
from quickstep.errors import EngineError, RequestError
from quickstep.server.api_errors import GenerationFailed
from quickstep.server.engine_face import ServedEngine, TokenStream, Vocabulary
from quickstep.types import FinishReason, SamplingParams, SequenceTimings, TokenLogprobs

__all__ = [
    "ChatPrompt",
    "Choice",
    "ChoiceDelta",
    "Generation",
    "GenerationRequest",
    "OutputReading",
    "TextPrompt",
    "TokenPrompt",
    "Usage",
    "open_generation",
    "opens_reasoning",
    "prompt_ids",
]

# Shorter prompts are rendered and tokenised on the event loop: a thread hop costs more.
_INLINE_CHARS = 2048
_QUEUED_DELTAS = 256
_PROMPT_END = 32  # tokens in which a prompt's last words stand: the opening of the reasoning


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenise; special tokens in the text itself are recognised."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as the client gave them."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template. `num_chars` estimates its size."""

    messages: tuple[Mapping[str, Any], ...]
    num_chars: int
    add_generation_prompt: bool = True
    tools: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class OutputReading:
    """The formats to look for in a message. `one_call`: further calls are dropped."""

    tool_calls: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    one_call: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asked, whichever surface it came through.

    Attributes:
        model: The name to answer with.
        output: What to read out of the text beside content; None for nothing.
        grammar_field: The client's name of what became `sampling.grammar`.
        echoed: Fields of the response that repeat what the client sent (`metadata`).
        tenant: Whom the work is accounted to.
        deadline_s: Seconds after which what there is is the answer; None for no limit.
        include_usage: One usage chunk ends the stream.
        continuous_usage: Every chunk carries the usage so far.
    """

    model: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    output: OutputReading | None = None
    grammar_field: str = ""
    echoed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """News of one choice."""

    choice: int
    delta: Delta


@dataclass(slots=True)
class Choice:
    """One choice, as its deltas add up. Owned by its Generation."""

    index: int
    seed: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    timings: SequenceTimings | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta. Raises EngineError if it says that the sequence could not end."""
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        self.timings = delta.timings or self.timings
        self.finish_reason = delta.finish_reason
        if delta.finish_reason is FinishReason.ERROR:
            raise GenerationFailed(delta.error or "the model failed on this request")
        if delta.finish_reason is FinishReason.SHUTDOWN:
            raise EngineError("the server is shutting down; send the request again")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request so far. A prompt counts once for its n choices."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class Generation:
    """A submitted request: its streams merged, its choices added up. Close it when done."""

    def __init__(self, request: GenerationRequest, streams: Sequence[TokenStream]) -> None:
        self.request = request
        self._streams = tuple(streams)
        self._n = request.sampling.n
        self.choices = tuple(
            Choice(prompt * self._n + index, sequence_seed(stream.seed, index))
            for prompt, stream in enumerate(self._streams)
            for index in range(self._n)
        )

    @property
    def seed(self) -> int | None:
        """The request's seed; None if its prompts drew different ones (each choice names its)."""
        seeds = {stream.seed for stream in self._streams}
        return seeds.pop() if len(seeds) == 1 else None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(stream.prompt_token_ids) for stream in self._streams)

    def prompt_token_ids(self, choice: Choice) -> Sequence[int]:
        """The prompt that a choice continues."""
        return self._streams[choice.index // self._n].prompt_token_ids

    @property
    def usage(self) -> Usage:
        """Tokens so far; the cached ones of a prompt are known once its first choice has ended."""
        firsts = [choice.timings for choice in self.choices[:: self._n]]
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=sum(len(choice.token_ids) for choice in self.choices),
            num_cached_tokens=sum(timings.num_cached_tokens for timings in firsts if timings),
        )

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """All deltas as they come, added to `choices`. Raises EngineError if a choice fails."""
        merged = self._merged() if len(self._streams) > 1 else self._of_stream(0)
        async with aclosing(merged) as deltas:
            async for item in deltas:
                self.choices[item.choice].add(item.delta)
                yield item

    async def finish(self) -> None:
        """Wait for all choices."""
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        for stream in self._streams:
            await stream.aclose()

    async def _of_stream(self, prompt: int) -> AsyncGenerator[ChoiceDelta, None]:
        async for delta in self._streams[prompt]:
            yield ChoiceDelta(prompt * self._n + delta.index, delta)

    async def _merged(self) -> AsyncGenerator[ChoiceDelta, None]:
        queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue(_QUEUED_DELTAS)
        tasks = [
            asyncio.create_task(self._feed(prompt, queue)) for prompt in range(len(self._streams))
        ]
        try:
            open_streams = len(tasks)
            while open_streams:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    open_streams -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self, prompt: int, queue: asyncio.Queue[ChoiceDelta | Exception | None]
    ) -> None:
        try:
            async for item in self._of_stream(prompt):
                await queue.put(item)
            await queue.put(None)
        except Exception as error:  # the task's top: the reader of the queue raises it
            await queue.put(error)


async def open_generation(engine: ServedEngine, request: GenerationRequest) -> Generation:
    """Tokenise and submit every prompt; returns when the engine has taken them all.

    Raises:
        RequestError: One of them is refused; then nothing stays submitted.
        EngineError: The engine takes no requests.
    """
    await _prepare(engine, request)
    prompts = [await prompt_ids(engine, prompt) for prompt in request.prompts]
    _check_reasoning(engine, request, prompts)
    streams: list[TokenStream] = []
    try:
        for token_ids in prompts:
            streams.append(
                engine.submit(
                    token_ids,
                    request.sampling,
                    priority=request.priority,
                    tenant=request.tenant,
                    cache_salt=request.cache_salt,
                    deadline_s=request.deadline_s,
                )
            )
        for stream in streams:
            await stream.accepted()
    except BaseException as error:
        for stream in streams:
            await stream.aclose()
        raise _in_clients_words(error, request) from None
    return Generation(request, streams)


async def _prepare(engine: ServedEngine, request: GenerationRequest) -> None:
    """Compile the grammar off the event loop. Raises RequestError in the client's words."""
    try:
        await engine.prepare(request.sampling)
    except RequestError as error:
        raise _in_clients_words(error, request) from None


def _in_clients_words(error: BaseException, request: GenerationRequest) -> BaseException:
    """A refused grammar under the name of the client's field; any other error as it is."""
    if not isinstance(error, RequestError) or error.param != "grammar":
        return error
    field = request.grammar_field
    message = str(error).replace("grammar", field, 1)
    return RequestError(message, param=field, status=error.status)


def _check_reasoning(
    engine: ServedEngine, request: GenerationRequest, prompts: Sequence[Sequence[int]]
) -> None:
    """A grammar begins with the output, so the prompt must not have opened the reasoning."""
    if request.sampling.grammar is None or request.output is None:
        return
    if any(opens_reasoning(request.output, engine.tokenizer, prompt) for prompt in prompts):
        field = request.grammar_field
        raise RequestError(
            f"{field} is not supported where the chat template opens the reasoning; turn that off "
            "with chat_template_kwargs",
            param=field,
        )


def opens_reasoning(output: OutputReading, tokenizer: Vocabulary, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends in the tag that opens the reasoning, as some templates write it."""
    reasoning = output.reasoning
    if reasoning is None or not reasoning.opening:
        return False
    end = tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)
    return end.rstrip().endswith(reasoning.opening)


async def prompt_ids(engine: ServedEngine, prompt: Prompt) -> Sequence[int]:
    """The tokens of a prompt. Raises RequestError if the template refuses it."""
    if isinstance(prompt, TokenPrompt):
        return prompt.token_ids
    num_chars = prompt.num_chars if isinstance(prompt, ChatPrompt) else len(prompt.text)
    if num_chars <= _INLINE_CHARS:
        return _encode(engine, prompt)
    return await asyncio.to_thread(_encode, engine, prompt)


def _encode(engine: ServedEngine, prompt: TextPrompt | ChatPrompt) -> Sequence[int]:
    if isinstance(prompt, TextPrompt):
        return engine.tokenizer.encode(prompt.text, prompt.add_special_tokens)
    template = engine.chat_template
    if template is None:
        raise RequestError(
            f"{engine.model_name} has no chat template; use /v1/completions", param="messages"
        )
    text = template.render(
        prompt.messages,
        tools=prompt.tools,
        add_generation_prompt=prompt.add_generation_prompt,
        extra=prompt.extra,
    )
    # the template has written the special tokens already
    return engine.tokenizer.encode(text, add_special_tokens=False)
