"""`quickstep batch` on the demo model: answers, errors, resuming, interruption, same bits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import live_server, until

from quickstep.cli.main import main
from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.assembly import open_engine

COMPLETIONS = "/v1/completions"
FLAGS = ("--num-blocks", "400", "--max-num-seqs", "16", "--device", "cpu")


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    fields = body or {"prompt": f"def f{custom_id}(", "max_tokens": 6, "seed": 7}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def written(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """The responses by custom id; fails if one is duplicate or malformed."""
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    found = {entry["custom_id"]: entry["response"] for entry in entries}
    assert len(found) == len(entries)
    return found


def batch(source: Path, output: Path, *flags: str) -> int:
    return main(["batch", "-i", str(source), "-o", str(output), *FLAGS, *flags])


REQUESTS = [
    line("chat", "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], seed=1,
         max_tokens=8),
    line("text", prompt="def add(", max_tokens=8, temperature=0.9, seed=5, n=2, logprobs=2),
    line("responses", "/v1/responses", input="hi", max_output_tokens=16, seed=3),
    line("messages", "/v1/messages", messages=[{"role": "user", "content": "hi"}], max_tokens=8,
         model="demo", temperature=0),
    line("embeddings", "/v1/embeddings", input=["hi", "def add("]),
]  # fmt: skip
BAD = [
    line("bad", prompt="a", temperature=-1),
    line("stream", prompt="a", stream=True),
    line("model", prompt="a", model="gpt"),
]


def test_every_api_answers_as_it_is_served(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert batch(written(tmp_path / "in.jsonl", REQUESTS), output) == 0
    found = answers(output)
    engine = open_engine(
        EngineConfig(load=LoadConfig(model="demo", device="cpu"), cache=CacheConfig(num_blocks=400))
    )
    said = {"chat": "choices", "text": "choices", "responses": "output", "messages": "content"}
    said["embeddings"] = "data"
    with live_server(engine) as server:
        for item in REQUESTS:
            name = item["custom_id"]
            response = httpx.post(server.url + item["url"], json=item["body"], timeout=60)
            told, live = found[name]["body"], response.json()
            assert found[name]["status_code"] == response.status_code == 200, live
            assert without_ids(told[said[name]]) == without_ids(live[said[name]])
            assert told.get("system_fingerprint") == live.get("system_fingerprint")


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {name: without_ids(item) for name, item in value.items() if name != "id"}
    return value


def test_lines_that_fail_say_why_and_are_tried_again_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "in.jsonl", [*BAD, line("1")])
    output = tmp_path / "out.jsonl"
    assert batch(source, output) == 1
    found = answers(output)
    assert {name: found[name]["status_code"] for name in ("bad", "stream", "model", "1")} == {
        "bad": 400,
        "stream": 400,
        "model": 404,
        "1": 200,
    }
    assert found["bad"]["body"]["error"]["param"] == "temperature"
    first = output.read_bytes()
    assert batch(source, output) == 1  # nothing is left to do, and no model is loaded for it
    assert output.read_bytes() == first
    assert "4 of 4 requests are answered, 0 of them by this run" in capsys.readouterr().err
    written(source, [*(line(item["custom_id"]) for item in BAD), line("1")])
    assert batch(source, output, "--retry-failed") == 0
    assert {response["status_code"] for response in answers(output).values()} == {200}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("lost", [1, 40, 0])
def test_a_broken_end_is_repaired(tmp_path: Path, lost: int) -> None:
    """So many bytes of the last line are lost: its newline, a part, or (0) nearly all of it."""
    source = written(tmp_path / "in.jsonl", [line("1"), line("2")])
    output = tmp_path / "out.jsonl"
    assert batch(source, output) == 0
    whole = output.read_bytes()
    first, _, rest = whole.partition(b"\n")
    output.write_bytes(whole[:-lost] if lost else first + b"\n" + rest[:3])
    assert batch(source, output) == 0
    assert {name: item["status_code"] for name, item in answers(output).items()} == {
        "1": 200,
        "2": 200,
    }


def test_an_interrupted_run_leaves_complete_lines_and_continues(tmp_path: Path) -> None:
    lines = [line(str(n), prompt=f"def f{n}(", max_tokens=30, seed=n) for n in range(60)]
    source = written(tmp_path / "in.jsonl", lines)
    output = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "quickstep", "batch", "-i", str(source), "-o", str(output)]
    with subprocess.Popen(
        [*command, *FLAGS, "--concurrency", "2"],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        until(lambda: output.exists() and output.read_bytes().count(b"\n") > 3)
        assert batch(source, output) == 2  # one run at a time
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"requests are answered" in said
    assert b"run it again to resume" in said
    assert b"Traceback" not in said
    stopped = answers(output)
    assert 3 < len(stopped) < 60
    assert batch(source, output) == 0
    found = answers(output)
    assert len(found) == 60
    assert all(found[name] == stopped[name] for name in stopped)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no request"),
        ('{"custom_id": "a"}\n', "line 1: method is missing"),
        ("\n\n{\n", "line 3: the text is not valid JSON"),
        (json.dumps(line("a")) + "\n" + json.dumps(line("a")), "line 2: custom_id 'a'"),
        (json.dumps(line("a", "/v1/files", x=1)), "line 1: url is '/v1/files'"),
    ],
)
def test_an_input_that_is_no_batch_is_refused_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    assert batch(source, tmp_path / "out.jsonl") == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "in.jsonl", [line("1")])
    foreign = {"notes": "hello\nworld\n", "word": "hello", "json": '{"a": 1}', "ids": '{"id": "x"}'}
    for name, text in foreign.items():
        (tmp_path / name).write_text(text)
    for given, output, flags, said in (
        (tmp_path / "none", tmp_path / "out", (), "none cannot be read"),
        (source, source, (), "are the same file"),
        (source, tmp_path / "no" / "out", (), "cannot be written"),
        *((source, tmp_path / name, (), "line 1 is not a batch response") for name in foreign),
        (source, tmp_path / "out", ("--max-body-bytes", "9"), "at least 128"),
        (source, tmp_path / "out", ("--tool-call-parser", "x"), "'x'"),
    ):
        assert batch(given, output, *flags) == 2
        assert said in capsys.readouterr().err
    assert foreign == {name: (tmp_path / name).read_text() for name in foreign}
