"""The head of a response and the first part of its body leave in one call of the system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quickstep.server.http.protocol import JoinedWrites

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport:
    """What was written, and how it was ended."""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def write_eof(self) -> None:
        self.done.append(b"eof")

    def close(self) -> None:
        self.done.append(b"close")

    def abort(self) -> None:
        self.done.append(b"abort")

    def is_closing(self) -> bool:
        return self.done[-1:] in ([b"close"], [b"abort"])

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


def written(use: Callable[[Any], None], num_runs: int = 0) -> list[bytes]:
    """What a transport got, once the loop has run `num_runs` times after `use`."""

    async def run() -> list[bytes]:
        transport = Transport()
        use(JoinedWrites(transport, asyncio.get_running_loop()))  # type: ignore[arg-type]
        for _ in range(num_runs):
            await asyncio.sleep(0)
        return list(transport.done)

    return asyncio.run(run())


def test_a_head_leaves_with_the_body_that_follows() -> None:
    def respond(transport: Any) -> None:
        for data in (HEAD, b"ab", HEAD, b"cd", b"ef"):
            transport.write(data)

    assert written(respond, 3) == [HEAD + b"ab", HEAD + b"cd", b"ef"]


def test_a_head_without_a_body_leaves_with_the_next_run_of_the_loop() -> None:
    assert written(lambda transport: transport.write(HEAD)) == []
    assert written(lambda transport: transport.write(HEAD), 2) == [HEAD]


def test_parts_leave_after_a_head_that_is_held() -> None:
    def respond(transport: Any) -> None:
        transport.write(HEAD)
        transport.writelines([b"a", b"b"])

    assert written(respond, 2) == [HEAD + b"ab"]


def test_a_second_head_leaves_with_the_first() -> None:
    def respond(transport: Any) -> None:
        transport.write(HEAD)
        transport.write(HEAD)

    assert written(respond, 2) == [HEAD + HEAD]


@pytest.mark.parametrize(
    ("end", "expected"),
    [("close", [HEAD, b"close"]), ("write_eof", [HEAD, b"eof"]), ("abort", [b"abort"])],
)
def test_a_head_that_is_held_leaves_before_an_end(end: str, expected: list[bytes]) -> None:
    def respond(transport: Any) -> None:
        transport.write(HEAD)
        getattr(transport, end)()

    assert written(respond) == written(respond, 2) == expected


def test_all_else_is_the_transports() -> None:
    found: list[str] = []
    written(lambda transport: found.append(transport.get_extra_info("socket")))
    assert found == ["the socket"]
