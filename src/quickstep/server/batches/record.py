"""One batch: where it stands, what it has counted. Its job writes it, the routes show it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from quickstep.server.batches.lines import LineAnswer
from quickstep.server.batches.request_types import BatchRequest
from quickstep.server.batches.response_types import (
    BatchError,
    BatchErrors,
    BatchObject,
    BatchStatus,
    BatchUsage,
    InputTokensDetails,
    OutputTokensDetails,
    RequestCounts,
)

__all__ = ["Batch"]

_OVER = frozenset({"failed", "completed", "expired", "cancelled"})


class Batch(msgspec.Struct):
    """A batch. Owned by its job.

    Attributes:
        model: The name that lines without a model of their own are answered with.
        moments: When it came into each status, in seconds since 1970.
    """

    owner: str
    request: BatchRequest
    model: str
    created_at: int
    window_s: int
    id: str = msgspec.field(default_factory=lambda: f"batch_{secrets.token_hex(16)}")
    status: BatchStatus = "validating"
    moments: dict[str, int] = msgspec.field(default_factory=dict)
    errors: list[BatchError] = msgspec.field(default_factory=list)
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.status in _OVER

    def enter(self, status: BatchStatus, now: int) -> None:
        """Go into a status."""
        self.status = status
        self.moments[status] = now

    def count(self, answer: LineAnswer) -> None:
        """A line was answered."""
        if not answer.succeeded:
            self.num_failed += 1
            return
        self.num_completed += 1
        usage = answer.usage
        self.num_input_tokens += _number(usage, "prompt_tokens", "input_tokens")
        self.num_output_tokens += _number(usage, "completion_tokens", "output_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.num_cached_tokens += _number(details, "cached_tokens")
        details = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        self.num_reasoning_tokens += _number(details, "reasoning_tokens")

    def shown(self) -> BatchObject:
        """OpenAI's object."""
        at = self.moments.get
        return BatchObject(
            id=self.id,
            endpoint=self.request.endpoint,
            input_file_id=self.request.input_file_id,
            completion_window=self.request.completion_window,
            status=self.status,
            created_at=self.created_at,
            expires_at=self.created_at + self.window_s,
            model=self.model,
            request_counts=RequestCounts(self.num_lines, self.num_completed, self.num_failed),
            usage=BatchUsage(
                self.num_input_tokens,
                InputTokensDetails(self.num_cached_tokens),
                self.num_output_tokens,
                OutputTokensDetails(self.num_reasoning_tokens),
                self.num_input_tokens + self.num_output_tokens,
            ),
            errors=BatchErrors(data=self.errors) if self.errors else None,
            output_file_id=self.output_file_id,
            error_file_id=self.error_file_id,
            in_progress_at=at("in_progress"),
            finalizing_at=at("finalizing"),
            completed_at=at("completed"),
            failed_at=at("failed"),
            expired_at=at("expired"),
            cancelling_at=at("cancelling"),
            cancelled_at=at("cancelled"),
            metadata=self.request.metadata,
        )


def _number(counts: Mapping[str, Any], *names: str) -> int:
    """The first of these counts that stands there."""
    return next((int(counts[name]) for name in names if counts.get(name)), 0)
