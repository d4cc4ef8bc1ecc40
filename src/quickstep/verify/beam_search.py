"""A beam search over the requests of one run of the exactness checker.

The search is the engine's (`engine.beam_search`); its beams are requests to the run's scheduler.
Called by `engine.verification_run`, whose loop gives the search's task its turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from msgspec.structs import replace

from quickstep.engine.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from quickstep.engine.stream import Delta
from quickstep.types import Request, SamplingParams, SequenceOutput, TokenLogprobs

__all__ = ["RunningSearch"]


class _BeamStream:
    """The deltas of one beam's request: a `Continuation`."""

    def __init__(self, abort: Callable[[], object]) -> None:
        self._abort = abort
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self.is_over = False

    def put(self, output: SequenceOutput) -> None:
        """Take what the scheduler gave."""
        self._deltas.append(
            Delta(
                output.index,
                token_ids=output.token_ids,
                logprobs=output.logprobs,
                finish_reason=output.finish_reason,
                error=output.error,
                prompt_logprobs=output.prompt_logprobs,
            )
        )
        self.is_over = output.finish_reason is not None
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """`Continuation.__aiter__`."""
        while self._deltas or not self.is_over:
            await self._arrived.wait()
            self._arrived.clear()
            while self._deltas:
                yield self._deltas.popleft()

    async def accepted(self) -> None:
        """The scheduler takes a request at once."""

    async def aclose(self) -> None:
        """`Continuation.aclose`."""
        if not self.is_over:
            self._abort()


class RunningSearch:
    """One search under way. `add` and `abort` are the scheduler's, by request and by its id."""

    def __init__(
        self,
        request: Request,
        params: BeamSearchParams,
        limits: tuple[int, int],
        add: Callable[[Request], None],
        abort: Callable[[str], object],
    ) -> None:
        """`limits`: longest sequence and vocabulary."""
        self._request = request
        self._add = add
        self._abort = abort
        self._streams: dict[str, _BeamStream] = {}
        sampling = request.sampling
        self._search = BeamSearch(
            self._submit,
            request.prompt_token_ids,
            params,
            request.eos_token_ids,
            limits=limits,
            scored=(sampling.logprobs or 0, sampling.prompt_logprobs),
        )
        self._search.start()
        self._task = asyncio.ensure_future(self._search.run())

    @property
    def is_done(self) -> bool:
        """Whether the hypotheses are known."""
        return self._task.done()

    @property
    def live_ids(self) -> list[str]:
        """The requests of the beams that run."""
        return [name for name, stream in self._streams.items() if not stream.is_over]

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """Of the prompt, after the search."""
        return self._search.prompt_logprobs

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The result, once done. Raises EngineError."""
        return self._task.result()

    def put(self, output: SequenceOutput) -> None:
        """Take the output of one of the beams' requests."""
        self._streams[output.request_id].put(output)

    def cancel(self) -> None:
        """Give up: abort the beams that run."""
        self._task.cancel()
        for name in self.live_ids:
            self._abort(name)

    def _submit(
        self, token_ids: Sequence[int], sampling: SamplingParams, left_s: float | None
    ) -> _BeamStream:
        name = f"{self._request.request_id}/{len(self._streams)}"
        stream = self._streams[name] = _BeamStream(lambda: self._abort(name))
        prompt = tuple(token_ids)
        self._add(
            replace(self._request, request_id=name, prompt_token_ids=prompt, sampling=sampling)
        )
        return stream
