"""What the operator may set about the HTTP surface, and the bounds on what a client may send.

Frozen sections made by `cli.serve` (or by a test) and read by the routes. Nothing here is about
the engine: its own limits (context, queue) are the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["RequestLimits", "ServerOptions"]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on one request; beyond one the answer is 400 (413 for the body).

    Attributes:
        body_bytes: Size of a request body.
        n: Choices per prompt.
        prompts: Prompts per request.
        sequences: Prompts times sequences of each (n, best_of or beams).
        tokens: Tokens of one request: its prompts, and all that its sequences may generate.
        stop: Stop strings per request.
        stop_chars: Characters of one stop string.
        stop_token_ids: Stop token ids, and allowed token ids, per request.
        logit_bias: Entries of `logit_bias`.
        logprobs: Alternatives per token.
        label_chars: Characters of `user`, `cache_salt` and the other labels, which logs keep.
        tools: Functions that a request may offer to the model.
        metadata: Entries of `metadata`; keys have at most 64 and values at most 512 characters.
    """

    body_bytes: int = 4 * 1024 * 1024
    n: int = 32
    prompts: int = 256
    sequences: int = 512
    tokens: int = 8 * 1024 * 1024
    stop: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 1024
    logit_bias: int = 1024
    logprobs: int = 20
    label_chars: int = 512
    tools: int = 128
    metadata: int = 16


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How one engine is served.

    Attributes:
        served_model_names: Names that clients may use; empty takes the engine's model name. The
            first one stands in the responses.
        limits: Bounds on one request.
        stall_s: `/health` fails when work is pending and no step has finished for this long.
        drain_s: How long SIGTERM lets running requests go on before they are ended.
        tool_call_parser: Name of the format of tool calls, `none` for no tools; None takes what
            the chat template tells.
        reasoning_parser: The same for reasoning.
    """

    served_model_names: tuple[str, ...] = ()
    limits: RequestLimits = field(default_factory=RequestLimits)
    stall_s: float = 60.0
    drain_s: float = 30.0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
