"""The state of an engine, for `/health` and `/metrics`: frozen values, made on request."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from quickstep.core.accounting import SchedulerStats
from quickstep.core.admission import AdmissionState
from quickstep.core.cost_model import Coefficients


class EngineState(enum.Enum):
    """The states of an engine, in order; FAILED when its loop failed.

    RESTARTING is for an engine in its own process, which is restarted after it has ended; ASLEEP
    for one that has none until it is woken.
    """

    NEW = "not started"
    RUNNING = "running"
    RESTARTING = "restarting"
    ASLEEP = "asleep"
    DRAINING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class ReplicaStats(msgspec.Struct, frozen=True):
    """The state of one of several engines with the same model (`cluster.replicas`).

    Attributes:
        process_id: The operating system's id of its process; None while there is none.
        stalled_s: `EngineStats.stalled_s`.
        is_draining: It gets no requests, because an operator drains or restarts it.
        role: `prefill` or `decode`, if these are different engines.
        address: HOST:PORT of an engine that listens, "" of one on this machine.
    """

    replica: int
    state: EngineState
    failure: str
    process_id: int | None
    num_requests: int
    num_waiting: int
    num_running: int
    num_restarts: int
    stalled_s: float
    is_draining: bool = False
    role: Literal["", "prefill", "decode"] = ""
    address: str = ""

    @property
    def is_up(self) -> bool:
        """Whether it gets requests."""
        return self.state is EngineState.RUNNING and not self.is_draining


class ReplicaChange(msgspec.Struct, frozen=True):
    """What the drain or the restart of a replica has done.

    Attributes:
        is_draining: It gets no requests until it is restarted.
        num_ended: Requests that ended on it meanwhile.
        num_moved: Requests that continue on another one, or on its new process.
        fingerprint: Of the weights that it has now.
        note: Why requests had to end before, "" if they had not.
    """

    replica: int
    is_draining: bool
    num_ended: int
    num_moved: int
    fingerprint: str
    note: str = ""


class EngineStats(msgspec.Struct, frozen=True):
    """The state of an engine at one time.

    Attributes:
        failure: Why the engine failed, or why it is restarting; "" otherwise.
        now_s: The engine's clock.
        last_step_s: When the last step was committed, by that clock; None before the first.
        busy_since_s: The time since which there is a request to generate for; None while there is
            none, or all are paused for their readers.
        num_steps_in_flight: Steps submitted and not committed.
        num_requests: Requests whose streams have not ended.
        scheduler: Waiting, running, blocks (`core.accounting.SchedulerStats`).
        num_restarts: How often the engine's process was restarted.
        admission: What decides whether one more request may queue.
        silent_s: Seconds that the engine's process has sent no message with requests pending.
        coefficients: Of the cost model that predicts its steps; None if there is none.
        replicas: The engines that these are the stats of, if they are several.
        num_moves: How often a request has continued on another engine, or on a restarted one.
        tensor_parallel_size, pipeline_parallel_size: Processes of each engine, by what they divide.
        num_handovers: How often one engine has computed the prompt of a request for another one.
    """

    state: EngineState
    failure: str
    now_s: float
    last_step_s: float | None
    busy_since_s: float | None
    num_steps_in_flight: int
    num_requests: int
    scheduler: SchedulerStats
    num_restarts: int = 0
    silent_s: float = 0.0
    admission: AdmissionState = AdmissionState()
    coefficients: Coefficients | None = None
    replicas: tuple[ReplicaStats, ...] = ()
    num_moves: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    num_handovers: int = 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self.num_requests > 0

    @property
    def stalled_s(self) -> float:
        """Seconds that requests have waited since the last step finished; 0 while there are none.

        Much more than the time of a step means that the executor hangs.
        """
        if self.busy_since_s is None:
            return 0.0
        last_s = self.busy_since_s if self.last_step_s is None else self.last_step_s
        return self.now_s - max(self.busy_since_s, last_s)
