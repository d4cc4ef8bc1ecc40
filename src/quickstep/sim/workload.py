"""What clients request in a simulation: lengths, shared prefixes, sessions, cancellations.

A `Workload` is plain data; `WORKLOADS` has presets. `Clients` makes the requests of one simulation:
`opening` at given times, and `follow`, for `simulate`, the next turn of a session or the next
request of a closed loop. Everything depends on the seeded generator only.

Prompts: a path through a tree of shared prefixes (a system prompt, then a document), the session so
far, and new tokens that no other request has. Token ids have no other meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from quickstep.config import LoRAConfig
from quickstep.sim.outcome import Arrival, Ending
from quickstep.types import Request, RequestClass, SamplingParams

if TYPE_CHECKING:
    from random import Random

_OUTPUT_TOKEN = 0  # what the simulator generates
_FIRST_PREFIX_TOKEN = 1
_FIRST_NEW_TOKEN = 1 << 40  # far above the tokens of prefixes


class Lengths(msgspec.Struct, frozen=True):
    """A lognormal distribution in tokens: its median, the deviation of the logarithm (0: always the
    median), and its bounds.
    """

    median: int
    sigma: float = 0.0
    least: int = 1
    most: int = 1 << 20

    def sample(self, rng: Random) -> int:
        """A length."""
        length = self.median if not self.sigma else self.median * rng.lognormvariate(0, self.sigma)
        return min(max(self.least, round(length)), self.most)


class PrefixLevel(msgspec.Struct, frozen=True):
    """A level of the tree: branches of each node above, and tokens of each branch."""

    num_branches: int
    num_tokens: int


class Tenant(msgspec.Struct, frozen=True):
    """Who sends requests: its part of them (relative to the others'), and how they are served.

    Attributes:
        timeout_s: Seconds after which its requests end, complete or not; None for no limit.
        ttft_deadline_s: Seconds after which a first token is useless; None for no limit.
    """

    name: str = ""
    part: float = 1.0
    priority: int = 0
    weight: float = 1.0
    request_class: RequestClass = RequestClass.INTERACTIVE
    timeout_s: float | None = None
    ttft_deadline_s: float | None = None


class AdapterMix(msgspec.Struct, frozen=True):
    """LoRA adapters, one of which each session has.

    Attributes:
        count: How many there are.
        skew: Exponent s of Zipf's law: the k-th is named in proportion to k ** -s. 0 is uniform.
        max_loras: As many are in memory at the same time.
        load_s: How long the load of one takes.
    """

    count: int
    skew: float = 1.0
    max_loras: int = LoRAConfig().max_loras
    load_s: float = 0.02


class Workload(msgspec.Struct, frozen=True):
    """What clients request.

    Attributes:
        inputs: New tokens of a prompt, without shared prefixes and earlier turns.
        outputs: Tokens that are generated.
        prefixes: The tree of shared prefixes; each session has one path.
        mean_turns: Mean turns of a session; the number is geometric.
        think_s: Mean seconds from an answer to the next turn (exponential).
        cancelled: The part of the requests whose client cancels them.
        cancel_after_s: Mean seconds after which it does (exponential).
        tenants: Who sends them.
        adapters: None for requests without adapters.
    """

    inputs: Lengths
    outputs: Lengths
    prefixes: tuple[PrefixLevel, ...] = ()
    mean_turns: float = 1.0
    think_s: float = 0.0
    cancelled: float = 0.0
    cancel_after_s: float = 1.0
    tenants: tuple[Tenant, ...] = (Tenant(),)
    adapters: AdapterMix | None = None

    @property
    def session_s(self) -> float:
        """Mean seconds that a session thinks, in all."""
        return (self.mean_turns - 1.0) * self.think_s


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "chat": Workload(
            Lengths(80, 0.8, 4, 2000),
            Lengths(180, 0.7, 4, 1500),
            (PrefixLevel(1, 256),),
            mean_turns=4.0,
            think_s=10.0,
            cancelled=0.02,
            cancel_after_s=3.0,
        ),
        "rag": Workload(
            Lengths(60, 0.6, 8, 500),
            Lengths(150, 0.6, 8, 800),
            (PrefixLevel(1, 128), PrefixLevel(100, 2048)),
        ),
        "code": Workload(
            Lengths(120, 0.7, 8, 1000),
            Lengths(40, 0.8, 1, 400),
            (PrefixLevel(40, 1536),),
            cancelled=0.3,
            cancel_after_s=0.5,
        ),
        "agent": Workload(
            Lengths(400, 0.8, 16, 4000),
            Lengths(100, 0.6, 8, 600),
            (PrefixLevel(4, 2048),),
            mean_turns=8.0,
            think_s=1.0,
        ),
        "batch": Workload(
            Lengths(600, 0.6, 16, 4000),
            Lengths(250, 0.5, 8, 1000),
            tenants=(Tenant(request_class=RequestClass.BATCH),),
        ),
        "prefill-heavy": Workload(Lengths(2000, 0.3, 64, 8000), Lengths(40, 0.3, 4, 200)),
        "decode-heavy": Workload(Lengths(100, 0.3, 8, 500), Lengths(800, 0.3, 64, 3000)),
    }
)


class _Session(msgspec.Struct):
    """One user: the tokens of earlier turns, and turns that are left."""

    history: tuple[int, ...]
    tenant: Tenant
    num_turns_left: int
    adapter_id: str = ""


class Clients:
    """The clients of one simulation. Owned by its caller; `simulate` calls `follow`.

    With `closed_loop`, a client whose session has ended begins a new one after thinking, until
    `num_requests` have been sent; without, sessions begin at the given times only. A client whose
    request is refused sends no more.
    """

    def __init__(
        self,
        workload: Workload,
        rng: Random,
        num_requests: int,
        max_model_len: int,
        closed_loop: bool = False,
    ) -> None:
        self._workload = workload
        self._rng = rng
        self._num_left = num_requests
        self._max_model_len = max_model_len
        self._closed_loop = closed_loop
        self._sessions: dict[str, _Session] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._prefixes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._sampling_of_length: dict[int, SamplingParams] = {}
        self._next_prefix_token = _FIRST_PREFIX_TOKEN
        self._next_token = _FIRST_NEW_TOKEN
        self._num_requests = 0
        adapters = workload.adapters
        self._adapter_ids = () if adapters is None else adapter_ids(adapters)
        skew = 0.0 if adapters is None else adapters.skew
        ranks = range(1, len(self._adapter_ids) + 1)
        self._adapter_parts = tuple(accumulate(rank**-skew for rank in ranks))

    def opening(self, times: Iterable[float]) -> list[Arrival]:
        """The first requests of new sessions at these times."""
        arrivals = (self._turn(self._new_session(), at_s) for at_s in times)
        return [arrival for arrival in arrivals if arrival is not None]

    def follow(self, ending: Ending) -> list[Arrival]:
        """What the client of an ended sequence requests next."""
        session = self._sessions.pop(ending.request_id)
        prompt = self._prompts.pop(ending.request_id)
        session.history = prompt + (_OUTPUT_TOKEN,) * ending.timings.num_output_tokens
        if session.num_turns_left < 1:
            if not self._closed_loop:
                return []
            session = self._new_session()
        at_s = ending.timings.finished_s + self._exponential(self._workload.think_s)
        arrival = self._turn(session, at_s)
        return [] if arrival is None else [arrival]

    def _new_session(self) -> _Session:
        workload, rng = self._workload, self._rng
        num_turns = 1
        while rng.random() > 1.0 / workload.mean_turns:
            num_turns += 1
        tenants = workload.tenants
        (tenant,) = rng.choices(tenants, [tenant.part for tenant in tenants])
        path: tuple[int, ...] = ()
        history: tuple[int, ...] = ()
        for level in workload.prefixes:
            path = (*path, rng.randrange(level.num_branches))
            history += self._prefix(path, level.num_tokens)
        adapter_id = ""
        if self._adapter_ids:
            (adapter_id,) = rng.choices(self._adapter_ids, cum_weights=self._adapter_parts)
        return _Session(history, tenant, num_turns, adapter_id)

    def _prefix(self, path: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        if path not in self._prefixes:
            start = self._next_prefix_token
            self._next_prefix_token += num_tokens
            self._prefixes[path] = tuple(range(start, start + num_tokens))
        return self._prefixes[path]

    def _turn(self, session: _Session, at_s: float) -> Arrival | None:
        """The next request of a session; None if enough were sent, or the context is full."""
        workload, rng = self._workload, self._rng
        num_new, num_outputs = workload.inputs.sample(rng), workload.outputs.sample(rng)
        num_tokens = len(session.history) + num_new + num_outputs
        if not self._num_left or num_tokens > self._max_model_len:
            return None
        self._num_left -= 1
        session.num_turns_left -= 1
        new = tuple(range(self._next_token, self._next_token + num_new))
        self._next_token += num_new
        request = self._request(session.history + new, num_outputs, session)
        self._sessions[request.request_id] = session
        self._prompts[request.request_id] = request.prompt_token_ids
        is_cancelled = workload.cancelled > 0 and rng.random() < workload.cancelled
        cancel_after_s = self._exponential(workload.cancel_after_s) if is_cancelled else None
        return Arrival(at_s, request, cancel_after_s)

    def _request(self, prompt: tuple[int, ...], num_outputs: int, session: _Session) -> Request:
        self._num_requests += 1
        tenant = session.tenant
        return Request(
            str(self._num_requests),
            prompt,
            self._sampling(num_outputs),
            priority=tenant.priority,
            tenant=tenant.name,
            tenant_weight=tenant.weight,
            request_class=tenant.request_class,
            timeout_s=tenant.timeout_s,
            ttft_deadline_s=tenant.ttft_deadline_s,
            adapter_id=session.adapter_id,
        )

    def _sampling(self, num_outputs: int) -> SamplingParams:
        """One object for all requests with this length: it is checked whenever it is made."""
        if num_outputs not in self._sampling_of_length:
            params = SamplingParams(max_tokens=num_outputs, ignore_eos=True)
            self._sampling_of_length[num_outputs] = params
        return self._sampling_of_length[num_outputs]

    def _exponential(self, mean: float) -> float:
        return self._rng.expovariate(1.0 / mean) if mean > 0 else 0.0


def adapter_ids(adapters: AdapterMix) -> tuple[str, ...]:
    """The ids under which a scheduler has to know the adapters, the most frequent first."""
    return tuple(f"adapter-{number}" for number in range(adapters.count))


def with_lengths(workload: Workload, num_inputs: int | None, num_outputs: int | None) -> Workload:
    """The workload with fixed lengths of new inputs or outputs; None keeps its own."""
    if num_inputs is not None:
        workload = replace(workload, inputs=Lengths(num_inputs))
    if num_outputs is not None:
        workload = replace(workload, outputs=Lengths(num_outputs))
    return workload
