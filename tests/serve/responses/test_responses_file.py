"""Stored responses that outlive the server: the same after a restart, private, bounded, and given
up where the disk is.
"""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import client_of
from fake_engine import FakeEngine
from route_calls import RESPONSES, saying

from quickstep.errors import ConfigError
from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.server.responses import stored_file
from quickstep.server.responses.store import ResponseStore
from quickstep.server.responses.stored_file import ResponseFile, check_response_file
from quickstep.server.usage.api_keys import ApiKey, ApiKeys

ANN, BOB = {"x-api-key": "a"}, {"x-api-key": "b"}
KEYS = ApiKeys([ApiKey("ann", "a"), ApiKey("bob", "b")])
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>'


def in_run(
    path: Path,
    steps: Callable[[httpx.AsyncClient], Awaitable[Any]],
    engine: FakeEngine | None = None,
    **options: Any,
) -> Any:
    """One life of a server with this file."""

    async def run() -> Any:
        given = ServerOptions(response_store=path, **options)
        async with client_of(create_app(engine or FakeEngine(), given)) as client:
            return await steps(client)

    return asyncio.run(run())


async def respond(client: httpx.AsyncClient, headers: Any = None, **fields: Any) -> dict[str, Any]:
    response = await client.post(RESPONSES, json={"input": "hi", **fields}, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    fields = {
        "tools": [TOOL],
        "metadata": {"a": "b"},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hé"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "20"},
        ],
    }

    async def first(client: httpx.AsyncClient) -> Any:
        answer = await respond(client, **fields)
        items = await client.get(f"{RESPONSES}/{answer['id']}/input_items")
        return answer, items.json()

    answer, items = in_run(path, first, FakeEngine(script=saying(f"Let me see.{CALL}")))
    engine = FakeEngine()

    async def second(client: httpx.AsyncClient) -> None:
        url = f"{RESPONSES}/{answer['id']}"
        assert (await client.get(url)).json() == answer
        assert (await client.get(f"{url}/input_items")).json() == items
        reference = {"type": "item_reference", "id": answer["output"][0]["id"]}
        await respond(client, input=[reference, {"role": "user", "content": "And?"}])
        await respond(client, input="And?", previous_response_id=answer["id"])
        assert (await client.delete(url)).status_code == 200

    in_run(path, second, engine)
    assert "Let me see." in bytes(engine.submitted[0].prompt).decode()
    assert "tool: 20" in bytes(engine.submitted[1].prompt).decode()

    async def third(client: httpx.AsyncClient) -> None:
        assert (await client.get(f"{RESPONSES}/{answer['id']}")).status_code == 404

    in_run(path, third)


def test_what_is_deleted_is_nowhere_in_the_files(tmp_path: Path) -> None:
    path = tmp_path / "responses"

    async def steps(client: httpx.AsyncClient) -> None:
        kept = await respond(client, input="a kept question")
        secret = await respond(client, input="a secret question")
        await client.delete(f"{RESPONSES}/{secret['id']}")
        content = b"".join(each.read_bytes() for each in tmp_path.iterdir())
        assert b"secret" not in content
        assert b"a kept question" in content
        assert kept["id"].encode() in content

    in_run(path, steps)


def test_only_the_owner_may_read_it_and_only_the_key_finds_it(tmp_path: Path) -> None:
    path = tmp_path / "responses"

    async def first(client: httpx.AsyncClient) -> str:
        answer = await respond(client, ANN)
        assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} == {0o600}
        found: str = answer["id"]
        return found

    response_id = in_run(path, first, api_keys=KEYS)

    async def second(client: httpx.AsyncClient) -> list[int]:
        url = f"{RESPONSES}/{response_id}"
        return [(await client.get(url, headers=key)).status_code for key in (ANN, BOB)]

    assert in_run(path, second, api_keys=KEYS) == [200, 404]


def test_the_bounds_hold_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "responses"

    async def first(client: httpx.AsyncClient) -> list[str]:
        return [(await respond(client))["id"] for _ in range(5)]

    ids = in_run(path, first, stored_responses=3)
    assert rows_of(path) == set(ids[2:])

    async def second(client: httpx.AsyncClient) -> None:
        assert (await client.get(f"{RESPONSES}/{ids[3]}")).status_code == 404
        assert (await client.get(f"{RESPONSES}/{ids[4]}")).status_code == 200

    in_run(path, second, stored_responses=1)
    assert rows_of(path) == {ids[4]}


def rows_of(path: Path) -> set[str]:
    with sqlite3.connect(path) as connection:
        found = {row[0] for row in connection.execute("SELECT id FROM responses")}
    connection.close()
    return found


def test_old_responses_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "responses"

    async def first(client: httpx.AsyncClient) -> str:
        found: str = (await respond(client))["id"]
        return found

    response_id = in_run(path, first)
    now = [0.0]
    store = ResponseStore(max_age_s=10.0, path=path, clock=lambda: now[0])
    store.open()
    (row,) = store._stored.values()
    now[0] = row.stored_at + 10.0
    assert store.get("", response_id) is not None
    now[0] = row.stored_at + 10.5
    assert store.get("", response_id) is None
    assert store.item("", row.stored.response.output[0].id) is None
    store.close()
    store = ResponseStore(max_age_s=10.0, path=path, clock=lambda: now[0])
    store.open()
    assert not len(store)
    store.close()
    assert rows_of(path) == set()


def damaged(path: Path) -> None:
    async def steps(client: httpx.AsyncClient) -> None:
        for _ in range(20):
            await respond(client, input="x" * 3000)

    in_run(path, steps)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096 * 3] = b"\xff" * 4096 * 3
    path.write_bytes(content)


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (id INTEGER)")
    connection.commit()
    connection.close()


def newer(path: Path) -> None:
    check_response_file(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.commit()
    connection.close()


def unreadable_row(path: Path) -> None:
    file = ResponseFile(path)
    file.open()
    file.put("", "resp_1", 1, b'[{"id": 3')
    file.close()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.write_bytes(b"not a database, " * 100), "not a database"),
        (damaged, "damaged|malformed"),
        (foreign, "another program"),
        (newer, "version 99"),
        (unreadable_row, "cannot be read"),
        (lambda path: path.mkdir(), "cannot be opened"),
    ],
    ids=["text", "damaged", "foreign", "newer", "row", "directory"],
)
def test_a_file_that_is_no_store_is_refused_in_a_sentence(
    tmp_path: Path, make: Callable[[Path], Any], problem: str
) -> None:
    path = tmp_path / "responses"
    make(path)
    before = None if path.is_dir() else path.read_bytes()
    with pytest.raises(ConfigError, match=problem) as refused:
        ResponseStore(path=path).open()
    assert "\n" not in str(refused.value)
    assert "--response-store" in str(refused.value)
    if problem != "cannot be read" and before is not None:
        assert path.read_bytes() == before
    assert not [each for each in threading.enumerate() if each.name == "responses"]


def test_one_server_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_file, "_BUSY_S", 0.0)
    path = tmp_path / "responses"
    file = ResponseFile(path)
    file.open()
    with pytest.raises(ConfigError, match="used by another server"):
        check_response_file(path)
    file.close()
    check_response_file(path)


def test_a_full_disk_turns_the_file_off_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no response is concerned, except that it cannot be deleted for good."""
    path = tmp_path / "responses"

    async def first(client: httpx.AsyncClient) -> str:
        found: str = (await respond(client))["id"]
        return found

    kept = in_run(path, first)
    written = stored_file._written

    def full(*args: Any) -> sqlite3.Error | None:
        written(*args) if is_writable else None
        return None if is_writable else sqlite3.OperationalError("database or disk is full")

    is_writable = False
    monkeypatch.setattr(stored_file, "_written", full)

    async def second(client: httpx.AsyncClient) -> None:
        nonlocal is_writable
        ids = [(await respond(client))["id"] for _ in range(3)]
        for response_id in ids:
            assert (await client.get(f"{RESPONSES}/{response_id}")).status_code == 200
        gone = await client.delete(f"{RESPONSES}/{kept}")
        assert gone.status_code == 507
        assert gone.json()["error"]["code"] == "insufficient_storage"
        assert (await client.get(f"{RESPONSES}/{kept}")).status_code == 404
        is_writable = True  # the deletion that failed is tried again with the next one
        assert (await client.delete(f"{RESPONSES}/{ids[0]}")).status_code == 200

    with caplog.at_level(logging.ERROR):
        in_run(path, second)
    errors = [record for record in caplog.records if "cannot be written" in record.message]
    assert len(errors) == 1
    assert rows_of(path) == set()


def test_a_server_without_the_option_writes_nothing(tmp_path: Path) -> None:
    store = ResponseStore()
    store.open()
    assert asyncio.run(store.flush())
    store.close()
    assert not [*tmp_path.iterdir()]
