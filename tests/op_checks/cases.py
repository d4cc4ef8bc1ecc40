"""Seeded inputs for every op: what an implementation is checked on.

Used by `agreement` (distance from float64) and `invariance` (same bits in every batch), for the
reference and for every other implementation alike.
A case holds the inputs that have one entry per token (`tokens`, token first) apart from the
others (`fixed`), so that a check can pick tokens, and `bind` turns an op into a function of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, product
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from op_checks.attention_cases import (
    DTYPES,
    AttentionCase,
    attention_cases,
    latent_attention_cases,
    stored_heads,
)
from op_checks.case_inputs import CaseInputs, label
from op_checks.experts_cases import experts_inputs, experts_lora_inputs
from op_checks.latent_cases import keys_inputs, queries_inputs, values_inputs, write_inputs
from op_checks.quantized_cases import quantized_linear_inputs, quantized_rows_inputs
from op_checks.stream_cases import STREAM_INPUTS, stream_op
from quickstep.ops.reference.elementary import activation, add_layer_norm, layer_norm
from quickstep.ops.reference.experts import experts as reference_experts
from quickstep.ops.reference.experts import route as reference_route
from quickstep.ops.table import (
    WITHOUT_GATE,
    ExpertLoRA,
    ExpertWeights,
    LoRAAdapter,
    LoRAMapping,
    LoRAPart,
    OpTable,
    Routing,
    RoutingRule,
)
from quickstep.ops.weights import LinearWeight, QuantizedWeight

__all__ = ["CPU_OPS", "DTYPES", "OPS", "AttentionCase", "Case", "bind", "cases"]

KV_DTYPES = (*DTYPES, torch.int8, torch.uint8, torch.float8_e4m3fn)


class Case(msgspec.Struct, frozen=True):
    """Inputs of an op that treats each token by itself.

    `tokens` then `fixed` are the op's arguments, but for the linear ops, whose `fixed` is
    (weight, bias), and for gated_linear the kind of activation too, the embedding of packed rows,
    whose weight is not packed yet, write_kv, whose
    `tokens` are (k, v, slot_mapping) and `fixed` (k_cache, v_cache), lora, whose `tokens` are
    (y, x or token ids, adapter of each token or -1) and `fixed` the parts of each adapter, and the
    experts, whose `tokens` are (x, experts, weights) and `fixed` (activation, the experts' matrices
    and biases); experts_lora has also the adapter of each token, and the parts of each adapter by
    matrix. The `tokens` of rotary_write_kv are (q, k, v, cos, sin, slot_mapping), and `fixed` is
    (interleaved, k_cache, v_cache).
    """

    op: str
    name: str
    tokens: tuple[Tensor, ...]
    fixed: tuple[object, ...]


def bind(ops: OpTable, case: Case) -> Callable[..., tuple[Tensor, ...]]:
    """The op as a function of `case.tokens` alone; every output has the token axis first."""
    fixed = case.fixed
    if case.op in ("linear", "quantized_linear"):
        packed = _pack(ops, *fixed)  # type: ignore[arg-type]
        return lambda x: (ops.linear(x, packed),)
    if case.op == "gated_linear":
        gates_and_ups, kind = _pack(ops, *fixed[:2]), fixed[2]  # type: ignore[arg-type]
        return lambda x: (_gated_linear(ops, x, gates_and_ups, kind),)  # type: ignore[arg-type]
    if case.op in ("packed_rows", "quantized_rows"):
        weight, dtype = fixed
        rows = _pack(ops, weight, None)  # type: ignore[arg-type]
        return lambda token_ids: (ops.embedding(token_ids, rows, dtype),)  # type: ignore[arg-type]
    if case.op == "lora":
        adapters = [ops.pack_lora([(), parts]) for parts in fixed]  # type: ignore[list-item]
        return lambda y, x, ids: _add_lora(ops, y, x, ids, adapters)
    if case.op in ("experts", "experts_lora"):
        return _bind_experts(ops, case.fixed)
    if case.op == "route":
        return partial(_route, ops, fixed)
    if case.op == "rotary_write_kv":
        return partial(_rotate_and_write, ops, fixed)
    if case.op == "write_kv":
        return lambda k, v, slots: _write_and_read(ops, (k, v), slots, fixed)
    if case.op.startswith("latent_"):
        return _bind_latent(ops, case.op, case.fixed)
    if case.op in STREAM_INPUTS:
        return _as_tuple(stream_op(ops, case.op), fixed)
    if case.op == "logits":
        weight, divisor, softcap = fixed
        head = _pack(ops, weight, None)  # type: ignore[arg-type]
        return lambda x: (ops.logits(x, head, divisor, softcap, None),)  # type: ignore[arg-type]
    functions: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
        "embedding": ops.embedding,
        "rms_norm": ops.rms_norm,
        "add_rms_norm": ops.add_rms_norm,
        "rotary": ops.rotary,
        "gated_activation": ops.gated_activation,
        "layer_norm": ops.layer_norm or layer_norm,
        "add_layer_norm": ops.add_layer_norm or add_layer_norm,
        "activation": partial(_activation, ops),
        # what a captured step does beside the ops; torch's are their definition
        "add": torch.add if ops.steps is None else ops.steps.add,
        "scale": torch.mul if ops.steps is None else ops.steps.scale,
    }
    return _as_tuple(functions[case.op], fixed)


def _as_tuple(
    function: Callable[..., Tensor | tuple[Tensor, ...]], fixed: tuple[object, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    def call(*tokens: Tensor) -> tuple[Tensor, ...]:
        result = function(*tokens, *fixed)
        return result if isinstance(result, tuple) else (result,)

    return call


def _bind_latent(ops: OpTable, op: str, fixed: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    latent = ops.latent
    assert latent is not None
    if op == "latent_keys":
        weight, eps, interleaved = fixed
        return lambda x, cos, sin: (latent.keys(x, weight, eps, cos, sin, interleaved),)
    if op == "latent_queries":
        packed, interleaved = latent.pack_heads(fixed[0]), fixed[1]
        return lambda q, cos, sin: (latent.queries(q, packed, cos, sin, interleaved),)
    if op == "latent_values":
        packed = latent.pack_heads(fixed[0])
        return lambda x: (latent.values(x, packed),)
    return lambda k, slots: _write_and_read(ops, (k, None), slots, (*fixed, None))


def _pack(ops: OpTable, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> LinearWeight:
    if isinstance(weight, QuantizedWeight):
        return ops.pack_quantized(weight, bias)
    return ops.pack_linear(weight, bias)


def _gated_linear(ops: OpTable, x: Tensor, weight: LinearWeight, kind: str) -> Tensor:
    if ops.gated_linear is not None:
        return ops.gated_linear(x, weight, kind)
    return ops.gated_activation(ops.linear(x, weight), kind)


def _activation(ops: OpTable, *arguments: Any) -> Tensor:
    """Of x, or of x and a factor, and a kind."""
    x, *factor, kind = arguments
    return (ops.activation or activation)(x, factor[0] if factor else None, kind)


def _add_lora(
    ops: OpTable, y: Tensor, x: Tensor, ids: Tensor, adapters: Sequence[LoRAAdapter]
) -> tuple[Tensor, ...]:
    """Into a copy of y; the adapters' second matrix is the one that is changed."""
    changed = y.clone()
    groups = [(one, (ids == index).nonzero().flatten()) for index, one in enumerate(adapters)]
    ops.add_lora_(changed, x, 1, LoRAMapping(tuple(group for group in groups if len(group[1]))))
    untouched = ids < 0
    same = changed[untouched].nan_to_num() == y[untouched].nan_to_num()
    assert bool(same.all()), "a token without adapter changed"
    return (changed,)


def _bind_experts(ops: OpTable, fixed: tuple[Any, ...]) -> Callable[..., tuple[Tensor, ...]]:
    activation, matrices, *rest = fixed
    gate_up, down_proj = (tuple(_pack(ops, *one) for one in every) for every in matrices)
    data = None if ops.pack_experts is None else ops.pack_experts(gate_up, down_proj)
    # cases without a gate are those of weighted inputs too
    weights = ExpertWeights(gate_up, down_proj, data, activation in WITHOUT_GATE)
    run = partial(reference_experts, ops) if data is None or ops.experts is None else ops.experts
    if ops.experts is not None and data is None:  # only e4m3 on a CPU has no kernel
        weights_of = [weight for every in matrices for weight, _ in every]
        assert ops.steps is not None and any(getattr(one, "is_float8", False) for one in weights_of)
    adapters = [ops.pack_lora([(), *modules]) for modules in rest[0]] if rest else []

    def call(x: Tensor, chosen: Tensor, shares: Tensor, *ids: Tensor) -> tuple[Tensor, ...]:
        lora = None
        if ids:
            groups = [(one, (ids[0] == n).nonzero().flatten()) for n, one in enumerate(adapters)]
            mapping = LoRAMapping(tuple(group for group in groups if len(group[1])))
            lora = ExpertLoRA(mapping, first_module=1)
        return (run(x, Routing(chosen, shares), weights, activation, lora, None),)

    return call


def _route(ops: OpTable, fixed: tuple[Any, ...], scores: Tensor) -> tuple[Tensor, ...]:
    """The weight of every expert, 0 of those that were not chosen, and who was chosen."""
    routing = (ops.route or reference_route)(scores, *fixed)
    weights = torch.zeros_like(scores, dtype=torch.float32)
    return weights.scatter(1, routing.chosen, routing.weights), routing.chosen


def _write_and_read(
    ops: OpTable, kv: tuple[Tensor, Tensor | None], slots: Tensor, caches: Sequence[object]
) -> tuple[Tensor, ...]:
    """Write into copies of the caches, check that other slots are untouched, read the written."""
    written = []
    before = [cache for cache in caches if isinstance(cache, Tensor)]
    after = [cache.clone() for cache in before]
    values = None if kv[1] is None else after[1]
    ops.write_kv(kv[0], kv[1], after[0], values, slots)
    for old, new in zip(before, after, strict=True):
        written.append(new.flatten(0, 1)[slots])
        restored = new.clone()
        restored.view(-1, *new.shape[2:])[slots] = old.flatten(0, 1)[slots]
        assert torch.equal(restored.float(), old.float()), "a slot outside slot_mapping changed"
    return tuple(written)


def _rotate_and_write(ops: OpTable, fixed: tuple[Any, ...], *tokens: Tensor) -> tuple[Tensor, ...]:
    """Into copies of the caches: rotated queries, and what was written."""
    q, k, v, cos, sin, slots = tokens
    interleaved, caches = fixed[0], [cache.clone() for cache in fixed[1:]]
    if ops.rotary_write_kv is not None:
        rotated = ops.rotary_write_kv(q, k, v, cos, sin, interleaved, *caches, slots)
    else:
        rotated = ops.rotary(q, cos, sin, interleaved)
        ops.write_kv(ops.rotary(k, cos, sin, interleaved), v, *caches, slots)
    return (rotated, *(cache.flatten(0, 1)[slots] for cache in caches))


def cases(
    ops: Sequence[str] | None = None, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Case | AttentionCase]:
    """All cases of the named ops (None: of all), in each dtype; always the same values."""
    for name in OPS if ops is None else ops:
        for dtype in dtypes:
            yield from (OPS | CPU_OPS)[name](dtype)


def _linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    # (T, C, N, bias): one row, tile and vector edges, odd sizes, K far above a chunk
    shapes = [
        (1, 32, 32, False),
        (3, 64, 96, True),
        (17, 77, 33, True),
        (37, 896, 1152, True),
        (33, 2048, 130, False),
        (5, 4864, 65, False),
        (18, 8192, 48, False),
        (4, 64, 5003, False),
        (130, 128, 256, True),
        (0, 64, 32, True),
    ]
    for num_tokens, width, outputs, has_bias in shapes:
        name = label("linear", dtype, num_tokens, width, outputs)
        source = CaseInputs(name, dtype)
        weight = source.normal(outputs, width, scale=width**-0.5)
        bias = source.normal(outputs) if has_bias else None
        yield Case("linear", name, (source.normal(num_tokens, width),), (weight, bias))
    yield from _spread_linear_cases(dtype)


def _spread_linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Activations with one channel far above the others, as language models have them."""
    name = label("linear", dtype, "outlier")
    source = CaseInputs(name, dtype)
    x = source.normal(9, 512)
    x[:, 7] *= 60.0
    yield Case("linear", name, (x,), (source.normal(64, 512, scale=0.04), None))
    name = label("linear", dtype, "zero")
    zero = torch.zeros(5, 96, dtype=dtype)
    yield Case("linear", name, (zero,), (CaseInputs(name, dtype).normal(40, 96), None))


def _lora_cases(dtype: torch.dtype) -> Iterator[Case]:
    # (T, C, N, by adapter: its parts' (rank, first output, outputs))
    shapes = [
        (1, 32, 32, [[(1, 0, 32)]]),
        (9, 77, 96, [[(8, 0, 33), (3, 33, 30)], [(16, 63, 33)], []]),
        (37, 896, 1152, [[(16, 0, 896), (16, 896, 128), (16, 1024, 128)], [(64, 0, 896)]]),
        (5, 2049, 70, [[(256, 0, 70)], [(5, 2, 67)]]),
        (0, 64, 32, [[(4, 0, 32)]]),
    ]
    for num_tokens, width, outputs, adapters in shapes:
        name = label("lora", dtype, num_tokens, width, outputs)
        source = CaseInputs(name, dtype)
        fixed = tuple(
            tuple(
                LoRAPart(
                    source.normal(rank, width, scale=width**-0.5),
                    source.normal(size, rank, scale=rank**-0.5),
                    first,
                    0.5 + index,
                )
                for rank, first, size in parts
            )
            for index, parts in enumerate(adapters)
        )
        ids = torch.arange(num_tokens) * 7 % (len(adapters) + 1) - 1
        if num_tokens == 1:
            ids = torch.zeros(1, dtype=torch.int64)
        tokens = (source.normal(num_tokens, outputs), source.normal(num_tokens, width), ids)
        yield Case("lora", name, tokens, fixed)
    yield from _embedding_lora_cases(dtype)
    yield from _other_lora_cases(dtype)


def _other_lora_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Biases, complete matrices, and int8 weights, of linear layers and of embeddings."""
    num_tokens, width, outputs = 11, 77, 139
    for kind, is_embedding, is_int8 in product(
        ("low-rank", "complete", "bias"), (False, True), (False, True)
    ):
        name = label("lora", dtype, kind, *["embedding"] * is_embedding, *["int8"] * is_int8)
        source = CaseInputs(name, dtype)
        adapters = []
        for rank in (5, 24):
            rank = {"low-rank": rank, "complete": 107, "bias": 0}[kind]
            shape = (width, rank) if is_embedding else (rank, width)
            a, b = source.normal(*shape, scale=0.1), source.normal(107, rank, scale=0.2)
            scales = None
            if is_int8:
                a, b = (one.float().mul(400).clamp(-127, 127).to(torch.int8) for one in (a, b))
                scales = source.normal(rank).float().abs() * 1e-4 + 1e-4
            bias = None if kind == "low-rank" else source.normal(107).float()
            b_or_none = None if kind == "complete" else b
            scale = 1.0 if kind == "complete" else 0.7
            part = LoRAPart(a, b_or_none, 32, scale, is_embedding, scales, bias)
            adapters.append((part,))
        ids = torch.arange(num_tokens) * 7 % 3 - 1
        x = (
            torch.arange(num_tokens) * 13 % width
            if is_embedding
            else source.normal(num_tokens, width)
        )
        yield Case("lora", name, (source.normal(num_tokens, outputs), x, ids), tuple(adapters))


def _embedding_lora_cases(dtype: torch.dtype) -> Iterator[Case]:
    for num_tokens, vocabulary, outputs, ranks in ((1, 40, 32, [3]), (37, 301, 77, [8, 17, 64])):
        name = label("lora", dtype, num_tokens, vocabulary, outputs, "embedding")
        source = CaseInputs(name, dtype)
        fixed = tuple(
            (
                LoRAPart(
                    source.normal(vocabulary, rank),
                    source.normal(outputs, rank, scale=rank**-0.5),
                    0,
                    0.5 + rank,
                    is_embedding=True,
                ),
            )
            for rank in ranks
        )
        ids = torch.arange(num_tokens) * 7 % (len(ranks) + 1) - int(num_tokens > 1)
        token_ids = source.integers(0, vocabulary, num_tokens)
        yield Case("lora", name, (source.normal(num_tokens, outputs), token_ids, ids), fixed)


def _embedding_cases(dtype: torch.dtype) -> Iterator[Case]:
    for num_tokens, vocabulary, width in ((1, 10, 32), (45, 300, 77)):
        name = label("embedding", dtype, num_tokens, vocabulary, width)
        source = CaseInputs(name, dtype)
        token_ids = source.permutation(vocabulary)[:num_tokens]
        weight = source.normal(vocabulary, width)
        yield Case("embedding", name, (token_ids,), (weight, dtype))


def _packed_rows_cases(dtype: torch.dtype) -> Iterator[Case]:
    for num_tokens, vocabulary, width in ((1, 10, 32), (45, 300, 77), (0, 20, 16)):
        name = label("packed_rows", dtype, num_tokens, vocabulary, width)
        source = CaseInputs(name, dtype)
        token_ids = source.permutation(vocabulary)[:num_tokens]
        # multiples of 2**-6, which the reference's packing does not round
        weight = source.integers(-511, 512, vocabulary, width).float() / 64
        yield Case("packed_rows", name, (token_ids,), (weight.to(dtype), dtype))


def _quantized_linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in quantized_linear_inputs(dtype):
        yield Case("quantized_linear", *inputs)


def _quantized_rows_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in quantized_rows_inputs(dtype):
        yield Case("quantized_rows", *inputs)


_NORM_SHAPES: tuple[tuple[tuple[int, ...], float], ...] = (
    ((1, 32), 0.0),
    ((19, 77), 1.0),
    ((37, 896), 0.0),
    ((7, 8192), 0.0),
    ((0, 64), 0.0),
    ((21, 3, 64), 0.0),  # QK norm: [T, H, D]
)


def _experts_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in experts_inputs(dtype):
        yield Case("experts", *inputs)


def _experts_lora_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in experts_lora_inputs(dtype):
        yield Case("experts_lora", *inputs)


def _route_cases(dtype: torch.dtype) -> Iterator[Case]:
    # (T, experts, experts per token, normalised): also more tokens than one program plans
    for num_tokens, num_experts, per_token, normalise in (
        (1, 8, 2, True),
        (19, 128, 8, True),
        (37, 60, 4, False),
        (300, 8, 2, True),
        (5, 1, 1, True),
        (0, 8, 2, True),
    ):
        name = label("route", dtype, num_tokens, num_experts, per_token)
        scores = CaseInputs(name, dtype).normal(num_tokens, num_experts, scale=3.0)
        yield Case("route", name, (scores,), (RoutingRule(per_token, normalise), None))
    name = label("route", dtype, "ties")
    ties = CaseInputs(name, dtype).integers(-1, 2, 12, 32).to(dtype)
    ties[0] = 0.0
    yield Case("route", name, (ties,), (RoutingRule(4, True), None))
    name = label("route", dtype, "extremes")
    extremes = CaseInputs(name, dtype).normal(6, 16, scale=400.0)
    extremes[1, 3] = -torch.inf
    extremes[2, 5:] = -30_000.0
    yield Case("route", name, (extremes,), (RoutingRule(6, False), None))
    for rule, num_experts in (
        (RoutingRule(3, True, sigmoid=True), 8),
        (RoutingRule(4, True, sigmoid=True, num_groups=4, groups_per_token=2, scale=2.5), 16),
        (RoutingRule(2, False, num_groups=6, groups_per_token=3), 6),
        (RoutingRule(8, False, sigmoid=True, scale=0.5), 160),
    ):
        name = label("route", dtype, num_experts, rule.num_groups, "sigmoid" * rule.sigmoid)
        inputs = CaseInputs(name, dtype)
        bias = inputs.normal(num_experts, scale=0.3).float()
        scores = inputs.normal(23, num_experts, scale=2.0)
        yield Case("route", name, (scores,), (rule, bias))
        factors = bias + 1.5
        yield Case("route", f"{name} factors", (scores,), (rule, None, factors))
        scores = inputs.integers(-1, 2, 9, num_experts).to(dtype)  # ties
        yield Case("route", f"{name} ties", (scores,), (rule, None))


def _rms_norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape, offset in _NORM_SHAPES:
        name = label("rms_norm", dtype, *shape)
        source = CaseInputs(name, dtype)
        fixed = (source.normal(shape[-1]), 1e-6, offset)
        yield Case("rms_norm", name, (source.normal(*shape, scale=3.0),), fixed)
    name = label("rms_norm", dtype, "zero")
    fixed = (CaseInputs(name, dtype).normal(64), 1e-5, 0.0)
    yield Case("rms_norm", name, (torch.zeros(3, 64, dtype=dtype),), fixed)


def _add_rms_norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape, offset in _NORM_SHAPES[:-1]:
        name = label("add_rms_norm", dtype, *shape)
        source = CaseInputs(name, dtype)
        tokens = (source.normal(*shape), source.normal(*shape, scale=4.0))
        yield Case("add_rms_norm", name, tokens, (source.normal(shape[-1]), 1e-5, offset))


def _layer_norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    for (shape, offset), has_bias in zip(_NORM_SHAPES, cycle((True, False)), strict=False):
        name = label("layer_norm", dtype, *shape, "bias" * has_bias)
        source = CaseInputs(name, dtype)
        bias = source.normal(shape[-1]) if has_bias else None
        fixed = (source.normal(*shape[1:]), bias, 1e-5, offset)
        yield Case("layer_norm", name, (source.normal(*shape, scale=3.0) + 1.0,), fixed)


def _add_layer_norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape, offset in _NORM_SHAPES[:-1]:
        name = label("add_layer_norm", dtype, *shape)
        source = CaseInputs(name, dtype)
        tokens = (source.normal(*shape), source.normal(*shape, scale=4.0))
        weights = (source.normal(shape[-1]), source.normal(shape[-1]))
        yield Case("add_layer_norm", name, tokens, (*weights, 1e-5, offset))


def _activation_cases(dtype: torch.dtype) -> Iterator[Case]:
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        for num_tokens, width in ((1, 7), (19, 77), (0, 32)):
            name = label("activation", dtype, kind, num_tokens, width)
            source = CaseInputs(name, dtype)
            x, wide = (
                source.normal(num_tokens, width, scale=3.0),
                source.normal(num_tokens, 3 * width),
            )
            yield Case("activation", name, (x,), (kind,))
            if kind != "relu2":
                factor = wide[:, width : 2 * width]
                yield Case("activation", f"{name} factor", (x, factor), (kind,))


def _rotary_cases(dtype: torch.dtype) -> Iterator[Case]:
    # (T, H, D, D_rot): whole, partial, odd half, one token
    for num_tokens, heads, size, rotated in (
        (1, 1, 32, 32),
        (23, 3, 64, 64),
        (9, 2, 80, 20),
        (5, 4, 18, 6),
    ):
        for interleaved in (False, True):
            name = label("rotary", dtype, num_tokens, heads, size, rotated, interleaved)
            source = CaseInputs(name, dtype)
            angles = CaseInputs(name, torch.float32).normal(num_tokens, rotated // 2, scale=40.0)
            tokens = (source.normal(num_tokens, heads, size), angles.cos(), angles.sin())
            yield Case("rotary", name, tokens, (interleaved,))


def _write_kv_cases(dtype: torch.dtype) -> Iterator[Case]:
    shapes = ((1, 1, 32, 16), (29, 2, 80, 8), (3, 3, 18, 4))
    for (num_tokens, heads, size, block_size), kv_dtype in product(shapes, KV_DTYPES):
        name = label("write_kv", dtype, num_tokens, heads, size, kv_dtype)
        source = CaseInputs(name, dtype)
        num_blocks = num_tokens // block_size + 3
        slots = source.permutation(num_blocks * block_size)[:num_tokens]
        shape = (num_blocks, block_size, heads, size)
        kv = [source.normal(num_tokens, heads, size) for _ in range(2)]
        kv[0][0, 0] = 0.0
        caches = tuple(stored_heads(source.normal(*shape), kv_dtype) for _ in range(2))
        yield Case("write_kv", name, (*kv, slots), caches)


def _rotary_write_kv_cases(dtype: torch.dtype) -> Iterator[Case]:
    # (T, H, K, D, D_rot)
    for shape in ((1, 1, 1, 32, 32), (13, 4, 2, 64, 64), (3, 3, 3, 80, 20), (3, 4, 1, 18, 6)):
        for interleaved in (False, True):
            name = label("rotary_write_kv", dtype, *shape, interleaved)
            source = CaseInputs(name, dtype)
            num_tokens, heads, kv_heads, size, rotated = shape
            angles = CaseInputs(name, torch.float32).normal(num_tokens, rotated // 2, scale=40.0)
            heads_of = [source.normal(num_tokens, n, size) for n in (heads, kv_heads, kv_heads)]
            slots = source.permutation(5 * 8)[:num_tokens]
            caches = [source.normal(5, 8, kv_heads, size) for _ in range(2)]
            tokens = (*heads_of, angles.cos(), angles.sin(), slots)
            yield Case("rotary_write_kv", name, tokens, (interleaved, *caches))


def _gated_activation_cases(dtype: torch.dtype) -> Iterator[Case]:
    for kind in ("silu", "gelu", "gelu_tanh", "clamped_swiglu"):
        for num_tokens, width in ((1, 7), (19, 77), (6, 4864), (0, 32)):
            name = label("gated_activation", dtype, kind, num_tokens, width)
            gate_up = CaseInputs(name, dtype).normal(num_tokens, 2 * width, scale=3.0)
            yield Case("gated_activation", name, (gate_up,), (kind,))
        name = label("gated_activation", dtype, kind, "extremes")
        gate = torch.tensor([[0.0, -0.0, 1e-4, -1e-4, 8.0, -8.0, 90.0, -90.0, 2e4, -2e4]])
        gate_up = torch.cat((gate, torch.ones_like(gate)), -1).to(dtype)
        yield Case("gated_activation", name, (gate_up,), (kind,))


def _gated_linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    # (T, C, width, kind, bias): widths with and without a rest of a tile
    for num_tokens, num_inputs, width, kind, has_bias in (
        (1, 32, 32, "silu", False),
        (19, 77, 33, "gelu_tanh", True),
        (70, 136, 24, "silu", False),
        (5, 896, 130, "gelu", False),
        (9, 64, 48, "clamped_swiglu", True),
    ):
        name = label("gated_linear", dtype, num_tokens, num_inputs, width, kind)
        source = CaseInputs(name, dtype)
        weight = source.normal(2 * width, num_inputs, scale=2.0 * num_inputs**-0.5)
        bias = source.normal(2 * width) if has_bias else None
        x = source.normal(num_tokens, num_inputs)
        yield Case("gated_linear", name, (x,), (weight, bias, kind))


def _add_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((1, 7), (19, 77), (37, 896), (0, 64)):
        name = label("add", dtype, *shape)
        source = CaseInputs(name, dtype)
        yield Case("add", name, (source.normal(*shape), source.normal(*shape, scale=50.0)), ())


def _scale_cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape, factor in (((1, 7), 0.59375), ((19, 77), -3.0), ((37, 896), 29.875)):
        name = label("scale", dtype, *shape)
        yield Case("scale", name, (CaseInputs(name, dtype).normal(*shape),), (factor,))


def _logits_cases(dtype: torch.dtype) -> Iterator[Case]:
    for num_rows, width, vocabulary, divisor, softcap in (
        (1, 32, 1003, 1.0, None),
        (5, 96, 16411, 1.0, 30.0),
        (19, 64, 130, 13.0, 0.5),
        (0, 32, 40, 1.0, 30.0),
    ):
        name = label("logits", dtype, num_rows, width, vocabulary, softcap)
        source = CaseInputs(name, dtype)
        weight = source.normal(vocabulary, width, scale=0.3)
        yield Case("logits", name, (source.normal(num_rows, width),), (weight, divisor, softcap))


def _latent_keys_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in keys_inputs(dtype):
        yield Case("latent_keys", *inputs)


def _latent_queries_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in queries_inputs(dtype):
        yield Case("latent_queries", *inputs)


def _latent_values_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in values_inputs(dtype):
        yield Case("latent_values", *inputs)


def _latent_write_cases(dtype: torch.dtype) -> Iterator[Case]:
    for inputs in write_inputs(dtype, KV_DTYPES):
        yield Case("latent_write", *inputs)


def _stream_cases(op: str, dtype: torch.dtype) -> Iterator[Case]:
    for inputs in STREAM_INPUTS[op](dtype):
        yield Case(op, *inputs)


OPS: Mapping[str, Callable[[torch.dtype], Iterator[Case | AttentionCase]]] = MappingProxyType(
    {
        "linear": _linear_cases,
        "quantized_linear": _quantized_linear_cases,
        "lora": _lora_cases,
        "route": _route_cases,
        "experts": _experts_cases,
        "experts_lora": _experts_lora_cases,
        "embedding": _embedding_cases,
        "packed_rows": _packed_rows_cases,
        "quantized_rows": _quantized_rows_cases,
        "rms_norm": _rms_norm_cases,
        "add_rms_norm": _add_rms_norm_cases,
        "rotary": _rotary_cases,
        "write_kv": _write_kv_cases,
        "rotary_write_kv": _rotary_write_kv_cases,
        "gated_activation": _gated_activation_cases,
        "layer_norm": _layer_norm_cases,
        "add_layer_norm": _add_layer_norm_cases,
        "activation": _activation_cases,
        "gated_linear": _gated_linear_cases,
        "add": _add_cases,
        "scale": _scale_cases,
        "logits": _logits_cases,
        "paged_attention": attention_cases,
    }
)

# Of `OpTable.latent`, what the other ops do where values are in the keys, and of `OpTable.streams`:
# without kernels for a GPU.
CPU_OPS: Mapping[str, Callable[[torch.dtype], Iterator[Case | AttentionCase]]] = MappingProxyType(
    {
        "latent_keys": _latent_keys_cases,
        "latent_queries": _latent_queries_cases,
        "latent_values": _latent_values_cases,
        "latent_write": _latent_write_cases,
        "latent_attention": latent_attention_cases,
        **{op: partial(_stream_cases, op) for op in STREAM_INPUTS},
    }
)
