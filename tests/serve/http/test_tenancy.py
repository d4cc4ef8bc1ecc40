"""Two API keys: neither learns of the other's prompts nor books work on the other."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from client import CHAT, COMPLETIONS, MESSAGES, client_of
from fake_engine import FakeEngine, Submitted
from hypothesis import given
from hypothesis import strategies as st
from live_server import live_server

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.server.app import create_app
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys, cache_salt_of, tenant_of_key

KEYS = ApiKeys(["ann=AAAA", "bob=BBBB"])
SECRET = "def secret_of_ann(x):\n    return 'the password of ann is hunter2' + str(x)\n" * 4
ROUTES: tuple[tuple[str, dict[str, Any], str | None], ...] = (
    (COMPLETIONS, {"prompt": "a"}, "user"),
    (CHAT, {"messages": MESSAGES}, "safety_identifier"),
    ("/v1/responses", {"input": "a"}, "user"),
    ("/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 2}, None),
    ("/v1/embeddings", {"input": "a"}, "user"),
    ("/completion", {"prompt": "a", "n_predict": 2}, None),
)


def submitted(
    path: str, body: dict[str, Any], key: str | None, options: ServerOptions
) -> Submitted:
    engine = FakeEngine()
    headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def run() -> httpx.Response:
        async with client_of(create_app(engine, options)) as client:
            return await client.post(path, json=body, headers=headers)

    answer = asyncio.run(run())
    assert answer.status_code == 200, answer.text
    return engine.submitted[0]


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
def test_no_field_of_a_body_books_on_another_key(
    path: str, body: dict[str, Any], field: str | None
) -> None:
    if path == "/v1/messages":
        body = {**body, "metadata": {"user_id": "ann"}}
    elif field is not None:
        body = {**body, field: "ann"}
    tenant = submitted(path, body, "BBBB", ServerOptions(api_keys=KEYS)).tenant
    assert tenant == ("bob" if path == "/completion" else "bob/ann")


@pytest.mark.parametrize(("path", "body", "field"), ROUTES)
def test_each_key_has_its_own_part_of_the_prefix_cache(
    path: str, body: dict[str, Any], field: str | None
) -> None:
    def salt(key: str | None, options: ServerOptions) -> str:
        return submitted(path, body, key, options).cache_salt

    own = ServerOptions(api_keys=KEYS)
    assert salt("AAAA", own) == salt("AAAA", own)
    assert salt("AAAA", own) != salt("BBBB", own)
    shared = ServerOptions(api_keys=KEYS, share_prefix_cache=True)
    assert salt("AAAA", shared) == salt("BBBB", shared) == salt(None, ServerOptions()) == ""


@given(names=st.tuples(st.text(max_size=4), st.text(max_size=4)), salts=st.data())
def test_no_salt_of_a_client_is_another_keys(names: tuple[str, str], salts: st.DataObject) -> None:
    ann, bob = (f"k{name}" for name in names)
    texts = st.text("0123456789:k", max_size=6)
    one, other = salts.draw(texts), salts.draw(texts)
    same = cache_salt_of(ann, one, False) == cache_salt_of(bob, other, False)
    assert same == ((ann, one) == (bob, other))


def test_an_account_begins_with_the_keys_name() -> None:
    assert tenant_of_key("bob", "ann/x") == "bob/ann/x"
    assert tenant_of_key("bob", "") == "bob"
    assert tenant_of_key("", "ann") == "ann"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine(
        EngineConfig(
            load=LoadConfig(model="demo", device="cpu"),
            cache=CacheConfig(num_blocks=200),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        )
    )


def test_cached_tokens_say_nothing_of_another_keys_prompts(engine: Engine) -> None:
    """Bob guesses the prompt of ann, and his answers are those of any prompt that is new."""
    with live_server(engine, ServerOptions(api_keys=KEYS, drain_s=0.0)) as server:

        def cached(key: str, prompt: str, **fields: Any) -> int:
            answer = httpx.post(
                f"{server.url}{COMPLETIONS}",
                json={"prompt": prompt, "max_tokens": 1, **fields},
                headers={"authorization": f"Bearer {key}"},
                timeout=60,
            )
            assert answer.status_code == 200, answer.text
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("AAAA", SECRET) == 0
        assert cached("BBBB", SECRET) == 0
        assert cached("BBBB", SECRET, cache_salt="3:ann") == 0
        assert cached("BBBB", SECRET.replace("hunter2", "hunter3")) == cached(
            "BBBB", SECRET.replace("hunter2", "hunter4")
        )
        assert cached("AAAA", SECRET) > 0
        assert cached("BBBB", SECRET) > 0
