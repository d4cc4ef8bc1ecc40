"""The commands that open an engine, in this process or their own: output, exit codes, signals."""

import io
import json
import signal
import sys
from argparse import Namespace
from pathlib import Path

import httpx
import msgspec
import pytest
from serve_process import SMALL, serving

from quickstep import LLM, SamplingParams
from quickstep.cli.flags.hardware import measured_steps
from quickstep.cli.main import main
from quickstep.core.cost_model import LinearCostModel, StepLoad
from quickstep.engine.machine import usable_cores
from quickstep.engine.step_times.calibration import Calibration


def test_generate_prints_the_text_and_json_has_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["generate", "def add(first, second):\n", "--max-tokens", "8", *SMALL]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (choice,) = answer["choices"]
    assert plain == choice["text"] + "\n"
    assert answer["num_output_tokens"] == len(choice["token_ids"]) <= 8
    assert choice["finish_reason"] in ("max_tokens", "eos")
    assert choice["time_to_first_token_s"] > 0


def test_generate_reads_stdin_and_prints_the_seed_of_each_of_n(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    flags = ["--n", "2", "--seed", "3", "--temperature", "1", "--max-tokens", "4"]
    assert main(["generate", "-", *flags, *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- 0, seed 3"
    assert any(line.startswith("--- 1, seed ") for line in lines)


def test_chat_answers_each_line_of_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\nhello\n/quit\nmore\n"))
    assert main(["chat", "--max-tokens", "8", *SMALL]) == 0
    piped = capsys.readouterr().out
    assert main(["chat", "--max-tokens", "8", "--message", "hello", *SMALL]) == 0
    assert piped == capsys.readouterr().out * 2


def test_demo_streams_and_prints_the_phases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "demo", *SMALL]) == 0
    shown = capsys.readouterr()
    assert "def load_config(path):" in shown.out
    assert "What does itertools.chain do?" in shown.out
    for figure in ("prompt tokens", "cached", "TTFT ms", "TPOT ms", "tokens/s", "KV blocks"):
        assert figure in shown.out
    assert "weights" in shown.err
    assert "\x1b" not in shown.out + shown.err


def test_calibrate_stores_a_fit_that_the_engine_starts_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUICKSTEP_CACHE_DIR", str(tmp_path))
    assert main(["calibrate", "demo", "--seconds", "0.3", "--json", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    (file,) = tmp_path.rglob("*.json")
    assert result["file"] == str(file)
    assert result["fit"]["num_steps"] >= 20
    assert result["fit"]["highest"]["num_rows"] == 4
    assert {error["kind"] for error in result["errors"]} <= {"decode", "prefill", "mixed"}
    assert result["overhead"].keys() == {"step_s", "row_s"}
    # the engine continues from it: its steps are added
    argv = ["generate", "def add(", "--max-tokens", "60", "--speculative-method", "off", *SMALL]
    assert main(argv) == 0
    (again,) = tmp_path.rglob("*.json")
    assert again == file
    stored = json.loads(file.read_text())
    assert stored["fit"]["num_steps"] > result["fit"]["num_steps"] + 50
    assert stored["overhead"] == result["overhead"]


def test_plans_for_this_machine_use_the_calibration_of_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUICKSTEP_CACHE_DIR", str(tmp_path))
    args = Namespace(
        model="demo", model_flag=None, hardware="this", quantization=None, kv_cache_dtype="auto"
    )
    assert measured_steps(args) is None
    assert main(["calibrate", "demo", "--seconds", "0.3", "--json", *SMALL]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=Calibration)
    measured, overhead = measured_steps(args), result.overhead
    assert measured is not None and overhead is not None
    steps = measured.costs
    load = StepLoad.of_span(20, 1, num_logits_rows=1)
    expected = LinearCostModel.of_fit(result.fit).seconds(load) + overhead.seconds(1)
    assert steps.seconds(load) == pytest.approx(expected)
    for other in ({"hardware": "h100"}, {"quantization": "int8"}, {"model": "llama-3-8b"}):
        assert measured_steps(Namespace(**{**vars(args), **other})) is None


def test_a_pipeline_is_calibrated_and_simulated_with_its_stages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("QUICKSTEP_CACHE_DIR", str(tmp_path))
    simulated = ("simulate", "demo", "-pp", "2", "--num-prompts", "5", "--json")
    assert main(list(simulated)) == 2
    threads = usable_cores()
    hint = f"--pipeline-parallel-size 2 --threads {threads}`"
    assert hint in capsys.readouterr().err
    flags = ("-pp", "2", "--threads", str(threads), *SMALL)
    assert main(["calibrate", "demo", "--seconds", "0.3", "--json", *flags]) == 0
    stages = msgspec.json.decode(capsys.readouterr().out, type=Calibration).stages
    assert stages is not None
    assert sum(stages.parts) == pytest.approx(1.0)
    assert min(*stages.parts, stages.hop_s) > 0.0
    assert main(list(simulated)) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert 0.0 < run["figures"]["bubble"] < 1.0


def test_calibrate_prints_costs_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--seconds", "0.3", *SMALL]) == 0
    shown = capsys.readouterr().out
    for text in ("a logits row under a grammar", "not measured", "decode", "QUICKSTEP_CACHE_DIR"):
        assert text in shown


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-bandwidth"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"]["threads"] >= 1
    assert facts["cpu"]["usable_cpus"] >= 1


def test_a_chat_template_replaces_the_checkpoints_in_serve_and_chat(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}def {{ m.content[0].text }}({% endfor %}")
    messages = [{"role": "user", "content": "add"}]
    flags = ("--chat-template", str(file), "--chat-template-content-format", "openai")
    with serving(*flags) as (_, address):
        body = {"messages": messages}
        applied = httpx.post(f"{address}/apply-template", json=body, timeout=60).json()
        shown = httpx.get(f"{address}/props", timeout=60).json()["chat_template"]
    assert applied == {"prompt": "def add("}
    assert shown == file.read_text()
    assert main(["generate", "def add(", "--max-tokens", "8", *SMALL]) == 0
    generated = capsys.readouterr().out
    assert main(["chat", "--message", "add", "--max-tokens", "8", *SMALL, *flags]) == 0
    assert capsys.readouterr().out == generated
    with LLM("demo", chat_template=str(file), chat_template_content_format="openai") as llm:
        answers = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    assert answers[0].outputs[0].text.strip() == generated.strip()


def test_serve_lets_a_running_stream_end_at_sigterm_and_exits_with_0() -> None:
    body = {"prompt": "def add(", "max_tokens": 48, "ignore_eos": True, "stream": True}
    with serving() as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert process.wait(60) == 0
    assert rest[-2] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-4]


def test_serve_ends_streams_with_an_error_event_when_the_drain_is_over() -> None:
    body = {"prompt": "def add(", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with serving("--drain-timeout-s", "0") as (process, address):
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert process.wait(60) == 0
    assert rest[-2] == "data: [DONE]"
    assert "shutting down" in json.loads(rest[-4].removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_checkpoint_that_is_not_there_is_exit_code_2(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, "--model", str(tmp_path / "nothing"), "--offline"]
    assert main([*argv, "hello"] if command == "generate" else [*argv, "--port", "0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing" in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err
