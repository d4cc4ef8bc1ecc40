"""What the runner asks of a model's steps, and what the implementations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from quickstep.errors import EngineError
from quickstep.ops.table import LoRAAdapter
from quickstep.ops.tensors import AnyTensor
from quickstep.runtime.slots import Slot
from quickstep.types import StepRow

# A token that gets logits: the row of the step, and how many of the row's tokens come after it.
EmittingToken = tuple[int, int]


class StepModel(Protocol):
    """Runs a model with its KV cache step by step: `CapturedSteps`, or `EagerSteps` op by op.

    `runtime.runner` prepares the rows, which may set the failure of a slot, and then runs them.
    """

    def prepare(self, rows: Sequence[StepRow], slots: Sequence[Slot]) -> None:
        """Set the step's rows. Raises EngineError when they contradict their blocks or tokens.

        `parents` of a row may begin with nodes of its tree that earlier steps computed.
        """

    def run(
        self,
        emitting: Sequence[EmittingToken],
        every_token: bool,
        features: AnyTensor | None = None,
    ) -> tuple[AnyTensor, AnyTensor]:
        """Compute the prepared rows: final hidden states, and fp32 logits [E, V] of the `emitting`
        tokens. The hidden states are of every token [T, C], or of these tokens only [E, C]. Both
        are valid until the next `prepare`; they are tensors of torch where the step ran op by op.
        `features` [T, N] are the second input of a model that has one.
        """

    def aux_hidden_states(self) -> tuple[AnyTensor, ...]:
        """Of the step that ran, the inputs [T, C] of the `aux_layers` that it was opened for; valid
        until the next `prepare`.
        """

    def logits(self, hidden: AnyTensor, adapter: str) -> AnyTensor:
        """Logits [E, V] fp32 of some of the hidden states [E, C] that `run` returned, of rows with
        this adapter, "" for none.
        """

    def move_kv(self, pairs: Sequence[tuple[int, int]]) -> None:
        """`OpTable.move_kv` in the cache that steps read, of every rank."""


class GraphBackend(Protocol):
    """Records launches of a device: `runtime.steps.graphs.CudaGraphs`, and a double in tests."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` launches. Returns what launches it again, on the same memory."""

    def free_bytes(self) -> int:
        """Bytes that are free on the device."""


class GraphOptions(msgspec.Struct, frozen=True):
    """How steps become graphs.

    Attributes:
        backend: Records them.
        num_slots: Most rows of a step.
        max_width: Most tokens of a decode row: one more than its drafts.
        max_prompt_tokens: Most tokens of a step that computes prompts; longer ones run op by op.
    """

    backend: GraphBackend
    num_slots: int
    max_width: int = 1
    max_prompt_tokens: int = 0


def adapters_of(
    rows: Sequence[StepRow], adapters: Mapping[str, LoRAAdapter]
) -> dict[str, LoRAAdapter]:
    """Those that the rows name. Raises EngineError."""
    named: dict[str, LoRAAdapter] = {}
    for row in rows:
        if row.adapter and row.adapter not in named:
            if row.adapter not in adapters:
                raise EngineError(f"a row needs adapter {row.adapter!r}, which is not loaded")
            named[row.adapter] = adapters[row.adapter]
    return named
