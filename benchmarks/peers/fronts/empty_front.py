"""The front with no engine behind it: what the transport itself costs per token."""

from __future__ import annotations

from http_front import StepThread, front_arguments, serve


class _EmptyEngine:
    """Gives every request one token a step, at once."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def add(self, number: int, prompt: list[int], num_outputs: int) -> None:
        self._left[number] = num_outputs

    def step(self) -> dict[int, list[int]]:
        found = {number: [1] for number in self._left}
        self._left = {number: left - 1 for number, left in self._left.items() if left > 1}
        return found

    def has_work(self) -> bool:
        return bool(self._left)


if __name__ == "__main__":
    args = front_arguments().parse_args()
    serve(StepThread(_EmptyEngine), args.host, args.port)
