"""`quickstep serve` with several models, their engines in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_lists import workers
from serve_process import serving

from quickstep.cli.main import main

BUDGET = 30 * 2**20  # for `c` and one of the others
MODELS = [
    {"model": "demo", "name": "a", "aliases": ["first"]},
    {"model": "demo", "name": "b", "max-model-len": 128},
    {"model": "demo-draft", "name": "c"},
]


def in_file(path: Path, models: Any) -> str:
    file = path / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    return str(file)


def completion(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "def add(a, b):\n    ", "temperature": 0, **fields}


def test_models_of_a_file_take_turns_and_a_killed_engine_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    arguments = ["--config", in_file(tmp_path, MODELS), "--max-num-batched-tokens", "256"]
    with (
        serving(*arguments, "--models-memory-bytes", str(BUDGET)) as (process, address),
        httpx.Client(base_url=address, timeout=60) as client,
    ):

        def text(name: str) -> str:
            answer = client.post("/v1/completions", json=completion(name, max_tokens=8))
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        first = [text(name) for name in ("a", "first", "b", "c")]
        assert first[0] == first[1] == first[2]
        assert [text(name) for name in ("c", "b", "a")] == [first[3], first[0], first[0]]
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards["b"]["max_model_len"] == 128
        status = {name: cards[name]["status"] for name in "abc"}
        assert {name: status[name]["state"] for name in "abc"} == {
            "a": "ready",
            "b": "asleep",
            "c": "ready",
        }
        assert status["a"]["size_bytes"] + status["c"]["size_bytes"] <= BUDGET
        assert status["a"]["size_bytes"] + status["b"]["size_bytes"] > BUDGET

        both = set(workers(process.pid))
        client.post("/v1/models/unload", json={"model": "c"})
        assert text("c") == first[3]
        (of_c,) = set(workers(process.pid)) - both
        long = completion("a", max_tokens=300, ignore_eos=True, stream=True)
        with client.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(of_c, signal.SIGKILL)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert not any('"error"' in line for line in rest)
        assert text("c") == first[3]


@pytest.mark.parametrize(
    ("models", "sentence"),
    [
        ([{"model": "demo"}, {"model": "demo"}], "'demo' names the models demo and demo"),
        ([{"model": "demo", "max-model-length": 1}], "did you mean max-model-len?"),
        ([{"model": "demo", "port": 1}], "(demo): port is no flag"),
        ([{"name": "a"}], "number 1: Object missing required field `model`"),
        ([{"model": "demo", "pin": "yes"}], "Expected `bool`, got `str` - at `$.pin`"),
        ([{"model": "demos"}], "the model 'demos' is no directory"),
        (["demo"], "number 1 is no mapping"),
        ({"model": "demo"}, "is no list of models"),
    ],
)
def test_a_wrong_section_of_models_is_one_sentence(
    models: Any, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--config", in_file(tmp_path, models)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--served-model-name", "x"], "--served-model-name is for one model"),
        (["--lora-dir", "."], "--lora-modules and --lora-dir are for one model"),
        (["--record", "x"], "--record is for one model"),
        (["--engines", "localhost:1"], "--engines is for one model"),
        (["--models-memory-bytes", "0"], "--models-memory-bytes"),
    ],
)
def test_a_flag_for_one_model_is_refused_with_several(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "demo", "demo-draft", *flags]) == 2
    assert sentence in capsys.readouterr().err
