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
