"""Records the usage of every finished sequence: its cost, a row of the ledger, its key's limits.

`UsageRecorder` follows the step log of one model's engine, which has every sequence, however it
ended: aborted by its client, in a batch, or as an embedding. An upstream's answer is a row, too.
The app's lifespan opens and closes the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from quickstep.engine.records.step_log import SequenceRecord
from quickstep.server.usage.limits import KeyLimiter, Used
from quickstep.server.usage.price_book import (
    Cost,
    PriceBook,
    SequenceUsage,
    cost,
    sequence_usage,
)

if TYPE_CHECKING:
    from quickstep.server.usage.ledger import Ledger, UsageTotals

BATCHES = "/v1/batches"  # the endpoint of the lines of batches

_NANO = 1e9


class UpstreamAnswer(msgspec.Struct, frozen=True):
    """What another server has generated for a request (`server.fallback`).

    Attributes:
        model: Its name there, by which it is priced.
        finish_reason: The last one of its choices, as the other server says it, "" if it says none;
            "error" if it has failed in its stream, "aborted" if the client has left.
    """

    request_id: str
    key_name: str
    model: str
    endpoint: str
    finish_reason: str = ""
    usage: SequenceUsage = SequenceUsage()
    costs: Cost = Cost()


class UsageRecorder:
    """A follower of the step log (`engine.records.step_log.Follower`).

    Args:
        model: The name under which the model is recorded and priced.
        limiter: The limits of the keys, which are charged.
        has_keys: The part of a tenant's name before the slash is the name of an API key.
        ledger: Where rows are written, open; None for nowhere.
        wall_clock: Seconds since 1970.
    """

    def __init__(
        self,
        model: str,
        price_book: PriceBook,
        limiter: KeyLimiter,
        *,
        has_keys: bool,
        ledger: Ledger | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._model = model
        self._price_book = price_book
        self._limiter = limiter
        self._has_keys = has_keys
        self._ledger = ledger
        self._wall_clock = wall_clock

    def add_sequence(self, record: SequenceRecord) -> None:
        """Record a sequence that ended: the seconds of its steps are in its `device_s`."""
        timings = record.timings
        pays_prompt = record.index == 0 and not record.is_continuation
        usage = sequence_usage(record.finish_reason, timings, pays_prompt)
        costs = cost(usage, self._price_book.price(self._model, record.adapter))
        key_name = record.tenant.partition("/")[0] if self._has_keys else ""
        self._limiter.charge(key_name, usage, costs, in_batch=record.endpoint == BATCHES)
        if self._ledger is None:
            return
        from quickstep.server.usage.ledger import LedgerRow

        self._ledger.add(
            LedgerRow(
                request_id=record.request_id,
                sequence_index=record.index,
                finished_ns=round(self._wall_clock() * _NANO),
                key_name=key_name,
                model=self._model,
                adapter=record.adapter,
                endpoint=record.endpoint,
                finish_reason=record.finish_reason.value,
                num_prompt_tokens=usage.num_prompt_tokens,
                num_cached_tokens=usage.num_cached_tokens,
                num_output_tokens=usage.num_output_tokens,
                queue_ns=round(timings.queue_s * _NANO),
                prefill_ns=round(timings.prefill_s * _NANO),
                decode_ns=round(timings.decode_s * _NANO),
                device_ns=round(timings.device_s * _NANO),
                cost_by_tokens_nusd=costs.by_tokens_nusd,
                cost_by_device_nusd=costs.by_device_nusd,
            )
        )


def record_upstream(
    ledger: Ledger, answer: UpstreamAnswer, wall_clock: Callable[[], float] = time.time
) -> None:
    """Write a row of an answer of another server: it took none of this one's device seconds."""
    from quickstep.server.usage.ledger import LedgerRow

    usage = answer.usage
    ledger.add(
        LedgerRow(
            request_id=answer.request_id,
            sequence_index=0,
            finished_ns=round(wall_clock() * _NANO),
            key_name=answer.key_name,
            model=answer.model,
            adapter="",
            endpoint=answer.endpoint,
            finish_reason=answer.finish_reason,
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens,
            queue_ns=0,
            prefill_ns=0,
            decode_ns=0,
            device_ns=0,
            cost_by_tokens_nusd=answer.costs.by_tokens_nusd,
            cost_by_device_nusd=0,
        )
    )


def restore_limits(limiter: KeyLimiter, ledger: Ledger) -> None:
    """Charge the keys what an open ledger has recorded of them. Raises ConfigError."""
    limiter.restore(
        lambda key_name, since_ns: _used(ledger.totals(key_name, since_ns)),
        lambda: [(totals.group[0], _used(totals)) for totals in ledger.take_others()],
    )


def _used(totals: UsageTotals) -> Used:
    usage = SequenceUsage(
        totals.num_prompt_tokens,
        totals.num_cached_tokens,
        totals.num_output_tokens,
        totals.device_ns / _NANO,
    )
    costs = Cost(totals.cost_by_tokens_nusd, totals.cost_by_device_nusd)
    return Used(usage, costs, totals.num_sequences)
