"""`quickstep serve` with its flags, as a process: keys from the environment, a log of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from live_server import until
from process_lists import workers

KEY = "secret-of-the-environment"


def environment_of(process_id: int) -> bytes:
    return Path(f"/proc/{process_id}/environ").read_bytes()


def asked_and_stopped(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The whole log of a server that was asked with and without keys, then stopped."""
    assert process.stderr is not None
    log = map(json.loads, process.stderr)
    lines = []
    for line in log:
        lines.append(line)
        if line["message"].startswith("serving "):
            break
    url = lines[-1]["message"].split(" at ")[1].removesuffix("/v1")
    (worker,) = workers(process.pid)
    assert KEY.encode() not in environment_of(worker)
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401
    for key in (KEY, "secret-of-the-file", "secret-of-the-flag"):
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
    process.send_signal(signal.SIGTERM)
    lines += log
    assert process.wait(60) == 0
    return lines


def test_keys_and_the_json_log_hold_for_the_whole_server(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:secret-of-the-file\n")
    argv = [sys.executable, "-m", "quickstep", "serve", "--port", "0", "--num-blocks", "64"]
    argv += ["--log-format", "json", "--access-log", "--api-key-file", str(keys)]
    argv += ["--api-key", "bob=secret-of-the-flag", "--drain-timeout-s", "0"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "QUICKSTEP_API_KEY": f"env={KEY}",
    }
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines = asked_and_stopped(process)
        finally:
            process.kill()
    until(lambda: not workers(process.pid))
    messages = [line["message"] for line in lines]
    assert any("GET /v1/models 401" in message for message in messages)
    assert any("GET /v1/models 200" in message and "key=ann" in message for message in messages)
    assert any("SIGTERM" in message for message in messages)
    assert any("can read or change" in message for message in messages) == bool(
        keys.stat().st_mode & 0o077
    )
    assert not any("secret" in message for message in messages)
    assert {line["level"] for line in lines} <= {"INFO", "WARNING"}
