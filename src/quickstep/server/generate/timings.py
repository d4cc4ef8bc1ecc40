"""`quickstep` in a response: where the time of the request went, and what it costs.

Only responses to requests that send `quickstep_timings: true` (OpenAI's APIs), or the header
`x-quickstep-timings: true`, have it. The figures are those that the ledger records.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from quickstep.server.generate.generation import Generation
from quickstep.server.models.served_model import ServedModel
from quickstep.server.usage.price_book import Cost, Price, cost, sequence_usage
from quickstep.types import CacheMiss, SequenceTimings

TIMINGS_HEADER = "x-quickstep-timings"


class SequenceTimes(msgspec.Struct, frozen=True):
    """The times of one choice; the seven times add up to the time from its arrival to its end.
    `device_s` is its part of the measured seconds of the steps, without `rejected_s` for drafts
    that were rejected: of `num_drafts` draft tokens, `num_accepted` were accepted. The prompt's
    first `cached_tokens` were cached, and `cache_miss` is the reason why no more; `restored_tokens`
    of them were read from `--kv-cache-dir`.
    """

    index: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    preempted_ms: float
    paused_ms: float
    adapter_ms: float
    num_preemptions: int
    device_s: float
    rejected_s: float
    num_drafts: int
    num_accepted: int
    cached_tokens: int
    cache_miss: CacheMiss | None
    restore_ms: float
    restored_tokens: int

    @classmethod
    def of(cls, index: int, timings: SequenceTimings) -> SequenceTimes:
        """From the scheduler's times."""
        return cls(
            index,
            timings.queue_s * 1e3,
            timings.prefill_s * 1e3,
            timings.decode_s * 1e3,
            timings.preempted_s * 1e3,
            timings.paused_s * 1e3,
            timings.adapter_s * 1e3,
            timings.num_preemptions,
            timings.device_s,
            timings.rejected_s,
            timings.num_drafts,
            timings.num_accepted,
            timings.num_cached_tokens,
            timings.cache_miss,
            timings.restore_s * 1e3,
            timings.num_restored_tokens,
        )


class RequestTimings(msgspec.Struct, frozen=True):
    """What a request used, in sum and for each choice. Costs are in US dollars, by the price of
    tokens and by that of device time; null on a server without a price book.
    """

    cached_tokens: int
    device_s: float
    cost_by_tokens_usd: float | None
    cost_by_device_usd: float | None
    sequences: list[SequenceTimes]


def requested_timings(generation: Generation, model: ServedModel) -> RequestTimings | UnsetType:
    """The timings of a request whose choices have ended, if its client requested them."""
    parsed = generation.request
    if not parsed.timings:
        return UNSET
    return request_timings(generation, model.price(parsed.request.adapter))


def request_timings(generation: Generation, price: Price | None) -> RequestTimings:
    """The timings of a request whose choices have ended."""
    num_per_prompt = generation.request.sampling.n
    ended = [
        (choice, choice.timings) for choice in generation.choices if choice.timings is not None
    ]
    usages = [
        sequence_usage(choice.finish_reason, timings, choice.index % num_per_prompt == 0)
        for choice, timings in ended
    ]
    total = None if price is None else Cost.total(cost(usage, price) for usage in usages)
    return RequestTimings(
        cached_tokens=sum(usage.num_cached_tokens for usage in usages),
        device_s=sum(usage.device_s for usage in usages),
        cost_by_tokens_usd=None if total is None else total.by_tokens_usd,
        cost_by_device_usd=None if total is None else total.by_device_usd,
        sequences=[SequenceTimes.of(choice.index, timings) for choice, timings in ended],
    )
