"""Step times from first principles, for hardware that is not here: a `CostModel` for the simulator.

Matrix products and attention run one after the other, and each takes the longer of its operations
and its bytes; transfers between devices and a fixed overhead are added. The fractions of the data
sheet's figures and the host's times are `Achieved`: those of the hardware table, or on GPUs those
of an engine (`plan.engines`). Nothing else is fitted.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import astuple, replace

from quickstep.core.cost_model import CostModel, Prediction, StepLoad, UnitPrices
from quickstep.model.decoder_spec import ModelSpec, MoESpec
from quickstep.model.sizing import ElementBytes, elements_of_part, kv_bytes_per_token, weights_of
from quickstep.plan.formulas import (
    Split,
    all_reduce_s,
    all_to_all_s,
    attention_flops,
    experts_read,
    fullest_share,
    head_parameters,
    layer_parameters,
    layer_windows,
    rank_spec,
    read_fraction,
)
from quickstep.plan.hardware import Hardware


class StepParts(msgspec.Struct, frozen=True):
    """The seconds of a step by cause; the larger of reading and computing is what counts.

    Attributes:
        weights_read_s, matrix_compute_s: Of the matrix products.
        kv_read_s, attention_compute_s: Of attention.
        transfer_s: All-reduces of tensor parallelism, all-to-alls of experts on other replicas, and
            hand-overs between pipeline stages.
        overhead_s: Of every step.
    """

    weights_read_s: float
    matrix_compute_s: float
    kv_read_s: float
    attention_compute_s: float
    transfer_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        """The step."""
        matrix_s = max(self.weights_read_s, self.matrix_compute_s)
        attention_s = max(self.kv_read_s, self.attention_compute_s)
        return matrix_s + attention_s + self.transfer_s + self.overhead_s

    @property
    def binding(self) -> str:
        """What most of the step is spent on."""
        matrix = "memory bandwidth (weights)"
        if self.matrix_compute_s > self.weights_read_s:
            matrix = "compute (matrix products)"
        attention = "memory bandwidth (KV)"
        if self.attention_compute_s > self.kv_read_s:
            attention = "compute (attention)"
        named = {
            matrix: max(self.weights_read_s, self.matrix_compute_s),
            attention: max(self.kv_read_s, self.attention_compute_s),
            "transfers between devices": self.transfer_s,
            "overhead of a step": self.overhead_s,
        }
        return max(named, key=lambda name: named[name])


class StepWork(msgspec.Struct, frozen=True):
    """Operations of a step on one device, and the bytes that it reads of weights and KV."""

    matrix_flops: float
    attention_flops: float
    weight_bytes: float
    kv_bytes: float


class RooflineCostModel:
    """Seconds of a step of one replica: of all its pipeline stages, one after the other.

    It learns nothing. `Split.replicas` has no effect on a step unless replicas share experts: all
    are taken to have equal steps then, and tokens to be sent to all experts alike. `adapter_bytes`:
    what a LoRA adapter has on one device; as many are read as rows have one, and at most
    `max_loras`. `measured`: step times of this machine, which replace the predicted ones; the
    causes keep their proportions.
    """

    def __init__(
        self,
        spec: ModelSpec,
        elements: ElementBytes,
        hardware: Hardware,
        split: Split,
        adapter_bytes: int = 0,
        max_loras: int | None = None,
        measured: CostModel | None = None,
    ) -> None:
        self._measured = measured
        self._adapter_bytes = adapter_bytes
        self._max_loras = max_loras
        rank = rank_spec(spec, replace(split, pipeline=1))
        # of the hardware, once: the simulator asks twice a step
        self._bytes_per_s = hardware.bytes_per_s
        self._kv_bytes_per_s = hardware.kv_bytes_per_s
        achieved = hardware.achieved
        self._overhead_s = achieved.step_overhead_s + spec.num_layers * achieved.layer_overhead_s
        self._row_overhead_s = achieved.row_overhead_s
        self._products = 1.0 if spec.moe is None else achieved.experts
        self._half_tokens = achieved.half_tokens
        self._has_transfers = max(split.tensor, split.pipeline, split.experts) > 1
        self._windows = layer_windows(rank)
        self._has_windows = any(window is not None for window, _ in self._windows)
        self._pair_flops = attention_flops(rank, 1)
        self._hardware = hardware
        self._split = split
        self._flops_per_s = self._products * hardware.flops_per_s(elements.quantization)
        self._attention_flops_per_s = hardware.flops_per_s(None)
        self._activation_bytes = spec.hidden_size * elements.dtype  # of one token
        self._kv_bytes = kv_bytes_per_token(rank, elements.dtype, elements.kv_dtype)
        self._layer_parameters = layer_parameters(rank)
        self._without_experts = layer_parameters(rank, 0.0)
        self._head_parameters = head_parameters(rank)
        self._experts = spec.moe
        self._expert_parameters = 0.0  # of one expert in all layers, its part on a device
        if rank.moe is not None:
            of_experts = self._layer_parameters - self._without_experts
            self._expert_parameters = of_experts / rank.moe.num_experts
        self._num_sparse = sum(layer.sparse for layer in spec.layers)
        # all-reduces of a step: experts on other replicas are reached by all-to-all instead
        self._num_shares = 2 * spec.num_layers
        if split.experts > split.tensor:
            self._num_shares -= self._num_sparse
        held = weights_of(rank, elements_of_part(elements, spec, rank))
        matrices = self._layer_parameters + self._head_parameters * (1 if rank.tied else 2)
        self._bytes_per_parameter = held / matrices

    def seconds(self, load: StepLoad) -> float:
        """Predicted duration of a step."""
        if self._measured is not None:
            return self._measured.seconds(load)
        return self._predicted(load).seconds

    def usual_seconds(self, load: StepLoad) -> float:
        """The same: the machine of a simulation has no pace."""
        return self.seconds(load)

    def unit_prices(self, step: StepLoad) -> UnitPrices:
        """What a token computes, and what limits attention in the step, by its unit. Reading the
        weights is what the step costs once.
        """
        if self._measured is not None:
            return self._measured.unit_prices(step)
        chosen = self._layer_parameters
        if self._experts is not None:
            chosen, _ = self._with_experts(self._experts, step.num_tokens)
        parts = self._predicted(step)
        reads = parts.kv_read_s > parts.attention_compute_s
        empty_s = self._transfer_s(0)
        head_s = 2.0 * self._head_parameters / self._flops_per_s
        return UnitPrices(
            token=2.0 * chosen / self._flops_per_s + self._transfer_s(1) - empty_s,
            row=head_s + self._row_overhead_s,
            kv_token=parts.kv_read_s / step.num_kv_tokens if reads else 0.0,
            pair=0.0 if reads else parts.attention_compute_s / max(1, step.num_pairs),
            score=head_s,
            adapter_row=self._adapter_bytes / self._bytes_per_s,
        )

    def predict(self, load: StepLoad) -> Prediction:
        """The same: nothing is measured, so nothing is outside of it."""
        return Prediction(self.seconds(load), is_extrapolated=False)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Nothing: the model is not fitted."""

    def parts(self, load: StepLoad) -> StepParts:
        """The step's seconds by cause."""
        parts = self._predicted(load)
        if self._measured is None:
            return parts
        scale = self._measured.seconds(load) / parts.seconds if parts.seconds > 0.0 else 0.0
        return StepParts(*(scale * seconds for seconds in astuple(parts)))

    def work(self, load: StepLoad) -> StepWork:
        """What the step computes and reads, whatever its device reaches."""
        num_logits = load.num_rows + load.num_scored
        chosen = read = self._layer_parameters
        if self._experts is not None:
            chosen, read = self._with_experts(self._experts, load.num_tokens)
        read += self._head_parameters
        seen = 1.0
        if self._has_windows:
            context = load.num_kv_tokens / load.num_rows if load.num_rows else 0.0
            seen = read_fraction(self._windows, context)
        weight_bytes_read = read * self._bytes_per_parameter
        num_adapters = load.num_adapter_rows
        if self._max_loras is not None:
            num_adapters = min(num_adapters, self._max_loras)
        weight_bytes_read += self._adapter_bytes * num_adapters
        return StepWork(
            matrix_flops=2.0 * (chosen * load.num_tokens + self._head_parameters * num_logits),
            attention_flops=self._pair_flops * load.num_pairs * seen,
            weight_bytes=weight_bytes_read,
            kv_bytes=self._kv_bytes * load.num_kv_tokens * seen,
        )

    def _predicted(self, load: StepLoad) -> StepParts:
        work = self.work(load)
        matrix_flops = work.matrix_flops * self._dilution(load.num_tokens)
        return StepParts(
            weights_read_s=work.weight_bytes / (self._products * self._bytes_per_s),
            matrix_compute_s=matrix_flops / self._flops_per_s,
            kv_read_s=work.kv_bytes / self._kv_bytes_per_s,
            attention_compute_s=work.attention_flops / self._attention_flops_per_s,
            transfer_s=self._transfer_s(load.num_tokens),
            overhead_s=self._overhead_s + self._row_overhead_s * load.num_rows,
        )

    def _dilution(self, num_tokens: int) -> float:
        """How many times as long products take per token as with many tokens: at most twice."""
        most = max(num_tokens, self._half_tokens)
        return 1.0 + self._half_tokens / most if most else 1.0

    def _with_experts(self, experts: MoESpec, num_tokens: int) -> tuple[float, float]:
        """Parameters of the layers that a token of this engine meets, and that a device reads."""
        split = self._split
        num_sharing = max(1, split.experts // split.tensor)  # replicas whose tokens come here
        count, per_token = experts.num_experts, experts.experts_per_token
        share = fullest_share(per_token * num_tokens * num_sharing, split.experts)
        # a device has complete experts for 1 / experts of the choices, or a part of all experts
        part = num_sharing / split.experts if split.experts > 1 else 1.0
        chosen = self._expert_parameters * per_token * part * share
        reached = experts_read(count, per_token, num_tokens * num_sharing) / split.experts
        read = self._expert_parameters * reached
        return self._without_experts + chosen, self._without_experts + read

    def _transfer_s(self, num_tokens: int) -> float:
        if not self._has_transfers:
            return 0.0
        num_bytes = float(num_tokens * self._activation_bytes)
        latency_s = self._hardware.link.latency_us * 1e-6
        bytes_per_s = self._hardware.link_bytes_per_s
        shared = all_reduce_s(num_bytes, self._split.tensor, bytes_per_s, latency_s)
        handed = (self._split.pipeline - 1) * (latency_s + num_bytes / bytes_per_s)
        seconds = self._num_shares * shared + handed
        if self._experts is not None and self._split.experts > self._split.tensor:
            # to the experts and back; then each device of the group needs all tokens again
            sent = num_bytes / self._split.tensor * self._experts.experts_per_token
            there = all_to_all_s(sent, self._split.experts, bytes_per_s, latency_s)
            gathered = all_to_all_s(num_bytes, self._split.tensor, bytes_per_s, latency_s)
            seconds += self._num_sparse * (2.0 * there + gathered)
        return seconds
