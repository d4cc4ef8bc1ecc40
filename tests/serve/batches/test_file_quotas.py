"""Room for files: reserved before a byte is taken, in all and for each API key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from client import client_of
from fake_engine import FakeEngine
from live_server import DEADLINE_S

from quickstep.errors import RequestError
from quickstep.server.app import create_app
from quickstep.server.batches.file_store import FileStore
from quickstep.server.options import FileOptions, ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

MIB = 1024 * 1024
KEYS = ApiKeys(["ann=AAAA", "bob=BBBB"])
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in ("AAAA", "BBBB"))
FORM = {"content-type": "multipart/form-data; boundary=b"}
HEAD = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
)
TAIL = b"\r\n--b--\r\n"


def options(**files: int) -> ServerOptions:
    return ServerOptions(api_keys=KEYS, files=FileOptions(**files))


async def upload(
    client: httpx.AsyncClient, headers: dict[str, str], num_bytes: int
) -> httpx.Response:
    files = {"file": ("f", b"a" * num_bytes)}
    return await client.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)


def test_one_keys_files_leave_room_to_others() -> None:
    async def run() -> None:
        settings = options(total_bytes=10 * MIB, bytes_per_key=2 * MIB, files_per_key=3)
        async with client_of(create_app(FakeEngine(), settings)) as client:
            first = await upload(client, BOB, MIB)
            assert first.status_code == 200
            large = await upload(client, BOB, 2 * MIB)
            assert large.status_code == 413
            assert "your API key's files" in large.json()["error"]["message"]
            assert (await upload(client, ANN, 2 * MIB)).status_code == 200
            for _ in range(2):
                assert (await upload(client, BOB, 10)).status_code == 200
            many = await upload(client, BOB, 10)
            assert many.status_code == 413
            assert "your API key holds 3 files" in many.json()["error"]["message"]
            await client.delete(f"/v1/files/{first.json()['id']}", headers=BOB)
            assert (await upload(client, BOB, 2 * MIB - 100)).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("announced", [20 * MIB, 3 * MIB])
def test_an_upload_without_room_is_refused_before_its_first_byte(announced: int) -> None:
    taken = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        taken += 1
        yield HEAD

    async def run() -> httpx.Response:
        settings = options(file_bytes=10 * MIB, bytes_per_key=2 * MIB)
        async with client_of(create_app(FakeEngine(), settings)) as client:
            headers = {**BOB, **FORM, "content-length": str(announced)}
            return await client.post("/v1/files", content=body(), headers=headers)

    assert asyncio.run(run()).status_code == 413
    assert taken == 0


def test_uploads_at_the_same_time_share_the_room_and_give_it_back() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield HEAD + b"a" * (3 * MIB)
        begun.set()
        await ended.wait()
        yield b"nothing that ends a form"

    async def run() -> None:
        settings = options(total_bytes=4 * MIB)
        async with client_of(create_app(FakeEngine(), settings)) as client:
            # no length is announced: room is taken as the bytes come
            first = asyncio.create_task(
                client.post("/v1/files", content=slow(), headers={**ANN, **FORM})
            )
            await begun.wait()
            assert (await upload(client, BOB, 2 * MIB)).status_code == 413
            ended.set()
            assert (await first).status_code == 400
            assert (await upload(client, BOB, 2 * MIB)).status_code == 200

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_open_writers_count_as_files_until_they_end() -> None:
    store = FileStore(FileOptions(num_files=2))
    first, second = store.new("", "a", "batch"), store.new("", "b", "batch")
    with pytest.raises(RequestError, match="holds 2 files"):
        store.new("", "c", "batch")
    first.discard()
    first.discard()
    store.new("", "c", "batch").discard()
    second.write(b"x")
    second.commit()
    third = store.new("", "c", "batch")
    with pytest.raises(RequestError, match="holds 2 files"):
        store.new("", "d", "batch")
    third.discard()
    store.close()


def test_without_keys_only_the_totals_count() -> None:
    store = FileStore(FileOptions(total_bytes=100, bytes_per_key=10, files_per_key=1))
    for _ in range(3):
        writer = store.new("", "a", "batch")
        writer.write(b"x" * 30)
        writer.commit()
    store.close()


@pytest.mark.parametrize(
    "limits", [{"num_files": 18}, {"total_bytes": 18 * MIB, "bytes_per_key": 18 * MIB}]
)
def test_keys_that_take_all_they_can_leave_room_for_one_that_has_nothing(
    limits: dict[str, int],
) -> None:
    store = FileStore(FileOptions(**limits))

    def fill(owner: str) -> str:
        """Store files until one is refused; returns why."""
        for _ in range(19):
            writer = None
            try:
                writer = store.new(owner, "a", "batch")
                writer.reserve(MIB)
            except RequestError as error:
                if writer is not None:
                    writer.discard()
                return str(error)
            writer.commit()
        raise AssertionError("no limit was reached")

    assert "its share of 18" in fill("ann") or "their share of" in fill("ann")
    fill("bob")
    writer = store.new("eve", "a", "batch")
    writer.reserve(MIB)
    writer.commit()
    for file in store.files("ann"):
        store.delete(file)
    num_before = len(store.files("bob"))
    fill("bob")
    assert len(store.files("bob")) > num_before
    store.close()
