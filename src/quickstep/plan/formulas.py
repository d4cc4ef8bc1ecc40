"""The formulas of planning, with their units: memory per device, operations, rooflines, transfers.

Everything is a pure function of a `ModelSpec` and plain numbers. Bytes of weights, KV and
activations are those of `model.sizing`, which the engine allocates by: a device of a parallel
replica is sized as a smaller model (`rank_spec`). The planner, its cost model and `--explain` use
these functions and have no figures of their own.

Letters: T tokens, L layers, H query heads, K kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec
from msgspec.structs import replace

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.tensor_schema import layer_tensors
from quickstep.model.decoder_spec import ModelSpec

Windows = tuple[tuple[int | None, int], ...]  # (window, number of layers)


class Split(msgspec.Struct, frozen=True, order=True):
    """How a model is divided among devices.

    Attributes:
        tensor: Devices that share every layer (TP).
        pipeline: Stages of consecutive layers (PP).
        replicas: Complete copies, each of `tensor` x `pipeline` devices (DP).
        experts: Devices that divide the experts of a layer, each a complete expert (EP): 1, or the
            devices of a tensor-parallel group, or those of all replicas. Replicas that share
            experts are complete otherwise, and their steps begin together.
    """

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1
    experts: int = 1

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return self.tensor * self.pipeline * self.replicas

    def __str__(self) -> str:
        if self.experts > 1 and self.pipeline == 1:
            return f"TP {self.tensor} x DP {self.replicas} x EP {self.experts}"
        text = f"TP {self.tensor} x PP {self.pipeline} x DP {self.replicas}"
        return f"{text} x EP {self.experts}" if self.experts > 1 else text


# -- parallel splits ------------------------------------------------------------------------------


def check_split(spec: ModelSpec, split: Split) -> None:
    """Refuse a split that the model's sizes do not allow. Raises ConfigError."""
    tensor, pipeline = split.tensor, split.pipeline
    if min(tensor, pipeline, split.replicas) < 1:
        raise ConfigError(f"{split} is not possible: each must be at least 1")
    sizes = [("query heads", spec.num_heads)]
    if spec.latent is None:
        sizes.append(("kv heads", spec.num_kv_heads))
    if not all(layer.sparse for layer in spec.layers):
        sizes.append(("columns of the feed-forward part", spec.intermediate_size))
    if spec.moe is not None and split.experts == 1:
        sizes.append(("columns of an expert", spec.moe.intermediate_size))
    for what, size in sizes:
        if size % tensor:
            raise ConfigError(
                f"a tensor-parallel size of {tensor} does not divide the model's {size} {what}"
            )
    if pipeline > spec.num_layers:
        raise ConfigError(f"{pipeline} pipeline stages are more than {spec.num_layers} layers")
    if split.experts > 1:
        _check_experts(spec, split)


def _check_experts(spec: ModelSpec, split: Split) -> None:
    if spec.moe is None:
        raise ConfigError("expert parallelism divides experts, and this model has none")
    if split.experts not in (split.tensor, split.tensor * split.replicas):
        raise ConfigError(
            f"{split} is not possible: experts are divided over the {split.tensor} devices of a "
            f"tensor-parallel group, or over the {split.tensor * split.replicas} of all replicas"
        )
    if spec.moe.num_experts % split.experts:
        raise ConfigError(
            f"an expert-parallel size of {split.experts} does not divide the model's "
            f"{spec.moe.num_experts} experts"
        )


def expert_splits(spec: ModelSpec, split: Split) -> list[Split]:
    """The same with the experts divided, in the ways that the model's sizes allow."""
    sizes = {split.tensor, split.tensor * split.replicas} - {1}
    found = []
    for size in sorted(sizes):
        try:
            check_split(spec, replace(split, experts=size))
        except ConfigError:
            continue
        found.append(replace(split, experts=size))
    return found


def rank_spec(spec: ModelSpec, split: Split) -> ModelSpec:
    """The part of the model on one device, as a model: the largest stage, a part of the heads (a
    latent is complete on every device).

    A first or last stage holds the embedding or the output projection, which is counted once. With
    expert parallelism the router of that model is smaller than the device's, which is complete:
    `router_rest` has the difference.
    """
    tensor = split.tensor
    num_layers = -(-spec.num_layers // split.pipeline)
    moe = spec.moe
    if moe is not None and split.experts > 1:
        moe = replace(moe, num_experts=moe.num_experts // split.experts)
    elif moe is not None:
        moe = replace(moe, intermediate_size=moe.intermediate_size // tensor)
    return replace(
        spec,
        num_layers=num_layers,
        layers=spec.layers[:num_layers],
        num_heads=spec.num_heads // tensor,
        num_kv_heads=1 if spec.latent is not None else spec.num_kv_heads // tensor,
        intermediate_size=-(-spec.intermediate_size // tensor),
        vocab_size=-(-spec.vocab_size // tensor),
        tied=spec.tied or split.pipeline > 1,
        moe=moe,
    )


def router_rest(spec: ModelSpec, split: Split) -> int:
    """Parameters of the routers that a device has and its `rank_spec` has not."""
    if spec.moe is None:
        return 0
    rank = rank_spec(spec, split)
    num_rows = spec.moe.num_experts - spec.moe.num_experts // split.experts
    row = spec.hidden_size + spec.moe.biases
    return num_rows * row * sum(layer.sparse for layer in rank.layers)


# -- memory ---------------------------------------------------------------------------------------


def whole_blocks(num_tokens: int, block_size: int) -> int:
    """Tokens that a sequence occupies: it is rounded up to complete blocks."""
    return -(-num_tokens // block_size) * block_size


# -- operations -----------------------------------------------------------------------------------


def layer_parameters(spec: ModelSpec, num_experts: float | None = None) -> float:
    """Parameters of all layers' matrices, with `num_experts` of each mixture (None: all)."""
    kinds = Counter(layer.sparse for layer in spec.layers)
    return sum(
        count
        * _matrices_of(spec, [layer.sparse for layer in spec.layers].index(sparse), num_experts)
        for sparse, count in kinds.items()
    )


def _matrices_of(spec: ModelSpec, index: int, num_experts: float | None) -> float:
    marker = f".{spec.naming.experts}."
    fraction = 1.0
    if spec.moe is not None and num_experts is not None:
        fraction = num_experts / spec.moe.num_experts
    return sum(
        math.prod(shape) * (fraction if marker in name else 1.0)
        for name, shape in layer_tensors(spec, "", index).items()
        if len(shape) > 1
    )


def head_parameters(spec: ModelSpec) -> int:
    """Parameters of the output projection: V x hidden size."""
    return spec.vocab_size * spec.hidden_size


def active_parameters(spec: ModelSpec) -> float:
    """Parameters that multiply a token: the embedding is looked up, and of a mixture only the
    chosen experts count.
    """
    chosen = None if spec.moe is None else float(spec.moe.experts_per_token)
    return layer_parameters(spec, chosen) + head_parameters(spec)


def experts_read(num_experts: int, experts_per_token: int, num_tokens: float) -> float:
    """Expected experts that at least one of T tokens is sent to, if all are equally likely:
    E (1 - (1 - k / E)^T).
    """
    unread = math.pow(1.0 - experts_per_token / num_experts, num_tokens)
    return num_experts * (1.0 - unread)


def accepted_tokens(num_drafts: int, acceptance: float) -> float:
    """Tokens of a step that checks k drafts, each accepted with the probability p after those
    before it: 1 + p + ... + p^k. All k + 1 positions are computed.
    """
    return sum(acceptance**place for place in range(num_drafts + 1))


def fullest_share(num_choices: float, num_devices: int) -> float:
    """How many times the mean the fullest of n devices gets, if each choice of an expert is equally
    likely to be on each: about 1 + sqrt(2 ln n / mean), at most all.
    """
    if num_devices == 1 or num_choices <= 0:
        return 1.0
    mean = num_choices / num_devices
    return min(float(num_devices), 1.0 + math.sqrt(2.0 * math.log(num_devices) / mean))


def layer_windows(spec: ModelSpec) -> Windows:
    """How many layers have which window."""
    return tuple(Counter(layer.window for layer in spec.layers).items())


def seen_tokens(windows: Windows, context: float) -> float:
    """Positions that a token attends to, summed over layers: the context, or a layer's window."""
    return sum(
        count * (context if window is None else min(context, float(window)))
        for window, count in windows
    )


def read_fraction(windows: Windows, context: float) -> float:
    """The part of a sequence's KV that a decode step reads; windows make it less than 1."""
    if context <= 0 or all(window is None for window, _ in windows):
        return 1.0
    return seen_tokens(windows, context) / (context * sum(count for _, count in windows))


def attention_flops(spec: ModelSpec, num_pairs: float) -> float:
    """4 H D per layer and pair of a token and a position: q·k, and the weighted sum of values. Over
    latents, 2 H times the sizes of what is kept and of the vector in it.
    """
    return 2.0 * spec.num_layers * spec.num_heads * spec.pair_size * num_pairs


def attention_pairs(num_tokens: int) -> int:
    """Pairs of a causal prefill of T tokens: T (T + 1) / 2."""
    return num_tokens * (num_tokens + 1) // 2


def flops_per_token(spec: ModelSpec, context: float = 0.0) -> float:
    """2 x active parameters + 4 H D per layer and position of the context."""
    heads = 2.0 * spec.num_heads * spec.pair_size
    return 2.0 * active_parameters(spec) + heads * seen_tokens(layer_windows(spec), context)


# -- time -----------------------------------------------------------------------------------------


def balance_tokens(flops_per_s: float, bytes_per_s: float, bytes_per_parameter: float) -> float:
    """Tokens of a step at which computing takes as long as reading the weights; below it, a step
    is bound by memory: each parameter costs its bytes once, and 2 operations a token.
    """
    return flops_per_s / bytes_per_s * bytes_per_parameter / 2.0


def all_reduce_s(
    num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """A ring's 2 (n - 1) / n of the bytes over each link, and the latency."""
    if num_ranks == 1:
        return 0.0
    return latency_s + 2.0 * (num_ranks - 1) / num_ranks * num_bytes / bytes_per_s


def all_to_all_s(
    num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float = 0.0
) -> float:
    """Each device sends (n - 1) / n of its bytes to the others, and the latency."""
    if num_ranks == 1:
        return 0.0
    return latency_s + (num_ranks - 1) / num_ranks * num_bytes / bytes_per_s


def end_to_end_s(ttft_s: float, tpot_s: float, num_outputs: int) -> float:
    """TTFT + (outputs - 1) x TPOT: the first token comes out of the prefill."""
    return ttft_s + (num_outputs - 1) * tpot_s


def time_per_output_token_s(first_s: float, last_s: float, num_outputs: int) -> float:
    """(last - first) / (outputs - 1); 0 for a single output."""
    return (last_s - first_s) / (num_outputs - 1) if num_outputs > 1 else 0.0


def concurrency(requests_per_s: float, end_to_end_seconds: float) -> float:
    """Little's law: requests in the system = rate x time in it."""
    return requests_per_s * end_to_end_seconds
