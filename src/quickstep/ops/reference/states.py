"""Layers that keep a state of each sequence, and gates: the definitions.

A state is a fold over tokens one by one: each is computed by itself, from tensors of the same
shapes in any step, so that the result depends on the tokens before it only. Gated DeltaNet
(arXiv:2412.06464) in fp64, states rounded to fp32 after each token. `ops.table` says what an op
computes, `model.decoder_spec.StateSize` what a slot holds.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from quickstep.ops.reference.exact_math import reciprocal_sqrt, sigmoid
from quickstep.ops.table import DeltaWeights, MambaWeights, ShortConvWeights, StateRows
from quickstep.ops.tensors import AnyTensor, to_torch

_KEY_EPS = 1e-6  # as transformers adds it to the sum of squares


def gate(x: Tensor, gates: Tensor) -> Tensor:
    """`GateOp`."""
    parts = x.double().view(x.shape[0], gates.shape[1], -1)
    return (parts * sigmoid(gates.double()).unsqueeze(-1)).view(x.shape).float().to(x.dtype)


class _Row(msgspec.Struct, frozen=True):
    """One row of a step. Its tokens count from the first that is replayed.

    Attributes:
        tokens: Its tokens among the step's.
        before: The source's slot [elements] as it was, zeros for none.
        slots: All slots [N, elements].
        saves: Slots by the number of tokens after which they get the state.
    """

    tokens: slice
    before: Tensor
    slots: Tensor
    target: int
    num_replayed: int
    num_certain: int
    saves: tuple[tuple[int, int], ...]

    def kept(self, count: int) -> Iterator[Tensor]:
        """The slots that get the state after so many tokens."""
        for num_tokens, slot in self.saves:
            if num_tokens == count:
                yield self.slots[slot]
        if count == self.num_certain:
            yield self.slots[self.target]


def _rows(states: Tensor, rows: StateRows) -> list[_Row]:
    """All rows, with what they begin with: before anything is written."""
    found = []
    for index, source in enumerate(rows.sources):
        first, last = rows.row_offsets[index : index + 2]
        num_tokens = rows.num_replayed[index] + last - first
        before = torch.zeros_like(states[0]) if source < 0 else states[source].clone()
        found.append(
            _Row(
                slice(first, last),
                before,
                states,
                rows.targets[index],
                rows.num_replayed[index],
                num_tokens - rows.num_drafts[index],
                tuple([save[1:] for save in rows.saves if save[0] == index]),
            )
        )
    return found


def _convolved(inputs: Tensor, taps: Tensor) -> Tensor:
    """inputs [width - 1 + n, C] -> [n, C], in fp64."""
    width = taps.shape[0]
    num_tokens = inputs.shape[0] - width + 1
    total = inputs[:num_tokens].double() * taps[0].double()
    for tap in range(1, width):
        total = total + inputs[tap : tap + num_tokens].double() * taps[tap].double()
    return total


def short_conv(x: Tensor, weights: ShortConvWeights, states: AnyTensor, rows: StateRows) -> Tensor:
    """`ShortConvOp`."""
    taps, all_states = to_torch(weights.taps), to_torch(states)
    width, num_channels = taps.shape
    num_taps = width - 1
    gates, outer, values = torch.split(x.double(), num_channels, 1)
    gated = (gates * values).float().to(x.dtype).float()
    out = torch.empty_like(x[:, :num_channels])
    for row in _rows(all_states, rows):
        before = row.before[: (num_taps + row.num_replayed) * num_channels].view(-1, num_channels)
        inputs = torch.cat((before, gated[row.tokens]))
        mixed = _convolved(inputs, taps)[row.num_replayed :]
        if weights.bias is not None:
            mixed = mixed + to_torch(weights.bias).double()
        out[row.tokens] = (outer[row.tokens] * mixed).float().to(x.dtype)
        num_tokens = inputs.shape[0] - num_taps
        for count in range(1, num_tokens + 1):
            for slot in row.kept(count):
                slot[: num_taps * num_channels] = inputs[count : count + num_taps].flatten()
        drafts = inputs[num_taps + row.num_certain :].flatten()
        first = num_taps * num_channels
        row.slots[row.target, first : first + drafts.shape[0]] = drafts
    return out


class _Sizes(msgspec.Struct, frozen=True):
    """Of Gated DeltaNet; see `model.decoder_spec.GatedDelta`."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    num_taps: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def record(self) -> int:
        return self.channels + 2 * self.value_heads

    @property
    def matrix(self) -> int:
        return self.values * self.key_size


def gated_delta(x: Tensor, weights: DeltaWeights, states: AnyTensor, rows: StateRows) -> Tensor:
    """`GatedDeltaOp`."""
    taps, all_states = to_torch(weights.taps), to_torch(states)
    value_heads, value_size = weights.rates.shape[0], weights.norm.shape[0]
    key = weights.num_key_heads, value_heads, weights.key_size, value_size
    sizes = _Sizes(*key, taps.shape[0] - 1)
    channels, values = sizes.channels, sizes.values
    parts = torch.split(x.float(), [channels, values, 2 * value_heads], 1)
    records = torch.cat((parts[0], parts[2]), 1)
    out = torch.empty_like(x[:, :values])
    for row in _rows(all_states, rows):
        first = sizes.num_taps * channels
        before = row.before[:first].view(-1, channels)
        state = row.before[first : first + sizes.matrix]
        state = state.view(value_heads, sizes.key_size, value_size)
        first += sizes.matrix
        replayed = row.before[first : first + row.num_replayed * sizes.record]
        tokens = torch.cat((replayed.view(-1, sizes.record), records[row.tokens]))
        inputs = torch.cat((before, tokens[:, :channels]))
        for index in range(tokens.shape[0]):
            window = inputs[index : index + sizes.num_taps + 1]
            mixed, state = _delta_token(window, tokens[index, channels:], weights, sizes, state)
            if index >= row.num_replayed:
                place = row.tokens.start + index - row.num_replayed
                normed = _normed(mixed, parts[1][place], weights)
                out[place] = _placed(normed, weights).to(x.dtype)
            for slot in row.kept(index + 1):
                newest = inputs[index + 1 : index + 1 + sizes.num_taps]
                slot[:first] = torch.cat((newest.flatten(), state.flatten()))
        drafts = tokens[row.num_certain :].flatten()
        row.slots[row.target, first : first + drafts.shape[0]] = drafts
    return out


def _delta_token(
    window: Tensor, gates: Tensor, weights: DeltaWeights, sizes: _Sizes, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The output [value heads, E] of one token, and the state [value heads, D, E] after it."""
    convolved = _convolved(window, to_torch(weights.taps))[0]
    convolved = convolved * sigmoid(convolved)
    queries, keys, values = torch.split(convolved, [sizes.keys, sizes.keys, sizes.values])
    group = sizes.value_heads // sizes.key_heads

    def heads(part: Tensor) -> Tensor:
        each = part.view(sizes.key_heads, sizes.key_size)
        squares = (each * each).sum(1, keepdim=True)
        return (each * reciprocal_sqrt(squares + _KEY_EPS)).repeat_interleave(group, 0)

    query, key = heads(queries) * sizes.key_size**-0.5, heads(keys)
    value = values.view(sizes.value_heads, sizes.value_size)
    b, a = gates.double().chunk(2)
    step = torch.nn.functional.softplus(a + to_torch(weights.biases).double(), threshold=50)
    decay = torch.exp(to_torch(weights.rates).double() * step)
    decayed = state.double() * decay.view(-1, 1, 1)
    found = (decayed * key.unsqueeze(2)).sum(1)
    change = sigmoid(b).unsqueeze(1) * (value - found)
    state = (decayed + key.unsqueeze(2) * change.unsqueeze(1)).float()
    return (state.double() * query.unsqueeze(2)).sum(1), state


def _normed(mixed: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """The outputs of a token, normed and gated, [value heads * E] float32."""
    mean = (mixed * mixed).sum(1, keepdim=True) / mixed.shape[1]
    normed = mixed * reciprocal_sqrt(mean + weights.eps) * to_torch(weights.norm).double()
    wide = z.double().view_as(mixed)
    return (normed * (wide * sigmoid(wide))).flatten().float()


def _placed(normed: Tensor, weights: DeltaWeights) -> Tensor:
    """The outputs of a token in the order of `DeltaWeights.tiled`."""
    if not weights.tiled:
        return normed
    by_key = normed.view(weights.num_key_heads, -1, weights.norm.shape[0])
    return by_key.transpose(0, 1).flatten()


def mamba(x: Tensor, weights: MambaWeights, states: AnyTensor, rows: StateRows) -> Tensor:
    """`Mamba2Op`."""
    taps, all_states = to_torch(weights.taps), to_torch(states)
    heads, head_size = int(weights.rates.shape[0]), weights.head_size
    num_taps, channels = taps.shape[0] - 1, taps.shape[1]
    values, num_state = heads * head_size, weights.state_size
    record = channels + heads
    gates, records = torch.split(x.float(), [values, record], 1)
    out = torch.empty_like(x[:, :values])
    for row in _rows(all_states, rows):
        first = num_taps * channels
        before = row.before[:first].view(-1, channels)
        state = row.before[first : first + values * num_state].view(heads, num_state, head_size)
        first += values * num_state
        replayed = row.before[first : first + row.num_replayed * record].view(-1, record)
        tokens = torch.cat((replayed, records[row.tokens]))
        inputs = torch.cat((before, tokens[:, :channels]))
        for index in range(tokens.shape[0]):
            window = inputs[index : index + num_taps + 1]
            mixed, state = _mamba_token(window, tokens[index, channels:], weights, state)
            if index >= row.num_replayed:
                place = row.tokens.start + index - row.num_replayed
                out[place] = _normed_groups(mixed.flatten(), gates[place], weights).to(x.dtype)
            for slot in row.kept(index + 1):
                newest = inputs[index + 1 : index + 1 + num_taps]
                slot[:first] = torch.cat((newest.flatten(), state.flatten()))
        drafts = tokens[row.num_certain :].flatten()
        row.slots[row.target, first : first + drafts.shape[0]] = drafts
    return out


def _mamba_token(
    window: Tensor, steps: Tensor, weights: MambaWeights, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The output [heads, P] of one token, and the state [heads, N, P] after it."""
    heads, num_state, head_size = state.shape
    convolved = _convolved(window, to_torch(weights.taps))[0]
    if weights.conv_bias is not None:
        convolved = convolved + to_torch(weights.conv_bias).double()
    convolved = convolved * sigmoid(convolved)
    num_keys = weights.num_groups * num_state
    values, keys, queries = torch.split(convolved, [heads * head_size, num_keys, num_keys])
    value = values.view(heads, head_size)
    key, query = (
        part.view(weights.num_groups, num_state).repeat_interleave(heads // weights.num_groups, 0)
        for part in (keys, queries)
    )
    biased = steps.double() * weights.step_factor + to_torch(weights.biases).double()
    step = torch.nn.functional.softplus(biased, threshold=50)
    step = step.clamp(weights.least_step, weights.most_step)
    decay = torch.exp(to_torch(weights.rates).double() * step).view(-1, 1, 1)
    added = key.unsqueeze(2) * (step.unsqueeze(1) * value).unsqueeze(1)
    state = (state.double() * decay + added).float()
    found = (state.double() * query.unsqueeze(2)).sum(1)
    return found + to_torch(weights.skips).double().unsqueeze(1) * value, state


def _normed_groups(mixed: Tensor, z: Tensor, weights: MambaWeights) -> Tensor:
    """The outputs of a token, gated and normed, [heads * P] float32."""
    wide = z.double() * weights.gate_factor
    gate, gates_last = wide * sigmoid(wide), weights.norm is not None and weights.norms_first
    gated = mixed if gates_last else mixed * gate
    if weights.norm is None:
        return gated.float()
    groups = gated.view(weights.num_groups, -1)
    mean = (groups * groups).sum(1, keepdim=True) / groups.shape[1]
    normed = (groups * reciprocal_sqrt(mean + weights.eps)).flatten()
    normed = normed * to_torch(weights.norm).double()
    return (normed * gate if gates_last else normed).float()
