"""Several models in one budget: they are loaded when they are named, and idle ones leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import pytest
from client import CHAT, client_of
from fake_engine import FakeEngine
from msgspec.structs import replace

from quickstep.engine.adapters import LoadedAdapter
from quickstep.engine.interface import ServedEngine
from quickstep.errors import ConfigError, EngineDied, EngineError
from quickstep.server.app import app_of_models
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.residents import ModelEntry, SeveralModels
from quickstep.server.options import ModelsOptions, ServerOptions
from quickstep.server.usage.api_keys import ApiKeys

TWO_KEYS = ApiKeys(["one=secret-1", "two=secret-2"])
KEYS = {name: {"authorization": f"Bearer secret-{n}"} for n, name in ((1, "one"), (2, "two"))}
SAY = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
Use = Callable[[httpx.AsyncClient, "Server"], Awaitable[Any]]


class SleepyEngine(FakeEngine):
    """The scripted engine, with a count of what is in memory."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.sleeps = False
        server.take(1)

    async def sleep(self) -> None:
        assert not self.request_ids, "a busy model was unloaded"
        self.server.take(-1)
        self.sleeps = True

    async def wake(self) -> None:
        self.server.take(1)
        self.sleeps = False

    async def load_adapter(
        self, name: str, path: str, *, is_from_client: bool = False
    ) -> LoadedAdapter:
        self._check_awake()
        return await super().load_adapter(name, path, is_from_client=is_from_client)

    async def unload_adapter(self, name: str) -> None:
        self._check_awake()
        await super().unload_adapter(name)

    def _check_awake(self) -> None:
        if self.sleeps:
            raise EngineError("the engine is asleep")


class Server:
    """A server of the models a, b and c of one byte each, and `big` of nine, in two bytes."""

    def __init__(
        self, options: ModelsOptions, pinned: str = "", keys: ApiKeys | None = None
    ) -> None:
        self.num_in_memory = 0
        self.loads: list[str] = []
        self.broken = {"big"}
        self.opening_lasts: asyncio.Event | None = None
        self.num_deaths = 0  # of processes that load
        base = ServerOptions(models=options, api_keys=keys or ApiKeys())
        self.entries = tuple(
            ModelEntry(
                (name, f"{name}-alias"),
                replace(base, served_model_names=(name, f"{name}-alias")),
                self.opener(name),
                9 if name == "big" else 1,
                name in pinned,
            )
            for name in ("a", "b", "c", "big")
        )

    def take(self, num: int) -> None:
        self.num_in_memory += num
        assert 0 <= self.num_in_memory <= 2, "more models than the budget allows"

    def opener(self, name: str) -> Callable[[], Awaitable[ServedEngine]]:
        async def open_engine() -> ServedEngine:
            if name in self.broken:
                raise ConfigError(f"the weights of {name} are broken")
            if self.opening_lasts is not None:
                await self.opening_lasts.wait()
            if self.num_deaths:
                self.num_deaths -= 1
                raise EngineDied("the engine process was ended by SIGKILL while it loaded")
            self.loads.append(name)
            return SleepyEngine(self)  # type: ignore[return-value]

        return open_engine


def serve(
    use: Use,
    options: ModelsOptions | None = None,
    pinned: str = "",
    keys: ApiKeys | None = None,
    max_waiting: int | None = None,
) -> Any:
    """What `use` returns for such a server, whose first model is loaded."""

    async def run() -> Any:
        server = Server(options or ModelsOptions(), pinned, keys)
        engine = await server.entries[0].open()
        several = SeveralModels(server.entries, 2, max_waiting=max_waiting)
        models = ModelRegistry.of_several(engine, several)
        app = app_of_models(models, server.entries[0].options)
        async with client_of(app) as client:
            return await use(client, server)

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_three_models_take_turns_in_memory_for_two_and_nothing_is_refused() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> list[httpx.Response]:
        names = ["a", "b", "c", "c-alias", "a", "b", "c", "a"] * 3
        one_by_one = [await client.post(CHAT, json={**SAY, "model": name}) for name in names]
        at_once = await asyncio.gather(
            *(client.post(CHAT, json={**SAY, "model": name}) for name in names)
        )
        assert sorted(server.loads) == ["a", "b", "c"]  # the rest were woken
        return [*one_by_one, *at_once]

    responses = serve(use)
    assert {response.status_code for response in responses} == {200}
    texts = {response.json()["choices"][0]["message"]["content"] for response in responses}
    assert len(texts) == 1


def test_a_model_that_never_fits_is_refused_with_the_bytes() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> httpx.Response:
        return await client.post(CHAT, json={**SAY, "model": "big"})

    response = serve(use)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "model_does_not_fit"
    assert "needs 9 bytes, models have at most 2 bytes" in error["message"]
    assert error["message"].endswith("that fits: a, b, c")


def test_a_request_waits_for_a_model_no_longer_than_its_time_limit() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> httpx.Response:
        server.opening_lasts = asyncio.Event()
        late = await client.post(CHAT, json={**SAY, "model": "c", "timeout_s": 0.02})
        server.opening_lasts.set()
        in_time = await client.post(CHAT, json={**SAY, "model": "c"})
        assert in_time.status_code == 200
        return late

    response = serve(use)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "model_not_ready"
    assert "the model c is loading, and was not ready within 0.02 s" in response.text


def test_a_client_that_floods_a_model_that_is_loaded_leaves_room_for_others() -> None:
    """The limit and the shares of the engines' queues, before there is an engine."""

    async def use(client: httpx.AsyncClient, server: Server) -> Any:
        server.opening_lasts = asyncio.Event()
        post = partial(client.post, CHAT, json={**SAY, "model": "c"})
        flood = [asyncio.create_task(post(headers=KEYS["one"])) for _ in range(20)]
        while sum(task.done() for task in flood) < 12:
            await asyncio.sleep(0)
        other = asyncio.create_task(post(headers=KEYS["two"]))
        at_once = await client.post(CHAT, json={**SAY, "model": "a"}, headers=KEYS["one"])
        server.opening_lasts.set()
        return await asyncio.gather(*flood), await other, at_once

    flood, other, at_once = serve(use, keys=TWO_KEYS, max_waiting=9)
    assert sorted(response.status_code for response in flood) == [200] * 8 + [429] * 12
    refused = next(response for response in flood if response.status_code == 429)
    assert refused.headers["retry-after"] == "10"
    assert "8 requests of one wait for a model, at most 9 may" in refused.text
    assert other.status_code == at_once.status_code == 200


def test_a_model_that_cannot_be_loaded_does_not_touch_the_others() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> Any:
        server.broken.add("b")
        failed = await client.post(CHAT, json={**SAY, "model": "b"})
        other = await client.post(CHAT, json={**SAY, "model": "a"})
        health = await client.get("/health")
        server.broken.discard("b")
        again = await client.post(CHAT, json={**SAY, "model": "b"})
        return failed, other, health, again

    failed, other, health, again = serve(use)
    assert failed.status_code == 503
    assert "the weights of b are broken" in failed.json()["error"]["message"]
    assert other.status_code == health.status_code == again.status_code == 200
    assert health.json()["models"] == {"a": "ready", "b": "failed", "c": "absent", "big": "absent"}


@pytest.mark.parametrize(("num_deaths", "status"), [(2, 200), (3, 503)])
def test_a_process_that_dies_while_a_model_is_loaded_is_tried_again(
    num_deaths: int, status: int
) -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> Any:
        server.num_deaths = num_deaths
        return await client.post(CHAT, json={**SAY, "model": "b"})

    assert serve(use).status_code == status


def test_models_are_loaded_and_unloaded_by_routes_with_the_names_of_other_servers() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> Any:
        loaded = await client.post("/models/load", json={"model": "b-alias"})
        cards = (await client.get("/v1/models")).json()["data"]
        unloaded = await client.post("/v1/models/unload", json={"model": "b"})
        slept = await client.post("/sleep", params={"model": "a"})
        woken = await client.post("/wake_up", params={"model": "a"})
        asleep = await client.get("/is_sleeping", params={"model": "b"})
        return loaded, cards, unloaded, slept, woken, asleep

    loaded, cards, unloaded, slept, woken, asleep = serve(use)
    assert loaded.json() == {"success": True, "model": "b", "state": "ready"}
    states = {card["id"]: card["status"]["state"] for card in cards}
    assert states["b"] == states["b-alias"] == "ready"
    assert (states["c"], states["big"]) == ("absent", "absent")
    assert {card["id"]: card["max_model_len"] for card in cards}["c"] is None
    assert unloaded.json()["state"] == slept.json()["state"] == "draining"
    assert woken.json()["state"] == "ready"
    assert asleep.json() == {"is_sleeping": True}


def test_a_pinned_model_is_loaded_at_the_start_and_stays() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> Any:
        while "b" not in server.loads:
            await asyncio.sleep(0)
        for name in ("a", "c", "a", "c"):
            await client.post(CHAT, json={**SAY, "model": name})
        refused = await client.post("/v1/models/unload", json={"model": "b"})
        return refused, (await client.get("/health")).json()["models"]["b"]

    refused, state = serve(use, pinned="b")
    assert refused.status_code == 409
    assert state == "ready"


def test_an_idle_model_sleeps_after_its_time_and_wakes_for_a_request() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> httpx.Response:
        # a task of its own, as in a server, since a task holds its model until it ends
        await asyncio.create_task(client.post(CHAT, json={**SAY, "model": "a"}))
        while server.num_in_memory:
            await asyncio.sleep(0)
        return await client.post(CHAT, json={**SAY, "model": "a"})

    assert serve(use, ModelsOptions(idle_s=0.0)).status_code == 200


OLLAMA_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"messages": SAY["messages"], "stream": False}),
    ("/api/chat", {}),
    ("/api/generate", {"prompt": "a", "stream": True}),
    ("/api/embed", {"input": "a"}),
    ("/api/embeddings", {"prompt": "a"}),
]


async def in_memory(client: httpx.AsyncClient) -> dict[str, str]:
    """The models of `/api/ps`, and until when they stay."""
    models = (await client.get("/api/ps")).json()["models"]
    return {model["name"].removesuffix(":latest"): model["expires_at"] for model in models}


@pytest.mark.parametrize(("path", "body"), OLLAMA_BODIES)
def test_keep_alive_decides_how_long_a_model_stays(path: str, body: dict[str, Any]) -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> None:
        async def post(keep_alive: object) -> None:
            call = client.post(path, json={"model": "a", "keep_alive": keep_alive, **body})
            answer = await asyncio.create_task(call)
            assert answer.status_code == 200, answer.text
            assert "x-quickstep-ignored" not in answer.headers

        assert (await in_memory(client))["a"].startswith("9999")
        now = datetime.now(UTC)
        await post("1h")
        left = datetime.fromisoformat((await in_memory(client))["a"]) - now
        assert timedelta(minutes=59) < left < timedelta(minutes=61)
        await post(-1)
        assert (await in_memory(client))["a"].startswith("9999")
        await post(0)
        while server.num_in_memory:
            await asyncio.sleep(0)
        assert "a" not in await in_memory(client)
        await post("10m")
        assert server.num_in_memory == 1

    serve(use)


def test_with_keys_only_an_admin_decides_how_long_a_model_stays() -> None:
    keys = ApiKeys(["one=secret-1"], ["two=secret-2"])

    async def use(client: httpx.AsyncClient, server: Server) -> list[httpx.Response]:
        body = {"model": "a", "prompt": "a", "stream": False, "keep_alive": "1h"}
        answers = []
        for name in ("one", "two"):
            call = client.post("/api/generate", json=body, headers=KEYS[name])
            answers.append(await asyncio.create_task(call))
        return answers

    user, admin = serve(use, keys=keys)
    assert user.headers["x-quickstep-ignored"] == "keep_alive"
    assert "x-quickstep-ignored" not in admin.headers


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> httpx.Response:
        return await client.post(CHAT, json={**SAY, "model": "a-alais"})

    response = serve(use)
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith("did you mean a-alias?")


def test_each_model_has_its_own_metrics_once_it_was_loaded() -> None:
    async def use(client: httpx.AsyncClient, server: Server) -> str:
        for name in ("a", "b", "c", "b"):
            await client.post(CHAT, json={**SAY, "model": name})
        return (await client.get("/metrics")).text

    metrics = serve(use)
    count = 'quickstep:e2e_request_latency_seconds_count{engine="0",model_name="%s"}'
    for name, num in {"a": 1, "b": 2, "c": 1}.items():
        assert f"{count % name} {num}.0" in metrics


@pytest.mark.parametrize("keep_alive", [-1, 0])
def test_adapters_of_a_model_that_is_not_in_memory_are_loaded_and_unloaded(keep_alive: int) -> None:
    """As other requests, these wait until the first model is loaded, and hold it meanwhile."""

    async def use(client: httpx.AsyncClient, server: Server) -> Any:
        async def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return await asyncio.create_task(client.post(path, json=body))

        async def asleep() -> None:
            while server.num_in_memory:
                await asyncio.sleep(0)

        await post("/api/generate", {"model": "a", "prompt": "a", "keep_alive": keep_alive})
        await post("/v1/models/unload", {"model": "a"})
        await asleep()
        load = {"lora_name": "poet", "lora_path": "poet"}
        loaded = await post("/v1/load_lora_adapter", load)
        await post("/v1/models/unload", {"model": "a"})
        await asleep()
        return loaded, await post("/v1/unload_lora_adapter", {"lora_name": "poet"})

    loaded, unloaded = serve(use)
    assert (loaded.status_code, unloaded.status_code) == (200, 200), loaded.text + unloaded.text


def test_each_model_has_slots_of_its_own() -> None:
    """Without a name, a save is for the one that used the slot last, and an erase for all."""

    async def use(client: httpx.AsyncClient, server: Server) -> None:
        for name, prompt in (("a", "abcdefgh"), ("b", "ijkl")):
            body = {"model": name, "prompt": prompt, "n_predict": 1, "id_slot": 0}
            assert (await client.post("/completion", json=body)).status_code == 200

        async def change(action: str, id_slot: int = 0, **body: str) -> httpx.Response:
            return await client.post(f"/slots/{id_slot}?action={action}", json=body)

        saves = [await change("save", filename="x", model=name) for name in ("a", "b-alias", "c")]
        saves.append(await change("save", filename="x"))
        assert [save.json().get("n_saved") for save in saves] == [8, 4, None, 4]
        assert "the model c is not loaded" in saves[2].text
        assert "id_slot is 1" in (await change("save", 1, filename="x")).text
        for action in ("save", "restore"):
            unknown = await change(action, filename="x", model="d")
            assert unknown.status_code == 404
        assert (await change("restore", filename="x", model="a")).json()["n_restored"] == 8
        assert (await change("save", filename="x")).json()["n_saved"] == 8
        assert (await client.get("/slots?model=b")).json()[0]["n_ctx"]
        assert (await client.get("/slots?model=d")).status_code == 404
        erased = await client.post("/slots/0?action=erase&model=b")
        assert erased.json()["n_erased"] == 6
        assert (await client.post("/slots/0?action=erase")).json()["n_erased"] == 8
        assert (await client.post("/slots/0?action=erase")).json()["n_erased"] == 0

    serve(use)
