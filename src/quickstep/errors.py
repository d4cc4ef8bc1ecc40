"""The exceptions that cross a layer border, and nothing else.

    QuickstepError
    ├── RequestError    the client's fault: HTTP 4xx, the request alone fails
    ├── EngineError     our fault: HTTP 5xx, logged once with its trace
    │   └── EngineDied      the engine's process ended before it had decided on the request
    ├── ConfigError     a start-up option or a checkpoint cannot be used: exit code 2
    └── OutOfBlocks     the pool cannot serve an allocation; the scheduler preempts or waits

A message says what is wrong, the value, the limit and the way out, in one sentence.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineDied",
    "EngineError",
    "OutOfBlocks",
    "PromptTooLong",
    "QuickstepError",
    "RequestError",
]


class QuickstepError(Exception):
    """The root of every exception that Quickstep raises on purpose."""


class RequestError(QuickstepError):
    """The request cannot be served as it stands: `param` names the field, `status` is HTTP's,
    `code` is a word for programs (None for the one that the status has).
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class PromptTooLong(RequestError):
    """A prompt that the context has no room for, in the words that clients look for: OpenAI's code
    and sentence, and how Anthropic's message begins.
    """

    def __init__(
        self, num_tokens: int, context: int, *, num_outputs: int = 1, at_least: bool = False
    ) -> None:
        limit = context - num_outputs
        more = " (or more: it was not tokenised)" if at_least else ""
        answer = " with 1 output token" if num_outputs else ""
        super().__init__(
            f"prompt is too long: {num_tokens} tokens > {limit} maximum{more}; this model's "
            f"maximum context length is {context} tokens{answer}; shorten the prompt or raise "
            "--max-model-len",
            param="prompt",
            code="context_length_exceeded",
        )


class EngineError(QuickstepError):
    """The engine failed; the request may be sent again."""


class EngineDied(EngineError):
    """The engine's process ended with the request, for which it may even have been to blame."""


class ConfigError(QuickstepError):
    """A start-up option, a checkpoint or the hardware does not allow what was asked."""


class OutOfBlocks(QuickstepError):
    """Fewer KV blocks are free than the allocation needs. Nothing was allocated."""
