"""Random clients at the real scheduler: whatever they do, answers are right and nothing is left."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import run

from quickstep.config import StreamConfig
from quickstep.types import FinishReason, SamplingParams


@dataclass(frozen=True)
class Client:
    """`leaves_after` deltas it closes its stream; `aborts_after` deltas it aborts its request.

    `dozes` turns of the loop it lets go by before each delta.
    """

    prompt: str
    max_tokens: int
    stop: tuple[str, ...]
    n: int
    waits: int
    leaves_after: int | None
    aborts_after: int | None
    dozes: int


clients = st.builds(
    Client,
    prompt=st.text("ab", min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    stop=st.lists(st.text("ab", min_size=2, max_size=3), max_size=2).map(tuple),
    n=st.integers(1, 3),
    waits=st.integers(0, 6),
    leaves_after=st.none() | st.integers(0, 6),
    aborts_after=st.none() | st.integers(0, 6),
    dozes=st.sampled_from((0, 0, 3, 30)),
)


def expected(client):
    """The scripted model repeats the prompt; the first stop to complete cuts it."""
    tokens = (client.prompt * client.max_tokens)[: client.max_tokens]
    for length in range(1, len(tokens) + 1):
        ended = [stop for stop in client.stop if tokens[:length].endswith(stop)]
        if ended:
            return tokens[: length - max(map(len, ended))], FinishReason.STOP_STRING
    return tokens, FinishReason.MAX_TOKENS


async def live(engine, client):
    for _ in range(client.waits):
        await asyncio.sleep(0)
    sampling = SamplingParams(max_tokens=client.max_tokens, stop=client.stop, n=client.n)
    texts, ends, num_deltas = [""] * client.n, {}, 0
    async with engine.generate(client.prompt, sampling) as stream:
        while True:
            if num_deltas == client.leaves_after:
                return
            if num_deltas == client.aborts_after:
                engine.abort(stream.request_id)
            for _ in range(client.dozes):
                await asyncio.sleep(0)
            try:
                delta = await anext(stream)
            except StopAsyncIteration:
                break
            num_deltas += 1
            texts[delta.index] += delta.text
            assert delta.index not in ends, "news after the end"
            if delta.finish_reason is not None:
                assert delta.timings is not None
                ends[delta.index] = delta.finish_reason
    assert sorted(ends) == list(range(client.n))
    text, reason = expected(client)
    for index, end in ends.items():
        if end in (FinishReason.ABORTED, FinishReason.ERROR):
            assert (client.prompt * 12).startswith(texts[index])
        else:
            assert (texts[index], end) == (text, reason)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=60, deadline=None)
@given(
    crowd=st.lists(clients, min_size=1, max_size=8),
    num_blocks=st.integers(6, 12),
    broken=st.none() | st.integers(0, 12),
    unread=st.none() | st.integers(1, 4),
)
def test_whatever_clients_do_answers_are_right_and_all_blocks_come_back(
    depth, crowd, num_blocks, broken, unread
):
    async def test(parts, engine):
        parts.executor.broken = set() if broken is None else {broken}
        await asyncio.gather(*(live(engine, client) for client in crowd))
        assert engine.stats().num_requests == 0

    logging.getLogger("quickstep.engine.engine").disabled = True
    try:
        sizes = {"num_blocks": num_blocks, "max_num_seqs": 4, "max_model_len": 24}
        streams = unread and StreamConfig(max_unread_deltas=unread)
        run(test, pipeline_depth=depth, streams=streams, **sizes)
    finally:
        logging.getLogger("quickstep.engine.engine").disabled = False
