"""A web page whose name was made to point here (DNS rebinding) uses no server without keys."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine

from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

OWN = ("127.0.0.1", "127.0.0.1:8000", "192.168.1.7:8000", "[::1]:8000", "[fe80::1]", "localhost")
OWN += ("LOCALHOST:8000", "localhost.", "app.localhost:8000", "gpu-box", "quickstep:8000")
FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example")
FOREIGN += ("box.lan", "[evil]", "1.2.3", "", ":8000", "evil.example:127.0.0.1", "evil.example.")
ROUTES = (
    ("POST", CHAT, {"messages": MESSAGES}),
    ("POST", COMPLETIONS, {"prompt": "a"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/files", None),
    ("GET", "/debug/steps", None),
    ("POST", "/reset_prefix_cache", None),
    ("GET", "/metrics", None),
    ("GET", "/nothing", None),
)


def status(host: str, method: str, path: str, body: object, options: ServerOptions) -> int:
    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine(), options)) as client:
            headers = {"host": host, "origin": f"http://{host}"}
            return await client.request(method, path, json=body, headers=headers)

    return asyncio.run(run()).status_code


@pytest.mark.parametrize("host", OWN)
def test_an_address_and_localhost_are_names_of_the_server(host: str) -> None:
    assert status(host, "GET", "/v1/models", None, ServerOptions()) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_any_other_name_is_refused_without_keys(host: str) -> None:
    assert status(host, "GET", "/v1/models", None, ServerOptions()) == 403


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_every_route_but_the_probes_is_behind_it(method: str, path: str, body: object) -> None:
    assert status("evil.example", method, path, body, ServerOptions()) == 403
    assert status("evil.example", "GET", "/health", None, ServerOptions()) == 200


@pytest.mark.parametrize("allowed", [("box.example", "Box.Lan"), ("*",)])
def test_the_operator_allows_names(allowed: tuple[str, ...]) -> None:
    options = ServerOptions(allowed_hosts=allowed)
    for host in ("box.example", "box.example:8000", "BOX.LAN"):
        assert status(host, "GET", "/v1/models", None, options) == 200
    assert status("evil.example", "GET", "/v1/models", None, options) == (
        200 if "*" in allowed else 403
    )


def test_with_keys_any_name_will_do() -> None:
    options = ServerOptions(api_keys=ApiKeys(["a=k"]))

    async def run() -> list[int]:
        async with client_of(create_app(FakeEngine(), options)) as client:
            headers = {"host": "box.example", "x-api-key": "k"}
            found = [await client.get("/v1/models", headers=headers)]
            del headers["x-api-key"]
            found.append(await client.get("/v1/models", headers=headers))
            return [one.status_code for one in found]

    assert asyncio.run(run()) == [200, 401]


@pytest.mark.parametrize(
    "header",
    ["forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"],
)
def test_a_client_behind_a_proxy_is_no_operator(header: str) -> None:
    async def run() -> list[int]:
        async with client_of(create_app(FakeEngine())) as client:
            direct = await client.get("/debug/steps")
            proxied = await client.get("/debug/steps", headers={header: "x"})
            return [direct.status_code, proxied.status_code]

    assert asyncio.run(run()) == [200, 403]
