"""`LLM`: the library's synchronous face, with vLLM's class and argument names.

    from quickstep import LLM, SamplingParams

    with LLM("demo") as llm:
        for output in llm.generate(["def add(", "import "], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

It is a thin face: a background thread runs an event loop with the one asynchronous engine (see
`engine.engine`), and every method waits for a coroutine there. Any thread may call it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self, TypeVar, Unpack, cast

from quickstep.engine.assembly import open_engine
from quickstep.engine.chat_template import Message
from quickstep.engine.engine import Engine
from quickstep.engine.llm_options import LLMOptions, engine_config
from quickstep.engine.outputs import RequestOutput, collect
from quickstep.engine.stream import Stream
from quickstep.errors import EngineError, RequestError
from quickstep.types import SamplingParams

__all__ = ["LLM", "Prompt"]

Prompt = str | Sequence[int] | Mapping[str, Any]

_T = TypeVar("_T")


class _Tokenised(NamedTuple):
    """A prompt ready to submit, and its text if that was given."""

    text: str | None
    token_ids: Sequence[int]


class LLM:
    """A loaded model. The constructor loads (as vLLM's does); close it, or use it in a `with`.

    Raises:
        ConfigError: An option is unknown or bad, or the checkpoint cannot be used.
    """

    def __init__(self, model: str = "demo", **options: Unpack[LLMOptions]) -> None:
        config = engine_config(model, options)
        with _progress_bar("Loading weights", is_wanted=True) as show:
            self._engine = open_engine(config, show)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="quickstep-llm", daemon=True
        )
        self._thread.start()
        # also at the interpreter's exit, for those who never close
        self._end = weakref.finalize(self, _shut_down, self._engine, self._loop, self._thread)
        self._wait_for(self._engine.start())

    @property
    def engine(self) -> Engine:
        """The asynchronous engine behind it; it runs in this object's own event loop."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; answers stand in the order of the prompts.

        A prompt is text, token ids, or a mapping with `prompt` or `prompt_token_ids`. A sequence
        that fails alone says so in its output's `error`.

        Raises:
            RequestError: One of the prompts or parameters is invalid; then none is served.
        """
        plain = [_plain_prompt(prompt) for prompt in _as_prompts(prompts)]
        # tokenised here, in the caller's thread, so that others' streams go on meanwhile
        encode = self._engine.tokenizer.encode
        tokenised = [
            _Tokenised(one, encode(one)) if isinstance(one, str) else _Tokenised(None, one)
            for one in plain
        ]
        return self._serve(tokenised, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Raises:
            RequestError: As `generate`, or the model has no chat template.
        """
        render = self._engine.chat_prompt
        tokenised = [
            _Tokenised(None, render(one, tools, add_generation_prompt, chat_template_kwargs))
            for one in _as_conversations(messages)
        ]
        return self._serve(tokenised, sampling_params, use_tqdm)

    def close(self) -> None:
        """End what runs and free everything. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _serve(
        self,
        prompts: Sequence[_Tokenised],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        sampling = _as_many(sampling_params, len(prompts))
        with _progress_bar("Generating", is_wanted=use_tqdm) as show:
            return self._wait_for(self._serve_all(prompts, sampling, show))

    async def _serve_all(
        self,
        prompts: Sequence[_Tokenised],
        sampling: Sequence[SamplingParams],
        show: Callable[[int, int], None] | None,
    ) -> list[RequestOutput]:
        streams: list[Stream] = []
        num_done = 0

        async def answer(stream: Stream, number: int) -> RequestOutput:
            nonlocal num_done
            text = prompts[number].text
            output = await collect(stream, text, sampling[number], self._engine.tokenizer)
            num_done += 1
            if show is not None:
                show(num_done, len(prompts))
            return output

        try:
            for prompt, params in zip(prompts, sampling, strict=True):
                streams.append(self._engine.submit(prompt.token_ids, params))
            answers: list[Awaitable[RequestOutput]] = [
                answer(stream, number) for number, stream in enumerate(streams)
            ]
            return list(await asyncio.gather(*answers))
        finally:
            for stream in streams:
                await stream.aclose()

    def _wait_for(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        if not self._end.alive:
            coroutine.close()
            raise EngineError("this LLM is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()


def _shut_down(engine: Engine, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Stop the engine, then its loop. The garbage collector may call it in any thread."""

    async def leave() -> None:
        try:
            await engine.stop()
            # whoever waits for an answer gets what there is
            waiting = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            loop.stop()

    asyncio.run_coroutine_threadsafe(leave(), loop)
    if threading.current_thread() is not thread:
        thread.join()
        loop.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many; a list of integers is one prompt."""
    is_single = isinstance(prompts, (str, Mapping))
    if is_single or (len(prompts) > 0 and isinstance(prompts[0], int)):  # type: ignore[index]
        return [cast(Prompt, prompts)]
    return cast(Sequence[Prompt], prompts)


def _plain_prompt(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    known = {"prompt", "prompt_token_ids"} & set(prompt)
    if len(prompt) != 1 or not known:
        raise RequestError(
            f"a prompt has the keys {sorted(prompt)}, it takes either `prompt` or "
            "`prompt_token_ids`",
            param="prompt",
        )
    return cast("str | Sequence[int]", prompt[known.pop()])


def _as_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return cast("Sequence[Sequence[Message]]", messages)


def _as_many(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, Sequence):
        kind = type(sampling_params).__name__
        raise RequestError(
            f"sampling_params is a {kind}, it must be SamplingParams or a list of them",
            param="sampling_params",
        )
    if len(sampling_params) != num_prompts:
        raise RequestError(
            f"{len(sampling_params)} sampling_params for {num_prompts} prompts; pass one for all "
            "or one for each",
            param="sampling_params",
        )
    if not all(isinstance(params, SamplingParams) for params in sampling_params):
        raise RequestError("sampling_params must be SamplingParams", param="sampling_params")
    return sampling_params


@contextmanager
def _progress_bar(what: str, is_wanted: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on standard error, (done, total) at a time; None where nobody looks."""
    if not is_wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
