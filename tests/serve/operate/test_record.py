"""`--record` and `quickstep replay` with the demo model: equal plans, and equal tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quickstep.cli.main import main
from quickstep.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    RecordingConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.core.cost_model import LinearCostModel
from quickstep.core.policies import make_policy
from quickstep.core.recordings.replay import read_recording, replay
from quickstep.core.resources.block_pool import KVBlockPool
from quickstep.engine.assembly import open_engine
from quickstep.engine.records.recording_file import RecordingFile
from quickstep.types import SamplingParams

CODE = "def add(first, second):\n    return"
REQUEST = b'{"kind":"request"'


def recorded(path: Path, is_full: bool) -> bytes:
    """What an engine records of requests that share prefixes, stop, are cancelled, and wait."""
    config = EngineConfig(
        load=LoadConfig(model="demo", device="cpu"),
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48, pipeline_depth=2),
        speculation=SpeculationConfig(num_speculative_tokens=3),
        recording=RecordingConfig(str(path), is_full),
    )

    async def serve() -> None:
        engine = open_engine(config)
        await engine.start()

        async def answer(prompt: str, **sampling: object) -> str:
            params = SamplingParams(**{"max_tokens": 24, "seed": 5, **sampling})  # type: ignore[arg-type]
            return "".join([delta.text async for delta in engine.generate(prompt, params)])

        async def cancelled() -> None:
            async with engine.generate(CODE * 3, SamplingParams(max_tokens=200)) as stream:
                async for _ in stream:
                    break

        first = await answer(CODE, temperature=0.0)
        await asyncio.gather(
            answer(CODE + first, temperature=0.8),
            answer(CODE * 2, n=2),
            answer("import os", stop=("\n",)),
            answer("class A:", temperature=1.3, top_p=0.9),
            answer(CODE + first, ignore_eos=True, max_tokens=40),
            cancelled(),
        )
        await engine.stop()

    asyncio.run(serve())
    return path.read_bytes()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "full.jsonl"
    recorded(path, is_full=True)
    return path


def test_a_recording_without_text_gives_the_identical_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text("of an engine that failed")
    content = recorded(path, is_full=False)
    assert (tmp_path / "recording.jsonl.1").read_text() == "of an engine that failed"
    for text in (b"first", b"import", b"class", b"request-1"):
        assert text not in content
    replayed = replay(read_recording(content.splitlines()))
    assert replayed.different_line is None
    assert replayed.num_plans > 30
    report = tmp_path / "page.html"
    assert main(["replay", str(path), "--report", str(report)]) == 0
    output = capsys.readouterr().out
    assert output == f"identical: {replayed.num_plans} plans of 7 requests\n"
    assert "<title>recording recording.jsonl</title>" in report.read_text()


def test_a_full_recording_gives_the_identical_tokens(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert b"def add(first, second)" in full.read_bytes()
    assert main(["replay", str(full)]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "identical:"
    assert int(words[words.index("tokens") - 1]) > 100


def test_other_tokens_are_reported(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of another machine or a bug: the first request's output is changed in the file."""
    lines = full.read_bytes().splitlines(keepends=True)
    place = next(
        at
        for at, line in enumerate(lines)
        if line.startswith(REQUEST) and b'"number":0,"sequences"' in line
    )
    before, found, after = lines[place].partition(b'"token_ids":[')
    number, rest = after.split(b",", 1)
    lines[place] = before + found + str(int(number) ^ 1).encode() + b"," + rest
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"".join(lines))
    assert main(["replay", str(path)]) == 1
    assert "sequence 0 of request 0 got" in capsys.readouterr().out


def test_a_recording_of_a_killed_server_is_replayed_as_far_as_it_goes(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = full.read_bytes().splitlines(keepends=True)
    ends = [at for at, line in enumerate(lines) if line.startswith(REQUEST)]
    path = tmp_path / "short.jsonl"
    path.write_bytes(b"".join(lines[: ends[0] + 1]))
    assert main(["replay", "--plans-only", str(path)]) == 0
    assert "cut off" in capsys.readouterr().out
    running = [line for line in lines if b'"kind":"end"' not in line]
    del running[max(at for at, line in enumerate(running) if line.startswith(REQUEST))]
    path.write_bytes(b"".join(running))
    assert main(["replay", "--plans-only", str(path)]) == 0
    assert "1 requests were running then" in capsys.readouterr().out


def test_lines_reach_the_file_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quickstep.engine.records.recording_file._FLUSH_S", 0.001)
    path = tmp_path / "recording.jsonl"
    opened = RecordingFile.open(RecordingConfig(str(path)), None)  # type: ignore[arg-type]
    config = SchedulerConfig(4, 48, 64)
    pool = KVBlockPool(8, 4)
    opened.scheduler(config, pool, make_policy(config), LinearCostModel(), EngineConfig(), "")
    while b'"kind":"engine"' not in path.read_bytes():
        pass
    opened.close()


def test_a_bad_line_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    assert main(["replay", str(path)]) == 2
    assert "line 1 of the recording is not valid" in capsys.readouterr().err
