"""Whatever arrives at files, batches, tokens and `/completion`: an answer in shape, no 5xx."""

import asyncio
import json
from typing import Any

import httpx
from client import client_of
from example_counts import examples
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from quickstep.server.app import create_app
from quickstep.server.batches.lines import BatchLine, LineFault, read_line
from quickstep.server.llama_cpp.request_types import LlamaCompletionRequest
from quickstep.server.openai.tokenize import DetokenizeRequest, TokenizeRequest
from quickstep.server.options import ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, 2**64, -(2**70), 10**40]),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=4))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "prompt_string"]), inner, max_size=2),
    ),
    max_leaves=5,
)
PATHS = {
    "/completion": LlamaCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    names = PATHS[path].__struct_fields__
    return st.dictionaries(st.sampled_from(names), JSON, max_size=4)


CALLS = st.sampled_from(list(PATHS)).flatmap(lambda path: st.tuples(st.just(path), bodies(path)))


def post(path: str, **sent: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with client_of(create_app(FakeEngine())) as client:
            return await client.post(path, **sent)

    return asyncio.run(run())


def assert_in_shape(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@examples(60)
@given(CALLS)
def test_any_json_is_answered(call: tuple[str, dict[str, Any]]) -> None:
    path, body = call
    assert_in_shape(post(path, json=body))


@examples(40)
@given(st.binary(max_size=200), st.sampled_from(["x", "", '"x', "x; charset=utf-16"]))
def test_any_form_is_answered(content: bytes, boundary: str) -> None:
    kind = f"multipart/form-data; boundary={boundary}"
    begin = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    for body in (content, begin + content, begin + content + b"\r\n--x--\r\n"):
        assert_in_shape(post("/v1/files", content=body, headers={"content-type": kind}))


@examples(100)
@given(st.one_of(st.binary(max_size=60), JSON.map(lambda value: str(value).encode())))
def test_any_line_is_a_request_or_a_fault(text: bytes) -> None:
    for line in (text, b'{"custom_id": "a", "method": "POST", "url": "/u", "body": ' + text + b"}"):
        try:
            assert isinstance(read_line(1, line, ("/u",)), BatchLine)
        except LineFault as fault:
            assert str(fault).startswith("line 1: ")


def test_files_and_batches_belong_to_their_key() -> None:
    """Another key sees neither, by whatever route."""

    async def run() -> None:
        options = ServerOptions(api_keys=ApiKeys(["ann=secret-a", "bob=secret-b"]))
        ann, bob = ({"authorization": f"Bearer secret-{name}"} for name in "ab")
        engine = FakeEngine()
        async with client_of(create_app(engine, options)) as client:
            url = "/v1/completions"
            line = {"custom_id": "1", "method": "POST", "url": url, "body": {"prompt": "a"}}
            form = {"data": {"purpose": "batch"}, "files": {"file": json.dumps(line)}}
            assert (await client.post("/v1/files", **form)).status_code == 401
            file_id = (await client.post("/v1/files", **form, headers=ann)).json()["id"]
            fields = {
                "input_file_id": file_id,
                "endpoint": url,
                "completion_window": "24h",
            }
            refused = await client.post("/v1/batches", json=fields, headers=bob)
            assert refused.status_code == 404
            batch = (await client.post("/v1/batches", json=fields, headers=ann)).json()
            one = f"/v1/batches/{batch['id']}"
            while batch["status"] in ("validating", "in_progress", "finalizing"):
                batch = (await client.get(one, headers=ann)).json()
                await asyncio.sleep(0)  # in memory, a call lets no other task run
            assert batch["status"] == "completed", batch
            for method, path in (
                ("GET", one),
                ("POST", f"{one}/cancel"),
                ("GET", f"/v1/files/{file_id}"),
                ("DELETE", f"/v1/files/{file_id}"),
                ("GET", f"/v1/files/{file_id}/content"),
                ("GET", f"/v1/files/{batch['output_file_id']}/content"),
            ):
                assert (await client.request(method, path, headers=bob)).status_code == 404
            for path in ("/v1/files", "/v1/batches"):
                assert (await client.get(path, headers=bob)).json()["data"] == []
                assert len((await client.get(path, headers=ann)).json()["data"]) >= 1
            assert engine.submitted[0].tenant == "ann"

    asyncio.run(run())
