"""`quickstep usage`: every form of its output, and what it refuses."""

import csv
import io
import json
from pathlib import Path

import pytest
from ledger_rows import DAY_NS, ROW, written
from msgspec.structs import replace

from quickstep.cli.main import main


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    path = tmp_path / "usage.db"
    bob = replace(ROW, request_id="request-1", key_name="bob", finished_ns=20_001 * DAY_NS)
    written(path, [ROW, replace(ROW, sequence_index=1), bob])
    return str(path)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["usage", *arguments]) == 0
    return capsys.readouterr().out


def test_json_has_a_row_per_group(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    ann, bob = json.loads(output(capsys, "--db", ledger, "--by", "key,day", "--format", "json"))
    assert ann == {
        "key": "ann",
        "day": "2024-10-04",
        "sequences": 2,
        "prompt_tokens": 200,
        "cached_tokens": 80,
        "output_tokens": 14,
        "queue_s": 2e-9,
        "prefill_s": 4e-8,
        "decode_s": 6e-7,
        "device_s": 8e-6,
        "cost_by_tokens_usd": 1e-8,
        "cost_by_device_usd": 1.2e-7,
    }
    assert (bob["key"], bob["day"], bob["sequences"]) == ("bob", "2024-10-05", 1)


def test_rows_that_wait_for_the_next_server_are_reported(
    ledger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{ledger}.unwritten-1").write_bytes(b"")
    assert main(["usage", "--db", ledger]) == 0
    assert "usage.db.unwritten-1 has more rows" in capsys.readouterr().err


def test_csv_has_the_same_rows(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--db", ledger, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["key"], row["sequences"]) for row in rows] == [("ann", "2"), ("bob", "1")]


def test_a_table_fits_100_columns(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--db", ledger, "--by", "key,day")
    assert "ann   2024-10-04           2      200       80       14      0.000" in text
    assert max(map(len, text.splitlines())) <= 100


def test_times_limit_the_rows(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--db", ledger, "--by", "", "--format", "json"]
    for more, num_sequences in (
        (["--since", "2024-10-05"], 1),
        (["--until", "2024-10-05"], 2),
        (["--since", "2024-10-05T01:00+01:00"], 1),
        (["--since", "2024-10-05T00:00:01"], 0),
    ):
        (total,) = json.loads(output(capsys, *options, *more))
        assert total["sequences"] == num_sequences


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "user"], "'user' is none of key, model"),
        (["--by", "key,key"], "names a group twice"),
        (["--since", "yesterday"], "'yesterday' is no date or time"),
        (["--format", "xml"], "invalid choice: 'xml'"),
    ],
)
def test_bad_arguments_are_one_sentence(
    ledger: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--db", ledger, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_missing_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--db", str(tmp_path / "none.db")]) == 2
    assert "there is no usage database" in capsys.readouterr().err
