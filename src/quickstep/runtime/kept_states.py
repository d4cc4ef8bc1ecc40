"""Sampling states of sequences that have left their slots, for those that return.

Rebuilding a state replays every output: a grammar near its limit searches an ending for each of
them, DRY compares the whole text with itself. A preempted sequence continues with the state that it
had, so its return costs a step nothing. A plan does not say which released sequences return, so the
last ones are kept, as many as there are slots; a state that is not found is rebuilt and is the
same. Owned by `runtime.slots`.
"""

from __future__ import annotations

from collections import OrderedDict

from quickstep.runtime.sampling.state import SamplingState
from quickstep.types import Admission

__all__ = ["KeptStates"]


class KeptStates:
    """The newest `max_kept` states, by sequence id."""

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._states: OrderedDict[str, SamplingState] = OrderedDict()

    def put(self, sequence_id: str, state: SamplingState) -> None:
        """Keep the state of a sequence that leaves, if rebuilding it is expensive."""
        if not state.is_expensive or state.failure:
            return
        self._states[sequence_id] = state
        self._states.move_to_end(sequence_id)
        while len(self._states) > self._max_kept:
            self._states.popitem(last=False)

    def take(self, admission: Admission) -> SamplingState | None:
        """The state that this admission continues; None if it has to be built."""
        state = self._states.pop(admission.sequence_id, None)
        return state if state is not None and state.continues_with(admission) else None
