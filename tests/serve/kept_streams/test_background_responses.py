"""Responses in the background: they continue without their client, and any event can be the last
that a client has.
"""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from client import JSON
from cut_connection import Steps, cut_call, settled
from fake_engine import WORDS, FakeEngine, Script
from kept_world import ANN, BOB, KEYS, World, in_world
from live_server import DEADLINE_S, live_server, until
from route_calls import RESPONSES, saying

from quickstep.server.options import Deadlines, KeptStreamOptions, ServerOptions
from quickstep.types import FinishReason

BODY = {"input": "hi", "background": True}
TEXT = "".join(WORDS)


async def post(world: World, **fields: Any) -> dict[str, Any]:
    response = await world.client.post(RESPONSES, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def get(world: World, url: str, **params: Any) -> httpx.Response:
    return await world.client.get(url, params=params)


def data_of(body: bytes) -> list[dict[str, Any]]:
    """The events, after a check that each has its number as id."""
    assert body.endswith(b"\n\n")
    found = []
    for event in body.decode()[:-2].split("\n\n"):
        number, name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert number == f"id: {found[-1]['sequence_number']}"
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("stream", [True, False])
def test_a_response_is_there_whether_or_not_its_client_waits(stream: bool) -> None:
    async def steps(world: World) -> None:
        body = {**BODY, "stream": stream}
        await cut_call(world.app, "POST", RESPONSES, body, num_events=1)
        await settled(world.streams)
        assert not world.engine.open_streams
        (response_id,) = [stream.names[0].name for stream in world.streams.of_owner("")]
        answer = (await get(world, f"{RESPONSES}/{response_id}")).json()
        assert (answer["status"], answer["background"]) == ("completed", True)
        assert answer["output"][0]["content"][0]["text"] == TEXT
        assert len(world.engine.submitted) == 1

    in_world(steps)


def test_the_rest_after_each_event_is_that_of_the_first_stream() -> None:
    """Cut while it is generated, at every event; resumed before the rest is generated."""

    async def steps(world: World) -> None:
        num_events = len(data_of((await stream(world, Steps(99), None)).body))
        assert num_events > len(WORDS)
        for count in range(num_events):
            gate = Steps(count)
            cut = await stream(world, gate, count)
            (live,) = world.streams.of_owner("")
            url = f"{RESPONSES}/{live.names[0].name}"
            last = {"last-event-id": str(count - 1)}
            after = f"{url}?stream=true&starting_after={count - 1}"
            readers = [
                asyncio.create_task(cut_call(world.app, "GET", f"{url}?stream=true")),
                asyncio.create_task(
                    cut_call(world.app, "GET", f"{url}?stream=true", headers=last)
                    if count
                    else cut_call(world.app, "GET", f"{url}?stream=true")
                ),
                asyncio.create_task(
                    cut_call(world.app, "GET", after if count else f"{url}?stream=true")
                ),
            ]
            await asyncio.sleep(0)
            gate.set()
            complete, by_header, by_query = await asyncio.gather(*readers)
            assert cut.body + by_header.body == cut.body + by_query.body == complete.body
            assert [each["sequence_number"] for each in data_of(complete.body)] == [
                *range(num_events)
            ]
            late = await get(world, url, stream="true")
            assert late.content == complete.body
            world.streams.forget(live)

    async def stream(world: World, gate: Steps, num_events: int | None) -> Any:
        world.engine.script = Script(gate=gate)  # type: ignore[arg-type]
        cut = await cut_call(
            world.app, "POST", RESPONSES, {**BODY, "stream": True}, num_events=num_events
        )
        if num_events is None:
            world.streams.forget(world.streams.of_owner("")[0])
        return cut

    in_world(steps)


def test_a_running_response_shows_what_it_has() -> None:
    gate = Steps()
    script = Script(gate=gate)  # type: ignore[arg-type]

    async def steps(world: World) -> None:
        begun = await post(world)
        assert (begun["status"], begun["output"]) == ("in_progress", [])
        url = f"{RESPONSES}/{begun['id']}"
        assert (await get(world, url)).json() == begun
        gate.let(2)
        while world.engine.num_steps < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        (item,) = (await get(world, url)).json()["output"]
        assert item["status"] == "in_progress"
        assert item["content"][0]["text"] == "".join(WORDS[:2])
        refused = await world.client.post(
            RESPONSES, json={"input": "And?", "previous_response_id": begun["id"]}
        )
        assert refused.status_code == 400
        assert "status in_progress" in refused.text
        gate.set()
        await settled(world.streams)
        assert (await get(world, url)).json()["status"] == "completed"
        again = await post(world, previous_response_id=begun["id"])
        assert again["previous_response_id"] == begun["id"]

    in_world(steps, script)


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_cancelled_response_ends_with_what_it_has(num_steps: int) -> None:
    gate = Steps(num_steps)
    script = Script(gate=gate)  # type: ignore[arg-type]

    async def steps(world: World) -> None:
        begun = await post(world)
        url = f"{RESPONSES}/{begun['id']}"
        reader = asyncio.create_task(cut_call(world.app, "GET", f"{url}?stream=true"))
        while world.engine.num_steps < num_steps:
            await asyncio.sleep(0)
        cancelled = await world.client.post(f"{url}/cancel")
        assert cancelled.status_code == 200
        assert cancelled.json()["status"] == "cancelled"
        assert not world.engine.open_streams
        *_, last = data_of((await reader).body)
        assert last["type"] == "response.incomplete"
        assert last["response"] == cancelled.json()
        assert (await world.client.post(f"{url}/cancel")).json() == cancelled.json()
        assert (await get(world, url)).json() == cancelled.json()
        refused = await world.client.post(
            RESPONSES, json={"input": "And?", "previous_response_id": begun["id"]}
        )
        assert refused.status_code == 400
        assert "status cancelled" in refused.text

    in_world(steps, script)


def test_a_response_is_cancelled_at_once() -> None:
    """Before its task has run at all."""
    script = Script(gate=Steps())  # type: ignore[arg-type]

    async def steps(world: World) -> None:
        begun = await post(world)
        (stream,) = world.streams.of_owner("")
        await world.streams.cancel(stream)
        assert not world.engine.open_streams
        assert (await get(world, f"{RESPONSES}/{begun['id']}")).json()["status"] == "cancelled"

    in_world(steps, script)


def test_deleting_a_running_response_ends_it() -> None:
    script = Script(endless=True)

    async def steps(world: World) -> None:
        begun = await post(world)
        url = f"{RESPONSES}/{begun['id']}"
        assert (await world.client.delete(url)).json()["deleted"] is True
        assert not world.engine.open_streams
        for call in (get(world, url), get(world, url, stream="true")):
            assert (await call).status_code == 404
        assert not world.streams.num_streams

    in_world(steps, script)


def test_a_failed_response_is_there_with_its_error() -> None:
    script = saying("x", reason=FinishReason.ERROR, error="the logits are NaN")

    async def steps(world: World) -> None:
        begun = await post(world)
        await settled(world.streams)
        url = f"{RESPONSES}/{begun['id']}"
        failed = (await get(world, url)).json()
        assert failed["status"] == "failed"
        assert "NaN" in failed["error"]["message"]
        *_, last = data_of((await get(world, url, stream="true")).content)
        assert (last["type"], last["response"]) == ("response.failed", failed)

    in_world(steps, script)


def test_another_key_finds_nothing() -> None:
    script = Script(gate=Steps())  # type: ignore[arg-type]

    async def steps(world: World) -> None:
        begun = await world.client.post(RESPONSES, json=BODY, headers=ANN)
        url = f"{RESPONSES}/{begun.json()['id']}"
        calls = [
            ("GET", url),
            ("GET", f"{url}?stream=true"),
            ("POST", f"{url}/cancel"),
            ("DELETE", url),
        ]
        for method, each in calls:
            found = await world.client.request(method, each, headers=BOB)
            assert found.status_code == 404, (method, each)
        assert len(world.engine.open_streams) == 1
        assert (await world.client.get(url, headers=ANN)).status_code == 200

    in_world(steps, script, ServerOptions(api_keys=KEYS))


def test_two_places_to_continue_are_400() -> None:
    async def steps(world: World) -> None:
        begun = await post(world)
        await settled(world.streams)
        refused = await world.client.get(
            f"{RESPONSES}/{begun['id']}?stream=true&starting_after=1",
            headers={"last-event-id": "1"},
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "starting_after"

    in_world(steps)


def test_a_conversation_is_not_in_the_background() -> None:
    """The name would be that of a stream which has ended at once."""

    async def steps(world: World) -> None:
        refused = await world.client.post(RESPONSES, json=BODY, headers={"x-conversation-id": "c"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "x-conversation-id"
        assert not world.streams.num_streams
        assert not world.engine.submitted

    in_world(steps)


def test_one_that_finds_no_place_leaves_nothing_open() -> None:
    """Both pass the first check of the room; the second has submitted its request by then."""
    script = Script(gate=Steps())  # type: ignore[arg-type]
    options = ServerOptions(kept_streams=KeptStreamOptions(streams_per_key=1))

    async def steps(world: World) -> None:
        answers = await asyncio.gather(*(world.client.post(RESPONSES, json=BODY) for _ in range(2)))
        assert sorted(answer.status_code for answer in answers) == [200, 429]
        await asyncio.sleep(0)
        assert len(world.engine.open_streams) == 1

    in_world(steps, script, options)


def test_the_operators_default_time_is_for_clients_that_wait() -> None:
    async def steps(world: World) -> None:
        for fields in ({}, {"background": False}, {"timeout_s": 7}):
            await post(world, **fields)
        await settled(world.streams)
        assert [item.deadline_s for item in world.engine.submitted] == [None, 5, 7]

    in_world(steps, options=ServerOptions(deadlines=Deadlines(default_s=5)))


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=true&starting_after=99", None),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=perhaps", "stream"),
        ("strem=true", "strem"),
    ],
)
def test_a_wrong_query_is_400(query: str, param: str | None) -> None:
    async def steps(world: World) -> None:
        begun = await post(world)
        await settled(world.streams)
        refused = await world.client.get(f"{RESPONSES}/{begun['id']}?{query}")
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        header = {"last-event-id": "x"}
        refused = await world.client.get(f"{RESPONSES}/{begun['id']}?stream=true", headers=header)
        assert refused.json()["error"]["param"] == "last-event-id"

    in_world(steps)


def test_other_responses_are_not_followed_or_cancelled() -> None:
    async def steps(world: World) -> None:
        answer = await post(world, background=False)
        url = f"{RESPONSES}/{answer['id']}"
        followed, cancelled = (
            await get(world, url, stream="true"),
            await world.client.post(f"{url}/cancel"),
        )
        assert followed.status_code == cancelled.status_code == 400
        assert "background" in followed.text
        assert "background" in cancelled.text

    in_world(steps)


def test_what_cannot_be_in_the_background_is_refused() -> None:
    async def steps(world: World) -> None:
        refused = await world.client.post(RESPONSES, json={**BODY, "store": False})
        assert refused.json()["error"]["param"] == "background"
        wrong = await world.client.post(RESPONSES, json={**BODY, "temperature": -1})
        assert wrong.status_code == 400
        assert not world.streams.num_streams

    in_world(steps)


def test_running_responses_of_a_key_are_bounded() -> None:
    script = Script(gate=Steps())  # type: ignore[arg-type]
    options = ServerOptions(kept_streams=KeptStreamOptions(streams_per_key=2), api_keys=KEYS)

    async def steps(world: World) -> None:
        async def status(key: dict[str, str]) -> int:
            return (await world.client.post(RESPONSES, json=BODY, headers=key)).status_code

        assert [await status(ANN) for _ in range(3)] == [200, 200, 429]
        assert await status(BOB) == 200
        await world.streams.cancel(world.streams.of_owner("ann")[0])
        assert await status(ANN) == 200  # in the place of the one that has ended
        assert len(world.streams.of_owner("ann")) == 2

    in_world(steps, script, options)


def test_the_end_of_the_server_ends_them() -> None:
    script = Script(endless=True)

    async def steps(world: World) -> None:
        content = json.dumps(BODY).encode()
        await world.client.post(RESPONSES, content=content, headers=JSON)

    worlds: list[World] = []

    async def noted(world: World) -> None:
        worlds.append(world)
        await steps(world)

    in_world(noted, script)
    assert not worlds[0].engine.open_streams


def test_a_draining_server_lets_them_end(caplog: pytest.LogCaptureFixture) -> None:
    """As requests whose clients wait: SIGTERM does not lose them."""
    gate = asyncio.Event()
    engine = FakeEngine(script=Script(gate=gate))
    options = ServerOptions(drain_s=DEADLINE_S)
    with caplog.at_level(logging.INFO, "uvicorn.error"), live_server(engine, options) as server:
        begun = httpx.post(f"{server.url}{RESPONSES}", json=BODY).json()
        until(lambda: bool(engine.open_streams))
        server.server.should_exit = True
        until(lambda: "background tasks to complete" in caplog.text)
        assert engine.loop is not None
        engine.loop.call_soon_threadsafe(gate.set)
    assert begun["status"] == "in_progress"
    assert engine.num_steps == len(WORDS)
