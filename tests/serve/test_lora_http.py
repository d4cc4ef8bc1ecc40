"""LoRA adapters over HTTP: selected as models, listed with their parent, exact in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import LiveServer, live_server

from adapter_files import write_adapter
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, LoRAConfig
from quickstep.engine.assembly import open_engine
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.spec import read_spec
from quickstep.server.generate.adapter import Served
from quickstep.server.options import ServerOptions

PROMPT = "def add(first, second):\n    return"
OPTIONS = ServerOptions(drain_s=0.0, adapter_names=("poet", "coder"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = tmp_path_factory.mktemp("adapters")
    load = LoadConfig(model="demo", device="cpu")
    spec = read_spec(find_checkpoint(load).path)
    modules = tuple(
        (name, str(write_adapter(path / name, spec, rank=8, seed=seed)))
        for seed, name in enumerate(OPTIONS.adapter_names)
    )
    config = EngineConfig(load=load, cache=CacheConfig(num_blocks=200), lora=LoRAConfig(modules))
    with live_server(open_engine(config), OPTIONS) as server:
        yield server


def post(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{path}", json=fields, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(server: LiveServer, model: str) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "max_tokens": 12, "seed": 7, "logprobs": 1}
    return post(server, "/v1/completions", model=model, **fields)


def test_a_model_name_selects_an_adapter_and_batches_change_nothing(server: LiveServer) -> None:
    names = ["demo", "poet", "coder", "poet", "demo", "coder"]
    alone = {name: complete(server, name) for name in set(names)}
    assert len({answer["choices"][0]["text"] for answer in alone.values()}) == 3
    with ThreadPoolExecutor(len(names)) as threads:
        together = list(threads.map(lambda name: complete(server, name), names))
    for name, answer in zip(names, together, strict=True):
        assert answer["model"] == name
        assert answer["choices"] == alone[name]["choices"]


def test_every_api_reaches_the_adapter(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    calls: list[tuple[str, dict[str, Any], Any]] = [
        (
            "/v1/chat/completions",
            {"messages": messages, "max_tokens": 8, "temperature": 0},
            lambda body: body["choices"][0]["message"]["content"],
        ),
        (
            "/v1/messages",
            {"messages": messages, "max_tokens": 8, "temperature": 0},
            lambda body: body["content"][0]["text"],
        ),
        (
            "/v1/responses",
            {"input": "hello", "max_output_tokens": 8, "temperature": 0, "store": False},
            lambda body: body["output"][0]["content"][0]["text"],
        ),
        (
            "/api/generate",
            {"prompt": "hello", "stream": False, "options": {"temperature": 0, "num_predict": 8}},
            lambda body: body["response"],
        ),
        ("/v1/embeddings", {"input": "hello"}, lambda body: body["data"][0]["embedding"]),
    ]
    for path, fields, text in calls:
        base = text(post(server, path, model="demo", **fields))
        assert text(post(server, path, model="poet", **fields)) != base, path


def test_models_lists_adapters_with_their_parent(server: LiveServer) -> None:
    data = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in data] == [
        ("demo", None),
        ("poet", "demo"),
        ("coder", "demo"),
    ]
    assert httpx.get(f"{server.url}/v1/models/poet").json()["parent"] == "demo"


def test_an_unknown_adapter_is_404_and_names_those_that_exist(server: LiveServer) -> None:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "bard", "prompt": "a"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found" and "poet" in error["message"]


def test_an_adapter_must_not_have_the_models_name() -> None:
    options = ServerOptions(served_model_names=("demo",), adapter_names=("demo",))
    with pytest.raises(ConfigError, match="both"):
        Served.of(FakeEngine(), options)


def test_prefixes_are_cached_for_each_adapter(server: LiveServer) -> None:
    prompt = "import itertools\n\n\n" + "def chain(*iterables):\n    pass\n" * 4
    fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0}

    def cached(model: str) -> int:
        usage = post(server, "/v1/completions", model=model, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in ("demo", "poet", "coder")] == [0, 0, 0]
    assert all(cached(name) > 0 for name in ("demo", "poet", "coder"))
