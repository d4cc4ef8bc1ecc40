"""Which engine gets a request, where some compute prompts for others, which continue the requests.

Pure functions of what the engines have reported, as `core.router`: the wait and the prefill where
it would go without, and what its prefill there delays the others, against the same elsewhere and
the transfer of the KV blocks. The server (`cluster.replicas`) and the simulator (`sim.replicas`)
call them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quickstep.core.router import (
    ReplicaState,
    ReplicaView,
    Router,
    RouteRequest,
    prefill_s,
    queue_s,
)
from quickstep.types import Request

# Between two processes of one machine; docs/design/0060 has the measurement.
TRANSFER_BYTES_PER_S = 1.0e9
_TRANSFER_S = 0.002  # of the shortest one, and of the request's way


class Phases(msgspec.Struct, frozen=True):
    """Engines of different phases: the first `num_prefill` ones compute prompts for the others.

    Attributes:
        block_size: Tokens of a KV block.
        block_bytes: What is sent of each.
    """

    num_prefill: int
    block_size: int
    block_bytes: int
    bytes_per_s: float = TRANSFER_BYTES_PER_S

    def transfer_s(self, num_blocks: int) -> float:
        """How long so many blocks are on their way."""
        return num_blocks * self.block_bytes / self.bytes_per_s


class Assignment(msgspec.Struct, frozen=True):
    """The number of the engine that gets a request, and of the one that continues it after its
    first token, if that is another one.
    """

    engine: int
    continues_at: int | None = None


def can_hand_over(request: Request) -> bool:
    """Whether two engines may share a request: its prompt's KV is all that the second one needs."""
    sampling = request.sampling
    is_short = sampling.max_tokens is not None and sampling.max_tokens <= 1
    needs_hidden = request.prompt_only or sampling.prompt_logprobs is not None
    is_elsewhere = bool(request.resumed) or request.is_in_search or request.is_continuation
    return not (is_short or needs_hidden or is_elsewhere)


class PhaseEngine(msgspec.Struct, frozen=True):
    """An engine that may compute a prompt, by number, and how much of it is cached there."""

    number: int
    view: ReplicaView
    num_cached: int

    def first_token_s(self, request: RouteRequest, now: float) -> float:
        """How long the first token would take there."""
        return queue_s(request, self.view, now) + self.prefill_s(request)

    def prefill_s(self, request: RouteRequest) -> float:
        """How long the rest of the prompt takes there."""
        return prefill_s(request, self.view, self.num_cached)


def choose_prefill(
    request: RouteRequest,
    prefill: Sequence[PhaseEngine],
    decode: PhaseEngine,
    transfer_s: float,
    now: float,
) -> int | None:
    """The engine that is to compute the prompt, and to send `transfer_s` of KV blocks to `decode`;
    None if `decode` is to compute it as well: its first token then comes earlier, the time counted
    that the requests there have to wait meanwhile.
    """
    best = min(prefill, key=lambda engine: (engine.first_token_s(request, now), engine.number))
    delay_s = decode.view.num_live * decode.prefill_s(request)
    split_s = best.first_token_s(request, now) + transfer_s + _TRANSFER_S
    return best.number if split_s < decode.first_token_s(request, now) + delay_s else None


def assign(
    request: RouteRequest,
    is_divided: bool,
    views: Sequence[ReplicaView],
    router: Router,
    phases: Phases,
    fingerprints: Sequence[str],
    now: float,
) -> Assignment:
    """Choose the engines of a request among those whose view is up, by number. `is_divided`: two
    engines may share it (`can_hand_over`). `fingerprints`, of the engines' weights: KV goes between
    equal ones only. A prompt for which the second engine has no room is not computed elsewhere: the
    transfer would be refused, and the prompt computed twice.
    """
    up = [number for number, view in enumerate(views) if view.is_up]
    first = phases.num_prefill
    decoders = [number for number in up if number >= first] or up
    cached = [0] * len(views)
    if is_divided:
        cached = router.num_cached_tokens(request, len(views))
    number = router.choose(request, _only(views, decoders), now)
    prefillers = [
        other
        for other in up
        if other < first <= number and fingerprints[other] == fingerprints[number]
    ]
    num_blocks = (request.num_prompt_tokens - cached[number]) // phases.block_size
    room = views[number].num_free_blocks
    has_room = room is None or num_blocks <= room
    if not (is_divided and prefillers and has_room):
        return Assignment(number)
    *of_prefill, of_decode = [
        PhaseEngine(other, views[other], cached[other]) for other in (*prefillers, number)
    ]
    transfer_s = phases.transfer_s(num_blocks)
    chosen = choose_prefill(request, of_prefill, of_decode, transfer_s, now)
    if chosen is None:
        return Assignment(number)
    # the router knows what it will have cached
    router.choose(request, _only(views, [chosen]), now)
    return Assignment(chosen, number)


def _only(views: Sequence[ReplicaView], numbers: Sequence[int]) -> list[ReplicaView]:
    """The views, with only these engines up."""
    return [
        replace(view, state=ReplicaState.DOWN) if view.is_up and number not in numbers else view
        for number, view in enumerate(views)
    ]
