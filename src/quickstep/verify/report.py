"""The options of the exactness checker, and its result. Called by `verify.checker`.

A comparison is one sequence of one run against its single run, at batch size 1: token ids, the
bits of their logprobs, and why it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quickstep.config import CacheConfig
from quickstep.errors import ConfigError
from quickstep.types import FinishReason
from quickstep.verify.run import RunCounts, Trace

Item = TypeVar("Item")


class Setup(msgspec.Struct, frozen=True):
    """What computes: threads in all, of so many processes that compute each step together, in so
    many stages that compute several steps at the same time.
    """

    threads: int
    ranks: int = 1
    stages: int = 1

    @property
    def num_processes(self) -> int:
        """Of the ranks of all stages."""
        return self.ranks * self.stages

    def __str__(self) -> str:
        counts = (self.stages, "stages"), (self.ranks, "ranks")
        parts = [f"{count} {name}" for count, name in counts if count > 1]
        return " in ".join([str(self.threads), *([" of ".join(parts)] if parts else [])])


class VerifyOptions(msgspec.Struct, frozen=True):
    """What to generate and run.

    Attributes:
        rounds: Number of groups that contain each request, per thread count.
        threads: CPU thread counts; the single runs use the first of them.
        kv_dtype: `CacheConfig.kv_dtype`.
        num_adapters: Random LoRA adapters, one of which half of the requests have.
        num_ranks: Processes that compute each step together in further groups, with the most
            threads; 1 for none.
        num_stages: Stages of a pipeline in these groups.
        against: Ranks of the setup that has the single runs, and is compared with the divided one
            only; None for one process with each of `threads`.
        fail_fast: Stop after the group with the first mismatch.
    """

    num_requests: int = 200
    seed: int = 0
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 1
    block_size: int = CacheConfig().block_size
    kv_dtype: str = "auto"
    num_adapters: int = 0
    fail_fast: bool = False
    num_ranks: int = 1
    num_stages: int = 1
    against: int | None = None

    @property
    def setups(self) -> tuple[Setup, ...]:
        """All that are compared; the single runs use the first."""
        of_threads = tuple([Setup(count) for count in self.threads])
        divided = Setup(max(self.threads), self.num_ranks, self.num_stages)
        if self.against is not None:
            return Setup(divided.threads, self.against), divided
        return of_threads + ((divided,) if divided.num_processes > 1 else ())

    def __post_init__(self) -> None:
        for name in ("num_requests", "rounds", "num_ranks", "num_stages"):
            if getattr(self, name) < 1:
                flag = name.replace("num_", "")
                raise ConfigError(f"--{flag} is {getattr(self, name)}, it must be at least 1")
        if not self.threads or min(self.threads) < 1:
            raise ConfigError(f"--threads is {self.threads}, it must name counts of at least 1")
        if self.against is not None and (self.against, 1) == (self.num_ranks, self.num_stages):
            raise ConfigError(
                f"--against is {self.against}, the number of ranks that would be compared with "
                "itself; set another --tensor-parallel-size or --pipeline-parallel-size"
            )


class Mismatch(msgspec.Struct, frozen=True):
    """The first difference. Logprobs as hexadecimal bits; None where one run has ended."""

    scenario: str
    threads: int
    ranks: int
    stages: int
    sequence_id: str
    position: int
    expected_token: int | None
    got_token: int | None
    expected_logprobs: str | None
    got_logprobs: str | None
    detail: str


class ScenarioCounts(msgspec.Struct):
    """Comparisons of one scenario, and what its runs went through."""

    comparisons: int = 0
    mismatches: int = 0
    runs: RunCounts = msgspec.field(default_factory=RunCounts)


class VerifyReport(msgspec.Struct):
    """What was compared and what differed."""

    options: VerifyOptions
    scenarios: dict[str, ScenarioCounts] = msgspec.field(default_factory=dict)
    first_mismatch: Mismatch | None = None

    @property
    def comparisons(self) -> int:
        """Sequences compared with their single run."""
        return sum(counts.comparisons for counts in self.scenarios.values())

    @property
    def mismatches(self) -> int:
        """Comparisons in which a token, a logprob bit or the end differed."""
        return sum(counts.mismatches for counts in self.scenarios.values())

    def of(self, scenario: str) -> ScenarioCounts:
        """The counts of a scenario, to add to."""
        return self.scenarios.setdefault(scenario, ScenarioCounts())

    def compare(
        self, scenario: str, setup: Setup, sequence_id: str, expected: Trace, got: Trace
    ) -> None:
        """Compare one sequence with its single run, and count."""
        counts = self.of(scenario)
        counts.comparisons += 1
        prompt_position = _first_prompt_difference(expected, got)
        if prompt_position is not None:
            counts.mismatches += 1
            self.first_mismatch = self.first_mismatch or Mismatch(
                scenario=scenario,
                threads=setup.threads,
                ranks=setup.ranks,
                stages=setup.stages,
                sequence_id=sequence_id,
                position=prompt_position,
                expected_token=None,
                got_token=None,
                expected_logprobs=_hex(_at(expected.prompt_bits, prompt_position)),
                got_logprobs=_hex(_at(got.prompt_bits, prompt_position)),
                detail="a score of the prompt or its embedding; the position is the prompt's",
            )
            return
        position = _first_difference(expected, got)
        if position is None:
            return
        counts.mismatches += 1
        if self.first_mismatch is None:
            self.first_mismatch = Mismatch(
                scenario=scenario,
                threads=setup.threads,
                ranks=setup.ranks,
                stages=setup.stages,
                sequence_id=sequence_id,
                position=position,
                expected_token=_at(expected.token_ids, position),
                got_token=_at(got.token_ids, position),
                expected_logprobs=_hex(_at(expected.logprob_bits, position)),
                got_logprobs=_hex(_at(got.logprob_bits, position)),
                detail=f"ended with {_end(expected)} at batch size 1, {_end(got)} here",
            )

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {
            "comparisons": self.comparisons,
            "mismatches": self.mismatches,
            **msgspec.to_builtins(self.options),
            "scenarios": msgspec.to_builtins(self.scenarios),
            "first_mismatch": msgspec.to_builtins(self.first_mismatch),
        }


def _first_prompt_difference(expected: Trace, got: Trace) -> int | None:
    """The first of the prompt's values that differ; an aborted run may have fewer."""
    wanted, have = expected.prompt_bits, got.prompt_bits
    for position, (one, other) in enumerate(zip(wanted, have, strict=False)):
        if one != other:
            return position
    is_complete = len(wanted) == len(have) or got.finish_reason is FinishReason.ABORTED
    return None if is_complete else min(len(wanted), len(have))


def _first_difference(expected: Trace, got: Trace) -> int | None:
    """The first output position where the runs differ; the length if only their ends do."""
    wanted, have = expected.token_ids, got.token_ids
    if got.finish_reason is FinishReason.ABORTED:
        wanted = wanted[: len(have)]
    shorter = min(len(wanted), len(have))
    for position in range(shorter):
        if wanted[position] != have[position]:
            return position
        if expected.logprob_bits[position] != got.logprob_bits[position]:
            return position
    if got.finish_reason is FinishReason.ABORTED:
        return None if len(wanted) == len(have) else shorter
    same_end = (got.finish_reason, got.text) == (expected.finish_reason, expected.text)
    return None if len(wanted) == len(have) and same_end else shorter


def _at(values: Sequence[Item], position: int) -> Item | None:
    return values[position] if position < len(values) else None


def _hex(bits: bytes | None) -> str | None:
    return None if bits is None else bits.hex()


def _end(trace: Trace) -> str:
    reason = trace.finish_reason.value if trace.finish_reason else "no end"
    text = f", text {trace.text!r}" if trace.text else ""
    return f"{reason} ({trace.error}){text}" if trace.error else reason + text
