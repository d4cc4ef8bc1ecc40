"""Which request ends the engines that compute it.

A request that an engine computes and that has got no token from it may be what ends it. After
`max_deaths` such ends in a row it is a suspect. The only one of an engine's requests that may have
ended it is the cause, if it is a suspect; if there are several, each suspect is tried once more,
without others that engines have ended with, until it gets a token or the engine ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickstep.engine.remote.streams import LostRequest


def is_suspect(lost: LostRequest, max_deaths: int) -> bool:
    """Whether a request may be what ends engines."""
    return lost.num_deaths >= max_deaths


def causes_of(requests: Sequence[LostRequest], tried: str | None, max_deaths: int) -> set[str]:
    """The ids of those of an ended engine's requests that ended it, as far as that is known;
    `tried` is the one that was on trial there.
    """
    possible = [lost for lost in requests if lost.was_computed and not lost.got_token]
    suspects = {lost.request.request_id for lost in possible if is_suspect(lost, max_deaths)}
    if tried in suspects:
        return {tried}
    return suspects if len(possible) == 1 else set()
