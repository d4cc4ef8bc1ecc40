"""Valid requests that are designed to delay other clients.

`benchmarks.storm` measures how they delay a stream;
`tests/serve/http/test_attacks_beside_a_stream.py` checks that each is answered and the server stays
healthy. Large bodies are built once (`build_bodies` before a measurement), so that the attackers
take little processor time from a server on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

import httpx

__all__ = ["ATTACKS", "JSON", "Attack", "build_bodies"]

JSON = {"content-type": "application/json"}
# Runs one attack and returns the statuses of the responses.
Attack = Callable[[httpx.AsyncClient], Awaitable[list[int]]]

_COMPLETIONS = "/v1/completions"
_MIB = 2**20
_FINAL_STATUSES = frozenset({"completed", "failed", "expired", "cancelled"})
_NUMBERS = {f"x{place}": {"type": "number"} for place in range(5)}
_TABLE = {"type": "object", "properties": _NUMBERS, "required": list(_NUMBERS)}
_TABLES = {f"k{place}": _TABLE for place in range(10)}
_SCHEMA = {"type": "object", "properties": _TABLES, "required": list(_TABLES)}


async def _post(client: httpx.AsyncClient, path: str, body: Mapping[str, Any] | bytes) -> int:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (await client.post(path, content=content, headers=JSON)).status_code


def _under(schema: Mapping[str, Any]) -> dict[str, Any]:
    form = {"name": "a", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": form}


async def _huge_schema(client: httpx.AsyncClient) -> list[int]:
    """A new schema each time, so that it is compiled each time."""
    names = [f"{secrets.token_hex(4)}_{place}" for place in range(450)]
    properties = {name: {"type": "string", "maxLength": 9} for name in names}
    schema = {"type": "object", "properties": properties}
    body = {"prompt": "x", "max_tokens": 8, "response_format": _under(schema)}
    return [await _post(client, _COMPLETIONS, body)]


async def _many_grammars(client: httpx.AsyncClient) -> list[int]:
    body = {"prompt": "x", "max_tokens": 300, "n": 32, "response_format": _under(_SCHEMA)}
    return [await _post(client, _COMPLETIONS, body)]


@cache
def _prompts_body() -> bytes:
    """Spaces take long to tokenize and become few tokens."""
    return json.dumps({"prompt": [" " * 2000] * 256, "max_tokens": 1}).encode()


async def _many_prompts(client: httpx.AsyncClient) -> list[int]:
    return [await _post(client, _COMPLETIONS, _prompts_body())]


@cache
def _large_bodies() -> list[tuple[str, bytes]]:
    text = "a" * (4 * _MIB - 1000)
    bodies: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (_COMPLETIONS, {"prompt": text, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/embeddings", {"input": [text[: _MIB // 2]] * 4}),
        (_COMPLETIONS, {"prompt": [1] * (2 * _MIB // 2), "max_tokens": 1}),
        ("/tokenize", {"prompt": text[:_MIB]}),
    )
    return [(path, json.dumps(body).encode()) for path, body in bodies]


async def _large_prompts(client: httpx.AsyncClient) -> list[int]:
    sent = (_post(client, path, body) for path, body in _large_bodies())
    return list(await asyncio.gather(*sent))


@cache
def _prefix_bodies() -> list[bytes]:
    """Many requests with the same long prefix that do not fit in the KV cache."""
    prompt = [17 + place % 900 for place in range(1500)]
    return [
        json.dumps({"prompt": [*prompt, place], "max_tokens": 40, "ignore_eos": True}).encode()
        for place in range(12)
    ]


async def _cached_prefix(client: httpx.AsyncClient) -> list[int]:
    bodies = _prefix_bodies()
    first = await _post(client, _COMPLETIONS, bodies[0])
    return [first, *await asyncio.gather(*(_post(client, _COMPLETIONS, body) for body in bodies))]


@cache
def _giant_lines() -> bytes:
    turns = [{"role": "user", "content": "a"}] * (12 * _MIB // 36)
    return _line("1", {"messages": turns, "max_tokens": 1})


async def _giant_line(client: httpx.AsyncClient) -> list[int]:
    return await _batch(client, _giant_lines(), "/v1/chat/completions", "24h")


@cache
def _many_lines() -> bytes:
    body = {"prompt": "x" * 200, "max_tokens": 16}
    return b"".join(_line(str(place), body) for place in range(5000))


async def _expiring_batch(client: httpx.AsyncClient) -> list[int]:
    return await _batch(client, _many_lines(), _COMPLETIONS, "1m")


def _line(custom_id: str, body: Mapping[str, Any]) -> bytes:
    url = "/v1/chat/completions" if "messages" in body else _COMPLETIONS
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line).encode() + b"\n"


def build_bodies() -> None:
    """Build all bodies that the attacks send again and again."""
    for build in (_prompts_body, _large_bodies, _prefix_bodies, _giant_lines, _many_lines):
        build()


async def _batch(client: httpx.AsyncClient, lines: bytes, url: str, window: str) -> list[int]:
    """Upload the lines, run them as a batch, read and delete its files."""
    form = {"file": ("in.jsonl", lines)}
    uploaded = await client.post("/v1/files", data={"purpose": "batch"}, files=form)
    if uploaded.status_code != 200:
        return [uploaded.status_code]
    file_id = uploaded.json()["id"]
    body = {"input_file_id": file_id, "endpoint": url, "completion_window": window}
    created = await client.post("/v1/batches", json=body)
    statuses = [uploaded.status_code, created.status_code]
    if created.status_code != 200:
        return statuses
    batch = created.json()
    while batch["status"] not in _FINAL_STATUSES:
        await asyncio.sleep(0.2)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    for name in ("error_file_id", "output_file_id"):
        if batch[name] is not None:
            content = await client.get(f"/v1/files/{batch[name]}/content")
            statuses.append(content.status_code)
            await client.delete(f"/v1/files/{batch[name]}")
    await client.delete(f"/v1/files/{file_id}")
    return statuses


ATTACKS: Mapping[str, Attack] = {
    "huge schema": _huge_schema,
    "n=32 with a grammar": _many_grammars,
    "256 prompts": _many_prompts,
    "4 MiB prompts": _large_prompts,
    "long cached prefix": _cached_prefix,
    "giant batch line": _giant_line,
    "expiring batch": _expiring_batch,
}
