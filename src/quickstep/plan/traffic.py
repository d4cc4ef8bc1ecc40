"""`simulate_traffic`: clients of a workload against one engine or several on some hardware.

Called by `quickstep simulate`, once for each rate and policy that it compares.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from quickstep.config import PolicyName
from quickstep.core.fallback import Route
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.core.router import ROUTERS
from quickstep.errors import ConfigError
from quickstep.model.sizing import kv_bytes_per_token
from quickstep.plan.candidates import BLOCK_SIZE, Candidate, Load
from quickstep.plan.hardware import Link
from quickstep.sim.arrivals import diurnal, gamma, ramp
from quickstep.sim.drafts import SimulatedDrafts, SimulatedModel
from quickstep.sim.engine import SimulatedEngine, VirtualClock, quick_digest
from quickstep.sim.fallback import FallbackRun, UpstreamTimes
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival, Follow, Progress, Simulation
from quickstep.sim.replicas.faults import random_faults
from quickstep.sim.replicas.handovers import KVLink
from quickstep.sim.replicas.replica import ReplicaSpec, Role
from quickstep.sim.replicas.run import ReplicaRun
from quickstep.sim.simulate import simulate
from quickstep.sim.window import CountedWindow
from quickstep.sim.workload import AdapterMix, Clients, Workload, adapter_ids

ARRIVALS = ("gamma", "ramp", "diurnal", "closed-loop")
_FAULTS_UNTIL_S = 60.0  # of a closed loop, in which all sessions arrive at once
_DAY_PARTS = 4  # periods of a simulated diurnal curve


class Traffic(msgspec.Struct, frozen=True):
    """Who sends how many requests when.

    Attributes:
        arrivals: Of sessions, one of ARRIVALS. `ramp` rises from 0 to twice the rate, `diurnal` has
            the rate as its mean and 1.8 times as much at its peak, in four periods; both last as
            long as the expected sessions take to arrive.
        num_requests: The most that are sent; sessions have the workload's mean turns.
        rate: Sessions per second; without effect in a closed loop.
        burstiness: Of `gamma`: 1 is Poisson, smaller is burstier.
        num_clients: Of a closed loop.
    """

    workload: Workload
    arrivals: str = "gamma"
    rate: float = 1.0
    num_requests: int = 500
    burstiness: float = 1.0
    num_clients: int = 16
    seed: int = 0

    def times(self) -> list[float]:
        """When sessions begin. Raises ConfigError."""
        rng = random.Random(self.seed)
        num_sessions = math.ceil(self.num_requests / self.workload.mean_turns)
        duration_s = num_sessions / self.rate
        if self.arrivals == "closed-loop":
            return [0.0] * self.num_clients
        if self.arrivals == "gamma":
            return gamma(rng, self.rate, num_sessions, self.burstiness)
        if self.arrivals == "ramp":
            return ramp(rng, 0.0, 2.0 * self.rate, duration_s)
        if self.arrivals == "diurnal":
            return diurnal(rng, self.rate, 1.8 * self.rate, duration_s / _DAY_PARTS, duration_s)
        raise ConfigError(f"--arrivals is {self.arrivals!r}, known are {', '.join(ARRIVALS)}")


class Replicas(msgspec.Struct, frozen=True):
    """Several engines that share requests through a router, and random faults meanwhile.

    Attributes:
        router: One of `core.router.ROUTERS`.
        num_faults: Crashes, slow-downs, late or lost messages, jumps of clocks, cancellations.
        seed: Of the faults.
    """

    count: int = 1
    router: str = "fewest-requests"
    num_faults: int = 0
    seed: int = 0


class FallbackEngines(msgspec.Struct, frozen=True):
    """A fallback chain of the requests to an engine (`sim.fallback`).

    Attributes:
        name: Of the model that the requests name; a route of any model has another one.
        models: The engines of the route's other models, by name.
        upstream: How soon its upstreams answer.
    """

    name: str
    route: Route
    models: dict[str, Candidate]
    upstream: UpstreamTimes


class PhasePools(msgspec.Struct, frozen=True):
    """Engines that only prefill and engines that decode (`sim.replicas.handovers`).

    Attributes:
        decode: An engine of the other phase.
        link: Hands KV over, in one direction, from each device to one of the other engine.
    """

    num_prefill: int
    num_decode: int
    decode: Candidate
    link: Link

    def kv_link(self, prefill: Candidate) -> KVLink:
        """Between a prefill engine and a decode engine: their devices send in parallel."""
        num_links = min(prefill.split.num_devices, self.decode.split.num_devices)
        elements = prefill.elements
        token_bytes = kv_bytes_per_token(prefill.spec, elements.dtype, elements.kv_dtype)
        token_bytes += sum(draft.model.sizes.kv_bytes_per_token for draft in prefill.drafts)
        return KVLink(
            num_links * self.link.gb_per_s * 1e9 * prefill.hardware.achieved.link,
            self.link.latency_us * 1e-6,
            token_bytes,
        )


def simulated_drafts(candidate: Candidate, rng: random.Random) -> SimulatedDrafts | None:
    """What drafts in an engine; None if nothing does. `rng`: Of which drafts are accepted."""
    if not candidate.drafts:
        return None
    models = [
        SimulatedModel(
            draft.model.method.value,
            draft.model.acceptance,
            draft.seconds,
            computes_prompts=draft.model.sizes.spec is not None,
            most_drafts=draft.model.sizes.num_heads or None,
        )
        for draft in candidate.drafts
    ]
    return SimulatedDrafts(models, rng)


def mean_load(arrivals: Sequence[Arrival]) -> Load:
    """The mean rate and lengths of arrivals, of which each sequence counts as a request.

    Raises:
        ConfigError: There are too few to have a rate.
    """
    duration_s = max(arrival.at_s for arrival in arrivals) - min(
        arrival.at_s for arrival in arrivals
    )
    if duration_s <= 0.0:
        raise ConfigError("a rate needs requests at two times at least; record for longer")
    num_requests = sum(arrival.request.sampling.n for arrival in arrivals)
    num_inputs = sum(len(arrival.request.prompt_token_ids) for arrival in arrivals)
    num_outputs = sum(arrival.request.sampling.max_tokens or 0 for arrival in arrivals)
    # the time between two arrivals, not the number of them, is what was measured
    rate = num_requests * (len(arrivals) - 1) / len(arrivals) / duration_s
    num_each = len(arrivals)
    return Load(rate, round(num_inputs / num_each), max(1, round(num_outputs / num_each)))


def simulate_traffic(
    candidate: Candidate,
    traffic: Traffic,
    max_model_len: int,
    policy: PolicyName,
    pads: bool = False,
    progress: Progress | None = None,
    replicas: Replicas | None = None,
    phases: PhasePools | None = None,
    window: CountedWindow | None = None,
    fallback: FallbackEngines | None = None,
    max_waiting: int | None = None,
) -> Simulation:
    """A candidate's engine, or replicas of it, with the clients of `traffic`; `phases`, `window`,
    `fallback` and `max_waiting` as in `simulate_arrivals`.
    """
    clients = Clients(
        traffic.workload,
        random.Random(traffic.seed + 1),
        traffic.num_requests,
        max_model_len,
        closed_loop=traffic.arrivals == "closed-loop",
    )
    arrivals = clients.opening(traffic.times())
    return simulate_arrivals(
        candidate,
        arrivals,
        max_model_len,
        policy,
        follow=clients.follow,
        pads=pads,
        adapters=traffic.workload.adapters,
        progress=progress,
        replicas=replicas,
        phases=phases,
        window=window,
        seed=traffic.seed,
        fallback=fallback,
        max_waiting=max_waiting,
    )


def simulate_arrivals(
    candidate: Candidate,
    arrivals: Iterable[Arrival],
    max_model_len: int,
    policy: PolicyName,
    follow: Follow | None = None,
    pads: bool = False,
    adapters: AdapterMix | None = None,
    progress: Progress | None = None,
    replicas: Replicas | None = None,
    phases: PhasePools | None = None,
    inter_token_target_s: float | None = None,
    window: CountedWindow | None = None,
    seed: int = 0,
    fallback: FallbackEngines | None = None,
    max_waiting: int | None = None,
) -> Simulation:
    """A candidate's engine, or replicas of it, with these arrivals; `pads`, `progress` and `window`
    as in `simulate`. With `phases`, which takes no window, the candidate is an engine that only
    prefills. `seed`: Of which drafts are accepted. With `fallback`, requests that the engine
    refuses enter the chain; then there is one engine of each model. `max_waiting`: As of
    `SchedulerConfig`, for each engine.
    """
    rng = random.Random(seed)
    load_s = 0.0 if adapters is None else adapters.load_s

    def new_scheduler(of: Candidate, pool: KVBlockPool) -> GroupedScheduler:
        config = replace(
            of.scheduler_config,
            max_model_len=max_model_len,
            policy=policy,
            max_loras=None if adapters is None else adapters.max_loras,
            transfers_kv=phases is not None,
            max_waiting=max_waiting,
        )
        if inter_token_target_s is not None:
            config = replace(config, inter_token_target_s=inter_token_target_s)
        scheduler = GroupedScheduler(config, pool, make_policy(config), of.stage_costs)
        for adapter_id in () if adapters is None else adapter_ids(adapters):
            scheduler.register_adapter(adapter_id, 1)
        return scheduler

    def new_pool(of: Candidate) -> KVBlockPool:
        return KVBlockPool(of.num_blocks, BLOCK_SIZE, digest=quick_digest)

    def new_engine(of: Candidate, clock: VirtualClock) -> SimulatedEngine:
        scheduler = new_scheduler(of, new_pool(of))
        drafts = simulated_drafts(of, rng)
        return SimulatedEngine(
            clock, scheduler, of.costs, pads, load_s, drafts=drafts, stages=of.stages
        )

    if fallback is not None:
        clock = VirtualClock()
        named = {fallback.name: candidate, **fallback.models}
        return FallbackRun(
            arrivals,
            clock,
            {name: new_engine(of, clock) for name, of in named.items()},
            fallback.route,
            fallback.upstream,
            follow,
            progress,
            window,
        ).run()
    router = ROUTERS["fewest-requests" if replicas is None else replicas.router]()
    if phases is not None:
        prefill = ReplicaSpec(partial(new_engine, candidate), Role.PREFILL)
        decode = ReplicaSpec(partial(new_engine, phases.decode), Role.DECODE)
        return ReplicaRun(
            arrivals,
            [prefill] * phases.num_prefill + [decode] * phases.num_decode,
            router,
            rng,
            kv_link=phases.kv_link(candidate),
            follow=follow,
            progress=progress,
        ).run()
    if replicas is None or (replicas.count == 1 and not replicas.num_faults):
        return simulate(
            arrivals,
            new_scheduler(candidate, new_pool(candidate)),
            candidate.costs,
            follow,
            pads,
            adapter_load_s=load_s,
            progress=progress,
            drafts=simulated_drafts(candidate, rng),
            window=window,
            stages=candidate.stages,
        )
    arrivals = tuple(arrivals)
    until_s = max((arrival.at_s for arrival in arrivals), default=0.0) or _FAULTS_UNTIL_S
    fault_rng = random.Random(replicas.seed)
    return ReplicaRun(
        arrivals,
        [ReplicaSpec(partial(new_engine, candidate))] * replicas.count,
        router,
        fault_rng,
        random_faults(fault_rng, replicas.count, until_s, replicas.num_faults),
        follow=follow,
        progress=progress,
        window=window,
    ).run()
