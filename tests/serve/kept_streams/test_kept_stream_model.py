"""A kept stream against the bytes that were written to it: what any reader gets."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstep.errors import RequestError
from quickstep.server.http.event_stream import SERVER_SENT_EVENTS
from quickstep.server.kept_streams.kept_stream import KeptStream, StreamName

_Result = TypeVar("_Result")
HEADERS = [(b"content-type", SERVER_SENT_EVENTS.encode())]
# the length of an event's data, 0 for a comment, or how much is kept from here on
WRITES = st.lists(st.one_of(st.integers(0, 40), st.integers(-200, -1)), max_size=30)


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    return asyncio.run(work)


def written(writes: list[int]) -> tuple[KeptStream, bytes, list[int]]:
    """A stream, all of its bytes, and where each of its events ends."""
    stream = KeptStream((StreamName("", "conversation", "c"),), {}, "")
    stream.begin(200, HEADERS)
    content, ends = b"", list[int]()
    for number in writes:
        if number < 0:
            stream.drop(-number)
        elif number == 0:
            stream.append(b": hi\n\n")
            content += b": hi\n\n"
        else:
            event = b"data: " + b"x" * number + b"\n\n"
            stream.append(event)
            content += b"id: %d\n" % len(ends) + event
            ends.append(len(content))
    return stream, content, ends


async def read(stream: KeptStream, offset: int) -> bytes:
    return b"".join([chunk async for chunk in stream.read(offset)])


@given(WRITES)
def test_a_reader_gets_the_rest_from_any_byte_that_is_kept(writes: list[int]) -> None:
    stream, content, _ = written(writes)
    stream.end()
    assert stream.num_bytes == len(content)

    async def check() -> None:
        for offset in range(len(content) + 1):
            if offset >= stream.num_dropped:
                assert await read(stream, stream.checked_offset(offset)) == content[offset:]
            else:
                with pytest.raises(RequestError, match="not kept any more"):
                    stream.checked_offset(offset)

    run(check())


@given(WRITES)
def test_a_reader_gets_what_follows_any_event_that_is_kept(writes: list[int]) -> None:
    stream, content, ends = written(writes)
    stream.end()

    async def check() -> None:
        for event in range(-1, len(ends)):
            end = ends[event] if event >= 0 else 0
            try:
                rest = await read(stream, stream.offset_after(event))
            except RequestError:
                assert end < stream.num_dropped
                continue
            # without the comments that follow the event at once
            assert content.endswith(rest)
            skipped = content[end : len(content) - len(rest)]
            assert skipped == b": hi\n\n" * (len(skipped) // 6)
        with pytest.raises(RequestError, match="not in the stream"):
            stream.offset_after(len(ends))

    run(check())


@given(WRITES, WRITES)
def test_readers_at_any_pace_get_the_same_bytes(before: list[int], after: list[int]) -> None:
    """While more is written, and nothing that one of them has not read is dropped."""
    before = [number for number in before if number >= 0]
    after = [number for number in after if number >= 0]

    async def check() -> None:
        stream, content, _ = written(before)
        readers = [asyncio.create_task(read(stream, offset)) for offset in (0, len(content) // 2)]
        for number in after:
            await asyncio.sleep(0)
            chunk = b"data: " + b"y" * number + b"\n\n"
            content += b"id: %d\n" % stream.num_events + chunk
            stream.append(chunk)
            await stream.wait_for_readers(60)
            stream.drop(60)
        half = len(written(before)[1]) // 2
        stream.end()
        assert await readers[0] == content
        assert await readers[1] == content[half:]

    run(check())
