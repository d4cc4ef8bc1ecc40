"""The operator's routes: for admin keys, or for clients on the server's machine without keys."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fake_engine import FakeEngine
from starlette.requests import Request
from starlette.responses import Response

from quickstep.errors import ConfigError
from quickstep.server.app import starlette_app
from quickstep.server.http.route import ApiRoute
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

KEYS = ApiKeys(["ann=secret-a"], ["root=secret-r"])


async def _answer(_: Request) -> Response:
    return Response("done")


def ask(
    keys: ApiKeys, key: str = "", client: str = "127.0.0.1", headers: dict[str, str] | None = None
) -> httpx.Response:
    route = ApiRoute("GET", "/debug/thing", _answer, "For operators.", needs_admin=True)
    options, engine = ServerOptions(api_keys=keys), FakeEngine()
    models = ModelRegistry.of_one(engine, options)
    app = starlette_app([route], options, models.server)
    sent = {**(headers or {}), **({"x-api-key": key} if key else {})}

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(client, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as one:
            return await one.get("/debug/thing", headers=sent)

    return asyncio.run(run())


def test_an_admin_key_is_a_key_that_may_call_operators_routes() -> None:
    assert ask(KEYS, "secret-r").status_code == 200
    refused = ask(KEYS, "secret-a")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_required"
    assert ask(KEYS).status_code == 401
    assert KEYS.names == ("ann", "root")


def test_keys_without_an_admin_key_open_no_operators_route() -> None:
    assert ask(ApiKeys(["ann=secret-a"]), "secret-a").status_code == 403


@pytest.mark.parametrize(
    ("client", "status"), [("127.0.0.1", 200), ("::1", 200), ("10.0.0.7", 403)]
)
def test_without_keys_only_the_servers_own_machine_may_call(client: str, status: int) -> None:
    assert ask(ApiKeys(), client=client).status_code == status


@pytest.mark.parametrize("header", ["forwarded", "x-forwarded-for"])
def test_a_proxy_on_the_servers_machine_is_no_client_on_it(header: str) -> None:
    assert ask(ApiKeys(), headers={header: "10.0.0.7"}).status_code == 403


def test_a_key_is_not_listed_as_both() -> None:
    with pytest.raises(ConfigError, match="another name already"):
        ApiKeys(["ann=secret-a"], ["root=secret-a"])
