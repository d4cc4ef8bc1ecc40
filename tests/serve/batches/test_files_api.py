"""`/v1/files` with the real `openai` client and by hand: stored, bounded, private."""

import asyncio
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from client import client_of
from fake_engine import FakeEngine
from live_server import live_server

from quickstep.errors import ConfigError, RequestError
from quickstep.server.app import create_app
from quickstep.server.batches.file_store import BATCH_OUTPUT, FileStore, StoredFile
from quickstep.server.options import FileOptions, ServerOptions

LINES = b'{"custom_id": "a"}\n'


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        live_server(FakeEngine()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def ranged(client: openai.OpenAI) -> str:
    """The id of a file."""
    return client.files.create(file=("ranged.jsonl", LINES), purpose="batch").id


def post(
    data: dict[str, Any], files: Any, options: FileOptions | None = None, **extra: Any
) -> httpx.Response:
    async def run() -> httpx.Response:
        app = create_app(FakeEngine(), ServerOptions(files=options or FileOptions()))
        async with client_of(app) as client:
            return await client.post("/v1/files", data=data, files=files, **extra)

    return asyncio.run(run())


def test_an_upload_is_written_beside_the_loop_and_its_record_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may wait for its disk, for long when a file is replaced."""
    threads: list[int] = []
    write_record = FileStore._write_record

    def noted(store: FileStore, file: StoredFile) -> None:
        threads.append(threading.get_ident())
        assert not store._record(file).exists()
        write_record(store, file)

    monkeypatch.setattr(FileStore, "_write_record", noted)
    answer = post({"purpose": "batch"}, {"file": ("a", LINES)}, FileOptions(directory=tmp_path))
    assert answer.status_code == 200, answer.text
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_files_that_end_with_their_server_have_no_records() -> None:
    store = FileStore(FileOptions())
    store.open()
    for purpose in ("batch", BATCH_OUTPUT):
        writer = store.new("ann", "a", purpose)
        writer.write(b"a")
        directory = store.path(writer.commit()).parent
    assert {path.name for path in directory.iterdir()} == {file.id for file in store.files("ann")}
    store.close()


def test_a_file_is_kept_listed_read_and_deleted(client: openai.OpenAI) -> None:
    stored = client.files.create(file=("lines.jsonl", LINES), purpose="batch")
    assert re.fullmatch(r"file-[0-9a-f]{32}", stored.id)
    assert (stored.bytes, stored.filename, stored.purpose) == (len(LINES), "lines.jsonl", "batch")
    assert (stored.object, stored.status, stored.expires_at) == ("file", "processed", None)
    assert client.files.retrieve(stored.id) == stored
    assert client.files.content(stored.id).content == LINES
    assert stored.id in [file.id for file in client.files.list()]
    assert client.files.delete(stored.id).deleted
    with pytest.raises(openai.NotFoundError) as gone:
        client.files.retrieve(stored.id)
    assert gone.value.code == "file_not_found"


def test_a_directory_of_files_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    options = ServerOptions(files=FileOptions(directory=tmp_path / "taken"))

    async def run() -> None:
        async with client_of(create_app(FakeEngine(), options)):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="--files-dir"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("wanted", "status", "content"),
    [
        ("bytes=0-3", 206, LINES[:4]),
        ("bytes=4-", 206, LINES[4:]),
        ("bytes=-5", 206, LINES[-5:]),
        ("bytes=-5000", 206, LINES),
        ("bytes=2-5000", 206, LINES[2:]),
        ("Bytes = 1-1", 206, LINES[1:2]),
        ("bytes=a-b", 400, None),
        ("bytes=", 400, None),
        ("bytes=-", 400, None),
        ("bytes=3-2", 400, None),
        ("bytes=0-1,3-4", 400, None),
        ("bytes=" + "1" * 5000, 400, None),
        ("lines=0-3", 400, None),
        ("bytes=5000-", 416, None),
        (f"bytes={len(LINES)}-", 416, None),
        ("bytes=-0", 416, None),
    ],
)
def test_one_range_of_a_file_is_read_and_others_are_refused(
    client: openai.OpenAI, ranged: str, wanted: str, status: int, content: bytes | None
) -> None:
    url = f"{client.base_url}files/{ranged}/content"
    answer = httpx.get(url, headers={"range": wanted})
    assert answer.status_code == status
    if content is not None:
        assert answer.content == content
    else:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["param"] == "range"
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(LINES)}"


def test_a_file_may_expire(client: openai.OpenAI) -> None:
    stored = client.files.create(
        file=LINES, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert stored.expires_at == stored.created_at + 3600
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.create(
            file=LINES, purpose="batch", expires_after={"anchor": "created_at", "seconds": 5}
        )
    assert refused.value.param == "expires_after.seconds"


def test_the_list_is_paged_and_ordered(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=LINES, purpose="batch").id for _ in range(3)]
    newest_first = [file.id for file in client.files.list(limit=2)]
    assert newest_first[:3] == ids[::-1]  # the client turns the pages by itself
    page = client.files.list(order="asc", after=ids[0], purpose="batch", limit=1)
    assert [file.id for file in page.data] == [ids[1]]
    assert page.has_more
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "file-x"}, {"colour": 1}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.files.list(extra_query=wrong)
        assert refused.value.param == next(iter(wrong))


def test_names_of_files_are_labels_only(tmp_path: Path) -> None:
    options = FileOptions(directory=tmp_path / "files")
    response = post({"purpose": "batch"}, {"file": ("../../etc/pass\x01wd", LINES)}, options)
    assert "/" not in response.json()["filename"]
    names = sorted(file.name for file in (tmp_path / "files").iterdir())
    assert names == [response.json()["id"], f"{response.json()['id']}.json"]
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "files").iterdir()} == {0o600}
    assert [file.name for file in tmp_path.iterdir()] == ["files"]


def test_data_of_the_users_own_is_kept_and_read_by_no_batch(client: openai.OpenAI) -> None:
    stored = client.files.create(file=("chat.json", b"{}"), purpose="user_data")
    assert stored.purpose == "user_data"
    assert client.files.content(stored.id).content == b"{}"
    assert [file.id for file in client.files.list(purpose="user_data")] == [stored.id]
    with pytest.raises(
        openai.BadRequestError, match="input_file_id is a file with the purpose user_data"
    ):
        client.batches.create(
            input_file_id=stored.id, endpoint="/v1/completions", completion_window="24h"
        )


@pytest.mark.parametrize(
    ("data", "files", "param"),
    [
        ({"purpose": "assistants"}, {"file": LINES}, "purpose"),
        ({}, {"file": LINES}, "purpose"),
        ({"purpose": "batch"}, {"other": LINES}, "other"),
        ({"purpose": "batch", "file": "x"}, {"other": LINES}, "other"),
        ({"purpose": "batch", "colour": "red"}, {"file": LINES}, "colour"),
        ({"purpose": "batch"}, [("file", LINES), ("file", LINES)], None),
        ({"purpose": "b" * 5000}, {"file": LINES}, None),
    ],
)
def test_what_is_wrong_with_a_form_is_reported(data: Any, files: Any, param: str | None) -> None:
    response = post(data, files)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_other_bodies_are_refused() -> None:
    assert post({"purpose": "batch"}, None).status_code == 400
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x", "application/json"):
        response = post({}, None, content=b"--y\r\nhello", headers={"content-type": kind})
        assert response.status_code == 400, response.text


def test_files_are_bounded() -> None:
    upload = ({"purpose": "batch"}, {"file": LINES})
    assert post(*upload, FileOptions(file_bytes=5)).status_code == 413
    assert post(*upload, FileOptions(total_bytes=5)).status_code == 413
    assert post(*upload, FileOptions(num_files=0)).status_code == 413
    large = ({"purpose": "batch"}, {"file": b"x" * 200_000})
    assert post(*large, FileOptions(file_bytes=5)).status_code == 413


def test_an_upload_that_is_too_large_is_413_over_a_socket() -> None:
    options = ServerOptions(files=FileOptions(file_bytes=1_000_000))
    with (
        live_server(FakeEngine(), options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=b"x" * 3_000_000, purpose="batch")
        assert refused.value.status_code == 413
        assert client.files.create(file=b"x" * 1_000_000, purpose="batch").bytes == 1_000_000


def test_room_comes_back_with_what_is_deleted_discarded_or_expired(tmp_path: Path) -> None:
    now = [1000.0]
    store = FileStore(FileOptions(tmp_path, total_bytes=10), now=lambda: now[0])
    store.open()

    def create_file(life_s: int | None = None) -> str:
        writer = store.new("ann", "a", "batch", life_s)
        writer.write(b"12345678")
        return writer.commit().id

    first = store.get("ann", create_file())
    with pytest.raises(RequestError):
        create_file()
    store.delete(first)
    writer = store.new("ann", "a", "batch")
    writer.write(b"123456789")
    writer.discard()
    expiring = create_file(3600)
    now[0] += 3600
    with pytest.raises(RequestError):
        store.get("ann", expiring)
    last = create_file()
    assert {file.name for file in tmp_path.iterdir()} == {last, f"{last}.json"}


def test_files_belong_to_their_owner_and_outlive_the_server(tmp_path: Path) -> None:
    store = FileStore(FileOptions(tmp_path))
    writer = store.new("ann", "a.jsonl", "batch")
    writer.write(b"hello")
    file = writer.commit()
    again = FileStore(FileOptions(tmp_path))
    again.open()
    assert again.get("ann", file.id) == file
    assert again.path(file).read_bytes() == b"hello"
    assert again.files("bob") == []
    with pytest.raises(RequestError) as refused:
        again.get("bob", file.id)
    assert refused.value.status == 404


def test_a_directory_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--files-dir"):
        FileStore(FileOptions(tmp_path / "file")).open()


def test_temporary_files_go_with_the_server() -> None:
    store = FileStore(FileOptions())
    writer = store.new("ann", "a", "batch")
    writer.write(b"x")
    path = store.path(writer.commit())
    assert path.parent.stat().st_mode & 0o777 == 0o700
    store.close()
    assert not path.parent.exists()


def test_a_record_that_cannot_be_read_costs_its_own_file_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(FileOptions(directory=tmp_path))
    store.open()
    ids = []
    for text in (b"a", b"b", b"c"):
        writer = store.new("ann", "a", "batch")
        writer.write(text)
        ids.append(writer.commit().id)
    store.close()
    (tmp_path / f"{ids[0]}.json").write_bytes(b"")
    (tmp_path / f"{ids[1]}.json").write_bytes(b'{"id": "file-')
    store = FileStore(FileOptions(directory=tmp_path))
    store.open()
    assert [file.id for file in store.files("ann")] == [ids[2]]
    assert caplog.text.count("cannot be read") == 2
    store.close()


def test_what_a_batch_had_written_outlives_a_kill_and_half_an_upload_does_not(
    tmp_path: Path,
) -> None:
    store = FileStore(FileOptions(directory=tmp_path))
    store.open()
    output = store.new("ann", "output", BATCH_OUTPUT)
    output.write(b'{"line": 1}\n')
    output.write(b'{"line": 2}\n{"li')  # as if the server was killed in the middle
    store.new("ann", "upload", "batch").write(b"half")
    store.new("ann", "empty", BATCH_OUTPUT)
    (tmp_path / f"file-{'0' * 32}").write_bytes(b"of nobody")
    store.close()
    store = FileStore(FileOptions(directory=tmp_path))
    store.open()
    (file,) = store.files("ann")
    assert (file.name, file.num_bytes) == ("output", 24)
    assert store.path(file).read_bytes() == b'{"line": 1}\n{"line": 2}\n'
    assert {one.name for one in tmp_path.iterdir()} == {file.id, f"{file.id}.json"}
    store.close()


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = (FileStore(FileOptions(directory=tmp_path)) for _ in range(2))
    first.open()
    with pytest.raises(ConfigError, match="used by another server"):
        second.open()
    first.close()
    second.open()
    second.close()


def full_after(num_bytes: int) -> Callable[[int, memoryview], int]:
    """`os.write` of a disk that has room for so many bytes more."""
    write, left = os.write, [num_bytes]

    def limited(descriptor: int, data: memoryview) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_written = write(descriptor, data[: left[0]])
        left[0] -= num_written
        return num_written

    return limited


@pytest.mark.parametrize("room", range(0, 700, 50))
def test_a_full_disk_keeps_what_was_written(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(FileOptions(directory=tmp_path))
    store.open()
    writer = store.new("ann", "a", BATCH_OUTPUT)
    monkeypatch.setattr(os, "write", full_after(room))
    num_lines = 0
    with pytest.raises(RequestError) as caught:
        while True:
            writer.write(b"%019d\n" % num_lines)
            num_lines += 1
    assert (caught.value.status, caught.value.code) == (507, "insufficient_storage")
    if num_lines:
        file = writer.commit()
        assert store.path(file).read_bytes() == b"".join(b"%019d\n" % n for n in range(num_lines))
        assert file.num_bytes == 20 * num_lines
    else:
        writer.discard()
    store.close()
    monkeypatch.undo()
    store = FileStore(FileOptions(directory=tmp_path))
    store.open()
    assert [file.num_bytes for file in store.files("ann")] == [20 * num_lines] * bool(num_lines)
    store.close()


@pytest.mark.parametrize("num_bytes", [0, len(LINES), len(LINES) + 50])
def test_an_upload_that_a_restart_would_lose_is_refused(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full before the content, before its record, or within it."""
    monkeypatch.setattr(os, "write", full_after(num_bytes))
    answer = post({"purpose": "batch"}, {"file": ("a", LINES)}, FileOptions(directory=tmp_path))
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_storage")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("order", [1, -1])
def test_a_form_with_a_field_twice_is_400(order: int) -> None:
    twice = [("expires_after", "1"), ("expires_after[seconds]", "3600")][::order]
    fields = {"purpose": "batch", **dict(twice)}

    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine())) as client:
            return await client.post("/v1/files", data=fields, files={"file": b"{}"})

    assert asyncio.run(run()).status_code == 400
