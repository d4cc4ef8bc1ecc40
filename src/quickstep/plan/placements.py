"""Disaggregated phases: engines that only prefill next to engines that decode, by formulas.

A prefill engine takes prompts one after the other (M/D/1: each as long, at random times). A decode
engine is `candidates.decode_state`. The KV cache is handed over through the devices' link, which
delays the second token only; that of a draft model is handed over too. Drafts are proposed by the
decode engines. The planner simulates the best placement with `plan.traffic`.

A pipeline is one engine; its stages compute several steps at the same time (`plan.candidates`).
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

_FEW = 8  # from here on, only powers of two are tried


class Placement(msgspec.Struct, frozen=True):
    """So many engines of each phase; a pipeline is one."""

    prefill: Candidate
    num_prefill: int
    decode: Candidate
    num_decode: int

    @property
    def num_devices(self) -> int:
        """Devices of all engines."""
        prefill, decode = self.prefill.split.num_devices, self.decode.split.num_devices
        return self.num_prefill * prefill + self.num_decode * decode

    @property
    def pools(self) -> PhasePools:
        """For the simulation, with the prefill engine as its candidate."""
        return PhasePools(
            self.num_prefill,
            self.num_decode,
            self.decode,
            self.prefill.hardware.link,
        )


def best_placement(
    candidates: Iterable[Candidate], load: Load, targets: Targets, num_devices: int
) -> tuple[Placement, SteadyState | None] | None:
    """That which meets the targets on the fewest of `num_devices`, and of those the one with the
    shortest time per token; if none does, the one with the highest rate. None for one device.

    `candidates` are splits; engines of one phase are those with one replica.
    """
    engines = [candidate for candidate in candidates if candidate.split.replicas == 1]
    pools = [
        (engine, count)
        for engine in engines
        for count in _counts((num_devices - 1) // engine.split.num_devices)
    ]
    ttfts = [_ttft_s(engine, count, load) for engine, count in pools]
    states = [_decode_state(engine, count, load) for engine, count in pools]
    placements = [
        (Placement(*pools[prefill], *pools[decode]), prefill, decode)
        for prefill in range(len(pools))
        for decode in range(len(pools))
        if _num_devices(*pools[prefill]) + _num_devices(*pools[decode]) <= num_devices
    ]
    if not placements:
        return None
    found = [
        (placement, _joined(ttfts[prefill], states[decode]))
        for placement, prefill, decode in placements
    ]
    meeting = [
        (placement, state)
        for placement, state in found
        if state is not None and state.meets(targets)
    ]
    if meeting:
        return min(meeting, key=lambda one: (one[0].num_devices, one[1].tpot_s))
    prefill_rates = {engine.split: _prefill_rate(engine, load, targets) for engine in engines}
    decode_rates = {engine.split: _decode_rate(engine, load, targets) for engine in engines}
    return max(
        found,
        key=lambda one: _capacity(
            one[0], prefill_rates[one[0].prefill.split], decode_rates[one[0].decode.split]
        ),
    )


def _num_devices(engine: Candidate, count: int) -> int:
    return count * engine.split.num_devices


def _counts(most: int) -> Iterator[int]:
    yield from range(1, min(most, _FEW) + 1)
    count = 2 * _FEW
    while count <= most:
        yield count
        count *= 2


def placement_state(placement: Placement, load: Load) -> SteadyState | None:
    """The balance under a load; None if one of the phases cannot keep up."""
    ttft_s = _ttft_s(placement.prefill, placement.num_prefill, load)
    return _joined(ttft_s, _decode_state(placement.decode, placement.num_decode, load))


def _joined(ttft_s: float | None, state: SteadyState | None) -> SteadyState | None:
    return None if state is None or ttft_s is None else replace(state, ttft_s=ttft_s)


def _ttft_s(engine: Candidate, count: int, load: Load) -> float | None:
    """Of so many prefill engines; None if they cannot keep up."""
    service_s = prompt_s(engine, load)
    busy = load.rate / (count * engine.num_parallel_steps) * service_s
    if busy >= 1.0:
        return None
    return service_s + busy * service_s / (2.0 * (1.0 - busy))


def _decode_state(engine: Candidate, count: int, load: Load) -> SteadyState | None:
    """The balance of so many decode engines; None if they cannot keep up."""
    return decode_state(engine, replace(load, rate=load.rate / count))


def placement_capacity(placement: Placement, load: Load, targets: Targets) -> float:
    """The highest rate whose balance meets the targets, in requests per second; 0 if none."""
    prefill_rate = _prefill_rate(placement.prefill, load, targets)
    return _capacity(placement, prefill_rate, _decode_rate(placement.decode, load, targets))


def _capacity(placement: Placement, prefill_rate: float, decode_rate: float) -> float:
    """Of engines that serve these rates each: so many of them serve so many times the rate."""
    return min(placement.num_prefill * prefill_rate, placement.num_decode * decode_rate)


def _prefill_rate(engine: Candidate, load: Load, targets: Targets) -> float:
    """The highest rate at which a prefill engine meets the target of the first token."""

    def holds(rate: float) -> bool:
        ttft_s = _ttft_s(engine, 1, replace(load, rate=rate))
        return ttft_s is not None and (targets.ttft_s is None or ttft_s <= targets.ttft_s)

    return highest_rate(holds)


def _decode_rate(engine: Candidate, load: Load, targets: Targets) -> float:
    """The highest rate at which a decode engine meets the target of the time per token."""

    def holds(rate: float) -> bool:
        state = _decode_state(engine, 1, replace(load, rate=rate))
        return state is not None and (targets.tpot_s is None or state.tpot_s <= targets.tpot_s)

    return highest_rate(holds)
