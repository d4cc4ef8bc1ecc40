"""`quickstep plan`: its answer, its exit code, one sentence for a question without an answer."""

from __future__ import annotations

import json

import pytest

from quickstep.cli.main import main

SMALL = ("plan", "llama-3.2-1b", "--input", "50", "--output", "8", "--hardware", "h100x2")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_target_that_is_met_is_exit_code_0_and_one_screen(capsys) -> None:
    code, text, _ = run(capsys, *SMALL, "--rate", "20", "--ttft-ms", "200", "--tpot-ms", "20")
    assert code == 0
    assert "MET: 1 of 2 devices meet the target" in text
    assert "32,768 bytes a token" in text
    assert "TP 1 x PP 1 x DP 1" in text
    assert "the change that helps most" in text
    assert "2026-03" in text
    assert len(text.splitlines()) <= 30
    assert max(map(len, text.splitlines())) <= 160


def test_a_gpu_that_was_not_measured_has_a_range_with_its_evidence(capsys) -> None:
    flags = (*SMALL, "--rate", "20", "--ttft-ms", "200", "--tpot-ms", "20")
    code, text, _ = run(capsys, *flags, "--engine", "vllm")
    assert code == 0
    assert "range of TP 1 x PP 1 x DP 1: " in text
    assert "evidence: " in text
    assert "published cases of vllm on h100" in text
    assert "% of the range" in text.splitlines()[-1]
    plan = json.loads(run(capsys, *flags, "--engine", "vllm", "--json")[1])
    known, likely = plan["range"], plan["options"][0]["predicted"]
    for name in ("ttft_s", "tpot_s"):
        assert known["high"][name]["p50"] < likely[name]["p50"] < known["low"][name]["p50"]
    assert known["low_capacity_per_s"] < known["high_capacity_per_s"]
    assert plan["evidence"]["num_cases"] > 20
    assert 0.0 <= known["met_part"] <= 1.0


def test_a_target_is_met_in_a_part_of_the_range(capsys) -> None:
    parts = []
    for tpot_ms in ("0.5", "2.5", "50"):
        flags = ("--rate", "20", "--tpot-ms", tpot_ms, "--hardware", "h100", "--json")
        parts.append(json.loads(run(capsys, *SMALL, *flags)[1])["range"]["met_part"])
    assert parts == sorted(parts)
    assert parts[0] == 0.0
    assert parts[-1] == 1.0


def test_hardware_with_step_times_of_its_own_keeps_them(capsys, tmp_path) -> None:
    file = tmp_path / "calibrated.yaml"
    file.write_text(
        "achieved:\n  gpu: {capacity: 0.9, memory: 0.8, compute: 0.6, link: 0.7, "
        "step_overhead_s: 0.001}\n"
    )
    flags = (*SMALL, "--rate", "5", "--hardware-file", str(file))
    plan = json.loads(run(capsys, *flags, "--json")[1])
    assert plan["evidence"] is None
    assert plan["range"] is None
    assert "of the range" not in run(capsys, *flags)[1]
    for also in (("--engine", "vllm"), ("--offline",)):
        code, _, error = run(capsys, *flags, *also)
        assert code == 2
        assert "--engine and --offline are of GPUs that were not measured" in error


def test_an_impossible_target_is_exit_code_1_and_says_why(capsys) -> None:
    code, text, _ = run(capsys, *SMALL, "--tpot-ms", "0.01")
    assert code == 1
    assert "NOT MET: no split of these devices meets the target: a single request takes at" in text
    code, text, _ = run(capsys, *SMALL, "--ttft-ms", "0.01")
    assert code == 1
    assert "the prompt of a single request takes at least" in text


def test_a_rate_above_the_capacity_is_not_met(capsys) -> None:
    flags = ("--input", "4000", "--output", "8", "--hardware", "l4", "--rate", "90")
    code, text, _ = run(capsys, "plan", "llama-3.2-1b", *flags)
    assert code == 1
    assert "no split of these devices keeps up with 90 requests/s; the best" in text


def test_json_has_the_plan_and_the_explanation(capsys) -> None:
    code, text, _ = run(capsys, *SMALL, "--json", "--explain", "--price", "3.5", "--rate", "100")
    plan = json.loads(text)
    assert code == 0
    assert plan["met"] is True
    assert plan["kv_bytes_per_sequence"] == 32_768 * 64
    assert plan["options"][0]["usd_per_hour"] == 3.5
    dollars = 3.5 / (100 * 8 * 3600) * 1e6
    assert plan["options"][0]["usd_per_million_output_tokens"] == pytest.approx(dollars)
    assert sum(row["num_bytes"] for row in plan["memory"]) == 76 * 10**9
    explained = {line["what"]: line["result"] for line in plan["explanation"]}
    assert explained["KV of a token"] == "32,768 bytes"
    assert "weights" in explained


def test_the_same_seed_gives_the_same_plan(capsys) -> None:
    flags = (*SMALL, "--hardware", "h100", "--json", "--seed")
    first = run(capsys, *flags, "3")
    assert run(capsys, *flags, "3") == first
    assert run(capsys, *flags, "4") != first


def test_parallelism_is_compared_per_phase(capsys) -> None:
    flags = ("--hardware", "h100x4", "-q", "int4", "--compare-parallelism", "--json")
    code, text, _ = run(capsys, "plan", "llama-3-70b", *flags)
    assert code == 0
    alone, tensor, pipeline, data = json.loads(text)
    # tensor parallelism shortens both phases; a pipeline shortens no token
    assert tensor["prefill_s"] < alone["prefill_s"] / 2
    assert tensor["decode_s"] < alone["decode_s"] / 2
    assert pipeline["decode_s"] == pytest.approx(data["decode_s"], rel=0.02)
    assert data["prefill_s"] == alone["prefill_s"]
    assert data["decode_tokens_per_s"] > alone["decode_tokens_per_s"]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("plan", "lama-3-8b", "--hardware", "h100"), "did you mean llama-3-8b"),
        (("plan", "llama-3-8b", "--hardware", "h1000"), "--hardware h1000 is unknown"),
        (("plan", "llama-3-70b", "--hardware", "h100"), "does not fit on 1 x NVIDIA H100"),
        (
            ("plan", "llama-3-8b", "--hardware", "h100", "--input", "9000"),
            "--input 9000 and --output 300 are more than the model's limit of 8192 tokens",
        ),
        (("plan", "llama-3-8b", "--rate", "-1"), "--rate: -1 is not above 0"),
        (("plan", "llama-3-8b", "--attainment", "2"), "--attainment: 2 is above 1"),
    ],
)
def test_a_question_without_an_answer_is_one_sentence(capsys, argv, sentence) -> None:
    code, text, error = run(capsys, *argv)
    assert (code, text) == (2, "")
    assert sentence in error
    assert len(error.splitlines()) == 1
