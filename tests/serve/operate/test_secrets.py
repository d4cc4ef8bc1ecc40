"""A secret is planted in every input of a server, and looked for in every output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from live_server import until
from process_lists import workers

# Of the server: in no output at all.
KEYS = {
    name: f"hidden-{name}-key-{7919 * number:x}"
    for number, name in enumerate(("env", "file", "flag", "admin", "upstream", "engine"), 1)
}
# Of clients: in responses to themselves, and in no log, metric or file.
TEXT = "marzipan-zeppelin-quokka"
WRONG_KEY = "presented-but-unknown-1f2e3d"
MODEL = "not-served-here"
CONFIG = f"""
routes:
  {MODEL}:
    - upstream: http://127.0.0.1:9/v1
      model: other
      key_env: UPSTREAM_KEY
  demo:
    - upstream: http://127.0.0.1:9/v1
      model: other
      key_env: UPSTREAM_KEY
"""


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server with all that it may write; it has ended after the block."""
    (folder / "keys.yaml").write_text(f"ann: {{key: {KEYS['file']}, requests_per_minute: 1000}}\n")
    (folder / "keys.yaml").chmod(0o600)
    (folder / "config.yaml").write_text(CONFIG.replace(f"  {MODEL}:", "  demo-2:"))
    argv = [sys.executable, "-m", "quickstep", "serve", "demo", "--port", "0"]
    argv += ["--served-model-name", "demo", "demo-2", "--config", str(folder / "config.yaml")]
    argv += ["--num-blocks", "64", "--max-num-seqs", "4", "--access-log", "--drain-timeout-s", "0"]
    argv += ["--api-key-file", str(folder / "keys.yaml"), "--api-key", f"bob={KEYS['flag']}"]
    argv += ["--admin-api-key", f"root={KEYS['admin']}", "--usage-db", str(folder / "usage.db")]
    argv += ["--record", str(folder / "record.jsonl"), "--log-level", "debug"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "QUICKSTEP_API_KEY": f"env={KEYS['env']}",
        "QUICKSTEP_ENGINE_TOKEN": KEYS["engine"],
        "UPSTREAM_KEY": KEYS["upstream"],
    }
    log = folder / "log.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file, env=environment)
    try:
        until(lambda: " serving " in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process, log.read_text().partition(" serving ")[2].split(" at ")[1].split("/v1")[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    until(lambda: not workers(process.pid))


def bodies() -> Iterator[tuple[str, Any]]:
    """Requests with the text in each place for text, valid and invalid."""
    chat: dict[str, Any] = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": TEXT},
            {"role": "user", "content": TEXT},
        ],
        "max_tokens": 4,
    }
    schema = {"type": "object", "properties": {TEXT: {"const": TEXT}}, "required": [TEXT]}
    named = {"name": "answer", "schema": schema}
    yield "/v1/chat/completions", chat
    yield "/v1/chat/completions", {**chat, "stop": [TEXT], "metadata": {"a": TEXT}}
    yield "/v1/chat/completions", {**chat, "cache_salt": TEXT, "logit_bias": {TEXT: 1}}
    yield "/v1/chat/completions", {**chat, "cache_salt": TEXT, "bad_words": [TEXT], "seed": 1}
    yield (
        "/v1/chat/completions",
        {**chat, "response_format": {"type": "json_schema", "json_schema": named}},
    )
    yield (
        "/v1/chat/completions",
        {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": TEXT * 9}}},
    )
    yield (
        "/v1/chat/completions",
        {**chat, "structured_outputs": {"regex": f"({TEXT}"}, "max_tokens": 8},
    )
    yield "/v1/chat/completions", {**chat, "messages": [{"role": TEXT, "content": "a"}]}
    yield "/v1/chat/completions", {**chat, "temperature": TEXT}
    yield "/v1/completions", {"model": "demo", "prompt": [TEXT, TEXT], "max_tokens": 2}
    yield "/v1/completions", {"model": "demo", "prompt": TEXT, "suffix": TEXT}
    yield "/v1/responses", {"model": "demo", "input": TEXT, "instructions": TEXT, "store": False}
    yield "/v1/messages", {**chat, "messages": chat["messages"][1:], "system": TEXT}
    yield "/api/chat", {**chat, "stream": False}
    yield "/v1/embeddings", {"model": "demo", "input": TEXT}
    yield "/tokenize", {"model": "demo", "prompt": TEXT}
    yield "/v1/chat/completions", f'{{"messages": "{TEXT}'


def outputs(url: str, folder: Path) -> Iterator[tuple[str, bytes]]:
    """What the server tells operators, and what it writes."""
    admin = {"authorization": f"Bearer {KEYS['admin']}"}
    for path in ("/health", "/ready", "/ping", "/metrics", "/v1/models", "/debug/steps", "/props"):
        yield path, httpx.get(url + path, headers=admin).content
    yield "/debug/requests", httpx.get(f"{url}/debug/requests/traced", headers=admin).content
    for file in sorted(folder.iterdir()):
        if file.name not in ("keys.yaml", "config.yaml"):
            yield file.name, file.read_bytes()


def test_no_output_has_a_key_and_none_but_the_clients_own_has_its_text(tmp_path: Path) -> None:
    found: dict[str, bytes] = {}
    with served(tmp_path) as (process, url):
        for worker in workers(process.pid):
            environment = Path(f"/proc/{worker}/environ").read_bytes()
            inherited = [name for name, key in KEYS.items() if key.encode() in environment]
            assert not inherited, "an engine's process has keys of the server"
        statuses = set()
        for path, body in bodies():
            content = body if isinstance(body, str) else json.dumps(body)
            for key in (KEYS["file"], WRONG_KEY):
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                headers |= {"x-request-id": "traced", "cookie": TEXT, "x-unknown": TEXT}
                reply = httpx.post(url + path, content=content, headers=headers, timeout=60)
                statuses.add(reply.status_code)
                found[f"{path} {reply.status_code} {len(found)}"] = reply.content
                if key == WRONG_KEY:
                    assert reply.status_code == 401
                    assert TEXT.encode() not in reply.content
        own = {"authorization": f"Bearer {KEYS['flag']}"}
        part = {"file": ("lines.jsonl", f'{{"custom_id": "{TEXT}"}}\n'.encode())}
        uploaded = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files=part, headers=own)
        assert uploaded.status_code == 200
        # where a client should put no key, and some do
        for key in (KEYS["file"], WRONG_KEY):
            reply = httpx.get(f"{url}/nowhere?api_key={key}", headers=own)
            found[f"query {key}"] = reply.content
        private = dict(outputs(url, tmp_path))
        assert {200, 400, 401} <= statuses <= {200, 400, 401, 404, 422, 501}, statuses
    private |= {name: content for name, content in files_of(tmp_path)}  # what comes at the end
    for place, content in {**found, **private}.items():
        shown = [name for name, key in KEYS.items() if key.encode() in content]
        assert not shown, f"{place} shows keys: {shown}"
    for place, content in private.items():
        assert TEXT.encode() not in content, f"{place} has a client's text: {line_of(content)}"
        assert WRONG_KEY.encode() not in content, f"{place} has a key that was presented"
    assert b"id=traced" in private["log.txt"], "the log was written"
    assert private["record.jsonl"].count(b'"request"') >= 3, "the recording was written"
    assert b"root" not in private["/metrics"]


def files_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.iterdir()):
        if file.name not in ("keys.yaml", "config.yaml"):
            yield file.name, file.read_bytes()


def line_of(content: bytes) -> str:
    return next(line for line in content.decode("latin-1").splitlines() if TEXT in line)[:400]
