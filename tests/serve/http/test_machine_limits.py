"""A machine without free descriptors or disk: a refusal with its own code, and nothing is held."""

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from client import client_of
from fake_engine import FakeEngine

from quickstep.server.app import create_app
from quickstep.server.http.errors import error_facts
from quickstep.server.options import FileOptions, ServerOptions

LINE = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    b'"body": {"model": "fake", "prompt": "a"}}\n'
)
LARGE = LINE * 20_000  # more than a form keeps in memory


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Leave this process none."""
    lowest = os.dup(0)  # the lowest that is free
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def upload(client: httpx.AsyncClient, content: bytes = LINE) -> httpx.Response:
    form = {"purpose": "batch"}
    return await client.post("/v1/files", data=form, files={"file": ("a.jsonl", content)})


async def status_of_batch(client: httpx.AsyncClient, file_id: str) -> str:
    """The last status of a new batch with the file's lines."""
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = (await client.post("/v1/batches", json=body)).json()
    while batch["completed_at"] is batch["failed_at"] is None:
        await asyncio.sleep(0.01)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    return str(batch["status"])


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 503, response.text
    assert response.json()["error"]["code"] == "too_many_open_files"
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("is_kept", [False, True])
def test_without_a_descriptor_files_and_batches_are_refused_until_there_is_one(
    is_kept: bool, tmp_path: Path
) -> None:
    files = FileOptions(directory=tmp_path if is_kept else None, num_files=6)

    async def run() -> None:
        async with client_of(create_app(FakeEngine(), ServerOptions(files=files))) as client:
            first = (await upload(client)).json()["id"]
            for _ in range(
                7
            ):  # more than the files that the server keeps: each gives its place back
                with no_free_descriptor():
                    assert_refused(await upload(client))
                    assert_refused(await upload(client, LARGE))
                    assert_refused(await client.get(f"/v1/files/{first}/content"))
            with no_free_descriptor():  # a batch reads its file later
                assert await status_of_batch(client, first) == "failed"
            assert (await upload(client)).status_code == 200
            assert (await client.get(f"/v1/files/{first}/content")).content == LINE
            assert await status_of_batch(client, first) == "completed"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("number", "status"),
    [
        *((number, 507) for number in (errno.ENOSPC, errno.EDQUOT)),
        *((number, 503) for number in (errno.EMFILE, errno.ENFILE)),
        *((number, 500) for number in (errno.EIO, errno.EACCES)),
    ],
)
def test_each_error_of_the_system_has_its_status(number: int, status: int) -> None:
    assert error_facts(OSError(number, os.strerror(number))).status == status
