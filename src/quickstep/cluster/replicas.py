"""Several engines with the same model, which the server uses as one: `ReplicaSet`.

    server ── ReplicaSet ── RemoteEngine 0 ── process
                  │    └─── RemoteEngine 1 ── process
               Router

A router (`core.router`) chooses the engine of each request by what the engines report. When an
engine's process ends, its requests continue on another one, or on its successor: a request is sent
with the tokens that its client has already (`Request.resumed`), and its deltas go to the same
stream. The same request gives the same bits on every replica, so that a client cannot notice it.

A request moves at most `max_moves` times in a row without a new token, since it may be what ends
the engines. While no engine serves, requests that were accepted wait here, and new ones are
refused. Everything runs in the event loop that called `open`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from quickstep.config import ReplicaConfig, StreamConfig
from quickstep.core.accounting import added
from quickstep.core.router import ROUTERS, ReplicaState, ReplicaView
from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.engine import LOG_CAPACITY, RemoteEngine
from quickstep.engine.remote.streams import LostRequest, records_of_lost
from quickstep.engine.remote.supervisor import LoadProgress
from quickstep.engine.requests import RequestIntake, open_seeds
from quickstep.engine.stats import EngineState, EngineStats, ReplicaStats
from quickstep.engine.stream import Stream
from quickstep.errors import ConfigError, EngineDied, EngineError, QuickstepError, RequestError
from quickstep.model.sizing import MemoryPlan
from quickstep.text.chat_template import ChatTemplate
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Delta, FinishReason, Pooling, Request, SequenceTimings

_LOGGER = logging.getLogger(__name__)

# Makes the engine of a replica: its number, the step log of all, and who continues its requests.
EngineMaker = Callable[[int, StepLog, "ReplicaSet"], RemoteEngine]


class ReplicaSet:
    """The engines of one model: they serve the same requests with the same bits.

    `open` it, `start` it, `stop` it. `make_engine` makes each of the engines, which this object
    owns; `seed` and `streams` are the engines' own.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        make_engine: EngineMaker,
        *,
        seed: int | None = None,
        streams: StreamConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._step_log = StepLog(LOG_CAPACITY)
        self._engines = [
            make_engine(number, self._step_log, self) for number in range(config.num_replicas)
        ]
        self._router = ROUTERS[config.router.value]()
        self._streams = streams
        self._max_moves = config.max_moves
        self._clock = clock
        self._intake = RequestIntake(open_seeds(seed), self)
        self._parked: dict[str, LostRequest] = {}  # accepted, and live on no engine
        self._timers: dict[str, asyncio.TimerHandle] = {}  # their deadlines
        self._num_moves = 0
        self._is_stopping = False

    @property
    def engines(self) -> Sequence[RemoteEngine]:
        """The replicas, by number."""
        return self._engines

    def __contains__(self, request_id: object) -> bool:
        """Whether the id is in use."""
        return request_id in self._parked or any(
            engine.has_id(request_id) for engine in self._engines
        )

    async def open(self, progress: LoadProgress | None = None) -> None:
        """Start the processes and have the model loaded, by all of them at once; `progress` is the
        first one's.

        Raises:
            ConfigError: The checkpoint is missing or broken, does not fit, or is not the same one
                for all.
            EngineError: A process failed.
        """
        first, *others = self._engines
        openings = [first.open(progress), *(engine.open(like=first) for engine in others)]
        results = await asyncio.gather(*openings, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(engine.stop() for engine in self._engines))
            raise errors[0]
        self._check_equal()

    def _check_equal(self) -> None:
        for number, engine in enumerate(self._engines):
            if engine.fingerprint != self.fingerprint:
                raise ConfigError(
                    f"replica {number} has the fingerprint {engine.fingerprint}, replica 0 has "
                    f"{self.fingerprint}: start them with the same checkpoint and version"
                )

    async def start(self) -> None:
        """Take requests. Raises EngineError if the engines are not open, or were stopped."""
        await asyncio.gather(*(engine.start() for engine in self._engines))

    async def stop(self, drain_s: float = 0.0) -> None:
        """Accept no more, let requests continue for `drain_s` seconds, end the rest with SHUTDOWN.

        A second call, with the first still draining, ends them at once.
        """
        self._is_stopping = True
        for lost in tuple(self._parked.values()):
            self._end(lost, FinishReason.SHUTDOWN, "the engine was stopped")
        await asyncio.gather(*(engine.stop(drain_s) for engine in self._engines))

    @property
    def process_ids(self) -> tuple[int | None, ...]:
        """The operating system's id of each engine's process; None while there is none."""
        return tuple(engine.process_id for engine in self._engines)

    @property
    def model_name(self) -> str:
        """The name that responses carry."""
        return self._engines[0].model_name

    @property
    def fingerprint(self) -> str:
        """Weights, dtype and kernel set: equal fingerprints give equal bits."""
        return self._engines[0].fingerprint

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that every replica takes, prompt and output."""
        return min(engine.max_model_len for engine in self._engines)

    @property
    def default_sampling(self) -> Mapping[str, float]:
        """The checkpoint's own sampling values (`generation_config.json`), by our names."""
        return self._engines[0].default_sampling

    @property
    def default_pooling(self) -> Pooling:
        """The pooling of embeddings in the model's card."""
        return self._engines[0].default_pooling

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The use of one engine's memory."""
        return self._engines[0].memory_plan

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; the prefix caches hold complete blocks."""
        return self._engines[0].block_size

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engines[0].tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None if the model has none."""
        return self._engines[0].chat_template

    @property
    def step_log(self) -> StepLog:
        """A copy of the step logs of all engines; each record has its `replica`."""
        return self._step_log

    def stats(self) -> EngineStats:
        """The state of all engines together."""
        return merged_stats(
            [engine.stats() for engine in self._engines],
            self.process_ids,
            len(self._parked),
            self._num_moves,
        )

    @property
    def has_queue(self) -> bool:
        """Whether sequences wait on every engine that serves."""
        return all(engine.has_queue for engine in self._serving)

    def check_admission(self, request: Request, num_sequences: int) -> None:
        """Raise RequestError for a request that no engine could accept now, whatever its prompt.
        The error is that of the engine with the shortest queue.
        """
        errors: dict[int, RequestError] = {}
        for engine in self._serving:
            try:
                return engine.check_admission(request, num_sequences)
            except RequestError as error:
                errors[engine.num_live] = error
        if errors:
            raise errors[min(errors)]

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of live requests."""
        placed = (name for engine in self._engines for name in engine.request_ids)
        return (*placed, *self._parked)

    async def live_timings(self, request_id: str) -> dict[int, SequenceTimings]:
        """What the live sequences of a request spent their time on so far, by index; empty if it is
        live on no engine, or that does not report it in time.
        """
        engine = self._engine_of(request_id)
        return {} if engine is None else await engine.live_timings(request_id)

    async def reset_prefix_cache(self) -> int:
        """Free every cached block that no sequence uses; returns how many there were.

        Raises:
            EngineError: An engine does not run, or its process does not answer in time.
        """
        counts = await asyncio.gather(*(engine.reset_prefix_cache() for engine in self._engines))
        for replica in range(len(self._engines)):
            self._router.lost_cache(replica)
        return sum(counts)

    async def load_adapter(
        self, name: str, path: str, *, is_from_client: bool = False
    ) -> LoadedAdapter:
        """Let new requests name a LoRA adapter, the latest of a name, on every engine.
        `is_from_client`: only from the directories that clients may load from.

        Raises:
            RequestError: The adapter cannot be used.
            EngineError: An engine does not run, or its process does not answer in time.
        """
        loads = (
            engine.load_adapter(name, path, is_from_client=is_from_client)
            for engine in self._engines
        )
        results = await asyncio.gather(*loads, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        loaded = results[0]
        assert not isinstance(loaded, BaseException), "the first of the results was checked"
        return loaded

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests with an adapter; running ones end on it.

        Raises:
            RequestError: There is no such adapter.
            EngineError: An engine does not run, or its process does not answer in time.
        """
        await asyncio.gather(*(engine.unload_adapter(name) for engine in self._engines))

    async def prepare(self, request: Request) -> None:
        """Do nothing: an engine's process prepares a request before it accepts it."""

    def stream(self, request: Request) -> Stream:
        """Check a request and send it to an engine; `Stream.accepted` returns once it is accepted.

        Raises:
            RequestError: The request cannot be served as it is.
            EngineError: No engine accepts requests now.
        """
        engine = self._engines[0]
        request = self._intake.take(
            request, engine.vocab_size, self.max_model_len, engine.tokenizer.eos_token_ids
        )
        if request.received_s is None:  # its deadlines count from here, wherever it runs
            request = replace(request, received_s=self._clock())
        stream = Stream(request, self, self._streams)
        self._engines[self._choose(request)].submit(request, stream)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its output so far is its answer. Ignores unknown and finished ids."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.abort(request_id)
        elif (lost := self._parked.get(request_id)) is not None:
            self._end(lost, FinishReason.ABORTED, "")

    def pause(self, request_id: str) -> None:
        """Generate no more for a request until `resume`; steps in flight still give deltas."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.pause(request_id)

    def resume(self, request_id: str) -> None:
        """Continue a paused request."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.resume(request_id)
        elif (lost := self._parked.get(request_id)) is not None:
            self._parked[request_id] = replace(lost, is_paused=False)

    def lost(self, engine: RemoteEngine, requests: Sequence[LostRequest]) -> None:
        """An engine's process has ended (the engine only): its requests continue on others."""
        self._router.lost_cache(self._engines.index(engine))
        for lost in requests:
            if self._is_stopping:
                self._end(lost, FinishReason.SHUTDOWN, "the engine was stopped")
            elif lost.num_moves >= self._max_moves:
                num = lost.num_moves + 1
                why = f"{num} engine processes ended in a row while they computed it"
                self._end(lost, FinishReason.ERROR, f"{why}; it is not tried again")
            else:
                self._park(lost)
        self._place_parked()

    def restarted(self, engine: RemoteEngine) -> None:
        """An engine serves again (the engine only)."""
        self._place_parked()

    def given_up(self, engine: RemoteEngine) -> None:
        """An engine will not be started again (the engine only)."""
        if all(other.stats().state is EngineState.FAILED for other in self._engines):
            for lost in tuple(self._parked.values()):
                self._end(lost, FinishReason.ERROR, "the engine process ended; send it again")

    @property
    def _serving(self) -> list[RemoteEngine]:
        return [engine for engine in self._engines if engine.is_serving]

    def _engine_of(self, request_id: str) -> RemoteEngine | None:
        return next((engine for engine in self._engines if engine.is_live(request_id)), None)

    def _choose(self, request: Request) -> int:
        """The number of the engine that gets a request. Raises EngineError if none serves."""
        serving = [number for number, engine in enumerate(self._engines) if engine.is_serving]
        if not serving:
            self._engines[0].check_serving()
            raise EngineError("no replica takes requests now; send it again later")
        if len(serving) == 1:
            return serving[0]
        if request.adapter:  # the engines know its id; for the router the name is as good
            request = replace(request, adapter_id=request.adapter)
        views = [self._view(engine) for engine in self._engines]
        return self._router.choose(request, views, self._clock())

    def _view(self, engine: RemoteEngine) -> ReplicaView:
        if not engine.is_serving:
            return ReplicaView(state=ReplicaState.DOWN)
        if not self._router.predicts:
            return ReplicaView(num_live=engine.num_live)
        return ReplicaView(
            num_live=engine.num_live,
            admission=engine.admission,
            reported_at_s=engine.reported_at_s,
            num_sent=engine.num_undecided,
            costs=engine.costs,
        )

    def _place_parked(self) -> None:
        """Send requests that wait here to the engines that serve, in the order of their arrival."""
        parked = sorted(self._parked.values(), key=lambda lost: lost.request.received_s or 0.0)
        for lost in parked:
            if not self._serving or self._is_stopping:
                return
            try:
                self._place(lost)
            except QuickstepError as error:
                self._end(lost, FinishReason.ERROR, str(error))

    def _place(self, lost: LostRequest) -> None:
        request = lost.request
        number = self._choose(request)
        request_id = request.request_id
        self._unpark(request_id)
        if lost.has_output and self._engines[number].fingerprint != lost.fingerprint:
            raise EngineError("the engine ended, and its successor has other weights")
        self._engines[number].submit(request, lost.stream, lost.num_moves + 1)
        if lost.is_paused:
            self._engines[number].pause(request_id)
        self._num_moves += 1
        num_tokens = sum(len(resumed.token_ids) for resumed in request.resumed)
        _LOGGER.info(
            "request %s continues on replica %d after %d tokens", request_id, number, num_tokens
        )

    def _park(self, lost: LostRequest) -> None:
        request = lost.request
        self._parked[request.request_id] = lost
        if request.timeout_s is not None:
            left_s = (request.received_s or 0.0) + request.timeout_s - self._clock()
            self._timers[request.request_id] = asyncio.get_running_loop().call_later(
                max(0.0, left_s), self._expire, request.request_id
            )

    def _unpark(self, request_id: str) -> None:
        self._parked.pop(request_id, None)
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, request_id: str) -> None:
        lost = self._parked.get(request_id)
        if lost is not None:
            self._end(lost, FinishReason.DEADLINE, "")

    def _end(self, lost: LostRequest, reason: FinishReason, error: str) -> None:
        """End a request that is live on no engine, with the output so far."""
        request, now = lost.request, self._clock()
        self._unpark(request.request_id)
        if request.resumed:  # it was accepted
            for record in records_of_lost(request, reason, request.received_s or now, now):
                self._step_log.add_sequence(record)
        if reason is FinishReason.DEADLINE:
            lost.stream.accept()
        elif error:
            lost.stream.refuse(EngineDied(error))
        stop_reason = reason.value if reason is FinishReason.DEADLINE else None
        for index in request.indices:
            lost.stream.put(
                Delta(index, finish_reason=reason, stop_reason=stop_reason, error=error)
            )


def merged_stats(
    stats: Sequence[EngineStats],
    process_ids: Sequence[int | None],
    num_parked: int,
    num_moves: int,
) -> EngineStats:
    """The stats of several engines as those of one, which runs if one of them does; what it waits
    for is the slowest of them. With the stats of each one as a replica, if there are several.
    """
    states = (EngineState.RUNNING, *EngineState)
    best = min(stats, key=lambda engine: states.index(engine.state))
    slowest = max(stats, key=lambda engine: engine.stalled_s)
    replicas = tuple(
        ReplicaStats(
            replica=number,
            state=engine.state,
            failure=engine.failure,
            process_id=process_id,
            num_requests=engine.num_requests,
            num_waiting=engine.scheduler.num_waiting,
            num_running=engine.scheduler.num_running,
            num_restarts=engine.num_restarts,
            stalled_s=engine.stalled_s,
        )
        for number, (engine, process_id) in enumerate(zip(stats, process_ids, strict=True))
    )
    return replace(
        best,
        last_step_s=slowest.last_step_s,
        busy_since_s=slowest.busy_since_s,
        num_steps_in_flight=sum(engine.num_steps_in_flight for engine in stats),
        num_requests=sum(engine.num_requests for engine in stats) + num_parked,
        scheduler=added([engine.scheduler for engine in stats]),
        num_restarts=sum(engine.num_restarts for engine in stats),
        silent_s=max(engine.silent_s for engine in stats),
        replicas=replicas if len(stats) > 1 else (),
        num_moves=num_moves,
    )
