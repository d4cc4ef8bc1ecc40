"""LoRA adapters over HTTP: selected as models, listed with their parent, exact in any batch."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import LiveServer, live_server_of
from msgspec.structs import replace

from adapter_files import write_adapter
from quickstep.config import CacheConfig, EngineConfig, LoadConfig, LoRAConfig
from quickstep.engine.remote.engine import RemoteEngine
from quickstep.engine.stats import EngineState
from quickstep.errors import ConfigError
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.spec import read_spec
from quickstep.server.models.lora_names import LoRANames
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.options import ServerOptions
from quickstep.types import Request, SamplingParams

PROMPT = "def add(first, second):\n    return"
OPTIONS = ServerOptions(drain_s=0.0, adapter_names=("poet", "coder"))
LOAD = LoadConfig(model="demo", device="cpu")
SPEC = read_spec(find_checkpoint(LOAD).path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four adapters in `dir`, which the server may load from, and one beside it."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("poet", "coder", "dir/cook", "dir/judge", "dir/new", "secret")):
        write_adapter(path / name, SPEC, rank=8, seed=seed)
    (path / "dir" / "link").symlink_to(path / "secret")
    (path / "dir" / "broken").mkdir()
    (path / "dir" / "broken" / "adapter_config.json").write_text("{}")
    return path


def lora_config(folder: Path, max_loras: int = 2) -> EngineConfig:
    modules = tuple((name, str(folder / name)) for name in OPTIONS.adapter_names)
    lora = LoRAConfig(modules, max_loras=max_loras, directory=str(folder / "dir"))
    return EngineConfig(load=LOAD, cache=CacheConfig(num_blocks=200), lora=lora)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    """In two processes, as `quickstep serve` runs it, with places for two of the adapters."""

    async def opened() -> RemoteEngine:
        engine = RemoteEngine(lora_config(folder))
        await engine.open()
        return engine

    options = replace(OPTIONS, lora_dir=str(folder / "dir"))
    with live_server_of(opened, options) as server:
        yield server


def post(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{path}", json=fields, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(server: LiveServer, model: str) -> dict[str, Any]:
    fields = {"prompt": PROMPT, "max_tokens": 12, "seed": 7, "logprobs": 1}
    return post(server, "/v1/completions", model=model, **fields)


def admin(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}_lora_adapter", json=fields, timeout=60)


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
        *((name, "demo") for name in ("poet", "coder", "broken", "cook", "judge", "link", "new")),
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
        ModelRegistry.of_one(FakeEngine(), options)


def test_prefixes_are_cached_for_each_adapter(server: LiveServer) -> None:
    prompt = "import itertools\n\n\n" + "def chain(*iterables):\n    pass\n" * 4
    fields = {"prompt": prompt, "max_tokens": 4, "temperature": 0}

    def cached(model: str) -> int:
        usage = post(server, "/v1/completions", model=model, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(name) for name in ("demo", "poet", "coder")] == [0, 0, 0]
    assert all(cached(name) > 0 for name in ("demo", "poet", "coder"))


def test_adapters_of_the_directory_are_loaded_when_they_are_named(server: LiveServer) -> None:
    names = ("cook", "judge", "poet", "demo", "coder")
    with ThreadPoolExecutor(10) as threads:
        together = list(threads.map(lambda name: complete(server, name), names * 2))
    texts = [answer["choices"][0]["text"] for answer in together]
    assert texts[: len(names)] == texts[len(names) :]
    assert len(set(texts)) == len(names)


def test_a_broken_adapter_of_the_directory_fails_its_own_requests_only(server: LiveServer) -> None:
    fields = {"model": "broken", "prompt": "a", "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=fields, timeout=60)
    assert answer.status_code == 400 and "adapter_config.json" in answer.text
    assert complete(server, "cook")["choices"]


BAD_NAMES = (
    "m" * 256,
    "m" * 100_000,
    "\u00e9" * 128,  # 256 bytes
    "line\nbreak",
    "line\u2028break",
    "a\0b",
    "\x1b[31mred",
)


@pytest.mark.parametrize(
    "name", ["../secret", "..", "dir/cook", "", "cook/../../secret", *BAD_NAMES]
)
def test_a_name_never_leads_out_of_the_directory(server: LiveServer, name: str) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        answer = httpx.post(f"{server.url}{path}", json={"model": name, field: "a"})
        assert answer.status_code == 404
        assert len(answer.content) < 2000


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_logs_and_lists_cannot_have_is_refused(server: LiveServer, name: str) -> None:
    answer = admin(server, "load", lora_name=name, lora_path="cook")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora_name"
    assert len(answer.content) < 2000


@pytest.mark.parametrize("path", ["p" * 256, "p/" * 4000, "a\0b", "p" * 100_000])
def test_a_path_that_no_disk_can_have_is_refused(server: LiveServer, path: str) -> None:
    answer = admin(server, "load", lora_name="guest", lora_path=path)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 6000


def test_a_folder_with_a_name_that_is_no_text_is_left_out_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [b"good", b"bad\xffname", b"line\nbreak", "caf\u00e9".encode()]
    for name in names:
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
    adapters = LoRANames((), str(tmp_path))
    for _ in range(2):
        assert adapters.names == ("caf\u00e9", "good")
    assert os.fsdecode(b"bad\xffname") not in adapters
    reported = [record.getMessage() for record in caplog.records]
    assert len(reported) == 2 and all(text.isprintable() for text in reported)


def test_of_concurrent_loads_of_a_new_name_one_succeeds(server: LiveServer) -> None:
    with ThreadPoolExecutor(8) as threads:
        loads = [
            threads.submit(admin, server, "load", lora_name="contested", lora_path=path)
            for path in ("cook", "judge") * 4
        ]
        statuses = sorted(load.result().status_code for load in loads)
    assert statuses == [200, *[400] * 7]
    assert admin(server, "load", lora_name="contested", lora_path="cook").status_code == 400
    assert admin(server, "unload", lora_name="contested").status_code == 200
    failed = admin(server, "load", lora_name="contested", lora_path="broken")
    assert failed.status_code == 400  # and the name is free again
    assert admin(server, "load", lora_name="contested", lora_path="cook").status_code == 200
    assert admin(server, "unload", lora_name="contested").status_code == 200


def test_an_adapter_is_loaded_replaced_and_unloaded_by_request(
    server: LiveServer, folder: Path
) -> None:
    answer = admin(server, "load", lora_name="guest", lora_path="cook")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'guest' added successfully.",
    )
    assert complete(server, "guest")["choices"] == complete(server, "cook")["choices"]
    names = [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert "guest" in names
    again = admin(server, "load", lora_name="guest", lora_path="judge")
    assert again.status_code == 400 and "load_inplace" in again.text
    path = str(folder / "dir" / "judge")
    assert admin(server, "load", lora_name="guest", lora_path=path, load_inplace=True).is_success
    assert complete(server, "guest")["choices"] == complete(server, "judge")["choices"]
    answer = admin(server, "unload", lora_name="guest")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'guest' removed successfully.",
    )
    assert admin(server, "unload", lora_name="guest").status_code == 404
    gone = httpx.post(f"{server.url}/v1/completions", json={"model": "guest", "prompt": "a"})
    assert gone.status_code == 404


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"lora_name": "x", "lora_path": "../secret"}, "outside"),
        ({"lora_name": "x", "lora_path": "/etc"}, "outside"),
        ({"lora_name": "x", "lora_path": "link"}, "outside"),
        ({"lora_name": "x", "lora_path": "absent"}, "no directory"),
        ({"lora_name": "x", "lora_path": "broken"}, "adapter_config.json"),
        ({"lora_name": "demo", "lora_path": "cook"}, "the model's own name"),
        ({"lora_name": "", "lora_path": "cook"}, "needs a name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 3, "lora_path": "cook"}, "lora_name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_sentence(
    server: LiveServer, fields: dict[str, Any], part: str
) -> None:
    answer = admin(server, "load", **fields)
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]


def continued(server: LiveServer, **fields: Any) -> str:
    body = {"prompt": PROMPT, "n_predict": 12, "seed": 7, **fields}
    return str(post(server, "/completion", **body)["content"])


def test_adapters_apply_at_the_scales_of_a_request(server: LiveServer) -> None:
    listed = httpx.get(f"{server.url}/lora-adapters").json()
    number = {one["path"]: one["id"] for one in listed}
    assert {"poet", "coder"} <= set(number) and {one["scale"] for one in listed} == {0.0}
    poet, coder = number["poet"], number["coder"]
    base, plain = continued(server), continued(server, model="poet")
    assert continued(server, lora=[{"id": poet, "scale": 1}]) == plain != base
    assert continued(server, model="poet", lora=[]) == base
    assert continued(server, lora=[{"id": poet, "scale": 0}]) == base
    mix = [{"id": poet, "scale": 0.6}, {"id": coder, "scale": -0.5}]
    mixed = continued(server, lora=mix)
    assert mixed not in (base, plain)
    assert continued(server, lora=list(reversed(mix))) == mixed
    assert completed(server, lora=mix) == mixed
    assert completed(server, model="poet", lora=[]) == base


def completed(server: LiveServer, **fields: Any) -> str:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 7, "model": "demo", **fields}
    return str(post(server, "/v1/completions", **body)["choices"][0]["text"])


def test_an_operator_sets_the_scales_of_other_requests(server: LiveServer) -> None:
    url = f"{server.url}/lora-adapters"
    base, poet = complete(server, "demo"), complete(server, "poet")
    number = next(one["id"] for one in httpx.get(url).json() if one["path"] == "poet")
    try:
        answer = httpx.post(url, json=[{"id": number, "scale": 1.0}])
        assert answer.status_code == 200
        assert [one["id"] for one in answer.json() if one["scale"]] == [number]
        assert complete(server, "demo")["choices"] == poet["choices"]
        assert continued(server, lora=[]) == base["choices"][0]["text"]
    finally:
        assert httpx.post(url, json=[]).is_success
    assert complete(server, "demo")["choices"] == base["choices"]


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ([{"id": 999, "scale": 1}], "there is no adapter 999"),
        ([{"id": 0, "scale": 1000}], "expected `float` <= 100"),
        ([{"id": 0}], "scale"),
        ([{"id": "0", "scale": 1}], "id"),
        ([{"id": number, "scale": 1} for number in range(9)], "the limit is 8"),
        ({"id": 0, "scale": 1}, "lora"),
        (3, "lora"),
    ],
)
def test_bad_scales_are_refused(server: LiveServer, body: Any, part: str) -> None:
    for path, sent in (("/completion", {"prompt": "a", "lora": body}), ("/lora-adapters", body)):
        answer = httpx.post(f"{server.url}{path}", json=sent)
        assert answer.status_code == 400, answer.text
        assert part in answer.json()["error"]["message"]


def test_metrics_name_the_adapters(server: LiveServer) -> None:
    complete(server, "cook")
    text = httpx.get(f"{server.url}/metrics").text
    values = {
        line.rpartition(" ")[0].partition("{")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if "lora" in line and not line.startswith("#")
    }
    assert 1 <= values["quickstep:lora_adapters_resident"] <= 2
    assert values["quickstep:lora_adapter_loads_total"] >= 1
    assert values["quickstep:lora_adapter_evictions_total"] >= 1
    info = [line for line in text.splitlines() if line.startswith("quickstep:lora_requests_info{")]
    assert len(info) == 1 and 'max_lora="2"' in info[0]


def test_a_new_engine_process_has_the_adapters_that_were_loaded(
    server: LiveServer, folder: Path
) -> None:
    async def test() -> None:
        engine = RemoteEngine(lora_config(folder))
        await engine.open()
        await engine.start()
        try:
            await engine.load_adapter("guest", "new", is_from_client=True)
            before = await tokens(engine, "guest")
            assert engine.process_id is not None
            os.kill(engine.process_id, signal.SIGKILL)
            while engine.stats().num_restarts < 1 or engine.stats().state is not RUNNING:
                await asyncio.sleep(0.01)
            assert await tokens(engine, "guest") == before
        finally:
            await engine.stop()

    asyncio.run(test())


RUNNING = EngineState.RUNNING


async def tokens(engine: RemoteEngine, adapter: str) -> list[int]:
    ids = tuple(engine.tokenizer.encode(PROMPT))
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    stream = engine.stream(Request("", ids, sampling, adapter=adapter))
    return [token async for delta in stream for token in delta.token_ids]
