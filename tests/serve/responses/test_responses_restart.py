"""Stored responses of a server that is killed, by a process that begins anew with their file."""

from pathlib import Path
from typing import Any

import httpx
from serve_process import serving

BODY: dict[str, Any] = {"input": "hi", "max_output_tokens": 4, "temperature": 0}
LONG = {**BODY, "max_output_tokens": 3000, "ignore_eos": True, "background": True}


def test_kill_9_loses_no_response_that_was_written(tmp_path: Path) -> None:
    """A deletion waits for the file, so what came before it is there. What ran has failed."""
    path = str(tmp_path / "responses")
    with serving("demo", "--response-store", path) as (process, address):
        url = f"{address}/v1/responses"
        kept, deleted = [httpx.post(url, json=BODY, timeout=60).json() for _ in range(2)]
        running = httpx.post(url, json=LONG, timeout=60).json()
        assert httpx.delete(f"{url}/{deleted['id']}", timeout=60).status_code == 200
        assert httpx.get(f"{url}/{running['id']}", timeout=60).json()["status"] == "in_progress"
        process.kill()
    with serving("demo", "--response-store", path) as (process, address):
        url = f"{address}/v1/responses"
        assert httpx.get(f"{url}/{kept['id']}", timeout=60).json() == kept
        assert httpx.get(f"{url}/{deleted['id']}", timeout=60).status_code == 404
        failed = httpx.get(f"{url}/{running['id']}", timeout=60).json()
        assert failed["status"] == "failed"
        assert "the server ended" in failed["error"]["message"]
        body = {**BODY, "previous_response_id": kept["id"]}
        assert httpx.post(url, json=body, timeout=60).status_code == 200
