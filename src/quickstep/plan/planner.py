"""`make_plan`: which split of the given devices serves a load within its targets, at what price.

All splits are sized and ordered by formulas (`plan.candidates`); the best are simulated with the
engine's own scheduler on a virtual clock, until enough are found. Fewer devices come first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from quickstep.config import PolicyName
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.policies import make_policy
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.errors import ConfigError
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.sizing import ElementBytes, MemoryRow, kv_bytes_per_token
from quickstep.plan.candidates import (
    BLOCK_SIZE,
    Candidate,
    DraftModel,
    EngineLimits,
    Load,
    LoRASizes,
    SteadyState,
    capacity,
    end_to_end,
    fit,
    splits,
    steady_state,
)
from quickstep.plan.engines import Evidence, over_range, slowed
from quickstep.plan.formulas import Split, whole_blocks
from quickstep.plan.hardware import Hardware
from quickstep.plan.placements import Placement, best_placement, placement_capacity
from quickstep.plan.traffic import simulate_arrivals, simulated_drafts
from quickstep.sim.arrivals import poisson
from quickstep.sim.grouped_scheduler import GroupedScheduler
from quickstep.sim.outcome import Arrival
from quickstep.sim.simulate import simulate
from quickstep.sim.summary import Summary, Targets, summarize
from quickstep.sim.workload import AdapterMix, adapter_ids
from quickstep.types import Request, SamplingParams

OVERLOAD = "overload"
_NUM_SHOWN = 3
_MAX_SIMULATED = 6
_MIN_REQUESTS = 120
_MAX_ROW_STEPS = 60_000  # of a simulation; a second or two
_WARMUP = 0.25  # part of the arrivals whose requests are not counted
_SLOWEST_TARGET_S = 0.2  # of the scheduler, without a target of TPOT


class PlanQuery(msgspec.Struct, frozen=True):
    """What the user requests.

    Attributes:
        model: Its name, for people.
        attainment: The part of the requests that must meet the targets.
        loras: AdapterMix of the requests; None without.
        drafts: What proposes tokens.
        divides_experts: Only splits with expert parallelism.
        measured: Step times of the model on one of the devices; None predicts them.
        evidence: Of an engine whose constants `hardware` has; None for hardware with others.
    """

    model: str
    spec: ModelSpec
    hardware: Hardware
    load: Load
    targets: Targets
    elements: ElementBytes
    attainment: float = 0.9
    limits: EngineLimits = EngineLimits()
    seed: int = 0
    loras: LoRASizes | None = None
    drafts: tuple[DraftModel, ...] = ()
    divides_experts: bool = False
    measured: CostModel | None = None
    evidence: Evidence | None = None

    def slowed(self, factor: float) -> PlanQuery:
        """The same, where each step takes so many times as long."""
        return replace(self, hardware=slowed(self.hardware, factor))

    def fit(self, split: Split, elements: ElementBytes | None = None) -> Candidate:
        """A split of the query's devices. Raises ConfigError."""
        elements = elements or self.elements
        sizes = self.load, self.limits, self.loras, self.drafts, self.measured
        return fit(self.spec, self.hardware, split, elements, *sizes)


class PrefillEngines(msgspec.Struct, frozen=True):
    """Of disaggregated phases: so many engines that only prefill; a pipeline is one."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_engines: int


class SimulatedOption(msgspec.Struct, frozen=True):
    """A simulated split, or a simulated placement of the phases on different engines.

    Attributes:
        formats: Of weights and KV.
        num_devices: Of all replicas.
        concurrency: Complete sequences that all KV caches together hold.
        usd_per_hour: Of all devices; None without a price.
        usd_per_million_output_tokens: At this load.
        capacity_per_s: Requests per second at which the means still meet the targets.
        binding: What most of a mean step is spent on; OVERLOAD if it cannot keep up.
        met: Whether enough requests met the targets.
        predicted: By simulation, of one engine: the load is divided among equal engines.
        num_engines: Replicas; a pipeline is one engine.
        prefill: Engines that only prefill; the other fields are of those that decode then, but
            `predicted` is of all. None if every engine does both (a mixed placement).
        handover_s: Mean seconds from the end of a prefill to the arrival of its KV.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    formats: str
    num_devices: int
    num_engines: int
    concurrency: int
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    capacity_per_s: float
    binding: str
    met: bool
    predicted: Summary
    prefill: PrefillEngines | None = None
    handover_s: float = 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Of all engines."""
        of_one = self.predicted.output_tokens_per_s
        return of_one if self.prefill is not None else of_one * self.num_engines

    @property
    def name(self) -> str:
        """For people."""
        if self.prefill is None:
            return str(self.split)
        of_prefill = self.prefill.tensor_parallel_size, self.prefill.pipeline_parallel_size
        of_decode = self.tensor_parallel_size, self.pipeline_parallel_size
        prefill = f"{self.prefill.num_engines}P {_sizes_text(*of_prefill)}"
        return f"{prefill}, {self.data_parallel_size}D {_sizes_text(*of_decode)}"

    @property
    def split(self) -> Split:
        """As one value."""
        return Split(
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.data_parallel_size,
            self.expert_parallel_size,
        )


def _sizes_text(tensor: int, pipeline: int) -> str:
    return f"TP {tensor}" if pipeline == 1 else f"TP {tensor} x PP {pipeline}"


class OptionRange(msgspec.Struct, frozen=True):
    """A split of which figures are known within a range: simulated with the steps of engines as
    slow and as fast as those of the evidence.

    Attributes:
        name: Of the split.
        low, high: By simulation, as `SimulatedOption.predicted`.
        low_capacity_per_s, high_capacity_per_s: As `SimulatedOption.capacity_per_s`.
        num_engines: As `SimulatedOption.num_engines`.
        met_part: The part of the range in which enough requests meet the targets.
    """

    name: str
    low: Summary
    high: Summary
    low_capacity_per_s: float
    high_capacity_per_s: float
    num_engines: int
    met_part: float


class PlanChange(msgspec.Struct, frozen=True):
    """One change to the best option, and its capacity in requests per second."""

    what: str
    capacity_per_s: float


class Plan(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        kv_bytes_per_token: On all devices of a replica together.
        kv_bytes_per_sequence: Of a complete request, in whole blocks.
        memory: Rows of one device of the best option.
        fits: For each format of weights, the fewest devices that hold it; None if too few. "stored"
            is that of a checkpoint that is quantized already, which has no other.
        options: The best first.
        change: The one change that raises the capacity most; None if none does.
        verdict: A sentence.
        evidence: Of an engine's constants; None for hardware with others.
        range: Of the first option whose engines do both phases; None without evidence.
    """

    model: str
    hardware: str
    load: Load
    targets: Targets
    attainment: float
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    memory: tuple[MemoryRow, ...]
    fits: dict[str, int | None]
    options: tuple[SimulatedOption, ...]
    change: PlanChange | None
    met: bool
    verdict: str
    evidence: Evidence | None = None
    range: OptionRange | None = None


class _Ranked(msgspec.Struct, frozen=True):
    candidate: Candidate
    state: SteadyState | None
    likely: bool  # the means meet the targets

    @property
    def order(self) -> tuple[object, ...]:
        split = self.candidate.split
        step_s = self.state.tpot_s if self.state else float("inf")
        return (not self.likely, split.num_devices, self.state is None, step_s, split)


def feasible(query: PlanQuery, elements: ElementBytes | None = None) -> Iterator[Candidate]:
    """All splits that fit, over 1 to all devices."""
    for num_devices in range(1, query.hardware.count + 1):
        for split in splits(query.spec, num_devices):
            if query.divides_experts and split.experts == 1:
                continue
            try:
                yield query.fit(split, elements)
            except ConfigError:
                continue


def make_plan(query: PlanQuery) -> Plan:
    """Answer a query.

    Raises:
        ConfigError: The model does not fit on the devices.
    """
    ranked = sorted(map(lambda one: _rank(query, one), feasible(query)), key=lambda one: one.order)
    if not ranked:
        raise ConfigError(_reason_for_none(query))
    options: list[tuple[SimulatedOption, Candidate]] = []
    for estimate in ranked[:_MAX_SIMULATED]:
        predicted = simulate_candidate(estimate.candidate, query)
        options.append(
            (_option(query, estimate.candidate, estimate.state, predicted), estimate.candidate)
        )
        if sum(option.met for option, _ in options) >= _NUM_SHOWN:
            break
    apart = _disaggregated(query, [estimate.candidate for estimate in ranked])
    if apart is not None:
        options.append(apart)
    options.sort(key=lambda pair: _preference(pair[0]))
    best, candidate = options[0]
    listed = [option for option, _ in options[:_NUM_SHOWN]]
    if apart is not None and apart[0] not in listed:
        listed.append(apart[0])
    per_token = kv_bytes_per_token(query.spec, query.elements.dtype, query.elements.kv_dtype)
    both = next(option for option, _ in options if option.prefill is None)
    return Plan(
        model=query.model,
        hardware=f"{query.hardware.count} x {query.hardware.device.label}",
        load=query.load,
        targets=query.targets,
        attainment=query.attainment,
        kv_bytes_per_token=per_token,
        kv_bytes_per_sequence=per_token * whole_blocks(query.load.num_tokens, BLOCK_SIZE),
        memory=candidate.memory.rows,
        fits={name: _fewest(query, name) for name in _formats(query)},
        options=tuple(listed),
        change=None if best.prefill else _best_change(query, candidate, best.capacity_per_s),
        met=best.met,
        verdict=_verdict(query, best, [estimate.candidate for estimate in ranked]),
        evidence=query.evidence,
        range=None if query.evidence is None else _range(query, query.evidence, both),
    )


def _range(query: PlanQuery, evidence: Evidence, option: SimulatedOption) -> OptionRange:
    """An option with steps as slow and as fast as published ones."""

    def made(factor: float) -> tuple[Summary, bool, float]:
        other = query.slowed(factor)
        candidate = other.fit(option.split)
        predicted = simulate_candidate(candidate, other)
        keeps_up = steady_state(candidate, query.load) is not None
        is_met = keeps_up and predicted.attainment >= query.attainment
        return predicted, is_met, capacity(candidate, query.load, query.targets)

    likely = option.predicted, option.met, option.capacity_per_s
    low, high, met_part = over_range(evidence, likely, made, lambda end: end[1])
    return OptionRange(option.name, low[0], high[0], low[2], high[2], option.num_engines, met_part)


def simulate_candidate(candidate: Candidate, query: PlanQuery) -> Summary:
    """One engine of a candidate with its part of the requests, which arrive at random."""
    rate = query.load.rate / candidate.split.replicas
    state = steady_state(candidate, query.load)
    inside = 3.0 * rate * end_to_end(state, query.load) if state else 0.0
    most = max(_MIN_REQUESTS, _MAX_ROW_STEPS // query.load.num_outputs)
    num_requests = min(max(_MIN_REQUESTS, round(inside)), most)
    loras = candidate.loras
    if candidate.drafts or loras is not None or candidate.stages.num_stages > 1:
        num_requests = max(_MIN_REQUESTS, num_requests // 3)  # each step is planned
    config = replace(
        candidate.scheduler_config,
        max_model_len=query.load.num_tokens,
        inter_token_target_s=query.targets.tpot_s or _SLOWEST_TARGET_S,
        max_loras=None if loras is None else loras.max_loras,
    )
    pool = KVBlockPool(candidate.num_blocks, BLOCK_SIZE, prefix_caching=False)
    scheduler = GroupedScheduler(config, pool, make_policy(config), candidate.stage_costs)
    adapters = None if loras is None else _adapters(loras)
    for name in () if adapters is None else adapter_ids(adapters):
        scheduler.register_adapter(name, 1)
    times = poisson(random.Random(query.seed), rate, num_requests)
    arrivals = _arrivals(query.load, times, adapters)
    drafts = simulated_drafts(candidate, random.Random(query.seed + 1))
    outcome = simulate(arrivals, scheduler, candidate.costs, drafts=drafts, stages=candidate.stages)
    warmup_s = times[int(_WARMUP * num_requests)]
    return summarize(outcome, candidate.num_blocks, query.targets, warmup_s)


def _disaggregated(
    query: PlanQuery, candidates: Sequence[Candidate]
) -> tuple[SimulatedOption, Candidate] | None:
    """The best placement with different engines for the phases, and its decode engine. None for one
    device or one output.
    """
    if query.load.num_outputs < 2:
        return None
    found = best_placement(candidates, query.load, query.targets, query.hardware.count)
    if found is None:
        return None
    placement, state = found
    decode, load = placement.decode, query.load
    most = _MAX_ROW_STEPS // load.num_outputs
    inside = round(3.0 * load.rate * end_to_end(state, load)) if state else 0
    num_requests = min(max(_MIN_REQUESTS, inside), max(_MIN_REQUESTS, most))
    num_stages = decode.stages.num_stages
    if decode.drafts or decode.loras is not None or num_stages > 1:
        num_requests = max(_MIN_REQUESTS, num_requests // 3)  # each step is planned
    adapters = None if decode.loras is None else _adapters(decode.loras)
    times = poisson(random.Random(query.seed), load.rate, num_requests)
    outcome = simulate_arrivals(
        placement.prefill,
        list(_arrivals(load, times, adapters)),
        load.num_tokens,
        PolicyName.MIXED,
        adapters=adapters,
        phases=placement.pools,
        inter_token_target_s=query.targets.tpot_s or _SLOWEST_TARGET_S,
        seed=query.seed + 1,
    )
    warmup_s = times[int(_WARMUP * num_requests)]
    predicted = summarize(outcome, decode.num_blocks, query.targets, warmup_s)
    handover_s = 0.0 if outcome.handovers is None else outcome.handovers.mean_s
    return _option(query, decode, state, predicted, placement, handover_s), decode


def _adapters(loras: LoRASizes) -> AdapterMix:
    """As many as fit, each in memory from the start."""
    return AdapterMix(loras.max_loras, max_loras=loras.max_loras, load_s=0.0)


def _arrivals(load: Load, times: Sequence[float], adapters: AdapterMix | None) -> Iterator[Arrival]:
    """Requests of the load, whose prompts have nothing in common; each has the next adapter."""
    sampling = SamplingParams(max_tokens=load.num_outputs, ignore_eos=True)
    names = ("",) if adapters is None else adapter_ids(adapters)
    for place, at_s in enumerate(times):
        first = place * load.num_inputs
        prompt = tuple(range(first, first + load.num_inputs))
        adapter_id = names[place % len(names)]
        yield Arrival(at_s, Request(str(place), prompt, sampling, adapter_id=adapter_id))


def _rank(query: PlanQuery, candidate: Candidate) -> _Ranked:
    state = steady_state(candidate, query.load)
    return _Ranked(candidate, state, state is not None and state.meets(query.targets))


def _option(
    query: PlanQuery,
    candidate: Candidate,
    state: SteadyState | None,
    predicted: Summary,
    placement: Placement | None = None,
    handover_s: float = 0.0,
) -> SimulatedOption:
    """A simulated candidate, or a simulated placement whose decode engines it is."""
    split, load, price = candidate.split, query.load, query.hardware.device.price
    if placement is None:
        num_devices, num_engines = split.num_devices, split.replicas
        capacity_per_s, prefill = capacity(candidate, load, query.targets), None
    else:
        num_devices = placement.num_devices
        num_engines = placement.num_decode
        capacity_per_s = placement_capacity(placement, load, query.targets)
        of_prefill = placement.prefill.split
        prefill = PrefillEngines(of_prefill.tensor, of_prefill.pipeline, placement.num_prefill)
    dollars = None if price is None else price.usd_per_hour * num_devices
    tokens_per_hour = load.rate * load.num_outputs * 3600.0
    return SimulatedOption(
        tensor_parallel_size=split.tensor,
        pipeline_parallel_size=split.pipeline,
        data_parallel_size=split.replicas if placement is None else placement.num_decode,
        expert_parallel_size=split.experts,
        formats=candidate.formats,
        num_devices=num_devices,
        num_engines=num_engines,
        concurrency=candidate.concurrency * num_engines,
        usd_per_hour=dollars,
        usd_per_million_output_tokens=None if dollars is None else dollars / tokens_per_hour * 1e6,
        capacity_per_s=capacity_per_s,
        binding=state.parts.binding if state else OVERLOAD,
        met=state is not None and predicted.attainment >= query.attainment,
        predicted=predicted,
        prefill=prefill,
        handover_s=handover_s,
    )


def _preference(option: SimulatedOption) -> tuple[object, ...]:
    """Options that meet the targets first, the cheapest of them; else those that come nearest. Of
    equally many devices, those that do both phases are the simpler ones.
    """
    if option.met:
        apart = option.prefill is not None
        return (False, option.num_devices, apart, option.predicted.tpot_s.p50)
    return (True, -option.predicted.attainment, -option.capacity_per_s)


def _formats(query: PlanQuery) -> tuple[str, ...]:
    """Of weights, the least compact first. A quantized checkpoint is not quantized again."""
    return ("none", "int8", "int4") if query.elements.weights is None else ("stored",)


def _fewest(query: PlanQuery, quantization: str) -> int | None:
    chosen = None if quantization in ("none", "stored") else quantization
    elements = replace(query.elements, quantization=chosen)
    return next((candidate.split.num_devices for candidate in feasible(query, elements)), None)


def _reason_for_none(query: PlanQuery) -> str:
    if query.load.num_tokens > query.spec.max_model_len:
        return (
            f"--input {query.load.num_inputs} and --output {query.load.num_outputs} are more than "
            f"the model's limit of {query.spec.max_model_len} tokens"
        )
    smaller = [
        name
        for name in _formats(query)[1:]
        if name != query.elements.quantization and _fewest(query, name) is not None
    ]
    way_out = f"--quantization {smaller[0]} does" if smaller else "more devices are needed"
    memory_gb = query.hardware.memory_bytes / 1e9
    return (
        f"{query.model} does not fit on {query.hardware.count} x {query.hardware.device.label} "
        f"({memory_gb:.1f} GB usable each) with one request of {query.load.num_tokens} tokens; "
        f"{way_out}"
    )


def _best_change(query: PlanQuery, candidate: Candidate, current: float) -> PlanChange | None:
    changes = list(_changes(query, candidate))
    best = max(changes, key=lambda one: one.capacity_per_s, default=None)
    return best if best is not None and best.capacity_per_s > 1.02 * current else None


def _changes(query: PlanQuery, candidate: Candidate) -> Iterator[PlanChange]:
    """One step in each direction: formats, a replica more, twice the tensor-parallel size. Measured
    step times are of this split and these formats only.
    """
    elements, split = candidate.elements, candidate.split
    more = ("one replica more", _resized(split, split.tensor, split.replicas + 1), elements)
    variants = [("--kv-cache-dtype int8", split, replace(elements, kv_dtype="int8"))]
    variants += [
        (f"--quantization {name}", split, replace(elements, quantization=name))
        for name in _formats(query)[1:]
    ]
    twice = _resized(split, 2 * split.tensor, split.replicas)
    variants += [more, ("twice the tensor-parallel size", twice, elements)]
    if query.measured is not None:
        variants = [more]
    for what, changed, formats in variants:
        try:
            other = query.fit(changed, formats)
        except ConfigError:
            continue
        yield PlanChange(what, capacity(other, query.load, query.targets))


def _resized(split: Split, tensor: int, replicas: int) -> Split:
    """Other sizes, with the experts divided over the same kind of group."""
    experts = split.experts
    if experts > 1:
        experts = tensor if experts == split.tensor else tensor * replicas
    return Split(tensor, split.pipeline, replicas, experts)


def _verdict(query: PlanQuery, best: SimulatedOption, candidates: Sequence[Candidate]) -> str:
    part = f"{best.predicted.attainment:.0%} of the requests are within the targets"
    if best.met:
        return f"{best.num_devices} of {query.hardware.count} devices meet the target: {part}"
    context = query.load.num_tokens
    least_s = min(
        candidate.costs.seconds(StepLoad(1, 1, context, context)) for candidate in candidates
    )
    if query.targets.tpot_s is not None and least_s > query.targets.tpot_s:
        return (
            f"no split of these devices meets the target: a single request takes at least "
            f"{1e3 * least_s:.2f} ms a token, the target is {1e3 * query.targets.tpot_s:g} ms"
        )
    prompt = StepLoad.of_span(0, query.load.num_inputs)
    least_s = min(candidate.costs.seconds(prompt) for candidate in candidates)
    if query.targets.ttft_s is not None and least_s > query.targets.ttft_s:
        return (
            f"no split of these devices meets the target: the prompt of a single request takes at "
            f"least {1e3 * least_s:.0f} ms, the target is {1e3 * query.targets.ttft_s:g} ms"
        )
    if best.binding == OVERLOAD:
        return (
            f"no split of these devices keeps up with {query.load.rate:g} requests/s; the best, "
            f"{best.name}, serves {best.capacity_per_s:.3g}"
        )
    return (
        f"no split of these devices meets the target: on the best, {best.name}, {part} "
        f"(needed: {query.attainment:.0%})"
    )
