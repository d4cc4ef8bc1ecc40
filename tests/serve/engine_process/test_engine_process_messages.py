"""The messages between the processes: each comes back as it was sent, in order, in any pieces."""

from __future__ import annotations

import asyncio
import socket
import typing
from collections.abc import Callable
from types import MappingProxyType

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from quickstep.config import EngineConfig
from quickstep.engine.remote import messages
from quickstep.engine.remote.connection import MAX_FRAME_BYTES, Sender, read_messages
from quickstep.engine.remote.messages import (
    ENCODER,
    FROM_ENGINE,
    TO_ENGINE,
    Abort,
    FromEngine,
    Message,
    ToEngine,
)
from quickstep.engine.retrieval.card import Retrieval
from quickstep.errors import EngineError
from quickstep.sampling_params import RepetitionDetectionParams
from quickstep.types import SamplingParams

INTS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SHORT_IDS = st.lists(st.integers(0, 2**31), max_size=4).map(tuple)

for kind, strategy in ((int, INTS), (float, FLOATS), (str, TEXTS)):
    st.register_type_strategy(kind, strategy)
st.register_type_strategy(
    SamplingParams,
    st.builds(
        SamplingParams,
        n=st.integers(1, 9),
        temperature=st.floats(0, 9),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(-1, 2**31 - 1),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.1, 9),
        logit_bias=st.dictionaries(st.integers(0, 2**31), FLOATS, max_size=3).map(MappingProxyType),
        allowed_token_ids=SHORT_IDS,
        seed=st.none() | INTS,
        max_tokens=st.none() | st.integers(8, 2**31 - 1),
        min_tokens=st.integers(0, 8),
        stop=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
        stop_token_ids=SHORT_IDS,
        include_stop_str_in_output=st.booleans(),
        ignore_eos=st.booleans(),
        skip_special_tokens=st.booleans(),
        logprobs=st.none() | st.integers(0, 99),
        typical_p=st.floats(0.01, 1),
        xtc_probability=st.floats(0, 1),
        xtc_threshold=st.floats(0, 1),
        dry_multiplier=st.floats(0, 9),
        dry_base=st.floats(1, 9),
        dry_allowed_length=st.integers(1, 99),
        dry_range=st.integers(0, 2**31 - 1),
        dry_sequence_breakers=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
        bad_words=st.lists(TEXTS.filter(bool), max_size=3).map(tuple),
        thinking_budget=st.none() | st.integers(0, 2**31 - 1),
        reasoning_tags=st.none() | st.tuples(TEXTS, TEXTS),
        repetition_detection=st.none()
        | st.builds(RepetitionDetectionParams, st.integers(4, 1024), st.integers(0, 4), st.just(2)),
    ),
)
CONFIGS = st.builds(
    EngineConfig,
    scheduler=st.builds(
        EngineConfig().scheduler.__class__,
        max_num_seqs=st.integers(1, 99),
        max_num_batched_tokens=st.integers(1, 99),
        max_model_len=st.integers(1, 99),
        max_waiting=st.none() | st.integers(1, 99),
        pipeline_depth=st.integers(1, 3),
        inter_token_target_s=st.floats(0.1, 9),
    ),
    cache=st.builds(
        EngineConfig().cache.__class__,
        block_size=st.sampled_from([1, 16, 256]),
        num_blocks=st.none() | st.integers(1, 99),
    ),
)
st.register_type_strategy(EngineConfig, CONFIGS)
PROMPTS = st.dictionaries(TEXTS, TEXTS, max_size=3).map(MappingProxyType)
st.register_type_strategy(Retrieval, st.builds(Retrieval, prompts=PROMPTS))
KINDS = [
    (kind, decoder)
    for union, decoder in ((ToEngine, TO_ENGINE), (FromEngine, FROM_ENGINE))
    for kind in typing.get_args(union)
]


def any_message(union: object) -> st.SearchStrategy[Message]:
    return st.one_of([st.from_type(kind) for kind in typing.get_args(union)])


@pytest.mark.parametrize(("kind", "decoder"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_every_message_comes_back_as_it_was_sent(
    kind: type[Message], decoder: msgspec.msgpack.Decoder[list[Message]]
) -> None:
    @settings(max_examples=30, deadline=None)
    @given(st.from_type(kind))
    def check(message: Message) -> None:
        (back,) = decoder.decode(msgspec.msgpack.encode([msgspec.Raw(ENCODER.encode(message))]))
        assert type(back) is kind
        assert back == message

    check()


@settings(max_examples=20, deadline=None)
@given(st.lists(any_message(FromEngine), max_size=20), st.integers(0, 3))
def test_messages_arrive_in_order_over_a_socket(sent: list[Message], num_flushes: int) -> None:
    async def whole() -> list[Message]:
        ours, theirs = socket.socketpair()
        reader, back = await asyncio.open_unix_connection(sock=ours)
        _, writer = await asyncio.open_unix_connection(sock=theirs)
        sender = Sender(writer)
        for place, message in enumerate(sent):
            sender.put(message)
            if place < num_flushes:
                await sender.flush()
        await sender.flush()
        writer.close()
        received = [message async for message in read_messages(reader, FROM_ENGINE, "them")]
        back.close()
        return received

    assert asyncio.run(whole()) == sent


def test_a_reader_that_is_slow_holds_nobody_and_misses_nothing() -> None:
    async def whole() -> None:
        ours, theirs = socket.socketpair()
        reader, back = await asyncio.open_unix_connection(sock=ours, limit=1024)
        _, writer = await asyncio.open_unix_connection(sock=theirs)
        sender = Sender(writer)
        sending = asyncio.create_task(sender.run())
        for number in range(200_000):  # many times what the socket takes
            sender.put(Abort(str(number)))
        received = read_messages(reader, TO_ENGINE, "them")
        for number in range(200_000):
            assert await anext(received) == Abort(str(number))
        sending.cancel()
        writer.close()
        back.close()

    asyncio.run(whole())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_sender_ends_quietly_with_its_connection(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def send_to_nobody() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        sender = Sender(writer)
        theirs.close()
        await reader.read()
        writer.transport.abort()
        sender.put(Abort("1"))
        with pytest.raises(OSError):
            await sender.flush()
        sender.put(Abort("2"))
        await sender.run()  # returns

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(send_to_nobody())


@pytest.mark.parametrize("tail", [b"\0", b"\0\0\0\5\x91", b""])
def test_an_end_in_the_middle_of_a_message_is_an_end(tail: bytes) -> None:
    async def whole() -> list[ToEngine]:
        reader = asyncio.StreamReader()
        frame = msgspec.msgpack.encode([msgspec.Raw(ENCODER.encode(Abort("3")))])
        reader.feed_data(len(frame).to_bytes(4, "big") + frame + tail)
        reader.feed_eof()
        return [message async for message in read_messages(reader, TO_ENGINE, "them")]

    assert asyncio.run(whole()) == [Abort("3")]


@pytest.mark.parametrize("frame", [b"\xc1", b"\x91\x92\xa6Abort!\1", b"\x91\x92\xa5Abort\1"])
def test_what_is_no_message_is_an_engine_error(frame: bytes) -> None:
    async def whole() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(len(frame).to_bytes(4, "big") + frame)
        await anext(read_messages(reader, TO_ENGINE, "them"))

    with pytest.raises(EngineError, match="no message"):
        asyncio.run(whole())


def test_a_frame_above_the_limit_is_not_waited_for() -> None:
    async def whole() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        await anext(read_messages(reader, TO_ENGINE, "them"))

    with pytest.raises(EngineError, match="them announced a frame of 268435457 bytes"):
        asyncio.run(whole())


def test_half_a_surrogate_pair_is_refused_when_it_is_put() -> None:
    with pytest.raises(UnicodeEncodeError):
        ENCODER.encode(messages.OpenRefused("\ud800", is_config=True))
