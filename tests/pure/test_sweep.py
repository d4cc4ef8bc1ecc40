"""`quickstep simulate --sweep`: knees, the recommendation, files, questions without an answer."""

from __future__ import annotations

import csv
import json

import pytest

from quickstep.cli.main import main

SWEEP = (
    *("simulate", "llama-3.2-1b", "--preset", "prefill-heavy", "--input", "3000", "--output", "2"),
    *("--num-prompts", "40", "--seed", "1", "--ttft-ms", "200"),
)


def sweep(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    code = main((*SWEEP, "--json", *argv))
    return code, json.loads(capsys.readouterr().out)


def test_the_knee_of_several_rates_is_the_highest_that_meets_the_targets(capsys) -> None:
    flags = ("--hardware", "l4", "--rate", "0.5,1,40", "--sweep", "policy")
    code, answer = sweep(capsys, *flags, "--scheduling-policy", "mixed,static")
    assert code == 1
    assert [row["combination"]["policy"] for row in answer["rows"]] == ["mixed", "static"]
    for row in answer["rows"]:
        met = [point["rate"] for point in row["points"] if point["met"]]
        assert row["knee"] == max(met, default=0.0)
        assert [point["rate"] for point in row["points"]] == [0.5, 1.0, 40.0]
        assert "the first token is late" in row["limit"]
    assert (
        "no combination has 90% of the requests in time at 40 sessions/s"
        in (answer["recommendation"])
    )


def test_a_single_rate_begins_a_search_and_more_replicas_serve_more(capsys, tmp_path) -> None:
    page, lines = tmp_path / "sweep.html", tmp_path / "sweep.csv"
    flags = ("--hardware", "l4x2", "--rate", "1", "--sweep", "replicas")
    code, answer = sweep(capsys, *flags, "--csv", str(lines), "--report", str(page))
    assert code == 0
    one, two = answer["rows"]
    assert (one["num_devices"], two["num_devices"]) == (1, 2)
    assert 1.0 < one["knee"] < two["knee"]
    assert two["usd_per_hour"] == 2 * one["usd_per_hour"]
    assert answer["recommended"] == 0  # the cheaper one serves the rate
    assert (
        "for 1 sessions/s: mixed, 2048 tokens, TP 1 (1 device, $0.44/h)"
        in (answer["recommendation"])
    )
    assert "compute (matrix products)" in answer["recommendation"]
    above = min(point["rate"] for point in one["points"] if not point["met"])
    assert above / one["knee"] <= 1.05
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert answer["recommendation"].split(";")[0] in text
    assert not any(part in text for part in ("http", "<script", "src=", "nan"))
    rows = list(csv.DictReader(lines.open()))
    assert len(rows) == sum(len(row["points"]) for row in answer["rows"])


def test_sizes_that_do_not_fit_are_named_and_the_table_has_the_options_that_vary(capsys) -> None:
    argv = ("simulate", "llama-3.1-8b", "--preset", "batch", "--input", "500", "--output", "2")
    flags = ("--hardware", "rtx4090x2", "--rate", "1,2", "--sweep", "tp,chunk", "--tpot-ms", "500")
    assert main((*argv, *flags, "--max-model-len", "90000")) == 0
    text = capsys.readouterr().out
    assert "TP 1: " in text
    assert " tp   chunk   devices " in text
    assert "for 2 sessions/s: mixed, " in text
    assert "TP 2 (2 devices, $0.68/h)" in text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (("--sweep", "policy", "--ttft-ms", "0"), "--ttft-ms: 0 is not above 0"),
        (("--sweep", "polcy"), "'polcy' is none of policy, chunk, tp, replicas"),
        (("--sweep", "tp", "--arrivals", "closed-loop"), "a closed loop has none"),
        (("--sweep", "tp", "--trace", __file__), "a file has its own; use --preset"),
    ],
)
def test_a_sweep_without_an_answer_is_one_sentence(capsys, argv, sentence) -> None:
    assert main((*SWEEP, "--hardware", "l4", *argv)) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.splitlines()) == 1


def test_a_sweep_needs_a_target(capsys) -> None:
    assert main(("simulate", "llama-3.2-1b", "--hardware", "l4", "--sweep", "policy")) == 2
    assert "--sweep needs a target: --ttft-ms, --tpot-ms, or both" in capsys.readouterr().err
