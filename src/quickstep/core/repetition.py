"""Finds an output that repeats itself: the same tokens several times in a row, at its end.

Owned by the sequence. It is a function of the output tokens, one after the other, so it ends a
sequence at the same token however many of them a step brings.
"""

from __future__ import annotations

from collections import deque

from quickstep.sampling_params import RepetitionDetectionParams


class RepetitionDetector:
    """Looks at one sequence's output. A pattern of `size` tokens has occurred `count` times in a
    row when each of the last size x (count - 1) tokens equals the one `size` places before it.

    A token takes time in proportion to the places where it occurs among the last
    `max_pattern_size` ones.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._smallest = max(1, params.min_pattern_size)
        self._largest = params.max_pattern_size
        self._num_repeated = params.min_count - 1
        self._num_tokens = 0
        self._places: dict[int, deque[int]] = {}  # by token, the last `largest` tokens and older
        # by size, how many of the last tokens equal those `size` places before them
        self._equal: dict[int, int] = {}

    def record(self, token_id: int) -> bool:
        """Take an output token; whether a pattern has occurred often enough."""
        place = self._num_tokens
        self._num_tokens += 1
        places = self._places.setdefault(token_id, deque())
        while places and place - places[0] > self._largest:
            places.popleft()
        before = self._equal
        self._equal = {
            place - earlier: before.get(place - earlier, 0) + 1
            for earlier in places
            if place - earlier >= self._smallest
        }
        places.append(place)
        return any(num >= size * self._num_repeated for size, num in self._equal.items())
