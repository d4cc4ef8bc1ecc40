"""`quickstep simulate`: runs over rates and policies, JSON, CSV and a page without a network."""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter
from pathlib import Path

import pytest
from page_reports import embedded_report

from quickstep.cli.flags.hardware import add_predicted_engine
from quickstep.cli.main import main
from quickstep.cli.simulate import _ARRIVALS, _PRESETS, _ROUTERS
from quickstep.core.router import ROUTERS
from quickstep.plan.engines import ENGINES
from quickstep.plan.traffic import ARRIVALS, Traffic
from quickstep.sim.workload import WORKLOADS

QUICK = ("simulate", "llama-3.2-1b", "--hardware", "h100", "--num-prompts", "24", "--seed", "3")


def figures(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict]:
    assert main((*QUICK, "--json", *argv)) == 0
    return json.loads(capsys.readouterr().out)


def test_the_choices_of_the_flags_are_those_that_exist() -> None:
    assert tuple(WORKLOADS) == _PRESETS
    assert ARRIVALS == _ARRIVALS
    assert tuple(ROUTERS) == _ROUTERS
    parser = argparse.ArgumentParser()
    add_predicted_engine(parser)
    (engine,) = (action for action in parser._actions if action.dest == "engine")
    assert tuple(engine.choices or ()) == ENGINES


def test_rates_and_policies_are_compared(capsys) -> None:
    flags = ("--rate", "2,4", "--scheduling-policy", "mixed,static", "--output", "20")
    rows = figures(capsys, *flags)
    assert [row["run"] for row in rows] == [
        *("mixed, 2/s", "mixed, 4/s"),
        *("static, 2/s", "static, 4/s"),
    ]
    mixed, static = (rows[place]["figures"]["ttft_s"]["mean"] for place in (1, 3))
    assert mixed < static
    assert figures(capsys, *flags) == rows


def test_runs_have_a_range_with_its_evidence(capsys) -> None:
    flags = ("--rate", "20", "--output", "20", "--engine", "sglang")
    (row,) = figures(capsys, *flags)
    known, likely = row["range"], row["figures"]
    for name in ("ttft_s", "tpot_s"):
        assert known["high"][name]["mean"] < likely[name]["mean"] < known["low"][name]["mean"]
    assert row["evidence"]["engine"] == "sglang"
    assert main((*QUICK, *flags, "--tpot-ms", "20")) == 0
    text = capsys.readouterr().out
    assert "tokens/s, TTFT p50" in text
    assert "% of the range" in text
    assert "evidence: " in text
    (row,) = figures(capsys, *flags, "--no-range")
    assert (row["range"], row["figures"]) == (None, likely)


def test_replicas_share_the_requests_and_survive_faults(capsys) -> None:
    flags = ("--rate", "200", "--preset", "decode-heavy", "--router", "prefix")
    one, four = figures(capsys, *flags, "--replicas", "1,4")
    assert [one["replicas"], four["replicas"]] == [1, 4]
    assert four["run"] == "mixed, 200/s, 4 replicas"
    assert four["figures"]["tpot_s"]["mean"] < one["figures"]["tpot_s"]["mean"]
    assert four["figures"]["busy"] <= 1.0
    (failed,) = figures(capsys, *flags, "--replicas", "3", "--faults", "12")
    assert failed["figures"]["num_requests"] == 24
    assert failed["resent"] > 0
    assert failed["lost_s"] > 0
    assert figures(capsys, *flags, "--replicas", "3", "--faults", "12") == [failed]
    assert main((*QUICK, *flags, "--replicas", "3", "--faults", "12")) == 0
    assert f"{failed['resent']} requests were sent again" in capsys.readouterr().out


def test_phases_on_different_engines_hand_the_kv_cache_over(capsys) -> None:
    flags = ("--rate", "20", "--preset", "prefill-heavy", "--input", "6000", "--output", "20")
    (mixed,) = figures(capsys, *flags, "--replicas", "2")
    flags += ("--prefill-replicas", "1", "--decode-replicas", "1")
    (apart,) = figures(capsys, *flags)
    assert mixed["handovers"] is None
    assert apart["run"] == "mixed, 20/s, 1P1D"
    num_divided = apart["handovers"]["count"]
    assert 4 < num_divided < 24  # an idle decode engine computes prompts itself
    assert apart["figures"]["tpot_s"]["p99"] < mixed["figures"]["tpot_s"]["p99"]
    (slow,) = figures(capsys, *flags, "--kv-link", "100gbe")
    assert 0 < slow["handovers"]["count"] < num_divided
    assert slow["handovers"]["mean_s"] > 5 * apart["handovers"]["mean_s"]
    assert main((*QUICK, *flags)) == 0
    assert f"{num_divided} of 24 requests continued at another engine" in capsys.readouterr().out
    for more, sentence in (
        (("--faults", "3"), "are all engines, without --replicas, --faults and --sweep"),
        (("--kv-link", "isdn"), "--kv-link isdn is unknown; known are nvlink3"),
    ):
        assert main((*QUICK, *flags, *more)) == 2
        assert sentence in capsys.readouterr().err
    assert main((*QUICK, "--prefill-replicas", "1")) == 2
    assert "go together; give both" in capsys.readouterr().err


def test_models_that_draft_shorten_the_time_per_token(capsys) -> None:
    flags = ("--preset", "decode-heavy", "--hardware", "l4", "--acceptance", "0.9", "--rate", "2")
    draft = (*flags, "--speculative-model", "demo-draft")
    (plain,) = figures(capsys, *flags)
    (drafted,) = figures(capsys, *draft)
    assert drafted["figures"]["tpot_s"]["p50"] < 0.7 * plain["figures"]["tpot_s"]["p50"]
    two = (*draft, "--acceptance", "0.1", "--speculative-model", "demo-medusa")
    (both,) = figures(capsys, *two)
    assert both["figures"]["tpot_s"]["p50"] < 0.8 * plain["figures"]["tpot_s"]["p50"]
    few = (*two, "--num-prompts", "6")
    assert figures(capsys, *few) == figures(capsys, *few)


def sized(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    """The figures of a run without `--num-prompts`."""
    assert main(("simulate", "llama-3.2-1b", "--hardware", "h100", "--json", *argv)) == 0
    (row,) = json.loads(capsys.readouterr().out)
    return row


def test_a_run_sends_as_many_requests_as_its_load_takes(capsys) -> None:
    flags = ("--preset", "chat", "--output", "4", "--seed", "3")
    for rate in (1, 4):
        row = sized(capsys, *flags, "--rate", str(rate))
        # sessions of 4 turns, some of which are cancelled or still to come
        assert 2.0 * rate < row["figures"]["requests_per_s"] < 4 * rate
        assert row["counted_from_s"] == 60  # twice the mean session
        assert row["figures"]["duration_s"] > 10


def test_an_overload_is_late_also_without_a_number_of_requests(capsys, tmp_path: Path) -> None:
    lines = tmp_path / "out.csv"
    flags = ("--preset", "code", "--rate", "20", "--max-num-seqs", "1", "--ttft-ms", "200")
    row = sized(capsys, *flags, "--csv", str(lines), "--tenant", "a", "--tenant", "b")
    assert row["figures"]["attainment"] < 0.2
    counted = [int(line["counted"]) for line in csv.DictReader(lines.open())]
    assert 0 < sum(counted) == row["figures"]["num_requests"] < len(counted)
    by_tenant = row["tenants"].values()
    assert sum(one["num_requests"] for one in by_tenant) == row["figures"]["num_requests"]


def test_replicas_and_phases_size_themselves_too(capsys) -> None:
    flags = ("--preset", "prefill-heavy", "--rate", "25", "--output", "2")
    for engines in (("--replicas", "2"), ("--prefill-replicas", "1", "--decode-replicas", "1")):
        row = sized(capsys, *flags, *engines)
        assert 20 < row["figures"]["requests_per_s"] < 30


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--rate", "32"), "mixed, 32/s: the load of 128 requests/s is not reached with "),
        (
            ("--arrivals", "closed-loop", "--max-concurrency", "20"),
            "the load of 20 clients is not reached with --num-prompts 24, it takes 40",
        ),
    ],
)
def test_a_run_that_ends_before_its_load_is_there_says_so(capsys, flags, sentence) -> None:
    assert main((*QUICK, *flags)) == 0
    assert sentence in capsys.readouterr().err
    assert main((*QUICK, *flags[:-1], "1", "--preset", "code")) == 0
    assert capsys.readouterr().err == ""


def test_a_trace_is_simulated_to_its_end(capsys, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 20, "output_length": 2, "hash_ids": [1]}'
    trace.write_text("\n".join(line % place for place in range(310)))
    assert sized(capsys, "--trace", str(trace))["figures"]["num_requests"] == 310


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_every_kind_of_arrivals_runs(capsys, arrivals: str) -> None:
    flags = ("--arrivals", arrivals, "--preset", "code", "--max-concurrency", "3", "--rate", "20")
    (row,) = figures(capsys, *flags)
    assert 5 < row["figures"]["num_requests"] <= 24


def test_sessions_have_several_turns(capsys) -> None:
    (row,) = figures(capsys, "--preset", "agent", "--num-prompts", "32")
    assert len(Traffic(WORKLOADS["agent"], num_requests=32).times()) == 4
    assert row["figures"]["num_requests"] > 8


def test_the_report_is_one_page_without_network(capsys, tmp_path: Path) -> None:
    page, lines = tmp_path / "out.html", tmp_path / "out.csv"
    flags = ("--rate", "2,8", "--ttft-ms", "100", "--report", str(page), "--csv", str(lines))
    assert main((*QUICK, "--preset", "rag", *flags)) == 0
    report = embedded_report(page)
    assert "rag with llama-3.2-1b" in report["title"]
    assert len(report["charts"]) == 3 + 1  # latencies and load
    assert [run["name"] for run in report["runs"]] == [row[0] for row in report["rows"]]
    for run in report["runs"]:
        kinds = Counter(record["kind"] for record in run["records"])
        assert kinds["sequence"] == 24
        assert kinds["step"] > 24
        ended = {record["request_id"] for record in run["records"] if "request_id" in record}
        assert run["sentences"].keys() == ended
    rows = list(csv.DictReader(lines.open()))
    assert len(rows) == 48
    assert all(float(row["finished_s"]) >= float(row["first_token_s"]) for row in rows)
    table = capsys.readouterr().out
    assert "mixed, 8/s" in table
    assert "in time" in table


def test_tenants_have_figures_of_their_own(capsys, tmp_path: Path) -> None:
    flags = (
        *("--rate", "40", "--num-prompts", "150", "--max-num-seqs", "4"),
        *("--preset", "code", "--scheduling-policy", "priority"),
        *("--tenant", "paid,part=1,priority=-2", "--tenant", "free,part=2,class=batch"),
    )
    (row,) = figures(capsys, *flags)
    paid, free = (row["tenants"][name] for name in ("paid", "free"))
    assert paid["num_requests"] + free["num_requests"] == row["figures"]["num_requests"]
    assert 0.2 < paid["num_requests"] / row["figures"]["num_requests"] < 0.5
    assert paid["ttft_s"]["mean"] < free["ttft_s"]["mean"]
    lines = tmp_path / "out.csv"
    assert main((*QUICK, *flags, "--csv", str(lines))) == 0
    table = capsys.readouterr().out
    assert "\n   paid " in table and "\n   free " in table
    assert {line["tenant"] for line in csv.DictReader(lines.open())} == {"paid", "free"}
    assert not figures(capsys)[0]["tenants"]


def test_tenants_have_deadlines(capsys, tmp_path: Path) -> None:
    lines = tmp_path / "out.csv"
    flags = (
        *("--preset", "decode-heavy", "--output", "400", "--hardware", "l4", "--rate", "50"),
        *("--max-num-seqs", "4", "--csv", str(lines)),
        *(
            "--tenant",
            "patient",
            "--tenant",
            "brief,timeout=1",
            "--tenant",
            "quick,ttft-deadline=2",
        ),
    )
    (row,) = figures(capsys, *flags)
    ends = [(one["tenant"], one["finish_reason"]) for one in csv.DictReader(lines.open())]
    assert ("brief", "deadline") in ends
    assert ("patient", "deadline") not in ends
    assert {reason for tenant, reason in ends if tenant == "patient"} == {"max_tokens"}
    assert ("quick", "shed") in ends or row["figures"]["num_refused"] > 0
    assert row["figures"]["num_incomplete"] > 0


def test_a_trace_that_cannot_be_read_is_one_sentence(capsys, tmp_path: Path) -> None:
    file = tmp_path / "missing.jsonl"
    for command, flag in (
        ("simulate", "--trace"),
        ("simulate", "--from-recording"),
        ("plan", "--from-recording"),
    ):
        assert main((command, "llama-3.2-1b", "--hardware", "h100", flag, str(file))) == 2
        error = capsys.readouterr().err
        assert f"{flag}: {file} cannot be read: No such file or directory" in error
        assert len(error.splitlines()) == 1


def test_adapters_are_loaded_and_evicted(capsys) -> None:
    flags = ("--preset", "code", "--rate", "20", "--num-prompts", "80", "--adapters", "50")
    (many,) = figures(capsys, *flags, "--max-loras", "50", "--adapter-load-ms", "50")
    (few,) = figures(capsys, *flags, "--max-loras", "4", "--adapter-load-ms", "50")
    (none,) = figures(capsys, *flags[:-2])
    assert none["figures"]["adapter_s"]["mean"] == 0.0
    assert many["figures"]["adapter_s"]["p99"] >= 0.05
    assert few["figures"]["adapter_s"]["mean"] > many["figures"]["adapter_s"]["mean"]
    assert many["figures"]["tpot_s"]["p50"] > none["figures"]["tpot_s"]["p50"]
    assert main((*QUICK, *flags, "--num-prompts", "8")) == 0
    assert "adapter p50/p90" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tenant", "part"),
    [
        (",part=1", "needs a name"),
        ("a,part=0", "must be above 0"),
        ("a,timeout=0", "must be above 0"),
        ("a,part=x", "float"),
        ("a,colour=red", "is none of part=N"),
        ("a,class=fast", "fast"),
    ],
)
def test_bad_tenants_are_refused(capsys, tenant: str, part: str) -> None:
    assert main((*QUICK, "--tenant", tenant)) == 2
    assert part in capsys.readouterr().err


def test_a_trace_has_its_own_tenants(capsys, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    assert main((*QUICK, "--trace", str(trace), "--adapters", "3")) == 2
    assert "--tenant and --adapters are for --preset" in capsys.readouterr().err


def test_faster_hardware_and_fixed_lengths_have_their_effect(capsys) -> None:
    lengths = ("--preset", "decode-heavy", "--input", "64", "--output", "40")
    (fast,) = figures(capsys, *lengths)
    (slow,) = figures(capsys, *lengths, "--hardware", "l4")
    assert slow["figures"]["tpot_s"]["p50"] > 3 * fast["figures"]["tpot_s"]["p50"]
    assert fast["figures"]["num_requests"] == 24


def test_a_trace_is_simulated_at_its_times(capsys, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 4, "hash_ids": [1]}'
    trace.write_text("\n".join(line % (1000 * place) for place in range(6)))
    (row,) = figures(capsys, "--trace", str(trace), "--rate", "1,2")
    assert row["run"] == "mixed, 1 x trace.jsonl"
    assert row["figures"]["duration_s"] == 5.0
    (fast,) = figures(capsys, "--trace", str(trace), "--trace-speed", "10")
    assert fast["figures"]["duration_s"] == 0.5
    trace.write_text("{")
    assert main((*QUICK, "--trace", str(trace))) == 2
    assert "line 1 of the trace is not valid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--rate", "1,0"), "0 is not above 0"),
        (("--scheduling-policy", "best"), "'best' is none of mixed"),
        (("--preset", "chatt"), "did you mean chat"),
        (("--hardware", "h2000"), "--hardware h2000 is unknown"),
        (("--hardware", "h100x3"), "size of 3 does not divide the model's 32 query heads"),
    ],
)
def test_bad_input_is_one_sentence(capsys, flags, sentence) -> None:
    assert main((*QUICK, *flags)) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert len(captured.err.splitlines()) == 1


CHAIN = """
models:
  - {model: llama-3.2-1b, name: large, aliases: [default]}
  - {model: llama-3.2-3b, name: small}
routes:
  large:
    - model: small
    - upstream: https://api.example.com/v1
      model: far
"""


def test_a_fallback_chain_is_compared_with_none(capsys, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(CHAIN)
    few = ("--rate", "900", "--max-num-seqs", "2", "--max-waiting", "1", "--ttft-ms", "2000")
    without, chained = figures(capsys, *few, "--fallback", str(file))
    assert chained["run"] == f"{without['run']}, with the chain"
    assert without["fallbacks"] is None
    assert {entry["step"] for entry in chained["fallbacks"]} == {
        "model=small",
        "upstream=api.example.com/far",
    }
    assert without["figures"]["num_refused"] > chained["figures"]["num_refused"] == 0
    assert without["figures"]["attainment"] < chained["figures"]["attainment"]
    assert figures(capsys, *few) == [without]
    assert main((*QUICK, *few, "--fallback", str(file))) == 0
    printed = capsys.readouterr().out
    assert "with the chain: " in printed
    assert " times after overload" in printed


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("routes: {other: [refuse: 503]}", (), "has no route for llama-3.2-1b"),
        ("{}", (), "it has routes for nothing"),
        ("routes: {'*': [model: nothing]}", (), "nothing"),
        ("routes: {'*': [refuse: 500]}", (), "it must be 429 or 503"),
        ("routes: {'*': [refuse: 503]}", ("--replicas", "2"), "one engine of each model"),
    ],
)
def test_a_chain_that_cannot_be_simulated_is_refused(
    capsys, tmp_path: Path, content: str, flags: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(content)
    assert main((*QUICK, "--fallback", str(file), *flags)) == 2
    assert message in capsys.readouterr().err
