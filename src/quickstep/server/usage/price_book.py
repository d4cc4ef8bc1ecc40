"""The price book: what tokens and device time cost, per model and per adapter, in US dollars.

`cost` prices the usage of a sequence in two ways that are independent of each other: by its tokens,
and by its seconds on the device. Costs are integers, in billionths of a dollar, so that a total is
exact and does not depend on the order of its terms.

    default: {input_per_million: 0.15, output_per_million: 0.60, device_per_hour: 1.20}
    models:
      my-model: {input_per_million: 0.10, cached_input_per_million: 0.05}
    adapters:
      sql: {output_per_million: 0.90}

An adapter's entry goes before its model's, and that before the default, price by price.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from quickstep.errors import ConfigError
from quickstep.types import FinishReason, SequenceTimings
from quickstep.yaml_file import read_yaml

_NANO = 1e9
_MILLION = 1e6
_HOUR_S = 3600.0
_MAX_PRICE = 1e6  # dollars; beyond it a typing error is more likely than a price


class SequenceUsage(msgspec.Struct, frozen=True):
    """What a sequence is charged for.

    Attributes:
        num_prompt_tokens: Tokens of the prompt, cached ones included. The n sequences of a request
            have one prompt: it is in the usage of the first.
        num_cached_tokens: Those of them that were found in the prefix cache.
        num_output_tokens: Generated tokens.
        device_s: The sequence's part of the measured seconds on the device.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    device_s: float = 0.0


class Price(msgspec.Struct, frozen=True):
    """Prices in dollars: per million tokens, and per hour of the device."""

    input_per_million: float = 0.0
    cached_input_per_million: float = 0.0
    output_per_million: float = 0.0
    device_per_hour: float = 0.0

    def most_usd(self, num_tokens: int) -> float:
        """What so many tokens cost at most, in dollars."""
        per_million = max(self.input_per_million, self.output_per_million)
        return num_tokens * per_million / 1e6


class PriceEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the file; a price that it does not have is that of a more general entry. Cached
    input costs as much as other input if the entry has a price of input only.
    """

    input_per_million: float | None = None
    cached_input_per_million: float | None = None
    output_per_million: float | None = None
    device_per_hour: float | None = None

    def prices(self) -> Mapping[str, float]:
        """The prices that the entry has."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if "input_per_million" in given:
            given.setdefault("cached_input_per_million", given["input_per_million"])
        return given


class PriceBook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All prices. Without an entry a price is 0."""

    default: PriceEntry = PriceEntry()
    models: dict[str, PriceEntry] = msgspec.field(default_factory=dict)
    adapters: dict[str, PriceEntry] = msgspec.field(default_factory=dict)

    def price(self, model: str, adapter: str = "") -> Price:
        """The prices of a model, with an adapter ("" for none)."""
        prices = dict(self.default.prices())
        if model in self.models:
            prices |= self.models[model].prices()
        if adapter in self.adapters:
            prices |= self.adapters[adapter].prices()
        return Price(**prices)


class Cost(msgspec.Struct, frozen=True):
    """The two prices of the same usage, in billionths of a dollar."""

    by_tokens_nusd: int = 0
    by_device_nusd: int = 0

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """The sum of costs."""
        listed = list(costs)
        return cls(
            sum(cost.by_tokens_nusd for cost in listed),
            sum(cost.by_device_nusd for cost in listed),
        )

    @property
    def by_tokens_usd(self) -> float:
        """The price of the tokens, in dollars."""
        return self.by_tokens_nusd / _NANO

    @property
    def by_device_usd(self) -> float:
        """The price of the time on the device, in dollars."""
        return self.by_device_nusd / _NANO


def cost(usage: SequenceUsage, price: Price) -> Cost:
    """What the usage costs, by tokens and by device seconds, each rounded once."""
    num_uncached = usage.num_prompt_tokens - usage.num_cached_tokens
    tokens = (
        num_uncached * price.input_per_million
        + usage.num_cached_tokens * price.cached_input_per_million
        + usage.num_output_tokens * price.output_per_million
    )
    device = usage.device_s * price.device_per_hour
    return Cost(round(tokens * _NANO / _MILLION), round(device * _NANO / _HOUR_S))


def sequence_usage(
    reason: FinishReason | None, timings: SequenceTimings, pays_prompt: bool
) -> SequenceUsage:
    """What a sequence is charged for.

    A prompt counts once for its n sequences: one of them pays it. It does not count if the request
    ended in the queue. The tokens of a sequence that the server failed to finish are free; its time
    on the device is not.
    """
    if reason in (FinishReason.ERROR, FinishReason.SHUTDOWN):
        return SequenceUsage(device_s=timings.device_s)
    has_prompt = pays_prompt and timings.first_scheduled_s is not None
    return SequenceUsage(
        num_prompt_tokens=timings.num_prompt_tokens if has_prompt else 0,
        num_cached_tokens=timings.num_cached_tokens if has_prompt else 0,
        num_output_tokens=timings.num_output_tokens,
        device_s=timings.device_s,
    )


def read_price_book(path: Path) -> PriceBook:
    """Read the file of `--price-book`. Raises ConfigError."""
    book = read_yaml(path, PriceBook, "--price-book")
    entries = {"default": book.default}
    entries |= {f"models.{name}": entry for name, entry in book.models.items()}
    entries |= {f"adapters.{name}": entry for name, entry in book.adapters.items()}
    for place, entry in entries.items():
        for name, price in entry.prices().items():
            if not (math.isfinite(price) and 0 <= price <= _MAX_PRICE):
                raise ConfigError(
                    f"--price-book {path} is not valid: {place}.{name} is {price}, it must be "
                    f"between 0 and {_MAX_PRICE:g} dollars"
                )
    if not any(entry.prices() for entry in entries.values()):
        raise ConfigError(
            f"--price-book {path} has no price; add one, such as default: {{output_per_million: 1}}"
        )
    return book
