"""Disaggregated phases: engines that only prefill next to engines that decode, by formulas.

A prefill engine takes prompts one after the other (M/D/1: each as long, at random times). A decode
engine is `candidates.decode_state`. The KV cache is handed over through the devices' link, which
delays the second token only; that of a draft model is handed over too. Drafts are proposed by the
decode engines. The planner simulates the best placement with `plan.traffic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from quickstep.plan.candidates import (
    Candidate,
    Load,
    SteadyState,
    decode_state,
    highest_rate,
    prompt_s,
)
from quickstep.plan.traffic import PhasePools
from quickstep.sim.summary import Targets

__all__ = ["Placement", "best_placement", "placement_capacity", "placement_state"]

_FEW = 8  # from here on, only powers of two are tried


class Placement(msgspec.Struct, frozen=True):
    """So many engines of each phase."""

    prefill: Candidate
    num_prefill: int
    decode: Candidate
    num_decode: int

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        prefill, decode = self.prefill.split.tensor, self.decode.split.tensor
        return self.num_prefill * prefill + self.num_decode * decode

    @property
    def pools(self) -> PhasePools:
        """For the simulation, with the prefill engine as its candidate."""
        link = self.prefill.hardware.link
        return PhasePools(self.num_prefill, self.num_decode, self.decode, link)


def best_placement(
    candidates: Iterable[Candidate], load: Load, targets: Targets, num_devices: int
) -> tuple[Placement, SteadyState | None] | None:
    """That which meets the targets on the fewest of `num_devices`, and of those the one with the
    shortest time per token; if none does, the one with the highest rate. None for one device.

    `candidates` are splits; engines of one phase are those with tensor parallelism only.
    """
    engines = [one for one in candidates if one.split == replace(one.split, pipeline=1, replicas=1)]
    found = [
        (placement, placement_state(placement, load))
        for placement in _placements(engines, num_devices)
    ]
    if not found:
        return None
    meeting = [
        (placement, state)
        for placement, state in found
        if state is not None and state.meets(targets)
    ]
    if meeting:
        return min(meeting, key=lambda one: (one[0].num_devices, one[1].tpot_s))
    return max(found, key=lambda one: placement_capacity(one[0], load, targets))


def _placements(engines: list[Candidate], num_devices: int) -> Iterator[Placement]:
    for prefill in engines:
        for decode in engines:
            for num_prefill in _counts(num_devices // prefill.split.tensor):
                left = num_devices - num_prefill * prefill.split.tensor
                for num_decode in _counts(left // decode.split.tensor):
                    yield Placement(prefill, num_prefill, decode, num_decode)


def _counts(most: int) -> Iterator[int]:
    yield from range(1, min(most, _FEW) + 1)
    count = 2 * _FEW
    while count <= most:
        yield count
        count *= 2


def placement_state(placement: Placement, load: Load) -> SteadyState | None:
    """The balance under a load; None if one of the phases cannot keep up."""
    service_s = prompt_s(placement.prefill, load)
    busy = load.rate / placement.num_prefill * service_s
    if busy >= 1.0:
        return None
    of_one = Load(load.rate / placement.num_decode, load.num_inputs, load.num_outputs)
    state = decode_state(placement.decode, of_one)
    if state is None:
        return None
    wait_s = busy * service_s / (2.0 * (1.0 - busy))
    return replace(state, ttft_s=wait_s + service_s)


def placement_capacity(placement: Placement, load: Load, targets: Targets) -> float:
    """The highest rate whose balance meets the targets, in requests per second; 0 if none."""

    def holds(rate: float) -> bool:
        state = placement_state(placement, Load(rate, load.num_inputs, load.num_outputs))
        return state is not None and state.meets(targets)

    return highest_rate(holds)
