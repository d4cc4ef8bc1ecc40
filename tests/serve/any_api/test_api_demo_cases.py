"""Requests drawn from our document, answered by the demo model as it is served.

The engine runs in a process of its own, which shows what the scripted engine cannot: grammars are
compiled, ids belong to a real vocabulary, every value has to travel, blocks have to be free again.
"""

import asyncio
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_cases import (
    CASE_TIMEOUT_S,
    NEGATIVE,
    POSITIVE,
    Api,
    GenerationMode,
    default_api,
    endpoints,
    json_request,
    num_cases,
)
from client import client_of
from hypothesis import given, note
from hypothesis import strategies as st

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.server.app import create_app

NUM_CASES = 40  # each mode of each endpoint with a body
API = default_api()
WITH_BODY = [item for item in endpoints(API.document) if API.has_body(*item)]
MAX_TOKENS = 3
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")


class DemoApi:
    """The app, its loop and its document."""

    def __init__(self, runner: asyncio.Runner, slots: Path) -> None:
        self.runner = runner
        self.engine = RemoteEngine(
            EngineConfig(
                load=LoadConfig(model="demo", device="cpu"),
                cache=CacheConfig(num_blocks=400, slot_save_path=str(slots)),
                scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
            )
        )
        runner.run(self.engine.open())
        self.opened = client_of(create_app(self.engine))
        self.client = runner.run(self.opened.__aenter__())
        self.api = Api(self.get("/openapi.json"))

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.runner.run(self.client.get(path)).json()
        return answer

    def check(self, method: str, path: str, mode: GenerationMode, body: Any) -> None:
        if mode is POSITIVE:
            body = shortened(body, self.api.fields(method, path))
        note(json.dumps(body))
        response = self.runner.run(self._exchange(json_request(method, path, body)))
        self.api.judge_mode(method, path, mode, response)

    async def until_idle(self) -> None:
        """Wait until all blocks are free: the engine reports its state now and then."""
        async with asyncio.timeout(CASE_TIMEOUT_S):
            while (await self.client.get("/health")).json()["num_used_blocks"]:
                await self.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})

    async def _exchange(self, request: dict[str, Any]) -> Any:
        async with asyncio.timeout(CASE_TIMEOUT_S):
            return await self.client.request(**request)


def shortened(body: Any, known: Collection[str]) -> Any:
    """The body with few tokens to generate and time for them; whatever else it says stays."""
    if not isinstance(body, dict):
        return body
    limits = {name: MAX_TOKENS for name in LENGTHS if name in body or name == "max_tokens"}
    few = {**limits, "min_tokens": None}
    if "n" in known:
        few["n"] = min(body.get("n") or 1, 2)
    few |= {"timeout_s": None, "ttft_deadline_ms": None}
    options = body.get("options") or {}
    if isinstance(options, dict) and "options" in known:  # Ollama's
        few["options"] = {**options, "num_predict": MAX_TOKENS}
    return {**body, **{name: value for name, value in few.items() if name in known}}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoApi]:
    """The app; the end of its tests fails where a request has left something behind."""
    with asyncio.Runner() as runner:
        demo = DemoApi(runner, tmp_path_factory.mktemp("slots"))
        yield demo
        runner.run(demo.until_idle())
        health = demo.get("/health")
        assert (health["status"], health["num_restarts"], health["num_requests"]) == ("ok", 0, 0)
        runner.run(demo.opened.__aexit__(None, None, None))


@pytest.mark.parametrize("mode", [POSITIVE, NEGATIVE], ids=["fits", "does_not_fit"])
@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_the_demo_model_answers_as_the_document_says(
    demo: DemoApi, method: str, path: str, mode: GenerationMode
) -> None:
    drawer = demo.api.drawer(method, path)

    @num_cases(NUM_CASES)
    @given(st.integers(0, 2**60))
    def each(seed: int) -> None:
        body = drawer.fitting(seed) if mode is POSITIVE else drawer.breaking(seed)
        demo.check(method, path, mode, body)

    each()


def test_the_demo_model_has_the_same_routes(demo: DemoApi) -> None:
    assert [item for item in endpoints(demo.api.document) if demo.api.has_body(*item)] == WITH_BODY


@pytest.mark.parametrize(
    "name", ["max_tokens", "min_tokens", "n", "priority", "seed", "temperature", "top_k"]
)
@pytest.mark.parametrize("value", [2**31, 2**63, 2**64, -(2**63) - 1, 10**40])
def test_a_huge_number_is_taken_or_refused_by_its_name(
    demo: DemoApi, name: str, value: int
) -> None:
    body = {"prompt": "a", "max_tokens": 2, name: value, "stop": list("etaoin sru")}
    response = demo.runner.run(demo.client.post("/v1/completions", json=body))
    assert response.status_code == 200 or response.json()["error"]["param"] == name, response.text
