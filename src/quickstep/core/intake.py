"""What a request may ask of this scheduler: checked once, when it is added.

Everything here is known beforehand from sizes, so that an admitted request can always finish: a
sequence that is alone fits the pool at its longest.
"""

from __future__ import annotations

import msgspec

from quickstep.config import SchedulerConfig
from quickstep.errors import PromptTooLong, RequestError
from quickstep.types import Request

__all__ = ["Limits"]


class Limits(msgspec.Struct, frozen=True):
    """Sizes that a sequence must keep, in tokens.

    Attributes:
        max_model_len: Longest sequence the engine was started for.
        pool_tokens: What the whole KV pool holds.
        max_num_seqs: Resident sequences.
        max_waiting: Queued sequences beyond which requests are refused; None for no limit.
    """

    max_model_len: int
    pool_tokens: int
    max_num_seqs: int
    max_waiting: int | None

    @staticmethod
    def of(config: SchedulerConfig, pool_tokens: int) -> Limits:
        """The limits of a scheduler."""
        return Limits(config.max_model_len, pool_tokens, config.max_num_seqs, config.max_waiting)

    def max_outputs(self, prompt_len: int) -> int:
        """Output tokens that fit behind a prompt."""
        return min(self.max_model_len, self.pool_tokens) - prompt_len

    def output_limit(self, request: Request) -> int:
        """Output tokens after which a sequence of `request` ends in any case."""
        if request.prompt_only:
            return 0
        room = self.max_outputs(len(request.prompt_token_ids))
        max_tokens = request.sampling.max_tokens
        return room if max_tokens is None else min(room, max_tokens)

    def check(self, request: Request, num_waiting: int) -> None:
        """Raise RequestError for a request that cannot be served, ever or now."""
        num_tokens = len(request.prompt_token_ids)
        if not num_tokens:
            raise RequestError("prompt has no tokens, it needs at least 1", param="prompt")
        least_outputs = 0 if request.prompt_only else 1
        if num_tokens + least_outputs > self.max_model_len:
            raise PromptTooLong(num_tokens, self.max_model_len, num_outputs=least_outputs)
        if num_tokens + least_outputs > self.pool_tokens:
            raise RequestError(
                f"prompt has {num_tokens} tokens, with {least_outputs} output tokens the KV cache "
                f"holds {self.pool_tokens}; raise --num-blocks or shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.sampling.n > self.max_num_seqs:
            raise RequestError(
                f"n is {request.sampling.n}, at most {self.max_num_seqs} sequences run at once;"
                " lower n or raise --max-num-seqs",
                param="n",
            )
        if self.max_waiting is not None and num_waiting:
            self._check_queue(num_waiting, request.sampling.n, self.max_waiting)

    def _check_queue(self, num_waiting: int, n: int, max_waiting: int) -> None:
        """Room for `n` more. An empty queue takes any request, else a large `n` would never run."""
        if num_waiting + n > max_waiting:
            more = "" if n == 1 else f" and the request adds {n}"
            raise RequestError(
                f"{num_waiting} sequences wait{more}, the limit is {max_waiting};"
                " send the request again later or raise --max-waiting",
                status=429,
            )
