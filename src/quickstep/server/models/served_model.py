"""`ServedModel`: one model of the server, as an API's parser and writer see it."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from quickstep.engine.interface import ServedEngine
from quickstep.errors import ConfigError, RequestError
from quickstep.server.models.lora_names import LoRANames
from quickstep.server.models.server_state import ServerState
from quickstep.server.options import ServerOptions
from quickstep.server.usage.price_book import Price
from quickstep.text.tool_calls.formats import (
    OutputFormats,
    check_budget_message,
    reasoning_format,
    tool_call_format,
)


class ServedModel(msgspec.Struct, frozen=True):
    """A model that serves requests.

    Attributes:
        engine: Its engine.
        names: Its names; responses to requests without one have the first.
        formats: How it writes tool calls and reasoning.
        adapters: Its LoRA adapters, each of which clients may name as the model.
        server: What all models share.
    """

    engine: ServedEngine
    names: tuple[str, ...]
    formats: OutputFormats
    adapters: LoRANames
    server: ServerState

    @classmethod
    def of(cls, engine: ServedEngine, options: ServerOptions, server: ServerState) -> ServedModel:
        """From an open engine and the options. Raises ConfigError."""
        names = options.served_model_names or (engine.model_name,)
        both = next((name for name in options.adapter_names if name in names), None)
        if both is not None:
            raise ConfigError(f"{both!r} names both the model and an adapter; rename the adapter")
        formats = output_formats(engine, options)
        _check_budget_message(options.answers.budget_message, formats)
        adapters = LoRANames(options.adapter_names, options.lora_dir, options.limits.adapters)
        return cls(engine, names, formats, adapters, server)

    @property
    def name(self) -> str:
        """The name under which it is recorded, measured and priced."""
        return self.names[0]

    def __contains__(self, name: object) -> bool:
        """Whether requests with this name are its own: a name of the model or of an adapter."""
        return name in self.names or name in self.adapters

    def name_or_default(self, name: str | None) -> str:
        """The name to answer with, of the client's own."""
        return self.name if name is None else name

    def adapter(self, name: str) -> str:
        """The adapter that a name selects, "" for none. The model's own names select what an
        operator has set with `/lora-adapters`.
        """
        if name in self.names or name not in self.adapters:
            return self.adapters.default_mix
        return name

    def price(self, adapter: str) -> Price | None:
        """The prices with an adapter ("" for none); None without a price book."""
        book = self.server.price_book
        return None if book is None else book.price(self.name, adapter)


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


def _check_budget_message(message: str, formats: OutputFormats) -> None:
    """Raise ConfigError for a message of the server that no request could have."""
    reasoning = formats.reasoning
    if message and reasoning is not None and reasoning.opening:
        try:
            check_budget_message(message, reasoning.closing)
        except RequestError as error:
            raise ConfigError(f"--reasoning-budget-message: {error}") from None
