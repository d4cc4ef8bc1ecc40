"""`ServerState`: what all models of a server share. It knows no model and no engine."""

from __future__ import annotations

import msgspec

from quickstep.server.fallback.chain import FallbackState
from quickstep.server.http.body import Reception
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.kept_streams.kept_stream import KeptStreams
from quickstep.server.options import (
    AnswerOptions,
    Deadlines,
    FieldRules,
    RequestLimits,
    ServerOptions,
)
from quickstep.server.usage.api_keys import ApiKeys
from quickstep.server.usage.limits import KeyLimiter
from quickstep.server.usage.price_book import PriceBook


class ServerState(msgspec.Struct, frozen=True):
    """What requests to any model share.

    Attributes:
        limits: Bounds on one request.
        deadlines: How long requests may take.
        field_rules: What happens to fields without effect.
        answers: What responses contain that a request did not request.
        shares_prefix_cache: The prompts of one API key may hit the cached prompts of another.
        api_keys: The keys, with the priorities that each may have.
        lanes: Threads for work that grows with a client's input.
        reception: Bytes for bodies that are being received.
        price_book: What requests cost; None if that is unknown.
        limiter: What the API keys have used of their limits.
        fallbacks: The fallback chains, and the upstreams that they lead to.
        kept_streams: Responses that continue without their client.
    """

    limits: RequestLimits
    deadlines: Deadlines
    field_rules: FieldRules
    answers: AnswerOptions
    shares_prefix_cache: bool
    api_keys: ApiKeys
    lanes: WorkLanes
    reception: Reception
    price_book: PriceBook | None
    limiter: KeyLimiter
    fallbacks: FallbackState
    kept_streams: KeptStreams

    @classmethod
    def of(cls, options: ServerOptions) -> ServerState:
        """The state of a server that has answered nothing yet. Raises ConfigError."""
        limiter = KeyLimiter(options.api_keys.limits)
        options.api_keys.follow(limiter.take_limits)
        return cls(
            limits=options.limits,
            deadlines=options.deadlines,
            field_rules=options.field_rules,
            answers=options.answers,
            shares_prefix_cache=options.share_prefix_cache,
            api_keys=options.api_keys,
            lanes=WorkLanes(),
            reception=Reception(options.reception_bytes, options.api_keys.weight_of),
            price_book=options.usage.price_book,
            limiter=limiter,
            fallbacks=FallbackState(options.routes),
            kept_streams=KeptStreams(options.kept_streams),
        )
