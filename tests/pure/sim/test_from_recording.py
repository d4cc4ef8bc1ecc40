"""`simulate` and `plan` with the traffic of a recording."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickstep.cli.main import main
from quickstep.config import SchedulerConfig
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.recordings.recording import Recorder, RecordingScheduler
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.sim.outcome import Arrival
from quickstep.sim.simulate import simulate
from quickstep.sim.traces import recorded_traffic
from quickstep.types import FinishReason, Request, SamplingParams

PREFIX = tuple(range(64))


def recorded(path: Path) -> None:
    """Twelve requests with one prefix, a second apart; every third is cancelled."""
    config = SchedulerConfig()
    lines: list[bytes] = []
    scheduler = RecordingScheduler(
        config,
        KVBlockPool(400, 16),
        make_policy(config),
        LinearCostModel(),
        Recorder(lines.append, 16, b"key"),
    )
    arrivals = [
        Arrival(
            float(place),
            Request(
                f"r{place}",
                (*PREFIX, *range(100 * place + 100, 100 * place + 136)),
                SamplingParams(max_tokens=20 if place % 3 else 400, ignore_eos=True),
                priority=place % 2,
                tenant=f"team {place % 2}",
            ),
            cancel_after_s=0.05 if place % 3 == 0 else None,
        )
        for place in range(12)
    ]
    simulate(arrivals, scheduler, LinearCostModel())
    scheduler.close()
    path.write_bytes(b"".join(lines))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "traffic.jsonl"
    recorded(path)
    return path


def test_the_traffic_has_times_prefixes_priorities_and_cancellations(file: Path) -> None:
    arrivals = recorded_traffic(file.read_bytes().splitlines())
    assert [arrival.at_s for arrival in arrivals] == [float(place) for place in range(12)]
    assert {len(arrival.request.prompt_token_ids) for arrival in arrivals} == {100}
    assert len({arrival.request.prompt_token_ids[:64] for arrival in arrivals}) == 1
    assert len({arrival.request.prompt_token_ids[:80] for arrival in arrivals}) == 12
    assert [arrival.request.priority for arrival in arrivals] == [0, 1] * 6
    assert [arrival.request.tenant for arrival in arrivals] == ["tenant-1", "tenant-2"] * 6
    cancelled = [arrival.cancel_after_s is not None for arrival in arrivals]
    assert cancelled == [place % 3 == 0 for place in range(12)]
    assert [arrival.request.sampling.max_tokens for arrival in arrivals[1:3]] == [20, 20]


def test_simulate_sends_the_recorded_requests(file: Path, capsys, tmp_path: Path) -> None:
    table = tmp_path / "requests.csv"
    argv = ("simulate", "llama-3.2-1b", "--hardware", "h100", "--json", "--csv", str(table))
    assert main((*argv, "--from-recording", str(file))) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["run"] == "mixed, 1 x traffic.jsonl"
    assert row["figures"]["num_requests"] >= 8
    rows = table.read_text().splitlines()[1:]
    assert sum(FinishReason.MAX_TOKENS.value in one for one in rows) >= 8
    assert len(rows) == 12
    assert main((*argv, "--from-recording", str(file), "--trace", str(file))) == 2
    assert "choose one" in capsys.readouterr().err


def test_plan_takes_the_means_of_the_recording(file: Path, capsys) -> None:
    flags = ("--hardware", "h100", "--ttft-ms", "500", "--from-recording", str(file))
    assert main(("plan", "llama-3.2-1b", *flags)) == 0
    assert "traffic.jsonl: 1 requests/s, 100 tokens in," in capsys.readouterr().out


def test_a_file_that_is_no_recording_is_one_sentence(capsys, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0}\n')
    argv = ("simulate", "llama-3.2-1b", "--hardware", "h100", "--from-recording", str(path))
    assert main(argv) == 2
    assert "line 1 of the recording is not valid" in capsys.readouterr().err
