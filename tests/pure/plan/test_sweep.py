"""`quickstep simulate --sweep`: knees, the recommendation, files, questions without an answer."""

from __future__ import annotations

import csv
import json

import pytest
from msgspec.structs import replace
from page_reports import embedded_report

from quickstep.cli.main import main
from quickstep.config import PolicyName
from quickstep.model.sizing import ElementBytes
from quickstep.plan.candidates import EngineLimits, Load, fit
from quickstep.plan.formulas import Split
from quickstep.plan.hardware import find_hardware, read_hardware
from quickstep.plan.models import find_model
from quickstep.plan.sweep import SweepQuery, measure
from quickstep.plan.traffic import Replicas, Traffic, simulate_traffic
from quickstep.sim.outcome import Ending
from quickstep.sim.summary import Targets
from quickstep.sim.window import CountedWindow
from quickstep.sim.workload import WORKLOADS
from quickstep.types import FinishReason, SequenceTimings

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
    report = embedded_report(page)
    assert report["sentence"] == answer["recommendation"]
    assert len(report["charts"]) == 1
    assert len(report["rows"]) == len(report["charts"][0]["lines"]) == len(answer["rows"])
    rows = list(csv.DictReader(lines.open()))
    assert len(rows) == sum(len(row["points"]) for row in answer["rows"])


def test_a_sweep_in_several_processes_has_the_same_answer(capsys, monkeypatch) -> None:
    flags = ("--hardware", "l4", "--rate", "0.5,40", "--sweep", "policy")
    answers = []
    for num_cores in (1, 2):
        monkeypatch.setattr("quickstep.engine.machine.usable_cores", lambda num=num_cores: num)
        answers.append(sweep(capsys, *flags))
    assert len(answers[0][1]["rows"]) == 3
    assert answers[0] == answers[1]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("preset", ["chat", "code"])
def test_a_window_ends_a_simulation_with_the_same_answer(preset: str, count: int) -> None:
    spec, hardware = find_model("llama-3.2-1b"), find_hardware("l4", read_hardware())
    load, workload = Load(1.0, 8000, 1), replace(WORKLOADS[preset], think_s=1.0)
    engine = fit(spec, hardware, Split(), ElementBytes(2, 8), load, EngineLimits())
    targets = Targets(ttft_s=0.2, tpot_s=0.015)
    seconds = workload.mean_turns - 1.0
    outcomes = set()
    for rate in (1.0, 4.0, 16.0, 40.0):
        query = SweepQuery((rate,), targets, 0.9, workload.mean_turns, seconds, 50)
        traffic = Traffic(workload, rate=rate, num_requests=query.window(rate).max_sequences)
        points = []
        for window in (None, query.window(rate)):
            replicas = Replicas(count)
            outcome = simulate_traffic(
                engine, traffic, 8192, PolicyName.MIXED, replicas=replicas, window=window
            )
            points.append((measure(engine, rate, window or query.window(rate), outcome), outcome))
        (full, all_of_it), (early, part) = points
        assert early.met is full.met
        if early.is_complete:
            assert replace(early, figures=replace(early.figures, num_refused=0)) == replace(
                full, figures=replace(full.figures, num_refused=0)
            )
        assert len(part.endings) <= len(all_of_it.endings)
        outcomes.add((early.met, early.is_complete, len(part.records) < len(all_of_it.records)))
    assert {(True, True, True), (False, False, True)} <= outcomes


def test_a_window_is_missed_when_the_others_cannot_make_up_for_it() -> None:
    window = CountedWindow(1.0, 2.0, Targets(ttft_s=0.5), 0.9, max_sequences=22)
    for number in range(22):
        window.arrived(0.5 if number < 2 else 1.5, 1)
    late = ending(arrival_s=0.5, first_token_s=3.0)
    for _ in range(2):
        window.ended(late)  # before the window
    for _ in range(2):
        window.ended(replace(late, timings=replace(late.timings, arrival_s=1.5)))
    assert not window.is_missed  # 18 of 20 would be enough
    window.ended(ending(arrival_s=2.5, first_token_s=9.0))  # after it
    window.ended(ending(arrival_s=1.5, first_token_s=9.0, reason=FinishReason.ABORTED))
    assert not window.is_over(9.0)
    window.ended(ending(arrival_s=1.5, first_token_s=2.1))
    assert window.is_missed
    assert window.is_over(1.0)


def ending(
    arrival_s: float, first_token_s: float, reason: FinishReason = FinishReason.MAX_TOKENS
) -> Ending:
    seconds = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "preempted_s", "device_s"), 0.0)
    counts = dict.fromkeys(("num_preemptions", "num_cached_tokens", "num_blocks"), 0)
    timings = SequenceTimings(
        arrival_s=arrival_s,
        first_scheduled_s=arrival_s,
        first_token_s=first_token_s,
        finished_s=first_token_s,
        num_prompt_tokens=1,
        num_output_tokens=2,
        **seconds,
        **counts,
    )
    return Ending("r", 0, reason, timings)


def test_a_search_downwards_ends_at_a_floor(capsys) -> None:
    flags = ("--hardware", "l4", "--rate", "64", "--sweep", "tp")
    code, answer = sweep(capsys, *flags, "--scheduling-policy", "static", "--tpot-ms", "0.1")
    assert code == 1
    (row,) = answer["rows"]
    assert [point["rate"] for point in row["points"]] == [0.5, 8.0, 32.0, 64.0]
    assert row["knee"] == 0.0
    # only the one that says what the limit is was not ended early
    assert [point["is_complete"] for point in row["points"]] == [True, False, False, False]
    assert (
        "static, 2048 tokens, TP 1 (1 device, $0.44/h), is late from 0.5/s on"
        in (answer["recommendation"])
    )
    assert main((*SWEEP, *flags, "--tpot-ms", "0.1", "--scheduling-policy", "static")) == 1
    assert "below 0.5/s" in capsys.readouterr().out


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
