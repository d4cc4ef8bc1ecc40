"""The requests that no engine has: new ones while none serves, and those of an engine that has
ended or drains: `ParkedRequests`.

They wait in the order of their arrival, until an engine takes them, their deadline passes or their
client leaves. A new request is one that no engine has accepted: it waits only while the queue's
limit allows it, as on an engine, and the engine that takes it checks it as any other. Owned by
`ReplicaSet`, which places them; used in its event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from quickstep.core.admission import AdmissionState
from quickstep.engine.records.step_log import StepLog
from quickstep.engine.remote.streams import LostRequest, records_of_lost
from quickstep.errors import EngineError, FirstTokenTooLate, QueueFull, QuickstepError
from quickstep.types import Delta, FinishReason, Request, RequestClass


class ParkedRequests:
    """Requests by id. Their ends are recorded in `step_log`; `max_waiting` is that of an engine's
    queue.
    """

    def __init__(
        self, step_log: StepLog, max_waiting: int | None, clock: Callable[[], float]
    ) -> None:
        self._step_log = step_log
        self._max_waiting = max_waiting
        self._clock = clock
        self._parked: dict[str, LostRequest] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}  # their deadlines

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._parked

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the requests."""
        return tuple(self._parked)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return sum(len(lost.request.indices) for lost in self._parked.values())

    def in_order(self) -> list[LostRequest]:
        """The requests in the order of their arrival."""
        return sorted(self._parked.values(), key=lambda lost: lost.request.received_s or 0.0)

    def check_room(self, request: Request, num_sequences: int) -> None:
        """Raise EngineError unless so many sequences of a new request may wait here, and those that
        follow.
        """
        if request.has_place:
            return
        waiting = [lost.request for lost in self._parked.values() if not lost.request.resumed]
        num_waiting, num_interactive = (
            sum(other.sampling.n for other in requests)
            for requests in (
                waiting,
                [other for other in waiting if other.request_class is not RequestClass.BATCH],
            )
        )
        state = AdmissionState(num_waiting, num_interactive, self._max_waiting)
        try:
            state.check_queue(request, num_sequences + request.num_following)
        except QueueFull:
            raise EngineError(
                f"no engine serves now, and {num_waiting} sequences wait for one, the limit is "
                f"{self._max_waiting}; send the request again later or raise --max-waiting"
            ) from None

    def add(self, lost: LostRequest) -> None:
        """A request waits from now on."""
        request = lost.request
        self._parked[request.request_id] = lost
        timeout_s, first_token_s = request.timeout_s, request.ttft_deadline_s
        if request.resumed or (timeout_s is not None and timeout_s <= (first_token_s or timeout_s)):
            first_token_s = None  # it was accepted with that deadline, or the other comes first
        wait_s = timeout_s if first_token_s is None else first_token_s
        if wait_s is not None:
            left_s = wait_s
            if not request.is_continuation:  # which has the time that is left
                left_s = (request.received_s or 0.0) + wait_s - self._clock()
            self._timers[request.request_id] = asyncio.get_running_loop().call_later(
                max(0.0, left_s), self._expire, lost, first_token_s
            )

    def remove(self, request_id: str) -> None:
        """An engine takes a request, or it ends. Ignores other ids."""
        self._parked.pop(request_id, None)
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def set_paused(self, request_id: str, is_paused: bool) -> None:
        """The reader of a request is too slow, or has caught up. Ignores other ids."""
        if (lost := self._parked.get(request_id)) is not None:
            self._parked[request_id] = replace(lost, is_paused=is_paused)

    def abort(self, request_id: str) -> None:
        """End a request with its output so far. Ignores other ids."""
        if (lost := self._parked.get(request_id)) is not None:
            self.end(lost, FinishReason.ABORTED)

    def end_all(self, reason: FinishReason, error: QuickstepError) -> None:
        """End every request."""
        for lost in tuple(self._parked.values()):
            self.end(lost, reason, error)

    def _expire(self, lost: LostRequest, first_token_s: float | None) -> None:
        if first_token_s is None:
            self.end(lost, FinishReason.DEADLINE)
        else:
            waited_s = self._clock() - (lost.request.received_s or 0.0)
            error = FirstTokenTooLate(first_token_s, 0.0, 0.0, waited_s)
            self.end(lost, FinishReason.SHED, error)

    def end(
        self, lost: LostRequest, reason: FinishReason, error: QuickstepError | None = None
    ) -> None:
        """End a request that no engine has, with the output so far."""
        request, now = lost.request, self._clock()
        self.remove(request.request_id)
        if request.resumed:  # it was accepted
            for record in records_of_lost(request, reason, request.received_s or now, now):
                self._step_log.add_sequence(record)
        if reason is FinishReason.DEADLINE:
            lost.stream.accept()
        elif error is not None:
            lost.stream.refuse(error)
        stop_reason = reason.value if reason is FinishReason.DEADLINE else None
        why = "" if error is None else str(error)
        for index in request.indices:
            lost.stream.put(Delta(index, finish_reason=reason, stop_reason=stop_reason, error=why))
