"""Web pages: whoever opens one lets it send requests here, so most of them are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, JSON, MESSAGES, client_of
from fake_engine import FakeEngine
from live_server import live_server

from quickstep.server.app import create_app
from quickstep.server.options import CorsOptions, ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

EVIL = "https://evil.example"
KEYED = ServerOptions(api_keys=ApiKeys(["ann=AAAA"]))
ROUTES = (
    ("POST", CHAT),
    ("POST", "/v1/messages"),
    ("POST", "/completion"),
    ("POST", "/tokenize"),
    ("POST", "/v1/files"),
    ("POST", "/ping"),
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/nowhere"),
    ("OPTIONS", CHAT),
    ("DELETE", "/v1/files/x"),
)


def ask(
    method: str, path: str, options: ServerOptions | None = None, **more: Any
) -> httpx.Response:
    engine = FakeEngine()

    async def run() -> httpx.Response:
        async with client_of(create_app(engine, options)) as client:
            return await client.request(method, path, **more)

    answer = asyncio.run(run())
    assert not engine.submitted or answer.status_code == 200
    return answer


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://localhost:81", "http://localhost.evil", ""]
)
def test_a_page_of_another_origin_is_refused_on_every_route(
    method: str, path: str, origin: str
) -> None:
    answer = ask(method, path, headers={"origin": origin})
    assert answer.status_code == 403
    if path != "/v1/messages":
        assert answer.json()["error"]["code"] == "origin_not_allowed"
    assert "--allowed-origins" in answer.text
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_can_not_use_a_key_either() -> None:
    headers = {"origin": EVIL, "authorization": "Bearer AAAA"}
    assert ask("GET", "/v1/models", KEYED, headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost", "http://localhost"),
        ("localhost", "http://localhost:80"),
        ("LocalHost:80", "http://localhost"),
        ("localhost", "https://localhost"),
        ("localhost:443", "https://localhost"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("[::1]", "http://[::1]"),
    ],
)
def test_a_page_of_this_server_may_call(host: str, origin: str) -> None:
    headers = {"host": host, "origin": origin}
    answer = ask("POST", CHAT, json={"messages": MESSAGES}, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("origins", [(EVIL,), ("*",), ("https://EVIL.example",)])
def test_an_origin_that_the_operator_allows_may_call(origins: tuple[str, ...]) -> None:
    options = ServerOptions(cors=CorsOptions(origins=origins))
    answer = ask("POST", CHAT, options, json={"messages": MESSAGES}, headers={"origin": EVIL})
    assert answer.status_code == 200
    other = ask("GET", "/v1/models", options, headers={"origin": "https://other.example"})
    assert other.status_code == (200 if "*" in origins else 403)


def test_two_origins_are_refused_unless_both_are_allowed() -> None:
    headers = [("origin", "http://localhost"), ("origin", EVIL)]
    assert ask("GET", "/v1/models", headers=headers).status_code == 403


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/embeddings"])
@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", "json"]
)
def test_below_v1_a_body_is_reported_to_be_json(path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = ask("POST", path, content=b"{}", headers=headers)
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["code"] == "unsupported_media_type"
    assert "send the header `content-type: application/json`" in error["message"]


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/x+json",
    ],
)
def test_json_by_any_of_its_names_is_taken(kind: str) -> None:
    body = b'{"prompt": "a"}'
    answer = ask("POST", COMPLETIONS, content=body, headers={"content-type": kind})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/completion", "/tokenize"])
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_llama_cpps_routes_take_any_type_but_from_no_page(path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    body = b'{"prompt": "a"}'
    assert ask("POST", path, content=body, headers=headers).status_code == 200
    page = {**headers, "origin": "http://localhost"}
    assert ask("POST", path, content=body, headers=page).status_code == 415
    assert ask("POST", path, content=body, headers={**page, **JSON}).status_code == 200


def test_the_rules_hold_below_a_root_path() -> None:
    options = ServerOptions(root_path="/llm")
    with live_server(FakeEngine(), options) as server:
        body = b'{"prompt": "a"}'
        for path, status in ((COMPLETIONS, 415), ("/completion", 200)):
            assert httpx.post(f"{server.url}{path}", content=body).status_code == status
