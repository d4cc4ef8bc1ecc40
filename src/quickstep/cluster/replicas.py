"""Several engines with the same model, which the server uses as one: `ReplicaSet`.

    server ── ReplicaSet ── RemoteEngine 0 ── process
                  │    └─── RemoteEngine 1 ── process
               Router

A router (`core.router`) chooses the engine of each request by what the engines report. When an
engine's process ends, its requests continue on another one, or on its successor: a request is sent
with the tokens that its client has already (`Request.resumed`), and its deltas go to the same
stream. The same request gives the same bits on every replica, so that a client cannot notice it.

A request may be what ends an engine that computes it: `cluster.suspects`. One that only waited is
not suspected, but moves at most `max_moves` times in a row: a process may end before it reports
what it begins.

While no engine serves, requests wait here (`cluster.parked`), and when none will serve again they
end. Everything runs in the event loop that called `open`.

An operator may drain and restart the engines one by one. Their requests move as if they had ended,
but only to engines with the same weights: if the checkpoint on disk was replaced, and no other
engine has the old one, they end first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from msgspec.structs import replace

from quickstep.cluster.parked import ParkedRequests
from quickstep.cluster.suspects import causes_of, is_suspect
from quickstep.config import ReplicaConfig, StreamConfig
from quickstep.core.accounting import added
from quickstep.core.handover import Phases, assign, can_hand_over
from quickstep.core.recordings.routing import RecordingRouter
from quickstep.core.router import (
    ROUTERS,
    ReplicaState,
    ReplicaView,
    Router,
    RouteRequest,
    route_request,
)
from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.owned_tasks import OwnedTasks
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.engine import LOG_CAPACITY, RemoteEngine
from quickstep.engine.remote.streams import LostRequest
from quickstep.engine.remote.supervisor import LoadProgress
from quickstep.engine.requests import RequestIntake, open_seeds
from quickstep.engine.retrieval.card import Retrieval
from quickstep.engine.stats import EngineState, EngineStats, ReplicaChange, ReplicaStats
from quickstep.engine.stream import Stream
from quickstep.errors import ConfigError, EngineDied, EngineError, QuickstepError, RequestError
from quickstep.model.sizing import MemoryPlan
from quickstep.text.chat_template import ChatTemplate
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import FinishReason, Request, SequenceTimings, SlotPrefix

_LOGGER = logging.getLogger(__name__)
_MAX_RESTORED = 64  # slots that are restored and not used yet; older ones are as other prefixes
_POLL_S = 0.05  # for what lasts longer and is rare

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
            make_engine(number, self._step_log, self) for number in range(config.num_engines)
        ]
        self._router: Router = ROUTERS[config.router.value]()
        self._config = config
        self._recording: IO[bytes] | None = None  # of the router
        self._num_prefill = config.num_prefill
        # slots that no request has used yet: the digests of their blocks, and in which engine
        self._restored: deque[tuple[tuple[bytes, ...], int]] = deque(maxlen=_MAX_RESTORED)
        self._streams = streams
        self._max_moves = config.max_moves
        self._max_deaths = config.max_deaths
        self._trials: dict[int, str] = {}  # by engine: the suspect that it computes
        # by engine: requests that others have ended with, and that wait for its first token
        self._unproven: dict[int, set[str]] = {
            number: set() for number in range(config.num_engines)
        }
        self._watching = OwnedTasks(_LOGGER)  # these
        self._clock = clock
        self._intake = RequestIntake(open_seeds(seed), self)
        self._parked = ParkedRequests(self._step_log, self._engines[0].max_waiting, clock)
        self._num_moves = 0
        self._num_handovers = 0
        self._draining: set[int] = set()  # get no requests
        self._restarting: set[int] = set()  # of those, which will get some again
        self._is_changing = False  # an operator drains or restarts engines
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
                for all; or the router's recording cannot be written.
            EngineError: A process failed.
        """
        if self._config.record_routing is not None:
            self._record_router(self._config.record_routing)
        first, *others = self._engines
        openings = [first.open(progress), *(engine.open(like=first) for engine in others)]
        results = await asyncio.gather(*openings, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(engine.stop() for engine in self._engines))
            raise errors[0]
        self._check_equal()

    def _record_router(self, path: Path) -> None:
        """Write the router's decisions to a file that only its owner may read."""
        try:
            file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
        self._recording = file
        name, num_replicas = self._config.router.value, len(self._engines)
        self._router = RecordingRouter(name, self._router, num_replicas, self._write_decision)

    def _write_decision(self, line: bytes) -> None:
        if self._recording is None:
            return
        try:
            self._recording.write(line)
        except OSError as error:
            _LOGGER.error("the recording of the router ends here: %s", error)
            self._recording = None

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
        self._parked.end_all(FinishReason.SHUTDOWN, EngineDied("the engine was stopped"))
        await asyncio.gather(*(engine.stop(drain_s) for engine in self._engines))
        if self._recording is not None:
            self._recording.close()
            self._recording = None

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
    def retrieval(self) -> Retrieval:
        """How the model embeds texts and scores pairs, as its card says."""
        return self._engines[0].retrieval

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
            [(engine.process_id, engine.address) for engine in self._engines],
            self._parked,
            self._draining,
            (self._num_moves, self._num_handovers),
            self._num_prefill,
        )

    @property
    def has_queue(self) -> bool:
        """Whether sequences wait on every engine that serves."""
        return all(self._engines[number].has_queue for number in self._takers())

    def check_admission(self, request: Request, num_sequences: int) -> None:
        """Raise RequestError for a request that no engine could accept now, whatever its prompt.
        The error is that of the engine with the shortest queue. Raises EngineError if none serves
        and it could not wait for one.
        """
        takers = self._takers()
        if not takers:
            self._check_parking(request, num_sequences)
        errors: dict[int, RequestError] = {}
        for engine in (self._engines[number] for number in takers):
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
        return (*placed, *self._parked.request_ids)

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
        self._restored.clear()
        return sum(counts)

    async def save_slot(
        self, filename: str, adapter: str, cache_salt: str, token_ids: Sequence[int]
    ) -> SlotPrefix:
        """Write what is cached of a prefix, by the engine that has the most of it.

        Raises:
            RequestError: As `RemoteEngine.save_slot`.
            EngineError: As that, or no engine runs.
        """
        cached = await self._slots(
            [number for number, engine in enumerate(self._engines) if engine.is_serving],
            lambda engine: engine.cached_slot(adapter, cache_salt, token_ids),
        )
        most = max(cached, key=lambda number: (len(cached[number].token_ids), -number))
        return await self._engines[most].save_slot(filename, adapter, cache_salt, token_ids)

    async def restore_slot(self, filename: str, cache_salt: str) -> SlotPrefix:
        """Read a file into the prefix cache of an engine that the router chooses and which gets the
        first request with this prefix; with a router that does not read prompts, into those of all.

        Raises:
            RequestError: As `RemoteEngine.restore_slot`.
            EngineError: As that, or no engine takes requests.
        """
        # engines on other hosts may have other files
        stored = await self._slots(
            self._of_decode(self._takers()),
            lambda engine: engine.stored_slot(filename, cache_salt),
        )
        prefix = stored[min(stored)]
        holders = [number for number, other in stored.items() if other == prefix]
        routed = None
        if self._router.reads_prompts:
            routed = self._routed_prefix(prefix, cache_salt)
            holders = [self._choose(routed, holders)]
        restores = (self._engines[number].restore_slot(filename, cache_salt) for number in holders)
        results = await asyncio.gather(*restores, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if routed is not None:
            self._restored.append((routed.digests, holders[0]))
        return prefix

    async def _slots(
        self, numbers: Sequence[int], find: Callable[[RemoteEngine], Awaitable[SlotPrefix]]
    ) -> dict[int, SlotPrefix]:
        """What engines know of a slot, by number: of those that know it. Raises RequestError and
        EngineError if none does.
        """
        if not numbers:
            self._engines[0].check_serving()
            raise EngineError("no replica takes requests now; send it again later")
        answers = await asyncio.gather(
            *(find(self._engines[number]) for number in numbers), return_exceptions=True
        )
        found: dict[int, SlotPrefix] = {}
        errors: list[QuickstepError] = []
        for number, answer in zip(numbers, answers, strict=True):
            if isinstance(answer, SlotPrefix):
                found[number] = answer
            elif isinstance(answer, QuickstepError):
                errors.append(answer)
            else:
                raise answer
        if not found:
            raise errors[0]
        return found

    def _of_decode(self, numbers: Sequence[int]) -> list[int]:
        """Of these engines, those to which the router sends requests first: the ones that decode,
        if any of them is there.
        """
        return [number for number in numbers if number >= self._num_prefill] or list(numbers)

    def _routed_prefix(self, prefix: SlotPrefix, cache_salt: str) -> RouteRequest:
        """A restored prefix, for the router: a request with nothing to compute but a token, so that
        it remembers where the blocks are, and no engine is taken to be busy with them.
        """
        request = Request(
            prompt_token_ids=prefix.token_ids, adapter=prefix.adapter, cache_salt=cache_salt
        )
        return replace(self._routed(request), num_prompt_tokens=1)

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
        """Check a request and send it to an engine, or let it wait for one while none serves;
        `Stream.accepted` returns once it is accepted.

        Raises:
            RequestError: The request cannot be served as it is.
            EngineError: No engine will serve, or too many requests wait for one.
        """
        engine = self._engines[0]
        eos_token_ids = engine.tokenizer.eos_token_ids
        request = self._intake.take(
            request, engine.vocab_size, self.max_model_len, eos_token_ids, self.retrieval
        )
        if request.received_s is None:  # its deadlines count from here, wherever it runs
            request = replace(request, received_s=self._clock())
        stream = Stream(request, self, self._streams)
        if takers := self._takers():
            number, request = self._assign(request, takers)
            self._engines[number].submit(request, stream)
        else:
            self._check_parking(request, request.sampling.n)
            self._parked.add(LostRequest(stream, request, self.fingerprint))
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its output so far is its answer. Ignores unknown and finished ids."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.abort(request_id)
        else:
            self._parked.abort(request_id)

    def pause(self, request_id: str) -> None:
        """Generate no more for a request until `resume`; steps in flight still give deltas."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.pause(request_id)
        else:
            self._parked.set_paused(request_id, True)

    def resume(self, request_id: str) -> None:
        """Continue a paused request."""
        engine = self._engine_of(request_id)
        if engine is not None:
            engine.resume(request_id)
        else:
            self._parked.set_paused(request_id, False)
            self._place_parked()

    def lost(self, engine: RemoteEngine, requests: Sequence[LostRequest]) -> None:
        """An engine's process has ended (the engine only): its requests continue on others."""
        number = self._engines.index(engine)
        self._router.lost_cache(number)
        for slot in [slot for slot in self._restored if slot[1] == number]:
            self._restored.remove(slot)
        tried = self._trials.pop(number, None)
        self._unproven[number].clear()
        causes = causes_of(requests, tried, self._max_deaths)
        if causes:  # however many such requests come, the engine is started again
            engine.cause_found()
        for lost in requests:
            if self._is_stopping:
                stopped = EngineDied("the engine was stopped")
                self._parked.end(lost, FinishReason.SHUTDOWN, stopped)
            elif lost.request.request_id in causes:
                self._end_as_cause(lost, lost.num_deaths)
            elif causes:  # it was none of the others
                self._parked.add(lost.uncharged())
            elif lost.num_moves > self._max_moves:
                self._end_as_cause(lost, lost.num_moves)
            else:
                self._parked.add(lost)
        self._place_parked()

    def _is_suspect(self, lost: LostRequest) -> bool:
        return is_suspect(lost, self._max_deaths)

    def _end_as_cause(self, lost: LostRequest, num: int) -> None:
        why = f"{num} engine processes ended in a row while they computed it"
        self._parked.end(lost, FinishReason.ERROR, EngineDied(f"{why}; it is not tried again"))

    def restarted(self, engine: RemoteEngine) -> None:
        """An engine serves again (the engine only)."""
        self._place_parked()

    def freed(self, engine: RemoteEngine) -> None:
        """An engine has ended requests that were moved from it (the engine only)."""
        self._place_parked()

    def given_up(self, engine: RemoteEngine) -> None:
        """An engine will not be started again (the engine only)."""
        if not any(map(self._will_take, range(len(self._engines)))):
            error = EngineDied("the engine process ended; send it again")
            self._parked.end_all(FinishReason.ERROR, error)

    # -- changes by an operator -------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """The replicas have numbers below this."""
        return len(self._engines)

    def has_new_files(self) -> bool:
        """Whether files of the checkpoint have changed since an engine loaded them."""
        return any(engine.has_new_files() for engine in self._engines)

    async def drain_replica(self, number: int, drain_s: float = 0.0) -> ReplicaChange:
        """Give an engine no more requests until it is restarted. Its requests may continue there
        for `drain_s` seconds, then they move. Returns when it has none.

        Raises:
            RequestError: There is no such engine, no other one serves, or a change is under way.
        """
        with self._changing(number):
            if not set(self._takers()) - {number}:
                raise RequestError(
                    f"replica {number} is the only one that serves; restart it instead", status=409
                )
            return await self._drain(number, drain_s)

    async def restart_replica(self, number: int, drain_s: float = 0.0) -> ReplicaChange:
        """Drain an engine and start it again. While it is the only one, requests wait.

        Raises:
            RequestError: There is no such engine, or a change is under way.
            EngineError: It does not serve, or its new process does not.
        """
        with self._changing(number):
            return await self._restart(number, drain_s)

    async def restart_replicas(self, drain_s: float = 0.0) -> list[ReplicaChange]:
        """Restart all engines that are not given up, one after the other, each when all others
        serve.

        Raises:
            RequestError: A change is under way.
            EngineError: A new process does not serve; the engines after it are as they were.
        """
        with self._changing():
            changes = []
            for number, engine in enumerate(self._engines):
                while any(other.is_coming for other in self._engines):
                    await asyncio.sleep(_POLL_S)
                if engine.is_serving:
                    changes.append(await self._restart(number, drain_s))
            return changes

    @contextmanager
    def _changing(self, number: int = 0) -> Iterator[None]:
        if not 0 <= number < len(self._engines):
            last = len(self._engines) - 1
            raise RequestError(
                f"there is no replica {number}, the last is {last}",
                status=404,
                code="replica_not_found",
            )
        if self._is_changing:
            raise RequestError(
                "a replica is being drained or restarted; send it again later", status=409
            )
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False

    async def _drain(self, number: int, drain_s: float, restarts: bool = False) -> ReplicaChange:
        """Give an engine no more requests, and move those that it has."""
        engine, note = self._engines[number], ""
        _LOGGER.info("replica %d gets no more requests", number)
        self._draining.add(number)
        num_before = engine.num_live
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await engine.wait_until_idle()
        if not self._may_move(number, restarts):
            note = "its requests ended there: no other replica has its weights"
            if restarts:
                note += ", and those on disk have changed"
            _LOGGER.warning("replica %d waits for the end of its requests: %s", number, note)
            await engine.wait_until_idle()
        lost = engine.take_requests()
        for request in lost:
            self._parked.add(request)
        self._place_parked()
        num_moved = len(lost)
        return ReplicaChange(
            number, True, num_before - num_moved, num_moved, engine.fingerprint, note
        )

    def _may_move(self, number: int, restarts: bool) -> bool:
        """Whether the requests of an engine can continue elsewhere, or on its next process."""
        engine = self._engines[number]
        if not engine.num_live:
            return True
        others = (self._engines[other] for other in self._takers())
        if any(other.fingerprint == engine.fingerprint for other in others):
            return True
        return restarts and not engine.has_new_files()

    async def _restart(self, number: int, drain_s: float) -> ReplicaChange:
        engine = self._engines[number]
        self._restarting.add(number)
        try:
            change = await self._drain(number, drain_s, restarts=True)
            await engine.restart()
        finally:
            self._restarting.discard(number)
            self._draining.discard(number)
            self._place_parked()
        return replace(change, is_draining=False, fingerprint=engine.fingerprint)

    # -- sleep ------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """End the processes of all engines, which gives their memory back, until `wake`.

        Raises:
            EngineError: Requests are live, or an engine does not run.
        """
        if self.request_ids:
            raise EngineError(f"{len(self.request_ids)} requests are live, the engine cannot sleep")
        await asyncio.gather(*(engine.sleep() for engine in self._engines))

    async def wake(self) -> None:
        """Start all processes again. Raises EngineError if one does not sleep, or does not serve
        then.
        """
        await asyncio.gather(*(engine.wake() for engine in self._engines))

    # -- choosing an engine -----------------------------------------------------------------------

    def _takers(self) -> list[int]:
        """The numbers of the engines that get requests now."""
        return [
            number
            for number, engine in enumerate(self._engines)
            if engine.is_serving and number not in self._draining
        ]

    def _will_take(self, number: int) -> bool:
        """Whether an engine gets requests, now or later."""
        is_held = number in self._draining - self._restarting
        return self._engines[number].will_serve and not is_held

    def _engine_of(self, request_id: str) -> RemoteEngine | None:
        return next((engine for engine in self._engines if engine.is_live(request_id)), None)

    def _check_parking(self, request: Request, num_sequences: int) -> None:
        """Raise EngineError unless a new request may wait for an engine to serve."""
        if self._is_stopping or not any(map(self._will_take, range(len(self._engines)))):
            self._engines[0].check_serving()
            raise EngineError("no replica takes requests now; send it again later")
        self._parked.check_room(request, num_sequences)

    def _assign(self, request: Request, takers: Sequence[int]) -> tuple[int, Request]:
        """Which of these engines gets a request, with the one that continues it after its first
        token if these are different engines.
        """
        if len(takers) == 1 and not self._num_prefill:
            return takers[0], request
        routed = self._routed(request)
        if not self._num_prefill:
            return self._choose(routed, self._restored_takers(routed, takers)), request
        numbers = range(len(self._engines))
        assignment = assign(
            routed,
            can_hand_over(request),
            [self._complete_view(number, number in takers) for number in numbers],
            self._router,
            Phases(self._num_prefill, self.block_size, self._engines[0].kv_block_bytes),
            [engine.fingerprint for engine in self._engines],
            self._clock(),
        )
        if assignment.continues_at is not None:
            target = self._engines[assignment.continues_at].kv_address
            request = replace(request, handover=target)
        return assignment.engine, request

    def _restored_takers(self, request: RouteRequest, takers: Sequence[int]) -> Sequence[int]:
        """Only the engine into which a client has restored the request's prefix, for the first such
        request and unless sequences wait there: a client restores a slot to have it used, and the
        router has it compete with predictions.
        """
        for place, (digests, number) in enumerate(self._restored):
            num = min(len(digests), len(request.digests))
            if num and digests[num - 1] == request.digests[num - 1]:  # of the chain up to there
                del self._restored[place]
                is_free = number in takers and not self._engines[number].has_queue
                return [number] if is_free else takers
        return takers

    def begun(self, engine: RemoteEngine, requests: Sequence[LostRequest]) -> None:
        """An engine has computed the prompts of requests (the engine only): those that they were
        sent to continue them.
        """
        for lost in requests:
            handover = lost.request.handover
            lost = replace(lost, request=replace(lost.request, handover=None))
            targets = [
                number
                for number in self._takers()
                if self._engines[number].kv_address == handover
                and not self._engines[number].has_id(lost.request.request_id)
            ]
            if targets:
                self._num_handovers += 1
                self._engines[targets[0]].submit(lost.request, lost.stream, lost)
                if lost.is_paused:
                    self._engines[targets[0]].pause(lost.request.request_id)
            else:
                self._parked.add(lost)
        self._place_parked()

    def _routed(self, request: Request) -> RouteRequest:
        if request.adapter:  # the engines know its id; for the router the name is as good
            request = replace(request, adapter_id=request.adapter)
        return route_request(request, self._router, self.block_size)

    def _choose(self, request: RouteRequest, takers: Sequence[int]) -> int:
        """Which of these engines gets a request."""
        views = [self._view(number, number in takers) for number in range(len(self._engines))]
        return self._router.choose(request, views, self._clock())

    def _view(self, number: int, is_up: bool) -> ReplicaView:
        if is_up and not self._router.predicts:
            return ReplicaView(num_live=self._engines[number].num_live)
        return self._complete_view(number, is_up)

    def _complete_view(self, number: int, is_up: bool) -> ReplicaView:
        engine = self._engines[number]
        if not is_up:
            state = ReplicaState.DRAINING if number in self._draining else ReplicaState.DOWN
            return ReplicaView(state=state)
        return ReplicaView(
            num_live=engine.num_live,
            admission=engine.admission,
            reported_at_s=engine.reported_at_s,
            num_sent=engine.num_undecided,
            num_blocks=engine.num_blocks,
            num_free_blocks=engine.num_free_blocks,
            costs=engine.costs,
        )

    def _place_parked(self) -> None:
        """Send requests that wait here to the engines that serve, in the order of their arrival."""
        for lost in self._parked.in_order():
            if self._is_stopping:
                return
            name = lost.request.request_id
            # one that has yet to end the request would end it again
            takers = [place for place in self._takers() if not self._engines[place].has_id(name)]
            if lost.has_output:  # other weights would not continue it
                same = self._with_fingerprint(lost.fingerprint)
                takers = [number for number in takers if number in same]
                if not any(map(self._will_take, same)):
                    error = EngineDied("the engine ended, and its successor has other weights")
                    self._parked.end(lost, FinishReason.ERROR, error)
            if lost.num_deaths:
                takers = [number for number in takers if number not in self._trials]
            if self._is_suspect(lost):
                takers = [number for number in takers if not self._unproven[number]]
                # its trial ends with a token, for which its reader has to be ready
                if lost.is_paused:
                    continue
            if not takers:
                continue
            self._parked.remove(name)
            try:
                self._place(lost, takers)
            except QuickstepError as error:
                self._parked.end(lost, FinishReason.ERROR, error)

    def _with_fingerprint(self, fingerprint: str) -> set[int]:
        return {
            number
            for number, engine in enumerate(self._engines)
            if engine.fingerprint == fingerprint
        }

    def _place(self, lost: LostRequest, takers: Sequence[int]) -> None:
        number, request = self._assign(replace(lost.request, handover=None), takers)
        engine, request_id = self._engines[number], request.request_id
        engine.submit(request, lost.stream, lost)
        if self._is_suspect(lost):
            self._trials[number] = request_id
        if lost.num_deaths and not lost.is_paused:  # which may get no token for long
            self._unproven[number].add(request_id)
            self._watching.start(self._watch_unproven(number, request_id))
        if lost.is_paused:
            engine.pause(request_id)
        if not request.resumed:
            return  # no engine has accepted it before
        self._num_moves += 1
        num_tokens = sum(len(resumed.token_ids) for resumed in request.resumed)
        _LOGGER.info(
            "request %s continues on replica %d after %d tokens", request_id, number, num_tokens
        )

    async def _watch_unproven(self, number: int, request_id: str) -> None:
        """A request's first token on an engine shows that it does not end it: what was not to be
        there with it is placed.
        """
        while self._engines[number].waits_for_token(request_id):
            await asyncio.sleep(_POLL_S)
        if request_id in self._unproven[number]:  # else the engine has ended
            self._unproven[number].discard(request_id)
            if self._trials.get(number) == request_id:
                del self._trials[number]
        self._place_parked()


def _role(number: int, num_prefill: int) -> Literal["", "prefill", "decode"]:
    """`ReplicaStats.role`."""
    if not num_prefill:
        return ""
    return "prefill" if number < num_prefill else "decode"


def merged_stats(
    stats: Sequence[EngineStats],
    processes: Sequence[tuple[int | None, str]],
    parked: ParkedRequests,
    draining: Set[int],
    num_moves: tuple[int, int],
    num_prefill: int = 0,
) -> EngineStats:
    """The stats of several engines as those of one, which runs if one of them does; what it waits
    for is the slowest of them, `parked` requests wait as in its queue, and one more would wait in
    the shortest queue. With the stats of each one as a replica, if there are several or one is
    `draining`. `processes` are their ids and addresses. `num_moves` counts requests that continued
    elsewhere: after an engine's end, and after their prompt. The first `num_prefill` engines
    compute prompts.
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
            is_draining=number in draining,
            role=_role(number, num_prefill),
            address=address,
        )
        for number, (engine, (process_id, address)) in enumerate(zip(stats, processes, strict=True))
    )
    scheduler = added([engine.scheduler for engine in stats])
    num_waiting = scheduler.num_waiting + parked.num_sequences
    return replace(
        best,
        last_step_s=slowest.last_step_s,
        busy_since_s=slowest.busy_since_s,
        num_steps_in_flight=sum(engine.num_steps_in_flight for engine in stats),
        num_requests=sum(engine.num_requests for engine in stats) + len(parked),
        scheduler=replace(scheduler, num_waiting=num_waiting),
        admission=min(
            (engine.admission for engine in stats if engine.state is best.state),
            key=lambda state: state.wait_s(state.num_waiting),
        ),
        num_restarts=sum(engine.num_restarts for engine in stats),
        silent_s=max(engine.silent_s for engine in stats),
        replicas=replicas if len(stats) > 1 or draining else (),
        num_moves=num_moves[0],
        num_handovers=num_moves[1],
    )
