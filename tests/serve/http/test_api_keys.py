"""Who gets in: keys, probes, and every spelling of a path that is not a probe's."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from live_server import live_server

from quickstep.errors import ConfigError
from quickstep.server.app import create_app
from quickstep.server.options import CorsOptions, ServerOptions
from quickstep.server.run import warn_without_keys
from quickstep.server.usage.api_keys import ApiKeys, read_key_file

KEYS = ApiKeys(["ann=secret-a", "bob=secret-b", "secret-c"])
OPTIONS = ServerOptions(api_keys=KEYS)
PROBES = ("/health", "/ready", "/ping", "/")


def ask(
    path: str,
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    options: ServerOptions = OPTIONS,
    method: str = "GET",
    **more: Any,
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine(), options)) as client:
            return await client.request(method, path, headers=headers, **more)

    return asyncio.run(run())


@pytest.mark.parametrize("path", PROBES)
def test_a_probe_needs_no_key(path: str) -> None:
    assert ask(path).status_code == 200


def test_the_root_needs_a_key_only_on_a_server_without_the_page() -> None:
    assert ask("/").text == "Ollama is running"
    without = ServerOptions(api_keys=KEYS, page=False)
    assert ask("/", options=without).status_code == 401
    keyed = ask("/", {"authorization": "Bearer secret-a"}, without)
    assert keyed.text == "Ollama is running"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/fake"),
        ("POST", CHAT),
        ("POST", COMPLETIONS),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("POST", "/"),
        ("GET", "/page/nothing.js"),
        ("GET", "/nowhere"),
        ("POST", "/health"),
        ("DELETE", "/ready"),
    ],
)
def test_everything_else_is_401_in_openais_shape_without_a_key(method: str, path: str) -> None:
    response = ask(path, method=method)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "API key is missing" in error["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/health/../v1/models",
        "/health/%2e%2e/v1/models",
        "/v1/models/../../health",
        "//health",
        "/health/",
        "/health//",
        "/./health",
        "/%68ealth",
        "/health%2f..%2fv1%2fmodels",
        "/Health",
        "/HEALTH",
        "/health;x",
        "/health%00",
        "/health%20",
        "/health/x",
        "/v1/health",
    ],
)
def test_no_other_spelling_of_a_path_passes_for_a_probe(path: str) -> None:
    """By hand, since clients clean paths up."""

    async def run(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
        )
        answer = await reader.read()
        writer.close()
        return answer

    with live_server(FakeEngine(), OPTIONS) as server:
        assert asyncio.run(run(server.port)).startswith(b"HTTP/1.1 401 ")


@given(path=st.text("/.%2eEhHealtv1;?#x", max_size=14))
def test_only_the_probes_own_paths_pass(path: str) -> None:
    raw = "/" + path
    scope_path = raw.partition("#")[0].partition("?")[0]
    app = create_app(FakeEngine(), OPTIONS)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": httpx.URL(f"http://x{scope_path}").path,
        "raw_path": scope_path.encode(),
        "query_string": b"",
        "headers": [],
        "root_path": "",
        "state": {},
    }
    asyncio.run(app(scope, receive, send))
    passed = sent[0]["status"] != 401
    assert passed == (scope_path in PROBES)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret-a"},
        {"authorization": "bearer  secret-b "},
        {"x-api-key": "secret-c"},
        {"authorization": "Bearer of-another-server", "x-api-key": "secret-a"},
    ],
)
def test_a_key_is_taken_as_bearer_or_as_x_api_key(headers: dict[str, str]) -> None:
    assert ask("/v1/models", headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer secret-"},
        {"authorization": "Bearer secret-aa"},
        {"authorization": "secret-a"},
        {"authorization": "Basic secret-a"},
        {"authorization": "Bearer"},
        {"authorization": "Bearer ann=secret-a"},
        {"x-api-key": ""},
        {"x-api-key": "SECRET-A"},
        {"x-api-key": "ann"},
    ],
)
def test_what_is_no_key_is_401(headers: dict[str, str]) -> None:
    assert ask("/v1/models", headers).status_code == 401


def test_the_keys_name_is_the_tenant_and_the_clients_user_a_label_below_it() -> None:
    async def run() -> list[str]:
        engine = FakeEngine()
        async with client_of(create_app(engine, OPTIONS)) as client:
            for headers, user in (("secret-a", None), ("secret-c", None), ("secret-b", "eve")):
                body = {"prompt": "a", "user": user}
                await client.post(COMPLETIONS, json=body, headers={"x-api-key": headers})
        return [item.tenant for item in engine.submitted]

    assert asyncio.run(run()) == ["ann", "key-26d46203179f", "bob/eve"]


def test_openais_client_comes_in_with_its_key_and_not_with_another() -> None:
    with live_server(FakeEngine(), OPTIONS) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key="secret-b", max_retries=0) as client:
            assert client.chat.completions.create(model="fake", messages=MESSAGES).choices
        with (
            openai.OpenAI(base_url=url, api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError, match="not one of this server's"),
        ):
            client.models.list()


def test_under_a_root_path_the_probes_are_the_probes() -> None:
    options = ServerOptions(api_keys=KEYS, root_path="/llm")
    with live_server(FakeEngine(), options) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/llm/health").status_code == 401
        headers = {"x-api-key": "secret-a"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


def test_no_keys_let_everybody_in() -> None:
    assert ask("/v1/models", options=ServerOptions()).status_code == 200


def test_no_page_of_another_origin_may_call_unless_allowed() -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    refused = ask(CHAT, asking, ServerOptions(), "OPTIONS")
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


def test_a_browsers_preflight_needs_no_key_and_names_the_origin() -> None:
    options = ServerOptions(
        api_keys=KEYS, cors=CorsOptions(origins=("https://a.example",), methods=("POST",))
    )
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    allowed = ask(CHAT, asking, options, "OPTIONS")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = ask(CHAT, {**asking, "origin": "https://b.example"}, options, "OPTIONS")
    assert "access-control-allow-origin" not in other.headers
    assert other.status_code == 403
    error = other.json()["error"]
    assert error["type"] == "permission_error"
    assert "origin is not allowed" in error["message"]
    locked = ask("/v1/models", {"origin": "https://a.example"}, options)
    assert locked.status_code == 401
    assert locked.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    ("host", "keys", "is_told"),
    [
        ("0.0.0.0", ApiKeys(), True),
        ("::", ApiKeys(), True),
        ("fe80::1%eth0", ApiKeys(), True),
        ("0.0.0.0", KEYS, False),
        ("127.0.0.1", ApiKeys(), False),
        ("::1", ApiKeys(), False),
    ],
)
def test_a_server_that_is_open_to_others_is_reported(
    host: str, keys: ApiKeys, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "quickstep.server"):
        warn_without_keys(host, keys)
    assert ("may call" in caplog.text) is is_told


def test_credentials_for_every_origin_are_refused() -> None:
    with pytest.raises(ConfigError, match="--allow-credentials"):
        CorsOptions(origins=("*",), credentials=True)


@pytest.mark.parametrize(
    ("given_keys", "names"),
    [
        (["a=x", "b:y"], ("a", "b")),
        (["x", "n=y", "z"], ("key-2d711642b726", "n", "key-594e519ae499")),
        (["YWJj=="], ("key-e88dd13c9615",)),
        (["n=YWJj=="], ("n",)),
    ],
)
def test_keys_have_names(given_keys: list[str], names: tuple[str, ...]) -> None:
    assert ApiKeys(given_keys).names == names


@pytest.mark.parametrize(
    ("given_keys", "words"),
    [
        ([""], "key-e3b0c44298fc is empty"),
        (["x", "x"], "is given twice"),
        (["a b"], "holds a blank"),
        (["a=x", "a=y"], "two API keys have the name a"),
        (["a=x", "b=x"], "the API key of b has another name already"),
        (["schlüssel"], "visible ASCII"),
    ],
)
def test_unusable_keys_are_configuration_errors(given_keys: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ApiKeys(given_keys)
    assert "=x" not in str(caught.value)


def test_a_key_file_has_a_key_a_line_and_says_who_may_read_it(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nann:secret-a\n\n bob=secret-b \n")
    file.chmod(0o600)
    entries, is_shared = read_key_file(file)
    assert (ApiKeys(entries).names, is_shared) == (("ann", "bob"), False)
    file.chmod(0o644)
    assert read_key_file(file)[1]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "none")
