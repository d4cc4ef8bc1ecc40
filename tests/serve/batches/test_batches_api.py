"""`/v1/batches` with the real `openai` client, with the scripted engine."""

import asyncio
import errno
import gc
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import openai
import pytest
from fake_engine import WORDS, FakeEngine, Script
from live_server import live_server, until
from openai.types import Batch

from quickstep.errors import EngineDied, EngineError, RequestError
from quickstep.server.batches import jobs
from quickstep.server.batches.file_store import FileStore, FileWriter, StoredFile
from quickstep.server.batches.jobs import BatchJobs, BatchRecord
from quickstep.server.batches.lines import (
    BatchLine,
    LineAnswer,
    LineRunner,
    LineSlots,
    run_lines,
)
from quickstep.server.batches.request_types import BatchRequest
from quickstep.server.generate.api import LineResult
from quickstep.server.generate.endpoint import GeneratingRoute
from quickstep.server.generate.generation import ParsedRequest
from quickstep.server.http.errors import GenerationFailed
from quickstep.server.models.registry import ModelRegistry
from quickstep.server.models.served_model import ServedModel
from quickstep.server.openai.completions import Completions
from quickstep.server.operate.metrics import ServerMetrics
from quickstep.server.options import BatchOptions, FileOptions, ServerOptions

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
OPTIONS = ServerOptions(
    drain_s=0.0, batches=BatchOptions(concurrency=4, num_lines=50, num_active=3, retry_s=0.0)
)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with (
        live_server(engine, OPTIONS) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    fields = {"prompt": "a", "max_tokens": 2, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def upload(client: openai.OpenAI, lines: Sequence[object]) -> str:
    texts = [item if isinstance(item, str) else json.dumps(item) for item in lines]
    return client.files.create(file=("in.jsonl", "\n".join(texts).encode()), purpose="batch").id


def begin(client: openai.OpenAI, lines: Sequence[object], **fields: Any) -> Batch:
    fields_sent: dict[str, Any] = {"endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    return client.batches.create(input_file_id=upload(client, lines), **fields_sent)


def ended(client: openai.OpenAI, batch: Batch, status: str) -> Batch:
    over = ("completed", "failed", "cancelled", "expired")
    until(lambda: client.batches.retrieve(batch.id).status in over)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == status, batch.errors
    return batch


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    lines = client.files.content(file_id).text.splitlines()
    entries = [json.loads(text) for text in lines]
    assert all(entry["id"].startswith("batch_req_") for entry in entries)
    return {entry["custom_id"]: entry for entry in entries}


def test_every_line_is_answered_in_its_file(client: openai.OpenAI, engine: FakeEngine) -> None:
    lines = [line(str(number)) for number in range(12)]
    lines += [line("bad", temperature=-1), line("streamed", stream=True)]
    batch = begin(client, lines, metadata={"k": "v"})
    assert batch.status == "validating"
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = ended(client, batch, "completed")
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 14, "completed": 12, "failed": 2}
    assert (batch.metadata, batch.endpoint, batch.model) == ({"k": "v"}, COMPLETIONS, "fake")
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (24, 24)
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
    results = answers(client, batch.output_file_id)
    assert set(results) == {str(number) for number in range(12)}
    response = results["3"]["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["text"] == "".join(WORDS[:2])
    assert results["3"]["error"] is None
    errors = answers(client, batch.error_file_id)
    params = {name: entry["response"]["body"]["error"]["param"] for name, entry in errors.items()}
    assert params == {"bad": "temperature", "streamed": "stream"}
    assert errors["bad"]["response"]["status_code"] == 400
    assert engine.submitted[-1].priority == 1000
    written = client.files.retrieve(batch.output_file_id or "")
    assert written.purpose == "batch_output"


def test_a_line_lists_its_fields_without_effect(client: openai.OpenAI) -> None:
    lines = [line("a", colour=1), line("b")]
    batch = ended(client, begin(client, lines), "completed")
    results = answers(client, batch.output_file_id)
    assert results["a"]["response"]["ignored"] == ["colour"]
    assert "ignored" not in results["b"]["response"]


def test_chat_lines_are_answered_as_the_route_answers(client: openai.OpenAI) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    entry = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    batch = ended(client, begin(client, [entry], endpoint=CHAT), "completed")
    body = answers(client, batch.output_file_id)["a"]["response"]["body"]
    live = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}]
    )
    assert body["choices"] == [choice.model_dump(exclude_unset=True) for choice in live.choices]
    assert batch.error_file_id is None


@pytest.mark.parametrize(
    ("lines", "code", "number", "param"),
    [
        (['{"custom_id": '], "invalid_json_line", 1, None),
        ([line("a"), line("a")], "duplicate_custom_id", 2, "custom_id"),
        ([line("a"), {**line("b"), "method": "GET"}], "invalid_request", 2, "method"),
        ([line("a", CHAT)], "invalid_url", 1, "url"),
        ([line("a", "/v1/files")], "invalid_url", 1, "url"),
        ([{**line("a"), "body": []}], "invalid_body", 1, "body"),
        ([{**line("a"), "colour": 1}], "invalid_request", 1, "colour"),
        ([line("")], "invalid_custom_id", 1, "custom_id"),
        ([{"custom_id": "a"}], "invalid_request", 1, "method"),
        (["\n"], "empty_file", None, None),
        ([line(str(number)) for number in range(51)], "too_many_requests", None, None),
    ],
)
def test_an_input_that_is_no_batch_fails_with_its_lines(
    client: openai.OpenAI, lines: list[object], code: str, number: int | None, param: str | None
) -> None:
    batch = ended(client, begin(client, lines), "failed")
    assert batch.errors is not None and batch.errors.data is not None
    error = batch.errors.data[0]
    assert (error.code, error.line, error.param) == (code, number, param)
    assert batch.output_file_id is None
    assert batch.failed_at


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
    ],
)
def test_a_wrong_field_is_400_with_its_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        begin(client, [line("a")], **fields)
    assert refused.value.param == param


def test_what_does_not_exist_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-x", endpoint=COMPLETIONS, completion_window="24h")
    with pytest.raises(openai.NotFoundError) as missing:
        client.batches.retrieve("batch_x")
    assert missing.value.code == "batch_not_found"


def test_outputs_may_expire(client: openai.OpenAI) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    batch = ended(client, begin(client, [line("a")], output_expires_after=expiry), "completed")
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.expires_at == output.created_at + 7200


def test_a_cancelled_batch_keeps_what_was_written_and_frees_the_rest(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.script = Script(gate=asyncio.Event())
    try:
        batches = [begin(client, [line(str(n)) for n in range(9)]) for _ in range(3)]
        until(lambda: len(engine.open_streams) == 4)  # all batches share the slots
        with pytest.raises(openai.RateLimitError):
            begin(client, [line("a")])
        for batch in batches:
            assert client.batches.cancel(batch.id).status == "cancelling"
        for batch in batches:
            over = ended(client, batch, "cancelled")
            assert over.cancelled_at and over.cancelling_at
        until(lambda: not engine.open_streams)
        with pytest.raises(openai.BadRequestError):
            client.batches.cancel(batches[0].id)
    finally:
        engine.script = Script()


def test_the_list_is_paged(client: openai.OpenAI) -> None:
    ids = [ended(client, begin(client, [line("a")]), "completed").id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=2)][:3] == ids[::-1]
    page = client.batches.list(after=ids[1], limit=1)
    assert [batch.id for batch in page.data] == [ids[0]]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=0)


@pytest.mark.parametrize(
    "refusal", [EngineError("restarting"), RequestError("the queue is full", status=429)]
)
def test_lines_wait_for_an_engine_that_takes_none(
    client: openai.OpenAI, engine: FakeEngine, refusal: Exception
) -> None:
    engine.refusals = [refusal] * 5
    batch = ended(client, begin(client, [line(str(n)) for n in range(3)]), "completed")
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 3
    assert not engine.refusals


def test_a_full_queue_is_waited_for_without_an_end(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    tries = BatchOptions().num_tries
    engine.refusals = [RequestError("the queue is full", status=429) for _ in range(2 * tries)]
    ended(client, begin(client, [line("a")]), "completed")
    assert not engine.refusals


DEATHS = [GenerationFailed("the engine process ended"), EngineDied("the engine process ended")]


class Deadly:
    """An endpoint of an engine that dies of the bodies `deadly`, and with it whatever runs."""

    def __init__(self, death: Exception, deadly: bytes) -> None:
        self.death, self.deadly = death, deadly
        self.running: set[bytes] = set()
        self.died = asyncio.Event()
        self.seen: list[tuple[bytes, int]] = []  # each body sent, and how many ran with it

    async def __call__(self, body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        self.running.add(body)
        died = self.died
        self.seen.append((body, len(self.running)))
        for _ in range(3):
            await asyncio.sleep(0)
        self.running.discard(body)
        if body == self.deadly:
            died.set()
            self.died = asyncio.Event()
        if died.is_set():
            raise self.death
        return LineResult({})


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: type(death).__name__)
def test_a_line_that_its_engine_died_under_is_sent_once_more_and_alone(death: Exception) -> None:
    async def run() -> None:
        endpoint = Deadly(death, b"3")
        runner = LineRunner({COMPLETIONS: endpoint}, LineSlots(4), retry_s=0.0)
        lines = [BatchLine(n, f"{n}", COMPLETIONS, f"{n}".encode()) for n in range(40)]
        results: list[LineAnswer] = []

        async def each() -> AsyncIterator[BatchLine]:
            for one in lines:
                yield one

        async def write(answer: LineAnswer) -> None:
            results.append(answer)

        await run_lines(each(), runner.answer, write, 8)
        statuses = {answer.custom_id: answer.status for answer in results}
        assert statuses == {line.custom_id: 500 if line.custom_id == "3" else 200 for line in lines}
        for one in lines:
            with_it = [count for body, count in endpoint.seen if body == one.body]
            assert len(with_it) <= 2
            assert with_it[1:] in ([], [1]), "a line that is sent again runs alone"
        assert sum(body == b"3" for body, _ in endpoint.seen) == 2
        assert any(count > 1 for _, count in endpoint.seen)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_lines_that_are_cancelled_while_they_wait_to_run_alone_leave_the_slots_free() -> None:
    async def run() -> None:
        slots = LineSlots(3)
        async with slots.shared():
            waiting = [asyncio.create_task(slots.exclusive().__aenter__()) for _ in range(3)]
            await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        async with slots.shared(), slots.shared(), slots.shared():
            pass
        async with slots.exclusive():
            pass

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_engine_that_stays_away_fails_the_batch(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.refusals = [EngineError("gone")] * 10_000
    try:
        batch = ended(client, begin(client, [line("a")]), "failed")
        assert batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "batch_failed"
    finally:
        engine.refusals = []


def test_a_batch_that_runs_out_of_time_says_which_lines_were_left(tmp_path: Path) -> None:
    store = FileStore(FileOptions(tmp_path), now=lambda: 1000.0)
    writer = store.new("ann", "in", "batch")
    for name in ("quick", "slow", "slower"):
        writer.write(json.dumps(line(name, prompt=name)).encode() + b"\n")
    request = BatchRequest(
        input_file_id=writer.commit().id, endpoint=COMPLETIONS, completion_window="1m"
    )

    async def endpoint(body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        assert caller == "ann"
        if b"slow" in body:
            await asyncio.Event().wait()
        return LineResult({"usage": {"prompt_tokens": 3, "completion_tokens": 5}})

    async def run() -> BatchRecord:
        jobs = BatchJobs(store, {COMPLETIONS: endpoint}, BatchOptions(concurrency=2))
        # two seconds of its minute are left
        batch = jobs.create(BatchRecord("ann", request, "fake", store.now() - 58, window_s=60))
        while not batch.is_over:
            await asyncio.sleep(0.01)
        return batch

    batch = asyncio.run(run())
    listed = batch.to_object()
    assert listed.status == "expired"
    assert (listed.request_counts.completed, listed.request_counts.failed) == (1, 2)
    assert listed.usage.total_tokens == 8
    assert listed.error_file_id is not None
    left = store.path(store.get("ann", listed.error_file_id)).read_text().splitlines()
    assert [json.loads(text)["custom_id"] for text in left] == ["slow", "slower"]
    assert {json.loads(text)["error"]["code"] for text in left} == {"batch_expired"}


class FullStore(FileStore):
    """Of a disk that gets full: what is written is complete, and nothing more can be."""

    is_full = False

    def begin(self, file: StoredFile) -> int:
        if self.is_full:
            raise RequestError("the server's disk is full", status=507)
        return super().begin(file)


def full_batch(folder: Path, num_lines: int) -> BatchRecord:
    """A batch of a client that has no other, on a disk that is full before its first answer."""
    store = FullStore(FileOptions(folder))
    writer = store.new("ann", "in", "batch")
    for number in range(num_lines):
        writer.write(json.dumps(line(str(number))).encode() + b"\n")
    request = BatchRequest(
        input_file_id=writer.commit().id, endpoint=COMPLETIONS, completion_window="1d"
    )
    store.is_full = True

    async def endpoint(body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        return LineResult({"choices": []})

    async def run() -> BatchRecord:
        options = BatchOptions(concurrency=4, active_per_key=1)
        jobs = BatchJobs(store, {COMPLETIONS: endpoint}, options)
        batch = jobs.create(BatchRecord("ann", request, "fake", store.now(), window_s=60))
        async with asyncio.timeout(30):
            while not batch.is_over:
                await asyncio.sleep(0.01)
        jobs.create(BatchRecord("ann", request, "fake", store.now(), window_s=60))
        await jobs.stop()
        return batch

    return asyncio.run(run())


def test_a_batch_on_a_full_disk_fails_and_every_writer_of_it_has_an_owner(tmp_path: Path) -> None:
    batch = full_batch(tmp_path, num_lines=8)
    gc.collect()  # the fixture of all tests finds what no owner has retrieved
    assert batch.status == "failed"
    assert [error.message for error in batch.errors] == ["the server's disk is full"]


def test_a_batch_whose_files_cannot_be_removed_ends_and_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(writer: FileWriter) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(FileWriter, "discard", broken)
    batch = full_batch(tmp_path, num_lines=2)
    assert batch.status == "failed"
    assert [error.message for error in batch.errors] == [
        "the server's disk is full",
        "OSError, which the log explains",
    ]


def test_a_batch_whose_input_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(jobs, "numbered_lines", lines)
    batch = full_batch(tmp_path, num_lines=2)
    assert batch.status == "failed"
    assert [error.message for error in batch.errors] == [
        "a file of the batch cannot be used: Too many open files"
    ]


def test_a_server_that_stops_ends_its_batches(tmp_path: Path) -> None:
    store = FileStore(FileOptions(tmp_path))
    writer = store.new("", "in", "batch")
    writer.write(json.dumps(line("a")).encode())
    request = BatchRequest(
        input_file_id=writer.commit().id, endpoint=COMPLETIONS, completion_window="1d"
    )

    async def endpoint(body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        await asyncio.Event().wait()
        return LineResult({})

    async def run() -> list[BatchRecord]:
        jobs = BatchJobs(store, {COMPLETIONS: endpoint}, BatchOptions())
        new = [BatchRecord("", request, "fake", store.now(), window_s=60) for _ in range(2)]
        jobs.create(new[0])
        while new[0].status != "in_progress":
            await asyncio.sleep(0)
        jobs.create(new[1])  # has not had a turn yet
        await jobs.stop()
        return new

    assert [batch.status for batch in asyncio.run(run())] == ["failed", "failed"]


def test_a_line_has_the_limits_of_a_body(client: openai.OpenAI) -> None:
    deep = "[" * 70 + "]" * 70
    lines: list[object] = [
        line("fine"),
        line("large", prompt="a" * (4 * 1024 * 1024)),
        line("huge", prompt="a" * (9 * 1024 * 1024)),
        json.dumps(line("deep")).replace('"a"', deep, 1),
    ]
    batch = ended(client, begin(client, lines), "failed")
    assert batch.errors is not None and batch.errors.data is not None
    faults = [(error.code, error.line) for error in batch.errors.data]
    assert faults[:2] == [("request_too_large", 2), ("request_too_large", 3)]
    assert faults[2][1] == 4
    assert "4194304" in (batch.errors.data[0].message or "")
    assert "nested" in (batch.errors.data[2].message or "")


def test_a_large_line_is_parsed_beside_the_loop(engine: FakeEngine) -> None:
    """The thread that parses is not the one of the event loop."""
    parsing: list[int] = []
    store = FileStore(FileOptions())
    writer = store.new("", "in", "batch")
    writer.write(json.dumps(line("a", prompt="b" * 200_000)).encode())
    request = BatchRequest(
        input_file_id=writer.commit().id, endpoint=COMPLETIONS, completion_window="1d"
    )

    class Watched(Completions):
        def parse(self, body: bytes, model: ServedModel, caller: str = "") -> ParsedRequest:
            parsing.append(threading.get_ident())
            return super().parse(body, model, caller)

    async def run() -> BatchRecord:
        engine = FakeEngine(max_model_len=300_000)
        options = ServerOptions()
        models = ModelRegistry.of_one(engine, options)
        await engine.start()
        route = GeneratingRoute(Watched(), models, ServerMetrics(models, options.metrics))
        jobs = BatchJobs(store, {COMPLETIONS: route.answer_line}, BatchOptions())
        batch = jobs.create(BatchRecord("", request, "fake", store.now(), window_s=60))
        while not batch.is_over:
            await asyncio.sleep(0.01)
        return batch

    batch = asyncio.run(run())
    store.close()
    assert (batch.status, batch.num_completed) == ("completed", 1)
    assert parsing and parsing != [threading.get_ident()]


def test_an_expiring_batch_is_written_in_pieces_beside_the_loop(tmp_path: Path) -> None:
    num_lines = 1000
    threads: set[int] = set()

    class Watched(FileStore):
        def reserve(self, owner: str, num_bytes: int) -> None:
            threads.add(threading.get_ident())
            super().reserve(owner, num_bytes)

        def complete(self, file: StoredFile) -> None:
            threads.add(threading.get_ident())
            super().complete(file)

    store = Watched(FileOptions(tmp_path), now=lambda: 1000.0)
    writer = store.new("ann", "in", "batch")
    lines = [line(str(number)) for number in range(num_lines)]
    writer.write("\n".join(map(json.dumps, lines)).encode())
    request = BatchRequest(
        input_file_id=writer.commit().id, endpoint=COMPLETIONS, completion_window="1m"
    )
    threads.clear()

    async def endpoint(body: bytes, caller: str = "", added_priority: int = 0) -> object:
        return await asyncio.Event().wait()

    async def run() -> tuple[BatchRecord, int]:
        jobs = BatchJobs(store, {COMPLETIONS: endpoint}, BatchOptions())
        batch = jobs.create(BatchRecord("ann", request, "fake", store.now() - 60, window_s=60))
        num_seen = set()
        while not batch.is_over:
            num_seen.add(batch.num_failed)
            await asyncio.sleep(0)
        return batch, len(num_seen)

    batch, num_turns = asyncio.run(run())
    assert (batch.status, batch.num_failed) == ("expired", num_lines)
    assert threads and threading.get_ident() not in threads
    assert num_turns > 3  # the loop had its turns between the pieces


def create_batch(jobs: BatchJobs, store: FileStore, owner: str) -> BatchRecord:
    """A batch of one line."""
    writer = store.new(owner, "in", "batch")
    writer.write(json.dumps(line("a")).encode())
    request = BatchRequest(
        input_file_id=writer.commit().id, endpoint=COMPLETIONS, completion_window="1d"
    )
    return jobs.create(BatchRecord(owner, request, "fake", store.now(), window_s=60))


def test_one_keys_batches_leave_places_to_others(tmp_path: Path) -> None:
    store = FileStore(FileOptions(tmp_path))

    async def endpoint(body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        return LineResult({})

    async def run() -> None:
        options = BatchOptions(num_active=4, active_per_key=2, num_kept=4)
        jobs = BatchJobs(store, {COMPLETIONS: endpoint}, options)

        def create(owner: str) -> BatchRecord:
            return create_batch(jobs, store, owner)

        for _ in range(2):
            create("bob")
        with pytest.raises(RequestError, match="2 batches of your API key") as refused:
            create("bob")
        assert refused.value.status == 429
        first = create("ann")
        for _ in range(6):
            while any(not batch.is_over for batch in jobs.batches("bob")) or not first.is_over:
                await asyncio.sleep(0.001)
            create("bob")
        assert jobs.get("ann", first.id) is first  # bob's own were forgotten
        await jobs.stop()

    asyncio.run(run())


def test_a_batch_that_is_over_leaves_its_place_at_once(tmp_path: Path) -> None:
    """The server logs the end of a batch before the batch's task has ended."""
    store = FileStore(FileOptions(tmp_path))

    async def endpoint(body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        return LineResult({})

    async def run() -> list[BatchRecord]:
        jobs = BatchJobs(store, {COMPLETIONS: endpoint}, BatchOptions(num_active=1))
        batches = [create_batch(jobs, store, "ann")]

        class NextBatch(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if len(batches) == 1 and batches[0].is_over:
                    batches.append(create_batch(jobs, store, "ann"))

        logger, handler = logging.getLogger("quickstep.server"), NextBatch()
        level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        try:
            while len(batches) < 2 or not batches[1].is_over:
                await asyncio.sleep(0.001)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        await jobs.stop()
        return batches

    batches = asyncio.run(asyncio.wait_for(run(), 60))
    assert [batch.status for batch in batches] == ["completed", "completed"]


def test_active_batches_of_one_key_leave_a_place_for_the_next(tmp_path: Path) -> None:
    store = FileStore(FileOptions(tmp_path))
    gate = asyncio.Event()

    async def endpoint(body: bytes, caller: str = "", added_priority: int = 0) -> LineResult:
        await gate.wait()
        return LineResult({})

    async def run() -> list[BatchRecord]:
        jobs = BatchJobs(store, {COMPLETIONS: endpoint}, BatchOptions(num_active=9))
        batches = [create_batch(jobs, store, "ann") for _ in range(8)]
        with pytest.raises(RequestError, match="8 batches of your API key are active, its share"):
            create_batch(jobs, store, "ann")
        batches.append(create_batch(jobs, store, "bob"))
        gate.set()
        async with asyncio.timeout(60):
            while not all(batch.is_over for batch in batches):
                await asyncio.sleep(0.001)
        batches += [create_batch(jobs, store, "ann") for _ in range(8)]
        await jobs.stop()
        return batches

    batches = asyncio.run(run())
    assert [batch.status for batch in batches[:9]] == ["completed"] * 9
