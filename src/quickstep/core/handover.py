"""Whether one engine computes a prompt for another one, which then continues the request.

Pure functions of what the engines have reported, as `core.router`: the wait and the prefill where
it would go without, and what its prefill there delays the others, against the same elsewhere and
the transfer of the KV blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quickstep.core.router import ReplicaView, RouteRequest, prefill_s, queue_s
from quickstep.types import Request

# Between two processes of one machine; docs/design/0060 has the measurement.
TRANSFER_BYTES_PER_S = 1.0e9
_TRANSFER_S = 0.002  # of the shortest one, and of the request's way


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
    best = min(prefill, key=lambda one: (one.first_token_s(request, now), one.number))
    delay_s = decode.view.num_live * decode.prefill_s(request)
    split_s = best.first_token_s(request, now) + transfer_s + _TRANSFER_S
    return best.number if split_s < decode.first_token_s(request, now) + delay_s else None
