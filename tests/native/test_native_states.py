"""Layers that keep states: native kernels against the definitions, and rows cut in any way."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from quickstep.model.decoder_spec import GatedDelta, Mamba2, ShortConv, StateSize
from quickstep.ops.native.backend import load_native
from quickstep.ops.reference import states as reference
from quickstep.ops.table import DeltaWeights, MambaWeights, OpTable, ShortConvWeights, StateRows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_RECORDS = 6

Mix = Callable[[Tensor, Tensor, StateRows], Tensor]


@functools.cache
def native() -> OpTable:
    table = load_native(2)
    assert table is not None
    return table


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Kind:
    """One of the three ops, on weights of its own."""

    name: str
    size: StateSize
    num_inputs: int
    by: Callable[[str], Mix]  # "native" or "reference"


def short_conv(channels: int, width: int, bias: bool) -> Kind:
    mixer = ShortConv(channels, width, bias)
    weights = ShortConvWeights(
        noise(width, channels, seed=1) * 0.5, noise(channels, seed=2) if bias else None
    )

    def by(which: str) -> Mix:
        op = native().short_conv if which == "native" else reference.short_conv
        assert op is not None
        return lambda x, states, rows: op(x, weights, states, rows)

    return Kind(f"conv-{channels}-{width}", mixer.kept, mixer.num_inputs, by)


def gated_delta(mixer: GatedDelta, *, tiled: bool = False) -> Kind:
    heads = mixer.num_value_heads
    weights = DeltaWeights(
        taps=noise(mixer.width, mixer.num_channels, seed=1) * 0.5,
        rates=-noise(heads, seed=2).exp(),
        biases=noise(heads, seed=3),
        norm=1.0 + 0.2 * noise(mixer.value_size, seed=4),
        num_key_heads=mixer.num_key_heads,
        key_size=mixer.key_size,
        eps=1e-6,
        tiled=tiled,
    )

    def by(which: str) -> Mix:
        op = native().gated_delta if which == "native" else reference.gated_delta
        assert op is not None
        return lambda x, states, rows: op(x, weights, states, rows)

    name = f"delta-{mixer.num_key_heads}-{heads}-{mixer.key_size}-{mixer.value_size}"
    name += "-tiled" if tiled else ""
    return Kind(name, mixer.kept, mixer.num_inputs, by)


def mamba(mixer: Mamba2, factors: tuple[float, float] = (1.0, 1.0)) -> Kind:
    heads, values = mixer.num_heads, mixer.num_outputs
    weights = MambaWeights(
        taps=noise(mixer.width, mixer.num_channels, seed=1) * 0.5,
        conv_bias=noise(mixer.num_channels, seed=2) if mixer.conv_bias else None,
        rates=-noise(heads, seed=3).exp(),
        biases=noise(heads, seed=4),
        skips=noise(heads, seed=5),
        norm=1.0 + 0.2 * noise(values, seed=6) if mixer.has_norm else None,
        num_groups=mixer.num_groups,
        state_size=mixer.state_size,
        eps=1e-5,
        least_step=mixer.least_step,
        most_step=mixer.most_step,
        gate_factor=factors[0],
        step_factor=factors[1],
        norms_first=mixer.norms_first,
    )

    def by(which: str) -> Mix:
        op = native().mamba if which == "native" else reference.mamba
        assert op is not None
        return lambda x, states, rows: op(x, weights, states, rows)

    return Kind(f"mamba-{heads}-{mixer.num_groups}", mixer.kept, mixer.num_inputs, by)


KINDS = [
    short_conv(40, 3, bias=False),
    short_conv(700, 4, bias=True),
    gated_delta(GatedDelta(2, 4, 12, 20, 4)),
    gated_delta(GatedDelta(1, 1, 128, 128, 4)),
    gated_delta(GatedDelta(2, 6, 16, 72, 2)),
    gated_delta(GatedDelta(2, 6, 12, 20, 3), tiled=True),
    mamba(Mamba2(6, 20, 2, 12, 3)),
    mamba(Mamba2(4, 64, 1, 128, 4, conv_bias=False, has_norm=False, most_step=0.5)),
    mamba(Mamba2(9, 24, 3, 72, 4), factors=(0.6, 1.7)),
    mamba(Mamba2(8, 20, 2, 12, 3, norms_first=True), factors=(0.6, 1.7)),
]


def rows_of(offsets: tuple[int, ...], sources: tuple[int, ...]) -> StateRows:
    none = (0,) * len(sources)
    return StateRows(offsets, sources, tuple(range(len(sources))), none, none)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kernels_agree_with_the_definition(kind: Kind, dtype: torch.dtype) -> None:
    x = noise(37, kind.num_inputs, seed=5).to(dtype)
    states = [torch.zeros(2, kind.size.num_elements(0)) for _ in range(2)]
    rows = rows_of((0, 30, 37), (-1, -1))
    found, expected = (
        kind.by(which)(x, slots, rows)
        for which, slots in zip(("native", "reference"), states, strict=True)
    )
    digits = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=digits, rtol=digits)
    torch.testing.assert_close(states[0], states[1], atol=digits, rtol=digits)


class Cut:
    """A sequence of tokens, computed in rows of random lengths with random drafts, among others.

    States move between slots, are saved on the way, and are begun with again.
    """

    def __init__(self, kind: Kind, x: Tensor, mix: Mix, seed: int) -> None:
        self.kind, self.x, self.mix = kind, x, mix
        self.rng = random.Random(seed)
        self.states = torch.full((6, kind.size.num_elements(NUM_RECORDS)), 7.0)
        self.slot, self.position, self.done = -1, 0, 0  # the state is after `position` tokens
        self.saved: list[tuple[int, int]] = []  # after how many tokens, slot
        self.out = torch.full((x.shape[0], 0), 0.0)

    def run(self, expected: Tensor) -> None:
        """All tokens; each output has the bits of `expected`, that of a draft by chance."""
        total = self.x.shape[0]
        while self.done < total:
            self._row(total, expected)
            if self.saved and self.rng.random() < 0.2:  # back to a saved state
                self.position, self.slot = self.rng.choice(self.saved)
                self.done = self.position

    def _row(self, total: int, expected: Tensor) -> None:
        rng, done = self.rng, self.done
        num_certain = rng.randint(1, min(total - done, rng.choice((1, 1, 7, 40))))
        end = done + num_certain
        num_right = rng.randint(0, min(NUM_RECORDS, total - end))
        num_drafts = num_right + rng.randint(0, NUM_RECORDS - num_right)
        wrong = noise(num_drafts - num_right, self.x.shape[1], seed=rng.randint(0, 99))
        tokens = torch.cat((self.x[done : end + num_right], wrong.to(self.x.dtype)))
        base = self.position if done else 0
        free = [slot for slot in range(6) if slot not in (self.slot, 5)]
        target = rng.choice((self.slot if self.slot >= 0 else free[0], free[0]))
        saves, slots = [], [slot for slot in free if slot != target]
        if num_certain > 1:
            saves.append((rng.randint(1, end - base), slots[0]))
        self.saved = [(base + count, slot) for count, slot in saves]
        other = noise(3, self.x.shape[1], seed=done).to(self.x.dtype)  # another sequence's row
        rows = StateRows(
            (0, 3, 3 + len(tokens)),
            (-1, self.slot if done else -1),
            (5, target),
            (0, done - base),
            (0, num_drafts),
            tuple([(1, *save) for save in saves]),
        )
        found = self.mix(torch.cat((other, tokens)), self.states, rows)[3:]
        assert torch.equal(found[: num_certain + num_right], expected[done : end + num_right])
        num_accepted = rng.randint(0, num_right)
        self.slot, self.position, self.done = target, end, end + num_accepted


@pytest.mark.parametrize("which", ["native", "reference"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_rows_cut_in_any_way_have_the_bits_of_one(kind: Kind, which: str) -> None:
    mix = kind.by(which)
    for seed in range(6 if which == "native" else 2):
        x = noise(60, kind.num_inputs, seed=seed).to(DTYPES[seed % 3])
        alone = torch.zeros(1, kind.size.num_elements(0))
        expected = mix(x, alone, rows_of((0, 60), (-1,)))
        Cut(kind, x, mix, seed).run(expected)


@pytest.mark.parametrize("num_gates", [1, 3, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_agree_with_the_definition(dtype: torch.dtype, num_gates: int) -> None:
    x, wide = noise(5, 24).to(dtype), noise(5, 60, seed=1).to(dtype)
    gates = wide[:, 7 : 7 + num_gates]
    op = native().gate
    assert op is not None
    digits = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(op(x, gates), reference.gate(x, gates), atol=digits, rtol=digits)
