"""A request's stream that outlives its engine: another one continues it, with the same bits.

    choose -> engine.stream -> deltas -> the client        what it has of each sequence is kept
       ^                          |
       └─ Request.resumed <── the engine is lost

Tokens are a function of the request, its seed and the tokens before them (`Request.resumed`), so
the client sees one stream without a seam. Everything here runs in the event loop of the server;
engines may be in any process. Which engine gets a request is the caller's choice.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.engine.interface import ServedEngine, TokenStream
from quickstep.errors import EngineDied, EngineError, QuickstepError, RequestError
from quickstep.types import Delta, FinishReason, Request, Resumed

__all__ = ["ChooseEngine", "ResumableStream"]

# (request, engines that were lost while they had it) to the engine that gets it now; may wait for
# one. Raises EngineError if there is none.
ChooseEngine = Callable[[Request, Sequence[ServedEngine]], Awaitable[ServedEngine]]

_MAX_MOVES = 3
# A request whose engine dies before it has a further token, so many times in a row, may be what
# kills them: it gets no other engine.
_MAX_FRUITLESS_DEATHS = 2


class _Received(msgspec.Struct):
    """What the client has of one sequence."""

    token_ids: list[int] = msgspec.field(default_factory=list)
    num_prompt_logprobs: int = 0
    num_processed: int = 0  # prompt tokens, as reported
    is_finished: bool = False


class ResumableStream:
    """The deltas of one request, whichever engines generate them: a `TokenStream`.

    Not for the requests of a beam search, which sends them again by itself. If the request cannot
    be moved, its sequences end as the lost engine has ended them.
    """

    def __init__(
        self, request: Request, choose: ChooseEngine, engine: ServedEngine, stream: TokenStream
    ) -> None:
        """Of a request that is submitted; use `open`."""
        # the seed is part of the request from now on: another engine would choose its own
        sampling = replace(request.sampling, seed=stream.seed)
        self._request = replace(request, request_id=stream.request_id, sampling=sampling)
        self._choose = choose
        self._engine = engine
        self._fingerprint = engine.fingerprint
        self._stream = stream
        self._received = [_Received() for _ in range(sampling.n)]
        for part in request.resumed:
            self._received[part.index] = _Received(
                list(part.token_ids), part.num_prompt_logprobs, is_finished=part.is_finished
            )
        self._lost: list[ServedEngine] = []
        self._num_fruitless_deaths = 0
        self._has_new_tokens = False  # since the last move
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        request: Request,
        choose: ChooseEngine,
        clock: Callable[[], float] = time.monotonic,
    ) -> ResumableStream:
        """Submit a request to the engine that `choose` names. `clock` is the engines' clock: a
        request keeps its deadlines when it moves.

        Raises:
            RequestError: The request cannot be served as it is.
            EngineError: There is no engine that accepts requests.
        """
        if request.received_s is None:
            request = replace(request, received_s=clock())
        engine = await choose(request, ())
        await engine.prepare(request)
        return cls(request, choose, engine, engine.stream(request))

    @property
    def request_id(self) -> str:
        """The id, the same in all engines."""
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the model reads it."""
        return self._request.prompt_token_ids

    @property
    def seed(self) -> int:
        """The seed of the sampling noise."""
        return self._stream.seed

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keywords of the request's schema that are enforced less strictly than written."""
        return self._stream.ignored

    @property
    def num_moves(self) -> int:
        """How often another engine has continued the request."""
        return len(self._lost)

    async def accepted(self) -> None:
        """Return once an engine has accepted the request.

        Raises:
            RequestError: It cannot be served as it is.
            EngineError: No engine accepts it.
        """
        while True:
            try:
                await self._stream.accepted()
                return
            except EngineError as error:
                if not await self._move(isinstance(error, EngineDied)):
                    raise

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Iterate the deltas."""
        while not self._is_closed:
            lost: list[Delta] = []  # the ends of sequences whose engine was lost
            ends: list[Delta] = []  # of those that no engine continues
            try:
                async for delta in self._stream:
                    if delta.is_lost or delta.finish_reason is FinishReason.SHUTDOWN:
                        lost.append(delta)
                    elif (new := self._new_of(delta)) is not None:
                        yield new
                is_death = any(delta.is_lost for delta in lost)
            except EngineError as error:  # it was lost before it accepted the request
                lost, is_death = self._ends(error), isinstance(error, EngineDied)
            except RequestError as error:
                if not self._lost:
                    raise
                ends = self._ends(error)
            if lost:
                ends = await self._moved(lost, is_death)
            for delta in ends:
                yield delta
            if ends or not lost:
                return

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        self._is_closed = True
        await self._stream.aclose()

    def _new_of(self, delta: Delta) -> Delta | None:
        """Note that the client gets a delta. Without what it has: a prompt that is computed once
        more reports its progress again.
        """
        received, progress = self._received[delta.index], delta.progress
        if progress is not None and progress.num_processed <= received.num_processed:
            delta = replace(delta, progress=None)
            if not (delta.token_ids or delta.prompt_logprobs or delta.finish_reason):
                return None
        elif progress is not None:
            received.num_processed = progress.num_processed
        received.token_ids += delta.token_ids
        received.num_prompt_logprobs += len(delta.prompt_logprobs)
        received.is_finished = delta.finish_reason is not None
        self._has_new_tokens |= bool(delta.token_ids)
        return delta

    def _ends(self, error: QuickstepError) -> list[Delta]:
        """The ends of all sequences that run, with this error."""
        return [
            Delta(index, finish_reason=FinishReason.ERROR, error=str(error))
            for index, received in enumerate(self._received)
            if not received.is_finished
        ]

    async def _moved(self, lost: list[Delta], is_death: bool) -> list[Delta]:
        """Move the request; returns how its sequences end if no engine continues them, else []."""
        try:
            return [] if await self._move(is_death) else lost
        except QuickstepError as error:
            return self._ends(error)

    async def _move(self, is_death: bool) -> bool:
        """Submit the rest of the request to another engine, after the last one was lost: by its
        death, or because it was stopped. Returns False if no engine continues it.

        Raises:
            RequestError: The other engine cannot serve it.
            EngineError: The other engine would not give the same bits.
        """
        is_fruitless = is_death and not self._has_new_tokens
        self._num_fruitless_deaths = self._num_fruitless_deaths + 1 if is_fruitless else 0
        if self._num_fruitless_deaths == _MAX_FRUITLESS_DEATHS:
            return False
        self._has_new_tokens = False
        request = replace(self._request, resumed=self._resumed())
        while self.num_moves < _MAX_MOVES and not self._is_closed:
            self._lost.append(self._engine)
            try:
                self._engine = await self._choose(request, tuple(self._lost))
            except EngineError:
                return False
            self._check_fingerprint(self._engine)
            try:
                await self._engine.prepare(request)
                self._stream = self._engine.stream(request)
            except EngineError:  # it was lost in between
                continue
            if self._is_closed:
                await self._stream.aclose()
            return True
        return False

    def _check_fingerprint(self, engine: ServedEngine) -> None:
        if engine.fingerprint != self._fingerprint:
            raise EngineError(
                f"the request began with fingerprint {self._fingerprint}, the engine that is left "
                f"has {engine.fingerprint} and would give other bits; send it again"
            )

    def _resumed(self) -> tuple[Resumed, ...]:
        return tuple(
            Resumed(
                index, tuple(received.token_ids), received.is_finished, received.num_prompt_logprobs
            )
            for index, received in enumerate(self._received)
        )
