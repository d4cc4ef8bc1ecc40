"""The least work of a step: bytes that it reads, operations that it computes. Pure functions.

A benchmark divides these amounts by the measured time, and then by the machine's measured limits.
Weights are read once per step at any batch size.
"""

from __future__ import annotations

import math

from quickstep.model.checkpoint.tensor_schema import layer_tensors
from quickstep.model.decoder_spec import LayerSpec, ModelSpec


def decode_kv_bytes(spec: ModelSpec, head_bytes: int, context: int, batch: int) -> int:
    """Bytes that one decode step reads in addition to weights: K and V of every token in a layer's
    window, and states, which it also writes.

    `head_bytes` is the size of one token's key in one KV head (`model.sizing.kv_head_bytes`).
    """
    per_token = spec.kv_size.num_tensors * spec.num_kv_heads * head_bytes
    lengths = [_window_len(layer, context) for layer in _attention_layers(spec)]
    states = 4 * sum(size.num_elements(0) for size in spec.state_sizes)
    return batch * (per_token * sum(lengths) + 2 * states)


def prefill_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Operations of a prompt's prefill: 2 per active parameter of the layers and token, 4 per
    query dimension and pair of positions, and the output projection once, for the last position.

    The usual count of a model's work, the same for every engine. It includes what an engine skips:
    in the last layer, Quickstep computes keys and values of every token, and the rest only for
    tokens with an output. So the result is not the utilization of the cores.
    """
    weights = sum(_active_parameters(spec, index) for index in range(spec.num_layers))
    pairs = sum(_pairs(layer, num_tokens) for layer in _attention_layers(spec))
    attention = 2 * spec.num_heads * spec.pair_size * pairs
    head = 2 * spec.vocab_size * spec.hidden_size
    return 2.0 * weights * num_tokens + attention + head


def expert_fraction(spec: ModelSpec, layer: LayerSpec, batch: int) -> float:
    """The largest fraction of a layer's experts that a step can use; 1 for a dense layer."""
    if not layer.sparse or spec.moe is None:
        return 1.0
    return min(1.0, batch * spec.moe.experts_per_token / spec.moe.num_experts)


def _attention_layers(spec: ModelSpec) -> list[LayerSpec]:
    return [layer for layer in spec.layers if layer.has_attention]


def _active_parameters(spec: ModelSpec, index: int) -> float:
    """Number of matrix elements of a layer that one token is multiplied with."""
    fraction = expert_fraction(spec, spec.layers[index], batch=1)
    total = 0.0
    for name, shape in layer_tensors(spec, "", index).items():
        if len(shape) == 2:
            is_expert = f".{spec.naming.experts}." in name
            total += math.prod(shape) * (fraction if is_expert else 1.0)
    return total


def _window_len(layer: LayerSpec, context: int) -> int:
    return context if layer.window is None else min(context, layer.window)


def _pairs(layer: LayerSpec, num_tokens: int) -> int:
    """(query, key) pairs of a causal prompt: n (n + 1) / 2 without a window."""
    window = _window_len(layer, num_tokens)
    return window * (window + 1) // 2 + (num_tokens - window) * window
