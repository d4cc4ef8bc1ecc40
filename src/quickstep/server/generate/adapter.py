"""The protocol of an API's adapter, and what an adapter may read of the server.

    Adapter.parse: bytes -> ParsedRequest, which names the Writer of its response

`endpoint` runs any adapter in the same way, streaming or not.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from quickstep.engine.interface import ServedEngine
from quickstep.errors import ConfigError, RequestError
from quickstep.server.api_keys import ApiKeys
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.http.body import Reception
from quickstep.server.http.errors import RouteNotFound
from quickstep.server.http.work_lanes import WorkLanes
from quickstep.server.lora_adapters import ServedAdapters
from quickstep.server.openai.request_types import SamplingFields
from quickstep.server.options import (
    AnswerOptions,
    Deadlines,
    FieldRules,
    RequestLimits,
    ServerOptions,
)
from quickstep.server.schema.field_reader import FieldReader
from quickstep.server.usage.limits import KeyLimiter
from quickstep.server.usage.price_book import Price, PriceBook
from quickstep.text.tool_calls.formats import (
    OutputFormats,
    check_budget_message,
    reasoning_format,
    tool_call_format,
)

_LISTED_NAMES = 20


class Served(msgspec.Struct, frozen=True):
    """What an adapter may read of the server.

    Attributes:
        engine: The engine.
        names: The model's names; the first one is the default.
        limits: Bounds on one request.
        formats: How the model writes tool calls and reasoning.
        deadlines: How long requests may take.
        field_rules: What happens to fields without effect.
        answers: What responses contain that a request did not request.
        shares_prefix_cache: The prompts of one API key may hit the cached prompts of another.
        api_keys: The keys, with the priorities that each may have.
        lanes: Threads for work that grows with a client's input.
        reception: Bytes for bodies that are being received.
        price_book: What requests cost; None if that is unknown.
        limiter: What the API keys have used of their limits.
        adapters: LoRA adapters, each of which clients may name as the model.
    """

    engine: ServedEngine
    names: tuple[str, ...]
    limits: RequestLimits
    formats: OutputFormats
    deadlines: Deadlines = msgspec.field(default_factory=Deadlines)
    field_rules: FieldRules = msgspec.field(default_factory=FieldRules)
    answers: AnswerOptions = msgspec.field(default_factory=AnswerOptions)
    shares_prefix_cache: bool = False
    api_keys: ApiKeys = msgspec.field(default_factory=ApiKeys)
    lanes: WorkLanes = msgspec.field(default_factory=WorkLanes)
    reception: Reception = msgspec.field(
        default_factory=lambda: Reception(ServerOptions().reception_bytes)
    )
    price_book: PriceBook | None = None
    limiter: KeyLimiter = msgspec.field(default_factory=KeyLimiter)
    adapters: ServedAdapters = msgspec.field(default_factory=ServedAdapters)

    @classmethod
    def of(cls, engine: ServedEngine, options: ServerOptions) -> Served:
        """From an open engine and the options. Raises ConfigError."""
        names = options.served_model_names or (engine.model_name,)
        both = next((name for name in options.adapter_names if name in names), None)
        if both is not None:
            raise ConfigError(f"{both!r} names both the model and an adapter; rename the adapter")
        formats = output_formats(engine, options)
        _check_budget_message(options.answers.budget_message, formats)
        limiter = KeyLimiter(options.api_keys.limits)
        options.api_keys.follow(limiter.take_limits)
        return cls(
            engine,
            names,
            options.limits,
            formats,
            options.deadlines,
            options.field_rules,
            options.answers,
            options.share_prefix_cache,
            options.api_keys,
            reception=Reception(options.reception_bytes, options.api_keys.weight_of),
            price_book=options.usage.price_book,
            limiter=limiter,
            adapters=ServedAdapters(
                options.adapter_names, options.lora_dir, options.limits.adapters
            ),
        )

    def price(self, adapter: str) -> Price | None:
        """The prices of the model with an adapter ("" for none); None without a price book."""
        return None if self.price_book is None else self.price_book.price(self.names[0], adapter)

    def model(self, name: str | None) -> str:
        """The name to answer with. Raises RequestError 404 for a model that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names and name not in self.adapters:
            known = (*self.names, *self.adapters.names)
            listed = ", ".join(known[:_LISTED_NAMES]) + ", ..." * (len(known) > _LISTED_NAMES)
            raise RouteNotFound(
                f"the model {name[:100]!r} does not exist; this server has {listed}",
                param="model",
                code="model_not_found",
            )
        return name

    def adapter(self, model: str) -> str:
        """The adapter that a model's name selects, "" for none. The model's own names select what
        an operator has set with `/lora-adapters`.
        """
        if model in self.names or model not in self.adapters:
            return self.adapters.default_mix
        return model


class LineResult(msgspec.Struct, frozen=True):
    """The JSON response to one line of a batch; `ignored` are the line's fields without effect."""

    body: object
    ignored: tuple[str, ...] = ()


class Adapter(Protocol):
    """One generating API."""

    def parse(self, body: bytes, served: Served, caller: str) -> ParsedRequest:
        """Validate a body of the API key `caller` ("" without keys). Raises RequestError."""


def output_formats(engine: ServedEngine, options: ServerOptions) -> OutputFormats:
    """The operator's choice, or else what the chat template implies. Raises ConfigError."""
    template = engine.chat_template
    return _chosen(OutputFormats() if template is None else template.formats, options)


def check_names(options: ServerOptions) -> None:
    """Raise ConfigError for a format that does not exist, before a model is loaded."""
    _chosen(OutputFormats(), options)


def _chosen(detected: OutputFormats, options: ServerOptions) -> OutputFormats:
    calls, reasoning = options.tool_call_parser, options.reasoning_parser
    return replace(
        detected,
        tool_calls=detected.tool_calls if calls is None else tool_call_format(calls),
        reasoning=detected.reasoning if reasoning is None else reasoning_format(reasoning),
    )


class MayReportProgress(Protocol):
    """A request that may ask for the progress of its prompt."""

    @property
    def stream(self) -> bool | None:
        """Whether the response is streamed."""

    @property
    def return_progress(self) -> bool | None:
        """Whether the progress is wanted."""


def reports_progress(fields: MayReportProgress, reader: FieldReader) -> bool:
    """Whether the engine reports how much of the prompt is computed: for a stream only."""
    if fields.return_progress and not fields.stream:
        reader.ignore("return_progress", "the response is not streamed")
    return bool(fields.return_progress and fields.stream)


def _check_budget_message(message: str, formats: OutputFormats) -> None:
    """Raise ConfigError for a message of the server that no request could have."""
    reasoning = formats.reasoning
    if message and reasoning is not None and reasoning.opening:
        try:
            check_budget_message(message, reasoning.closing)
        except RequestError as error:
            raise ConfigError(f"--reasoning-budget-message: {error}") from None


def response_flags(fields: SamplingFields, served: Served) -> dict[str, Any]:
    """`stream`, `stream_options` and `quickstep_timings` as fields of `ParsedRequest`.

    Raises RequestError.
    """
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options")
    always = served.answers.always_usage
    return {
        "stream": bool(fields.stream),
        "include_usage": always or (options is not None and bool(options.include_usage)),
        "continuous_usage": always
        or (options is not None and bool(options.continuous_usage_stats)),
        "timings": bool(fields.quickstep_timings),
    }
