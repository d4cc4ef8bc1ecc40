"""llama.cpp's streams of conversations: read again from any byte, listed, ended."""

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from client import CHAT, COMPLETIONS, MESSAGES
from cut_connection import Steps, cut_call, settled
from fake_engine import WORDS, Script
from kept_world import ANN, BOB, KEYS, World, in_world
from route_calls import ANTHROPIC, RESPONSES

from quickstep.server.options import ConnectionOptions, KeptStreamOptions, ServerOptions

BODY: dict[str, Any] = {"messages": MESSAGES, "stream": True}
ID = {"x-conversation-id": "c/1"}
STREAM = "/v1/stream/c/1"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, BODY),
    (COMPLETIONS, {"prompt": "a", "stream": True}),
    (RESPONSES, {"input": "a", "stream": True}),
    (ANTHROPIC, {"model": "fake", "messages": MESSAGES, "max_tokens": 20, "stream": True}),
    ("/completion", {"prompt": "a", "stream": True}),
    ("/api/chat", {"model": "fake", "messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_lost_response_is_read_again_in_every_api(path: str, body: dict[str, Any]) -> None:
    gate = Steps()

    async def steps(world: World) -> None:
        left = asyncio.Event()
        call = asyncio.create_task(cut_call(world.app, "POST", path, body, ID, leave=left))
        gate.let(3)
        while world.engine.num_steps < 3:
            await asyncio.sleep(0)
        left.set()
        cut = await call
        assert len(world.engine.open_streams) == 1
        resumed = asyncio.create_task(cut_call(world.app, "GET", f"{STREAM}?from={len(cut.body)}"))
        await asyncio.sleep(0)
        gate.set()
        rest = await resumed
        complete = await world.call("GET", STREAM)
        assert cut.body + rest.body == complete.content
        assert not cut.body or rest.headers.get("content-length") is None
        assert len(world.engine.submitted) == 1
        assert WORDS[-2].strip().encode() in complete.content

    in_world(steps, Script(gate=gate))  # type: ignore[arg-type]


def test_every_byte_and_every_event_is_a_place_to_continue() -> None:
    async def steps(world: World) -> None:
        first = (await world.client.post(CHAT, json=BODY, headers=ID)).content
        assert first == (await world.call("GET", "/v1/stream?conv_id=c/1")).content
        for offset in range(0, len(first) + 1, 7):
            rest = await world.call("GET", f"{STREAM}?from={offset}")
            assert rest.content == first[offset:]
        events = first.split(b"\n\n")[:-1]
        for index, event in enumerate(events):
            assert event.startswith(b"id: %d\ndata: " % index)
            rest = await world.call("GET", STREAM, {"last-event-id": str(index)})
            assert rest.content == b"".join(each + b"\n\n" for each in events[index + 1 :])

    in_world(steps)


def test_without_the_header_a_stream_is_as_ever() -> None:
    async def steps(world: World) -> None:
        first = await world.client.post(CHAT, json=BODY)
        assert first.text.startswith("data: ")
        assert not world.streams.num_streams
        await cut_call(world.app, "POST", CHAT, BODY, num_events=2)
        assert not world.engine.open_streams

    in_world(steps, Script(endless=False))


def test_a_stream_is_read_before_the_prompt_is_computed() -> None:
    gate = Steps()

    async def steps(world: World) -> None:
        left = asyncio.Event()
        call = asyncio.create_task(cut_call(world.app, "POST", CHAT, BODY, ID, leave=left))
        left.set()
        assert (await call).body == b""
        reader = asyncio.create_task(cut_call(world.app, "GET", STREAM))
        listed = (await world.call("GET", "/v1/streams?conversation_id=c/1")).json()
        assert [each["is_done"] for each in listed] == [False]
        gate.set()
        assert b"Hello" in (await reader).body
        assert len(world.engine.submitted) == 1

    in_world(steps, Script(gate=gate))  # type: ignore[arg-type]


def test_a_stream_is_read_before_its_status_is_known() -> None:
    """The status of a request with a deadline for its first token comes with that token."""
    gate = Steps()

    async def steps(world: World) -> None:
        left = asyncio.Event()
        body = {**BODY, "ttft_deadline_ms": 60_000}
        call = asyncio.create_task(cut_call(world.app, "POST", CHAT, body, ID, leave=left))
        while not world.engine.open_streams:
            await asyncio.sleep(0)
        left.set()
        await call
        reader = asyncio.create_task(cut_call(world.app, "GET", f"{STREAM}?from=0"))
        left = asyncio.Event()
        leaver = asyncio.create_task(cut_call(world.app, "GET", STREAM, leave=left))
        left.set()
        assert (await leaver).body == b""
        assert not reader.done()
        gate.set()
        assert (await reader).body == (await world.call("GET", STREAM)).content
        assert len(world.engine.submitted) == 1

    in_world(steps, Script(gate=gate))  # type: ignore[arg-type]


def test_a_conversation_has_one_stream() -> None:
    async def steps(world: World) -> None:
        first = asyncio.create_task(cut_call(world.app, "POST", CHAT, BODY, ID))
        while world.engine.num_steps < 2:
            await asyncio.sleep(0)
        world.engine.script = Script(words=("Second",))
        second = await world.client.post(CHAT, json=BODY, headers=ID)
        assert "Second" in second.text
        await first
        assert not world.engine.open_streams
        assert (await world.call("GET", STREAM)).content == second.content
        (listed,) = (await world.call("GET", "/v1/streams?conversation_id=c/1")).json()
        assert listed["total_bytes"] == len(second.content)

    in_world(steps, Script(endless=True))


def test_delete_ends_the_generation_and_is_idempotent() -> None:
    async def steps(world: World) -> None:
        reader = asyncio.create_task(cut_call(world.app, "POST", CHAT, BODY, ID))
        while world.engine.num_steps < 2:
            await asyncio.sleep(0)
        for url in (STREAM, STREAM, "/v1/stream?conv_id=c/1"):
            gone = await world.call("DELETE", url)
            assert (gone.status_code, gone.content) == (204, b"")
        assert b"Hello" in (await reader).body
        assert not world.engine.open_streams
        missing = await world.call("GET", STREAM)
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "stream_not_found"

    in_world(steps, Script(endless=True))


def test_streams_belong_to_their_key() -> None:
    async def steps(world: World) -> None:
        for name in ("one", "two::gemma"):
            header = {"x-conversation-id": name}
            await world.client.post(CHAT, json=BODY, headers={**ANN, **header})
        assert [each["conversation_id"] for each in await listed(world, ANN)] == [
            "one",
            "two::gemma",
        ]
        assert await listed(world, BOB) == []
        assert (await world.call("GET", "/v1/stream/one", BOB)).status_code == 404
        assert (await world.call("DELETE", "/v1/stream/one", BOB)).status_code == 204
        assert (await world.call("GET", "/v1/stream/one", ANN)).status_code == 200
        ids = {"conversation_ids": ["two", "one", "three"]}
        for key, names in ((ANN, {"one", "two::gemma"}), (BOB, set())):
            found = await world.client.post("/v1/streams/lookup", json=ids, headers=key)
            assert {each["conversation_id"] for each in found.json()} == names

    async def listed(world: World, key: dict[str, str]) -> Any:
        return (await world.call("GET", "/v1/streams", key)).json()

    in_world(steps, options=ServerOptions(api_keys=KEYS))


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-conversation-id": ""}, "x-conversation-id"),
        ({"x-conversation-id": "a" * 256}, "x-conversation-id"),
        ({"idempotency-key": "\u00e9"}, "idempotency-key"),
    ],
)
def test_a_wrong_name_is_400(headers: dict[str, str], param: str) -> None:
    async def steps(world: World) -> None:
        sent = {name: value.encode("latin-1") for name, value in headers.items()}
        refused = await world.client.post(CHAT, json=BODY, headers=sent)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    in_world(steps)


@pytest.mark.parametrize("query", ["from=-1", "from=a", "from=99999", "conv_id=other"])
def test_a_wrong_place_is_400(query: str) -> None:
    async def steps(world: World) -> None:
        await world.client.post(CHAT, json=BODY, headers=ID)
        assert (await world.call("GET", f"{STREAM}?{query}")).status_code == 400
        both = await world.call("GET", f"{STREAM}?from=1", {"last-event-id": "1"})
        assert both.status_code == 400

    in_world(steps)


def test_a_server_without_keys_lists_what_the_client_names_only() -> None:
    async def steps(world: World) -> None:
        await world.client.post(CHAT, json=BODY, headers=ID)
        assert (await world.call("GET", "/v1/streams")).status_code == 400
        assert (await world.call("GET", "/v1/stream")).status_code == 400

    in_world(steps)


def test_a_refused_request_leaves_no_stream() -> None:
    async def steps(world: World) -> None:
        refused = await world.client.post(CHAT, json={**BODY, "n": -1}, headers=ID)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "n"
        assert not world.streams.num_streams

    in_world(steps)


def test_a_long_stream_loses_its_beginning_only() -> None:
    """And none of it while its client still has to read it."""
    size = 64 * 1024
    options = ServerOptions(kept_streams=KeptStreamOptions(stream_bytes=size))

    async def steps(world: World) -> None:
        first = (await world.client.post(CHAT, json=BODY, headers=ID)).content
        assert first.endswith(b"data: [DONE]\n\n")
        (stream,) = world.streams.of_owner("")
        assert len(first) > 3 * size
        assert size / 2 < stream.num_kept <= size
        for url in (STREAM, f"{STREAM}?from={stream.num_dropped - 1}"):
            lost = await world.call("GET", url)
            assert lost.json()["error"]["code"] == "stream_offset_lost"
        rest = await world.call("GET", f"{STREAM}?from={stream.num_dropped}")
        assert first.endswith(rest.content)
        early = await world.call("GET", STREAM, {"last-event-id": "0"})
        assert early.status_code == 400
        late = await world.call("GET", STREAM, {"last-event-id": str(stream.num_events - 2)})
        assert late.content.endswith(b"data: [DONE]\n\n")

    in_world(steps, Script(words=("x" * 10_000,) * 20), options)


def test_all_streams_are_bounded_and_the_largest_key_loses() -> None:
    size = 64 * 1024
    options = ServerOptions(kept_streams=KeptStreamOptions(total_bytes=size), api_keys=KEYS)

    async def steps(world: World) -> None:
        async def post(key: dict[str, str], name: str) -> None:
            header = {"x-conversation-id": name}
            await world.client.post(CHAT, json=BODY, headers={**key, **header})

        await post(BOB, "kept")
        for number in range(30):
            await post(ANN, str(number))
            assert world.streams.num_bytes <= size
        assert world.streams.num_bytes > size / 2
        assert len(world.streams.of_owner("bob")) == 1
        names = [stream.names[0].name for stream in world.streams.of_owner("ann")]
        assert names == [str(number) for number in range(30 - len(names), 30)]
        for stream in world.streams.of_owner("ann"):
            world.streams.forget(stream)
        world.streams.forget(world.streams.of_owner("bob")[0])
        assert world.streams.num_bytes == 0

    in_world(steps, Script(words=("x" * 1000,) * 3), options)


def test_what_is_dropped_is_not_in_memory() -> None:
    """Also before the time after which it would have been forgotten."""
    options = ServerOptions(kept_streams=KeptStreamOptions(streams_per_key=1))

    async def steps(world: World) -> None:
        await world.client.post(CHAT, json=BODY, headers=ID)
        first = weakref.ref(world.streams.of_owner("")[0])
        await world.client.post(CHAT, json=BODY, headers={"x-conversation-id": "other"})
        gc.collect()
        assert first() is None

    in_world(steps, options=options)


def test_comments_are_part_of_the_stream() -> None:
    """So that a reader that counts bytes counts the same ones."""
    gate = Steps()
    options = ServerOptions(connections=ConnectionOptions(comment_every_s=0.001))

    async def steps(world: World) -> None:
        call = asyncio.create_task(cut_call(world.app, "POST", CHAT, BODY, ID))
        while not world.streams.of_owner("") or world.streams.of_owner("")[0].num_bytes < 400:
            await asyncio.sleep(0.001)
        gate.set()
        first = (await call).body
        assert b": keep-alive\n\n" in first
        assert (await world.call("GET", STREAM)).content == first
        await settled(world.streams)

    in_world(steps, Script(gate=gate), options)  # type: ignore[arg-type]


def test_an_ended_stream_is_forgotten() -> None:
    options = ServerOptions(kept_streams=KeptStreamOptions(kept_s=0.0))

    async def steps(world: World) -> None:
        await world.client.post(CHAT, json=BODY, headers=ID)
        while world.streams.num_streams:
            await asyncio.sleep(0)
        assert (await world.call("GET", STREAM)).status_code == 404

    in_world(steps, options=options)


def test_requests_of_a_conversation_that_come_together_leave_one_stream() -> None:
    """Both end the earlier one; the first of them is ended by the other."""

    async def steps(world: World) -> None:
        calls = [asyncio.create_task(cut_call(world.app, "POST", CHAT, BODY, ID))]
        while world.engine.num_steps < 2:
            await asyncio.sleep(0)
        calls += [asyncio.create_task(cut_call(world.app, "POST", CHAT, BODY, ID)) for _ in "ab"]
        for _ in range(1000):  # turns of the loop, until both have begun
            await asyncio.sleep(0)
        assert len(world.streams.of_owner("")) == len(world.engine.open_streams) == 1
        assert (await world.call("DELETE", STREAM)).status_code == 204
        assert not world.engine.open_streams
        await asyncio.gather(*calls)

    in_world(steps, Script(endless=True))


@pytest.mark.parametrize(
    ("path", "body", "is_event"),
    [
        (CHAT, BODY, True),
        ("/api/chat", {"model": "fake", "messages": MESSAGES}, False),
        (CHAT, {"messages": MESSAGES}, None),
    ],
)
def test_a_stream_that_is_ended_says_so(
    path: str, body: dict[str, Any], is_event: bool | None
) -> None:
    async def steps(world: World) -> None:
        reader = asyncio.create_task(cut_call(world.app, "POST", path, body, ID))
        while world.engine.num_steps < 2:
            await asyncio.sleep(0)
        await world.call("DELETE", STREAM)
        found = await reader
        if is_event is None:  # nothing was sent yet
            assert found.status == 409
            return
        *_, last = found.body.rstrip(b"\n").split(b"\n")
        assert last.startswith(b"data: ") == is_event
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert "cancelled" in (error["message"] if is_event else error)

    in_world(steps, Script(endless=True))


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/apply-template", {"messages": MESSAGES})]
)
def test_other_routes_report_the_headers_that_they_ignore(path: str, body: dict[str, Any]) -> None:
    async def steps(world: World) -> None:
        headers = {**ID, "idempotency-key": "k"}
        answer = await world.client.post(path, json=body, headers=headers)
        ignored = answer.headers["x-quickstep-ignored"].split(", ")
        assert {"x-conversation-id", "idempotency-key"} <= set(ignored)
        assert not world.streams.num_streams

    in_world(steps)
