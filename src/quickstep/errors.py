"""The exceptions that cross the border of a layer.

    QuickstepError
    ├── RequestError        the client's fault: HTTP 4xx, only this request fails
    │   ├── PromptTooLong       the prompt does not fit the context
    │   ├── QueueFull           too many sequences wait
    │   └── FirstTokenTooLate   the predicted wait is longer than the request allows
    ├── EngineError         the engine's fault: HTTP 5xx, logged once with its traceback
    │   ├── StepOutOfMemory     a step did not fit into the device's memory; the next one may
    │   ├── EngineNotStarted    the system does not let another process start now
    │   └── EngineDied          the engine's process ended before it finished the request
    ├── ConfigError         a start-up option or a checkpoint is not usable: exit code 2
    │   └── ModelTooLarge       the model needs more memory than there is for it
    └── OutOfBlocks         too few free KV blocks; the scheduler preempts or waits

A message is one sentence with the problem, the value, the limit and a solution.
"""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The command that adds an optional part. It names no package: on PyPI, `quickstep` is another
    project.
    """
    return f"pip install '.[{extra}]' in a clone of Quickstep"


def size_text(num_bytes: float) -> str:
    """A number of bytes in binary units, such as `1.50 GiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


class QuickstepError(Exception):
    """The root of every exception that Quickstep raises on purpose."""


def text_for_clients(error: BaseException) -> str:
    """What a client may read of an error: the sentence of one of ours; of any other one the type,
    since its text may name files of the server. Whoever catches it has it logged.
    """
    if isinstance(error, QuickstepError):
        return str(error)
    return f"{type(error).__name__}, which the log explains"


class RequestError(QuickstepError):
    """The request is invalid or cannot be run.

    Attributes:
        param: The field at fault.
        status: The HTTP status.
        code: A code for programs; None for the default of the status.
        retry_after_s: Seconds after which the request may succeed; None if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class PromptTooLong(RequestError):
    """The prompt does not fit the context.

    Clients search the message for OpenAI's sentence and for the start of Anthropic's.
    """

    def __init__(
        self,
        num_tokens: int,
        context: int,
        *,
        num_outputs: int = 1,
        at_least: bool = False,
        param: str = "prompt",
    ) -> None:
        limit = context - num_outputs
        more = " (or more: it was not tokenised)" if at_least else ""
        answer = " with 1 output token" if num_outputs else ""
        super().__init__(
            f"prompt is too long: {num_tokens} tokens > {limit} maximum{more}; this model's "
            f"maximum context length is {context} tokens{answer}; shorten the prompt or raise "
            "--max-model-len",
            param=param,
            code="context_length_exceeded",
        )


class QueueFull(RequestError):
    """Too many sequences wait, or too many of an `account`; `wait_s` is how long one more would."""

    def __init__(
        self, num_waiting: int, n: int, max_waiting: int, wait_s: float, account: str = ""
    ) -> None:
        more = "" if n == 1 else f" and the request adds {n}"
        whose = f" of {account}" if account else ""
        limit = (
            f"its share of {max_waiting} is used up" if account else f"the limit is {max_waiting}"
        )
        super().__init__(
            f"{num_waiting} sequences{whose} wait{more}, {limit}, and the predicted "
            f"wait is {wait_s:.2f} s; send the request again later or raise --max-waiting",
            status=429,
            retry_after_s=wait_s,
        )


class FirstTokenTooLate(RequestError):
    """The first token cannot come before the request's deadline for it, of which `waited_s` have
    passed.
    """

    def __init__(
        self, deadline_s: float, wait_s: float, first_token_s: float, waited_s: float = 0.0
    ) -> None:
        waited = f"it has waited for {waited_s:.2f} s, " if waited_s >= 0.01 else ""
        super().__init__(
            f"the first token cannot come within {deadline_s * 1e3:g} ms: {waited}the predicted "
            f"wait is {wait_s:.2f} s and its prompt takes {first_token_s:.2f} s; send the request "
            "again later or raise ttft_deadline_ms",
            param="ttft_deadline_ms",
            status=503,
            code="deadline_unreachable",
            retry_after_s=max(1.0, wait_s + first_token_s - deadline_s),
        )


class ResumedAfterEnd(RequestError):
    """A request is resumed with `num_tokens` tokens of a sequence that ended with the `number`-th
    of them.
    """

    def __init__(self, index: int, num_tokens: int, number: int, how: str) -> None:
        super().__init__(
            f"resumed holds {num_tokens} tokens of sequence {index}, which ended with token "
            f"{number} ({how}); set is_finished",
            param="resumed",
        )


class EngineError(QuickstepError):
    """The engine failed; the client may send the request again."""


class StepOutOfMemory(EngineError):
    """A step did not fit into the device's memory. Its sequences end; others continue."""


class EngineNotStarted(EngineError):
    """The system has no descriptor, process or memory for another process now."""


class EngineDied(EngineError):
    """The engine's process ended while the request ran, which may be the cause, or while it loaded
    the model.
    """


class ConfigError(QuickstepError):
    """A start-up option is invalid, or the checkpoint or the hardware does not support it."""


class ModelTooLarge(ConfigError):
    """The model does not fit into the memory that there is for it.

    Attributes:
        needed_bytes: The least that it needs.
    """

    def __init__(self, message: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


class OutOfBlocks(QuickstepError):
    """Fewer KV blocks are free than requested. Nothing was allocated."""
