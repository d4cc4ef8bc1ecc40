"""Beam search over an engine: each beam is a prompt that is continued by one token.

    step: submit every beam at once (they share a batch; their common tokens are cached blocks)
       -> the most likely tokens of each -> the best candidates of all beams are the next ones

The scheduler does not know of it: beams share blocks as any requests with a common prefix do. But
only the prompt is an arrival: the requests after it have the search's place in the order of
service, and pass neither the limit of the queue nor the deadline of a first token again.

The rules are those of transformers' `generate`: of a step's candidates, end tokens among the first
`beam_width` finish a beam, the first `beam_width` others continue. The score is the sum of the raw
logprobs / (number of generated tokens, an end token included) ** length_penalty. No token is
sampled, so the result depends on the prompt only. Used by `LLM.beam_search` and by the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import structs

from quickstep.engine.requests import part_id
from quickstep.errors import EngineError, RequestError
from quickstep.types import Delta, FinishReason, Request, SamplingParams, TokenLogprobs


class BeamSearchParams(msgspec.Struct, frozen=True):
    """How to search; vLLM's names.

    Attributes:
        beam_width: Number of beams, and of hypotheses that are returned.
        max_tokens: A beam ends after this many tokens.
        ignore_eos: Treat end tokens like other tokens.
        temperature: 0 or 1, with the same effect: beams are scored by the model's probabilities.
        length_penalty: Exponent of the length in the score; above 0 favours long answers.
        early_stopping: Stop once `beam_width` beams have finished. Otherwise the search continues
            as long as a beam may still become one of the best.

    Raises:
        RequestError: A value is outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise RequestError(f"{name} is {value}, it must be at least 1", param=name)
        if self.temperature not in (0, 1):
            raise RequestError(
                f"temperature is {self.temperature}, beam search takes 0 or 1: it samples nothing",
                param="temperature",
            )
        if not abs(self.length_penalty) <= _MAX_PENALTY:
            raise RequestError(
                f"length_penalty is {self.length_penalty}, it must be between -{_MAX_PENALTY:g} "
                f"and {_MAX_PENALTY:g}",
                param="length_penalty",
            )

    def score(self, total: float, length: int) -> float:
        """The score of a hypothesis with the sum of logprobs `total`."""
        return float(total / length**self.length_penalty)


_MAX_PENALTY = 10.0
_LEAST_S = 1e-6  # a deadline has to be ahead


class Continuation(Protocol):
    """The stream of a submitted request."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate the deltas."""

    async def accepted(self) -> None:
        """Return once the engine has accepted the request. Raises RequestError, EngineError."""

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""


# one request to its stream, as `Engine.stream`; raises RequestError, EngineError
Submit = Callable[[Request], Continuation]


class Hypothesis(msgspec.Struct, frozen=True):
    """A continuation of the prompt; `reason` is None while it may grow."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    score: float = 0.0
    reason: FinishReason | None = None


class _Step(msgspec.Struct, frozen=True):
    """The engine's answer for one beam: the next token's alternatives, None without a token."""

    last: Delta
    token: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...]


class BeamSearch:
    """One search. `start` it, `run` it, `aclose` it; `run` sets `prompt_logprobs` and
    `num_cached_tokens`.

    `request` is the prompt to continue; of its sampling, only the numbers of logprobs are read. Its
    timeout counts from now on `clock`: then the best beams so far are the answer. `end_ids` finish
    a beam.
    """

    def __init__(
        self,
        submit: Submit,
        request: Request,
        params: BeamSearchParams,
        end_ids: frozenset[int],
        *,
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._submit = submit
        self._request = request
        self._prompt = request.prompt_token_ids
        self._params = params
        self._end_ids = frozenset() if params.ignore_eos else end_ids
        self._max_tokens = min(params.max_tokens, max_model_len - len(self._prompt))
        self._num_top = request.sampling.logprobs or 0
        # all end tokens may precede the candidates that continue
        wanted = (1 + len(self._end_ids)) * max(2, 2 * params.beam_width)
        self._num_candidates = min(max(wanted, self._num_top), vocab_size)
        self._clock = clock
        self._arrived_s = clock() if request.received_s is None else request.received_s
        self._deadline_s = None if request.timeout_s is None else clock() + request.timeout_s
        self._streams: list[Continuation] = []
        self._finished: list[Hypothesis] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        self.num_cached_tokens = 0  # of the prompt

    def start(self) -> None:
        """Submit the prompt itself. Raises RequestError, EngineError."""
        self._streams = [self._continue(Hypothesis())]

    async def accepted(self) -> None:
        """Return once the engine has accepted the prompt. Raises RequestError, EngineError."""
        await self._streams[0].accepted()

    async def run(self) -> tuple[Hypothesis, ...]:
        """The `beam_width` best hypotheses, best first.

        Raises:
            EngineError: The model failed on a beam, or the engine ended.
        """
        beams = [Hypothesis()]
        for length in range(1, self._max_tokens + 1):
            steps = await self._read_all()
            if steps is None:
                return self._best(beams, FinishReason.DEADLINE)
            if length == 1:
                self.prompt_logprobs = steps[0].prompt_logprobs
                if (timings := steps[0].last.timings) is not None:
                    self.num_cached_tokens = timings.num_cached_tokens
                    # not by its name, which may come to mean another adapter
                    adapter_id = timings.adapter_id
                    self._request = structs.replace(self._request, adapter_id=adapter_id)
            beams = self._advance(beams, steps, length)
            if not beams or self._is_over(beams, length):
                return self._best([], None)
            if length < self._max_tokens and not self._submit_all(beams):
                return self._best(beams, FinishReason.DEADLINE)
        is_complete = self._max_tokens == self._params.max_tokens
        reason = FinishReason.MAX_TOKENS if is_complete else FinishReason.CONTEXT_LIMIT
        return self._best(beams, reason)

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        for stream in self._streams:
            await stream.aclose()

    def _continue(self, beam: Hypothesis) -> Continuation:
        is_prompt = not beam.token_ids
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=self._num_candidates,
            prompt_logprobs=self._request.sampling.prompt_logprobs if is_prompt else None,
        )
        left_s = None
        if self._deadline_s is not None:
            left_s = max(_LEAST_S, self._deadline_s - self._clock())
        token_ids = (*self._prompt, *beam.token_ids)
        return self._submit(
            structs.replace(
                self._request,
                request_id=part_id(self._request.request_id),
                prompt_token_ids=token_ids,
                sampling=sampling,
                timeout_s=left_s,
                ttft_deadline_s=self._request.ttft_deadline_s if is_prompt else None,
                received_s=self._arrived_s,
                is_continuation=not is_prompt,
                is_in_search=True,
            )
        )

    def _submit_all(self, beams: Sequence[Hypothesis]) -> bool:
        """Submit the beams. Returns False if the deadline has passed."""
        if self._deadline_s is not None and self._clock() >= self._deadline_s:
            return False
        self._streams = []
        for beam in beams:
            self._streams.append(self._continue(beam))
        return True

    async def _read_all(self) -> list[_Step] | None:
        """One token of every beam; None if the deadline came first."""
        steps = await asyncio.gather(*map(_read, self._streams))
        missing = [step.last for step in steps if step.token is None]
        if any(last.finish_reason is FinishReason.DEADLINE for last in missing):
            return None
        if missing:
            raise EngineError(missing[0].error or "a beam's request ended without a token")
        return list(steps)

    def _advance(
        self, beams: Sequence[Hypothesis], steps: Sequence[_Step], length: int
    ) -> list[Hypothesis]:
        """The beams that continue; adds those that end to the finished ones."""
        width, params = self._params.beam_width, self._params
        tops = [step.token.top if step.token else () for step in steps]
        candidates = [
            (beam.total + logprob, rank, beam, token_id, logprob, top)
            for beam, top in zip(beams, tops, strict=True)
            for rank, (token_id, logprob) in enumerate(top, 1)
        ]
        # the sort is stable: equal sums are in the order of their beams, then of token ids
        candidates.sort(key=lambda candidate: -candidate[0])
        going: list[Hypothesis] = []
        for place, (total, rank, beam, token_id, logprob, top) in enumerate(candidates):
            ends = token_id in self._end_ids
            if len(going) == width or (ends and place >= width):
                continue
            scored = TokenLogprobs(token_id, logprob, rank, top[: self._num_top])
            grown = Hypothesis(
                (*beam.token_ids, token_id),
                (*beam.logprobs, scored),
                total,
                params.score(total, length),
                FinishReason.EOS if ends else None,
            )
            (self._finished if ends else going).append(grown)
        self._finished = _ranked(self._finished)[:width]
        return going

    def _is_over(self, beams: Sequence[Hypothesis], length: int) -> bool:
        """Whether no beam can become better than the finished ones."""
        params = self._params
        if len(self._finished) < params.beam_width:
            return False
        if params.early_stopping:
            return True
        # sums only fall; dividing by the longest length makes the most of one
        best_length = self._max_tokens if params.length_penalty > 0 else length
        return params.score(beams[0].total, best_length) <= self._finished[-1].score

    def _best(
        self, beams: Sequence[Hypothesis], reason: FinishReason | None
    ) -> tuple[Hypothesis, ...]:
        cut = [
            Hypothesis(beam.token_ids, beam.logprobs, beam.total, beam.score, reason)
            for beam in beams
        ]
        best = _ranked([*self._finished, *cut])[: self._params.beam_width]
        # a vocabulary may have fewer continuations than there are beams
        return tuple(best + best[-1:] * (self._params.beam_width - len(best)))


async def _read(stream: Continuation) -> _Step:
    """Read a request for one token to its end."""
    await stream.accepted()
    scores: list[TokenLogprobs | None] = []
    last: Delta | None = None
    token: TokenLogprobs | None = None
    async for delta in stream:
        scores += delta.prompt_logprobs
        token = delta.logprobs[0] if delta.logprobs else token
        last = delta
    if last is None:
        raise EngineError("a beam's request ended without an answer")
    return _Step(last, token, tuple(scores))


def _ranked(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Best first; equal scores stay in the order in which they were found."""
    return sorted(hypotheses, key=lambda one: -one.score)
