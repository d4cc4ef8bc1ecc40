"""One way to run a model on some hardware: does it fit, how does it do under a load, by formulas.

A candidate is a split with formats of weights and KV. `fit` sizes it by the engine's own memory
plan. `steady_state` solves the balance of a constant load: in a step of t seconds rate x t requests
arrive, each with its prompt, and each decodes in (outputs - 1) steps. The planner orders candidates
by it, and simulates the best.

A pipeline of p stages works as p engines that take turns: each has 1 / p of the requests and of the
KV cache, and its step passes all stages. That assumes that their steps take equally long.
"""

from __future__ import annotations

import math

import msgspec

from quickstep.config import CacheConfig, SchedulerConfig
from quickstep.core.cost_model import StepLoad
from quickstep.errors import ConfigError
from quickstep.model.decoder_spec import ModelSpec
from quickstep.model.sizing import ElementBytes, MemoryPlan, plan_memory
from quickstep.plan.formulas import (
    Split,
    attention_pairs,
    check_split,
    end_to_end_s,
    rank_spec,
    whole_blocks,
)
from quickstep.plan.hardware import Hardware
from quickstep.plan.roofline import RooflineCostModel, StepParts
from quickstep.sim.summary import Targets

__all__ = [
    "BLOCK_SIZE",
    "Candidate",
    "Load",
    "SteadyState",
    "StepLimits",
    "capacity",
    "end_to_end",
    "fit",
    "splits",
    "steady_state",
]

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


class StepLimits(msgspec.Struct, frozen=True):
    """The engine's options of the same names."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


class Candidate(msgspec.Struct, frozen=True):
    """A split that fits.

    Attributes:
        memory: Of one device.
        num_blocks: KV blocks of one engine (see above).
        concurrency: Complete sequences of the load that its KV cache holds, at most
            `StepLimits.max_num_seqs`.
        costs: Step times of one engine.
    """

    spec: ModelSpec
    hardware: Hardware
    split: Split
    elements: ElementBytes
    limits: StepLimits
    memory: MemoryPlan
    num_blocks: int
    concurrency: int
    costs: RooflineCostModel

    @property
    def num_engines(self) -> int:
        """Engines that divide the requests."""
        return self.split.replicas * self.split.pipeline

    @property
    def usd_per_hour(self) -> float | None:
        """All devices of the split; None without a price."""
        price = self.hardware.device.price
        return None if price is None else price.usd_per_hour * self.split.num_devices

    @property
    def formats(self) -> str:
        """Formats of weights and KV."""
        weights = self.elements.quantization or f"{8 * self.elements.dtype}-bit"
        kv = "" if self.elements.kv_dtype == "auto" else f", KV {self.elements.kv_dtype}"
        return f"{weights}{kv}"


class SteadyState(msgspec.Struct, frozen=True):
    """An engine under a constant load.

    Attributes:
        step_s: Seconds of the mean step, which is the TPOT.
        num_rows: Sequences that decode.
        ttft_s: Half a step, and the prefill in a step with the decode rows.
        parts: Of the mean step.
    """

    step_s: float
    num_rows: float
    ttft_s: float
    parts: StepParts

    def meets(self, targets: Targets) -> bool:
        """Whether the means are within the targets."""
        in_time = targets.ttft_s is None or self.ttft_s <= targets.ttft_s
        return in_time and (targets.tpot_s is None or self.step_s <= targets.tpot_s)


def splits(spec: ModelSpec, num_devices: int) -> list[Split]:
    """All splits over exactly so many devices that the model's sizes allow."""
    found = []
    for tensor in range(1, num_devices + 1):
        for pipeline in range(1, num_devices // tensor + 1):
            if num_devices % (tensor * pipeline):
                continue
            split = Split(tensor, pipeline, num_devices // (tensor * pipeline))
            try:
                check_split(spec, split)
            except ConfigError:
                continue
            found.append(split)
    return found


def fit(
    spec: ModelSpec,
    hardware: Hardware,
    split: Split,
    elements: ElementBytes,
    load: Load,
    limits: StepLimits,
    adapter_bytes: int = 0,
) -> Candidate:
    """Size one device; `adapter_bytes` are those of one LoRA adapter, `elements.adapters` those of
    all that are in memory.

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
        max_num_seqs=limits.max_num_seqs * split.pipeline,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=load.num_tokens,
    )
    rank = rank_spec(spec, split)
    memory = plan_memory(rank, elements, CacheConfig(), scheduler, hardware.memory_bytes, None)
    num_blocks = memory.num_blocks // split.pipeline
    sequence_blocks = whole_blocks(load.num_tokens, BLOCK_SIZE) // BLOCK_SIZE
    concurrency = min(limits.max_num_seqs, num_blocks // sequence_blocks)
    if not concurrency:
        raise ConfigError(
            f"{split} leaves room for {memory.num_blocks * BLOCK_SIZE} tokens of KV, a request "
            f"has {load.num_tokens}"
        )
    costs = RooflineCostModel(spec, elements, hardware, split, adapter_bytes)
    return Candidate(
        spec, hardware, split, elements, limits, memory, num_blocks, concurrency, costs
    )


def steady_state(candidate: Candidate, load: Load) -> SteadyState | None:
    """The balance under a load; None if the engine cannot keep up."""
    rate = load.rate / candidate.num_engines
    costs = candidate.costs
    step_s = 0.0
    for _ in range(_MAX_ROUNDS):
        decode, prefill = _mean_step(load, rate * step_s)
        if decode.num_rows > candidate.concurrency:
            return None
        if prefill.num_tokens + decode.num_tokens > candidate.limits.max_num_batched_tokens:
            return None
        parts = costs.parts(decode + prefill)
        if abs(parts.seconds - step_s) <= _CLOSE * step_s:
            break
        step_s = parts.seconds
    else:
        return None
    prompt = StepLoad.of_span(0, load.num_inputs)
    ttft_s = 0.5 * step_s + costs.seconds(decode + prompt)
    return SteadyState(step_s, rate * step_s * (load.num_outputs - 1), ttft_s, parts)


def _mean_step(load: Load, num_arrivals: float) -> tuple[StepLoad, StepLoad]:
    """The decode rows and the prefill of a step during which so many requests arrive."""
    num_rows = max(1, round(num_arrivals * (load.num_outputs - 1)))
    context = load.num_inputs + load.num_outputs // 2
    decode = StepLoad(num_rows, num_rows, num_rows * context, num_rows * context)
    num_tokens = round(num_arrivals * load.num_inputs)
    prefill = StepLoad(
        num_tokens,
        math.ceil(num_arrivals),
        num_tokens,
        round(num_arrivals * attention_pairs(load.num_inputs)),
    )
    return decode, prefill


def capacity(candidate: Candidate, load: Load, targets: Targets) -> float:
    """The highest rate whose steady state meets the targets, in requests per second; 0 if none."""

    def holds(rate: float) -> bool:
        state = steady_state(candidate, Load(rate, load.num_inputs, load.num_outputs))
        return state is not None and state.meets(targets)

    low, high = 0.0, 1e-3
    while high < _HIGHEST_RATE and holds(high):
        low, high = high, 2.0 * high
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def end_to_end(state: SteadyState, load: Load) -> float:
    """Seconds of a request."""
    return end_to_end_s(state.ttft_s, state.step_s, load.num_outputs)
