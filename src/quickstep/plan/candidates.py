"""One way to run a model on some hardware: does it fit, how does it do under a load, by formulas.

A candidate is a split with formats of weights and KV. `fit` sizes it by the engine's own memory
plan. `steady_state` solves the balance of a constant load: in a step of t seconds rate x t requests
arrive, each with its prompt, and each decodes in (outputs - 1) steps. The planner orders candidates
by it, and simulates the best.

A pipeline of p stages computes p steps at the same time, each with 1 / p of the sequences, and a
step passes all stages (docs/design/0059). The formulas assume that all steps take equally long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from quickstep.config import CacheConfig, SchedulerConfig, SpeculationMethod
from quickstep.core.cost_model import CostModel, StepLoad
from quickstep.core.overhead import ScaledCosts, StageTimes
from quickstep.errors import ConfigError
from quickstep.model.adapters.lora_modules import adapter_bytes
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.sizing import (
    DraftSizes,
    ElementBytes,
    MemoryPlan,
    MemoryRow,
    elements_of_part,
    plan_memory,
    weights_of,
)
from quickstep.plan.formulas import (
    Split,
    accepted_tokens,
    attention_pairs,
    check_split,
    end_to_end_s,
    expert_splits,
    rank_spec,
    router_rest,
    whole_blocks,
)
from quickstep.plan.hardware import Hardware
from quickstep.plan.roofline import RooflineCostModel, StepParts
from quickstep.sim.summary import Targets

BLOCK_SIZE = CacheConfig().block_size
_MAX_ROUNDS = 100
_CLOSE = 1e-6
_HIGHEST_RATE = 1e6


class Load(msgspec.Struct, frozen=True):
    """Requests per second on all devices together, and tokens of a request."""

    rate: float
    num_inputs: int
    num_outputs: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a complete sequence."""
        return self.num_inputs + self.num_outputs


class EngineLimits(msgspec.Struct, frozen=True):
    """The engine's options of the same names."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = SchedulerConfig().max_num_batched_tokens
    num_speculative_tokens: int = 4


class LoRASizes(msgspec.Struct, frozen=True):
    """LoRA adapters, one of which each request has.

    Attributes:
        max_loras: As many are in memory.
        rank: Of each.
        targets: Names of the linear layers, such as `q_proj`; () for those of attention and MLP.
    """

    max_loras: int
    rank: int = 16
    targets: tuple[str, ...] = ()

    def bytes_each(self, spec: ModelSpec, itemsize: int) -> int:
        """Bytes of one adapter."""
        return adapter_bytes(spec, self.rank, itemsize, self.targets)


class DraftModel(msgspec.Struct, frozen=True):
    """A model that proposes tokens, next to the target on the same devices.

    Attributes:
        method: What it is; each of several has another one.
        sizes: What it needs of the memory of one device that has all of it.
        acceptance: The probability that a token is accepted after those before it were.
    """

    method: SpeculationMethod
    sizes: DraftSizes
    acceptance: float

    def split(self, split: Split) -> Split:
        """How it is divided over the devices of a group: a part of every head, where those divide;
        EAGLE layers, Medusa heads and quantized checkpoints are complete on each.
        """
        spec, complete = self.sizes.spec, Split()
        if spec is None or self.sizes.elements.weights is not None or spec.parameter_count:
            return complete
        try:
            return _checked(spec, Split(split.tensor))
        except ConfigError:
            return complete

    def on_device(self, split: Split) -> DraftSizes:
        """What it needs of a device."""
        spec, own = self.sizes.spec, self.split(split)
        return self.sizes if spec is None else replace(self.sizes, spec=rank_spec(spec, own))

    def seconds(self, hardware: Hardware, split: Split) -> Callable[[StepLoad], float]:
        """Predicts its steps, in each of which it computes a draft of each row."""
        spec, elements = self.sizes.spec, self.sizes.elements
        if spec is not None:
            return RooflineCostModel(spec, elements, hardware, self.split(split)).seconds
        return partial(_head_s, self.sizes, hardware)


class PlannedDraft(msgspec.Struct, frozen=True):
    """A draft model of a candidate. `seconds` predicts its steps."""

    model: DraftModel
    seconds: Callable[[StepLoad], float]

    def num_tokens(self, limits: EngineLimits) -> int:
        """The most that it proposes for a row."""
        most, num_heads = limits.num_speculative_tokens, self.model.sizes.num_heads
        return min(num_heads, most) if num_heads else most

    def call_s(self, decode: StepLoad, prefill: StepLoad, num_drafts: int) -> float:
        """Seconds next to a step: one small step for each token that it proposes, of which the
        first computes the prompts too.
        """
        if not num_drafts:
            return 0.0
        rows = decode.num_rows
        context = decode.num_kv_tokens // rows if rows else 0
        small = StepLoad(rows, rows, rows * context, rows * context)
        first = small if self.model.sizes.spec is None else small + prefill
        return self.seconds(first) + (num_drafts - 1) * self.seconds(small)


def _head_s(sizes: DraftSizes, hardware: Hardware, load: StepLoad) -> float:
    """Of one Medusa head."""
    read_s = sizes.weight_bytes / sizes.num_heads / hardware.bytes_per_s
    flops = 2.0 * sizes.num_parameters / sizes.num_heads * load.num_rows
    return max(read_s, flops / hardware.flops_per_s(None))


class Candidate(msgspec.Struct, frozen=True):
    """A split that fits.

    Attributes:
        memory: Of one device.
        num_blocks: KV blocks of one engine.
        concurrency: Complete sequences of the load that its KV cache holds, at most
            `EngineLimits.max_num_seqs`.
        costs: Step times of one engine, of all of its stages together.
        drafts: What proposes tokens.
        stages: How a step passes them.
    """

    spec: ModelSpec
    hardware: Hardware
    split: Split
    elements: ElementBytes
    limits: EngineLimits
    memory: MemoryPlan
    num_blocks: int
    concurrency: int
    costs: RooflineCostModel
    loras: LoRASizes | None = None
    drafts: tuple[PlannedDraft, ...] = ()
    stages: StageTimes = StageTimes()

    @property
    def num_parallel_steps(self) -> int:
        """How many steps all replicas compute at the same time."""
        return self.split.replicas * self.stages.num_stages

    @property
    def stage_costs(self) -> CostModel:
        """Seconds of a step in the mean stage, as a scheduler measures them."""
        num_stages = self.stages.num_stages
        return self.costs if num_stages == 1 else ScaledCosts(self.costs, 1.0 / num_stages)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """Of one engine."""
        return SchedulerConfig(
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.spec.max_model_len,
            num_speculative_tokens=self.limits.num_speculative_tokens if self.drafts else 0,
            num_stages=self.stages.num_stages,
        )

    @property
    def formats(self) -> str:
        """Formats of weights and KV."""
        weights = self.elements.quantization or f"{8 * self.elements.dtype}-bit"
        if self.elements.weights is not None:
            weights = "as stored"
        kv = "" if self.elements.kv_dtype == "auto" else f", KV {self.elements.kv_dtype}"
        return f"{weights}{kv}"


class SteadyState(msgspec.Struct, frozen=True):
    """An engine under a constant load.

    Attributes:
        step_s: Seconds of the mean step, with the steps of a draft model.
        num_rows: Sequences that decode.
        ttft_s: Half a step, and the prefill in a step with the decode rows.
        parts: Of the mean step.
        tokens_per_step: That a decode row generates; more than 1 with drafts.
    """

    step_s: float
    num_rows: float
    ttft_s: float
    parts: StepParts
    tokens_per_step: float = 1.0

    @property
    def tpot_s(self) -> float:
        """Seconds per output token."""
        return self.step_s / self.tokens_per_step

    def meets(self, targets: Targets) -> bool:
        """Whether the means are within the targets."""
        in_time = targets.ttft_s is None or self.ttft_s <= targets.ttft_s
        return in_time and (targets.tpot_s is None or self.tpot_s <= targets.tpot_s)


def _checked(spec: ModelSpec, split: Split) -> Split:
    check_split(spec, split)
    return split


def splits(spec: ModelSpec, num_devices: int) -> list[Split]:
    """All splits over exactly so many devices that the model's sizes allow; those of a mixture also
    with divided experts.
    """
    found = []
    for tensor in range(1, num_devices + 1):
        for pipeline in range(1, num_devices // tensor + 1):
            if num_devices % (tensor * pipeline):
                continue
            split = Split(tensor, pipeline, num_devices // (tensor * pipeline))
            if spec.moe is not None:
                found += expert_splits(spec, split)
            try:
                found.append(_checked(spec, split))
            except ConfigError:
                continue
    return found


def fit(
    spec: ModelSpec,
    hardware: Hardware,
    split: Split,
    elements: ElementBytes,
    load: Load,
    limits: EngineLimits,
    loras: LoRASizes | None = None,
    drafts: Sequence[DraftModel] = (),
    measured: CostModel | None = None,
    stages: StageTimes | None = None,
) -> Candidate:
    """Size one device by the engine's own memory plan. `measured` are step times of one device;
    `stages` those of a pipeline on it, for which `measured` is of all stages together.

    Raises:
        ConfigError: The split is impossible or does not fit.
    """
    check_split(spec, split)
    if load.num_tokens > spec.max_model_len:
        raise ConfigError(
            f"--input {load.num_inputs} and --output {load.num_outputs} are more than the model's "
            f"limit of {spec.max_model_len} tokens"
        )
    scheduler = SchedulerConfig(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=load.num_tokens,
    )
    rank = rank_spec(spec, split)
    bytes_each = 0 if loras is None else loras.bytes_each(rank, elements.dtype)
    num_loras = 0 if loras is None else loras.max_loras
    held = replace(elements_of_part(elements, spec, rank), adapters=num_loras * bytes_each)
    if split.experts > 1:
        weights = weights_of(rank, held) + router_rest(spec, split) * elements.dtype
        held = replace(held, weights=weights)
    sizes = [draft.on_device(split) for draft in drafts]
    memory = plan_memory(
        rank, held, CacheConfig(), scheduler, hardware.memory_bytes, None, drafts=sizes
    )
    if split.experts > 1:
        memory = _with_experts_named(memory, spec, split)
    num_blocks = memory.num_blocks
    sequence_blocks = whole_blocks(load.num_tokens, BLOCK_SIZE) // BLOCK_SIZE
    concurrency = min(limits.max_num_seqs, num_blocks // sequence_blocks)
    if not concurrency:
        raise ConfigError(
            f"{split} leaves room for {memory.num_blocks * BLOCK_SIZE} tokens of KV, a request "
            f"has {load.num_tokens}"
        )
    return Candidate(
        spec,
        hardware,
        split,
        elements,
        limits,
        memory,
        num_blocks,
        concurrency,
        RooflineCostModel(
            spec,
            elements,
            hardware,
            split,
            bytes_each,
            num_loras,
            measured if split.tensor * split.pipeline == split.experts == 1 else None,
        ),
        loras,
        tuple([PlannedDraft(draft, draft.seconds(hardware, split)) for draft in drafts]),
        stages or StageTimes.equal(split.pipeline),
    )


def _with_experts_named(memory: MemoryPlan, spec: ModelSpec, split: Split) -> MemoryPlan:
    """The row of the weights says which part of the experts they have."""
    assert spec.moe is not None, "the split was checked"
    num_experts = spec.moe.num_experts // split.experts
    detail = f"{num_experts} of {spec.moe.num_experts} experts in each layer"
    rows = tuple(
        MemoryRow(row.label, row.num_bytes, detail) if row.label == "weights" else row
        for row in memory.rows
    )
    return replace(memory, rows=rows)


def steady_state(candidate: Candidate, load: Load, prefills: bool = True) -> SteadyState | None:
    """The balance under a load; None if the engine cannot keep up. Drafts are those of the model
    that pays most, if one does.
    """
    states = [
        _steady_state(candidate, load, draft, prefills) for draft in (None, *candidate.drafts)
    ]
    found = [state for state in states if state is not None]
    return min(found, key=lambda one: one.tpot_s, default=None)


def decode_state(candidate: Candidate, load: Load) -> SteadyState | None:
    """The balance of an engine that only decodes; its `ttft_s` is 0."""
    state = steady_state(candidate, load, prefills=False)
    return None if state is None else replace(state, ttft_s=0.0)


def prompt_s(candidate: Candidate, load: Load) -> float:
    """Seconds of a prompt in a step of its own, with those of draft models."""
    prompt = StepLoad.of_span(0, load.num_inputs)
    if candidate.loras is not None:
        prompt = replace(prompt, num_adapter_rows=1)
    drafts_s = sum(
        draft.seconds(prompt) for draft in candidate.drafts if draft.model.sizes.spec is not None
    )
    return candidate.costs.seconds(prompt) + drafts_s


def _steady_state(
    candidate: Candidate, load: Load, draft: PlannedDraft | None, prefills: bool
) -> SteadyState | None:
    rate = load.rate / candidate.num_parallel_steps
    costs = candidate.costs
    num_drafts, tokens_per_step = 0, 1.0
    if draft is not None:
        num_drafts = draft.num_tokens(candidate.limits)
        tokens_per_step = accepted_tokens(num_drafts, draft.model.acceptance)
    step_s = 0.0
    for _ in range(_MAX_ROUNDS):
        num_arrivals = rate * step_s
        decode = _decodes(load, num_arrivals / tokens_per_step, num_drafts, candidate.loras)
        prefill = _prefills(load, num_arrivals, candidate.loras) if prefills else StepLoad()
        if decode.num_rows * candidate.stages.num_stages > candidate.concurrency:
            return None
        if prefill.num_tokens + decode.num_tokens > candidate.limits.max_num_batched_tokens:
            return None
        parts = costs.parts(decode + prefill)
        seconds = parts.seconds
        if draft is not None:
            seconds += draft.call_s(decode, prefill, num_drafts)
        if abs(seconds - step_s) <= _CLOSE * step_s:
            break
        step_s = seconds
    else:
        return None
    prompt = StepLoad.of_span(0, load.num_inputs)
    ttft_s = 0.5 * step_s + costs.seconds(decode + prompt)
    if draft is not None:
        ttft_s += draft.call_s(decode, prompt, num_drafts)
    num_rows = rate * step_s * (load.num_outputs - 1) / tokens_per_step
    return SteadyState(step_s, num_rows, ttft_s, parts, tokens_per_step)


def _decodes(load: Load, num_arrivals: float, num_drafts: int, loras: LoRASizes | None) -> StepLoad:
    """The decode rows of a step during which so many requests arrive, with their drafts."""
    rows = max(1, round(num_arrivals * (load.num_outputs - 1)))
    context = load.num_inputs + load.num_outputs // 2
    width = 1 + num_drafts
    return StepLoad(
        rows * width,
        rows,
        rows * (context + num_drafts),
        rows * width * context,
        num_logits_rows=rows * width,
        num_adapter_rows=0 if loras is None else rows,
    )


def _prefills(load: Load, num_arrivals: float, loras: LoRASizes | None) -> StepLoad:
    """The prompts of a step during which so many requests arrive."""
    num_tokens, num_rows = round(num_arrivals * load.num_inputs), math.ceil(num_arrivals)
    return StepLoad(
        num_tokens,
        num_rows,
        num_tokens,
        round(num_arrivals * attention_pairs(load.num_inputs)),
        num_logits_rows=num_rows,
        num_adapter_rows=0 if loras is None else num_rows,
    )


def capacity(candidate: Candidate, load: Load, targets: Targets) -> float:
    """The highest rate whose steady state meets the targets, in requests per second; 0 if none."""

    def holds(rate: float) -> bool:
        state = steady_state(candidate, Load(rate, load.num_inputs, load.num_outputs))
        return state is not None and state.meets(targets)

    return highest_rate(holds)


def highest_rate(holds: Callable[[float], bool]) -> float:
    """The highest rate per second up to which something holds; 0 if it never does."""
    low, high = 0.0, 1e-3
    while high < _HIGHEST_RATE and holds(high):
        low, high = high, 2.0 * high
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def end_to_end(state: SteadyState, load: Load) -> float:
    """Seconds of a request."""
    return end_to_end_s(state.ttft_s, state.tpot_s, load.num_outputs)
