"""The comparison with peers: valid rounds, the order of turns, settings, tables."""

import asyncio
import json
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.peers.client import Api, Reply, _body, fault_of, send_all
from benchmarks.peers.contestants import PRECISIONS, Contestant, launch_of, select
from benchmarks.peers.environments import Environment, fault_of_environment
from benchmarks.peers.report import Measured, figures, ratio_table, value_table
from benchmarks.peers.rounds import LoadedServers, Plan, measure, order_of_round
from benchmarks.peers.workloads import PeerRequest, WorkloadSize, random_requests, size_of

FRONTS = Path(__file__).parents[3] / "benchmarks" / "peers" / "fronts"
TOKENS = range(100, 200)


def events_of(api: Api, num_streamed: int, num_counted: int, num_prompt: int) -> list[dict]:
    """What a server streams."""
    if api is Api.LLAMA_CPP:
        end = {"stop": True, "tokens": [], "tokens_evaluated": num_prompt}
        return [{"tokens": [7], "stop": False}] * num_streamed + [
            {**end, "tokens_predicted": num_counted}
        ]
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_counted}
    chunk = {"choices": [{"text": "x", "token_ids": [7]}]}
    return [chunk] * num_streamed + [{"choices": [], "usage": usage}]


class ScriptedServer:
    """Answers every request with the same events, in HTTP chunks of a few bytes."""

    def __init__(self, events: list[dict], status: str = "200 OK", cut: bool = False) -> None:
        self._events, self._status, self._cut = events, status, cut
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> "ScriptedServer":
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {self._status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in self._events).encode()
        for first in range(0, len(text), 5):
            piece = text[first : first + 5]
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if not self._cut:
            writer.write(b"0\r\n\r\n")
        writer.close()


@pytest.mark.parametrize("api", Api)
def test_a_reply_with_the_requested_counts_is_valid(api):
    request = PeerRequest((1, 2, 3), 4)
    with ScriptedServer(events_of(api, 4, 4, 3)) as server:
        [reply] = send_all(server.port, api, [request])
    assert fault_of(request, reply) is None
    assert reply.token_ids == [7] * 4
    assert len(reply.marks) == 4


@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize(
    ("counts", "fault"),
    [
        ((3, 4, 3), "3 streamed token ids, not 4"),
        ((5, 4, 3), "5 streamed token ids, not 4"),
        ((4, 3, 3), "3 output tokens in the usage, not 4"),
        ((4, 4, 2), "2 prompt tokens in the usage, not 3"),
    ],
)
def test_a_reply_with_another_count_names_it(api, counts, fault):
    request = PeerRequest((1, 2, 3), 4)
    with ScriptedServer(events_of(api, *counts)) as server:
        [reply] = send_all(server.port, api, [request])
    assert fault_of(request, reply) == fault


def test_a_stream_without_usage_is_a_fault():
    request = PeerRequest((1,), 1)
    with ScriptedServer([{"choices": [{"token_ids": [7]}]}]) as server:
        [reply] = send_all(server.port, Api.OPENAI, [request])
    assert "None output tokens in the usage" in fault_of(request, reply)


@pytest.mark.parametrize(
    ("server", "fault"),
    [
        (ScriptedServer([], status="503 Service Unavailable"), "status 503"),
        (ScriptedServer([{"error": {"message": "full"}}]), "full"),
        (ScriptedServer(events_of(Api.OPENAI, 4, 4, 3), cut=True), "IncompleteReadError"),
    ],
)
def test_a_refusal_an_error_and_a_cut_stream_are_faults(server, fault):
    request = PeerRequest((1, 2, 3), 4)
    with server:
        [reply] = send_all(server.port, Api.OPENAI, [request])
    assert fault in fault_of(request, reply)


def test_a_server_that_does_not_listen_is_a_fault():
    request = PeerRequest((1,), 1)
    with ScriptedServer([]) as server:
        port = server.port
    # a port of the reserved range that nothing of ours listens on
    [reply] = send_all(1 if port != 1 else 2, Api.OPENAI, [request])
    assert "ConnectionRefusedError" in fault_of(request, reply)


def test_every_contestant_starts_about_as_many_rounds_as_the_others():
    names = ["a", "b", "c", "d"]
    firsts = [order_of_round(names, "w1", 0, number)[0] for number in range(400)]
    assert all(60 < firsts.count(name) < 140 for name in names)


def test_the_order_of_a_round_depends_on_seed_and_round_but_not_on_the_order_of_names():
    names = [f"engine {number}" for number in range(8)]
    orders = [order_of_round(names, "w1", 0, number) for number in range(5)]
    assert orders == [order_of_round(names[::-1], "w1", 0, number) for number in range(5)]
    assert len({tuple(order) for order in orders}) == 5
    assert order_of_round(names, "w1", 1, 0) != orders[0]
    assert all(sorted(order) == names for order in orders)


def test_rounds_have_prompts_of_their_own_and_lengths_in_common():
    for workload in ("w1", "w2", "w3", "w4"):
        one, other = (random_requests(workload, seed, TOKENS, 8) for seed in ("0 0", "0 1"))
        assert [size_of([each]) for each in one] == [size_of([each]) for each in other]
        assert [each.prompt for each in one] != [each.prompt for each in other]
        assert all(token in TOKENS for each in one for token in each.prompt)


def reply_of(due_s: float, *marks: float) -> Reply:
    return Reply(due_s, list(marks), [1] * len(marks))


def test_figures_count_from_when_a_request_was_due():
    found = figures([reply_of(10.0, 10.5, 10.6, 10.8), reply_of(12.0, 12.1, 12.3)])
    assert found["ttft_s"] == pytest.approx(0.3)
    assert found["tpot_ms"] == pytest.approx(175)
    assert found["wall_s"] == pytest.approx(2.3)
    assert found["itl_max_ms"] == pytest.approx(200)


def measured(engine: str, precision: str, *walls: float | None) -> Measured:
    found = Measured(engine, precision)
    for number, wall_s in enumerate(walls):
        if wall_s is None:
            found.faults[number] = "1 of 8 requests, first: 498 streamed token ids, not 512"
        else:
            found.rounds[number] = {"wall_s": wall_s}
    return found


def rows_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_losses_come_first_and_ratios_are_those_of_rounds():
    found = {
        "quickstep bf16": measured("quickstep", "bf16", 10.0, 20.0, 40.0),
        "slow bf16": measured("slow", "bf16", 20.0, 40.0, 80.0),
        "fast f16": measured("fast", "f16", 5.0, 10.0, 20.0),
        "even bf16": measured("even", "bf16", 11.0, 20.0, 39.0),
        "other int8": measured("other", "int8", 1.0, 1.0, 1.0),
    }
    rows = rows_of(ratio_table({"w2": found}))
    assert [(row[0], row[2], row[4]) for row in rows] == [
        ("behind", "fast f16", "2.00 (2.00 - 2.00)"),
        ("unclear", "even bf16", "1.00 (0.91 - 1.03)"),
        ("ahead", "slow bf16", "0.50 (0.50 - 0.50)"),
    ]


def test_an_invalid_round_is_in_no_median_and_is_named():
    found = {
        "quickstep bf16": measured("quickstep", "bf16", 10.0, 10.0, 10.0, 10.0),
        "peer bf16": measured("peer", "bf16", 20.0, None, 20.0, 20.0),
    }
    table = value_table("w2", found)
    assert "| peer bf16 | 20 (20 - 20) | 3 of 4 |" in table
    assert "peer bf16, round 2 is invalid: 1 of 8 requests, first: 498 streamed" in table
    [row] = rows_of(ratio_table({"w2": found}))
    assert row[-1] == "3"


def test_two_rounds_establish_nothing():
    found = {
        "quickstep bf16": measured("quickstep", "bf16", 10.0, 10.0),
        "peer bf16": measured("peer", "bf16", 20.0, 20.0),
    }
    [row] = rows_of(ratio_table({"w2": found}))
    assert row[0] == "unclear"


def contestant(engine: str, precision: str, variant: str | None = None) -> Contestant:
    environment = Environment(engine, Path("/nowhere") / engine)
    return Contestant(engine, precision, Path("/nowhere/model"), environment, 2, variant)


def after(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("workload", ["w1", "footprint"])
def test_llama_cpp_reserves_one_slot_and_4096_tokens_for_one_stream(workload):
    launch = launch_of(contestant("llama_cpp", "int8"), workload, WorkloadSize(1, 640))
    assert (after(launch.command, "-np"), after(launch.command, "-c")) == ("1", "4096")


def test_llama_cpp_reserves_what_its_slots_need():
    size = WorkloadSize(64, 1100)
    launch = launch_of(contestant("llama_cpp", "int4", variant="8"), "w2", size)
    assert (after(launch.command, "-np"), after(launch.command, "-c")) == ("8", str(8 * 1280))


def test_variants_are_contestants_of_their_own():
    found = select(["quickstep", "llama_cpp"], ["f16"], {"llama_cpp": ["4", "16"]})
    names = [contestant(*one).name for one in found]
    assert names == ["llama_cpp f16 (slots 4)", "llama_cpp f16 (slots 16)"]


def test_every_engine_has_a_command_line_for_every_workload():
    precisions = ["bf16", "f16", "int8", "int4"]
    for engine, precision, variant in select([*PRECISIONS], precisions, {"llama_cpp": ["4", "8"]}):
        for workload in ("w1", "w2", "w3", "w4", "footprint", "proof"):
            one = contestant(engine, precision, variant)
            launch = launch_of(one, workload, WorkloadSize(8, 1000))
            assert str(one.model) in launch.described(Path("/elsewhere"))


def test_an_environment_made_from_other_versions_is_made_anew(tmp_path):
    environment = Environment("openvino", tmp_path)
    assert "is not set up" in fault_of_environment(environment)
    (tmp_path / ".ready").write_text("made from something else")
    assert "other versions" in fault_of_environment(environment)


class EmptyLaunch(Plan):
    """A plan in which every contestant is the front without an engine."""

    def launch(self, contestant):
        launch = launch_of(contestant, self.workload, WorkloadSize(1, 640))
        command = (sys.executable, str(FRONTS / "empty_front.py"))
        return type(launch)(command, (("NAME", contestant.precision),), Api.OPENAI)


@pytest.mark.parametrize("workload", ["w2", "footprint"])
def test_rounds_run_every_contestant_and_end_their_servers(tmp_path, workload):
    plan = EmptyLaunch(workload, 0, 3, 4, 1.0, TOKENS, tmp_path)
    contestants = [contestant("vllm", "bf16"), contestant("vllm", "int8")]
    loaded = LoadedServers()
    try:
        results, orders = measure(plan, contestants, loaded)
    finally:
        loaded.close()
    assert len(orders) == 3
    for found in results.values():
        assert not found.faults
        assert set(found.rounds) == {0, 1, 2}
        assert all(one["rss_gb"] > 0 for one in found.rounds.values())


def test_a_server_that_refuses_is_left_out_at_once_with_its_reason(tmp_path, capsys):
    class Refused(EmptyLaunch):
        def short(self, label):
            return PeerRequest((), "no number")

    loaded = LoadedServers()
    plan = Refused("w1", 0, 1, 4, 1.0, TOKENS, tmp_path)
    results, _ = measure(plan, [contestant("vllm", "bf16")], loaded)
    loaded.close()
    assert results["vllm bf16"].faults
    assert not results["vllm bf16"].rounds
    assert "vllm bf16: " in capsys.readouterr().err


def test_an_interrupted_start_leaves_no_process(tmp_path, monkeypatch):
    started = []

    def interrupted(port, api, requests):
        started.append(port)
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.peers.servers.send_all", interrupted)
    plan = EmptyLaunch("w1", 0, 1, 4, 1.0, TOKENS, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        measure(plan, [contestant("vllm", "bf16")], LoadedServers())
    [reply] = send_all(started[0], Api.OPENAI, [PeerRequest((1,), 1)])
    assert "ConnectionRefusedError" in reply.error


def test_requests_name_the_model_or_an_adapter():
    bodies = [_body(Api.OPENAI, PeerRequest((1,), 1, model=name)) for name in ("model", "sql")]
    assert [body["model"] for body in bodies] == ["model", "sql"]
