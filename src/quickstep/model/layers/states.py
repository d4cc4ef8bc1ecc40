"""Mixers that keep a state of each sequence, instead of something of each token or next to it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from quickstep.model.adapters.lora_modules import Projection
from quickstep.model.decoder_spec import KVSize
from quickstep.model.decoder_weights import (
    Mamba2Weights,
    ShortConvLayerWeights,
    StateMixerWeights,
)
from quickstep.model.layers.attention import Attention
from quickstep.model.layers.interface import LayerStep
from quickstep.model.layers.layer_ops import LayerOps, scaled

if TYPE_CHECKING:
    from torch import Tensor


class StateMixer:
    """A `Mixer`: `place` is that of its states in a `KVCache`."""

    def __init__(self, ops: LayerOps, weights: StateMixerWeights, place: int) -> None:
        self._ops = ops
        self._weights = weights
        self._place = place

    @property
    def kv_size(self) -> KVSize | None:
        """Nothing of a token."""
        return None

    def write(self, x: Tensor, step: LayerStep) -> tuple[Tensor, ...]:
        """Move the states of x's [T, hidden] rows on; return what is projected to the output."""
        assert step.state_rows is not None, "a model with states gets the rows' slots"
        table, weights = self._ops.table, self._weights
        x = self._ops.linear(x, weights.in_proj, Projection.STATE_IN, step.lora)
        states, rows = step.kv.states[self._place], step.state_rows
        if isinstance(weights, ShortConvLayerWeights):
            short_conv = table.short_conv or _reference().short_conv
            return (short_conv(x, weights.conv, states, rows),)
        if isinstance(weights, Mamba2Weights):
            mamba = table.mamba or _reference().mamba
            return (mamba(x, weights.mamba, states, rows),)
        gated_delta = table.gated_delta or _reference().gated_delta
        return (gated_delta(x, weights.delta, states, rows),)

    def read(self, rows: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        """[T, hidden] of the rows."""
        return self._ops.linear(rows[0], self._weights.out_proj, Projection.STATE_OUT, step.lora)


class AttentionAndState:
    """A `Mixer`: attention and a state, of the same input, whose outputs are added (Falcon-H1)."""

    def __init__(self, ops: LayerOps, attention: Attention, state: StateMixer) -> None:
        self._multipliers = ops.spec.multipliers
        self._attention = attention
        self._state = state

    @property
    def kv_size(self) -> KVSize | None:
        """What attention keeps."""
        return self._attention.kv_size

    def write(self, x: Tensor, step: LayerStep) -> tuple[Tensor, ...]:
        """Those of attention, then that of the state."""
        multipliers = self._multipliers
        of_attention = self._attention.write(scaled(x, multipliers.attention_input), step)
        return *of_attention, *self._state.write(scaled(x, multipliers.state_input), step)

    def read(self, rows: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        """[T, hidden] of the rows."""
        *of_attention, of_state = rows
        attended = self._attention.read(tuple(of_attention), step)
        mixed = self._state.read((of_state,), step)
        multipliers = self._multipliers
        return scaled(attended, multipliers.attention) + scaled(mixed, multipliers.state)


def _reference() -> ModuleType:
    """The ops of a table that lacks one: they compute with torch."""
    from quickstep.ops.reference import states

    return states
