"""The ledger: rows survive a kill, totals are exact, other files are refused."""

import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from ledger_rows import DAY_NS, ROW, written
from msgspec.structs import astuple, replace

from quickstep.errors import ConfigError
from quickstep.server.usage.ledger import Ledger, check_ledger, usage_totals


def test_closing_commits_every_row(tmp_path: Path) -> None:
    path = tmp_path / "usage?.db"
    written(path, [replace(ROW, request_id=f"request-{number}") for number in range(1000)])
    (totals,) = usage_totals(path)
    assert (totals.num_sequences, totals.num_output_tokens) == (1000, 7000)
    assert (totals.device_ns, totals.cost_by_tokens_nusd) == (4_000_000, 5000)


def test_a_ledger_reads_what_other_servers_add_and_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    written(path, [ROW])
    one, other = Ledger(path, commit_every_s=0.01), Ledger(path, commit_every_s=0.01)
    one.open()
    other.open()
    try:
        for ledger, count in ((one, 3), (other, 5)):
            for _ in range(count):
                ledger.add(replace(ROW, key_name="bob"))
        read = {one: 0, other: 0}
        deadline = time.monotonic() + 30
        while read != {one: 5, other: 3}:
            assert time.monotonic() < deadline, read
            for ledger in read:
                for totals in ledger.take_others():
                    assert totals.group == ("bob",)
                    assert totals.num_output_tokens == 7 * totals.num_sequences
                    read[ledger] += totals.num_sequences
        assert one.totals("bob", 0).num_sequences == 0  # of before
        assert one.totals("ann", 0).num_sequences == 1
    finally:
        one.close()
        other.close()
    assert usage_totals(path)[0].num_sequences == 9


def test_requests_with_the_same_id_all_count(tmp_path: Path) -> None:
    """A client may send any id, and ids begin again when a server starts again."""
    path = tmp_path / "usage.db"
    written(path, [ROW, ROW])
    written(path, [ROW])
    assert usage_totals(path)[0].num_sequences == 3


def test_a_transaction_that_is_tried_again_adds_no_row_twice(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    ledger = Ledger(path)
    rows = [(ledger._run, number, *astuple(ROW)) for number in range(3)]
    check_ledger(path)
    with closing(sqlite3.connect(path)) as connection:
        for num_rows in (2, 3, 3):
            assert ledger._commit(connection, rows[:num_rows])
    assert usage_totals(path)[0].num_sequences == 3


def test_a_file_without_rows_has_totals_of_zero(tmp_path: Path) -> None:
    check_ledger(tmp_path / "usage.db")
    (totals,) = usage_totals(tmp_path / "usage.db")
    assert (totals.num_sequences, totals.num_prompt_tokens, totals.group) == (0, 0, ())
    assert usage_totals(tmp_path / "usage.db", ["key"]) == []


def test_totals_by_key_and_day_add_up_to_the_total(tmp_path: Path) -> None:
    path, source = tmp_path / "usage.db", random.Random(7)
    rows = [
        replace(
            ROW,
            request_id=f"request-{number}",
            key_name=source.choice(["ann", "bob"]),
            finished_ns=20_000 * DAY_NS + source.randrange(3 * DAY_NS),
            num_output_tokens=source.randrange(100),
            cost_by_tokens_nusd=source.randrange(10**12),
        )
        for number in range(300)
    ]
    written(path, rows)
    groups = usage_totals(path, ["key", "day"])
    assert [group.group for group in groups] == [
        (key, f"2024-10-0{day}") for key in ("ann", "bob") for day in (4, 5, 6)
    ]
    for group in groups:
        day = 20_000 + int(group.group[1][-1]) - 4
        own = [
            row
            for row in rows
            if row.key_name == group.group[0] and row.finished_ns // DAY_NS == day
        ]
        assert group.num_sequences == len(own)
        assert group.cost_by_tokens_nusd == sum(row.cost_by_tokens_nusd for row in own)
    (total,) = usage_totals(path)
    assert total.cost_by_tokens_nusd == sum(row.cost_by_tokens_nusd for row in rows)
    since, until = 20_001 * DAY_NS, 20_002 * DAY_NS
    (ann,) = usage_totals(path, since_ns=since, until_ns=until, key_name="ann")
    assert replace(ann, group=("ann", "2024-10-05")) == groups[1]


CHILD = """
import itertools, sys, time
from pathlib import Path
from msgspec.structs import replace
import msgspec
from quickstep.server.usage.ledger import Ledger, LedgerRow
row = msgspec.json.decode(sys.argv[2], type=LedgerRow)
ledger = Ledger(Path(sys.argv[1]), commit_every_s=0.02)
ledger.open()
for number in itertools.count():
    ledger.add(replace(row, request_id=f"request-{number}", num_output_tokens=number))
    if number % 500 == 0:
        print(number, flush=True)
        time.sleep(0.001)  # a turn for the thread that commits: else its first rows are very many
"""


def test_a_killed_writer_leaves_exact_totals_of_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    arguments = [sys.executable, "-c", CHILD, str(path), msgspec.json.encode(ROW).decode()]
    child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        while not path.exists() or not _num_rows(path):
            assert child.stdout.readline(), "the writer ended"
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    (totals,) = usage_totals(path)
    num_rows = totals.num_sequences
    assert num_rows > 0
    # rows are committed in order: exactly the first ones are there, each once
    assert totals.num_output_tokens == num_rows * (num_rows - 1) // 2
    assert totals.num_prompt_tokens == 100 * num_rows
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    written(path, [ROW])  # the next start continues the file
    assert usage_totals(path)[0].num_sequences == num_rows + 1


def _num_rows(path: Path) -> int:
    try:
        return usage_totals(path)[0].num_sequences
    except ConfigError:  # not created completely
        return 0


def test_rows_are_committed_while_the_ledger_is_open(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    ledger = Ledger(path, commit_every_s=0.01)
    ledger.open()
    try:
        ledger.add(ROW)
        deadline = time.monotonic() + 30
        while not usage_totals(path)[0].num_sequences:
            assert time.monotonic() < deadline
    finally:
        ledger.close()
    later = Ledger(path)
    later.open()
    assert later.totals("ann", ROW.finished_ns).num_sequences == 1
    assert later.totals("ann", ROW.finished_ns + 1).num_sequences == 0
    assert later.totals("bob", 0).num_sequences == 0
    later.close()


def test_a_row_that_cannot_be_stored_does_not_end_the_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.db"
    ledger = Ledger(path, commit_every_s=0.01)
    ledger.open()
    ledger.add(replace(ROW, device_ns=2**63))
    deadline = time.monotonic() + 30
    while "a row cannot be stored" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    ledger.add(ROW)
    ledger.close()
    assert usage_totals(path)[0].num_sequences == 1


def test_rows_are_kept_while_the_file_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quickstep.server.usage.ledger._BUSY_S", 0.01)
    path = tmp_path / "usage.db"
    ledger = Ledger(path, commit_every_s=0.01)
    ledger.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        ledger.add(ROW)
        deadline = time.monotonic() + 30
        while "1 rows cannot be written" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        other.execute("ROLLBACK")
    ledger.close()
    assert usage_totals(path)[0].num_sequences == 1


def test_rows_that_come_while_commits_fail_are_all_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows before, between and after failed commits: two with one number would be one row."""
    monkeypatch.setattr("quickstep.server.usage.ledger._BUSY_S", 0.001)
    caplog.set_level(logging.DEBUG, "quickstep.server")
    path = tmp_path / "usage.db"
    ledger = Ledger(path, commit_every_s=0.001)
    ledger.open()
    ledger.add(ROW)
    deadline = time.monotonic() + 30
    while usage_totals(path)[0].num_sequences < 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(1, 4):
            ledger.add(replace(ROW, num_output_tokens=10**number))
            while f"{number} rows cannot be written" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        other.execute("ROLLBACK")
    ledger.add(replace(ROW, num_output_tokens=10**4))
    ledger.close()
    # the log of a disk that is full for a night says it once, and when it is over
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.levelname for record in said] == ["ERROR", "WARNING"]
    assert "rows were written" in said[1].getMessage()
    (totals,) = usage_totals(path)
    assert (totals.num_sequences, totals.num_output_tokens) == (5, ROW.num_output_tokens + 11110)


@pytest.mark.parametrize("bad", [{"device_ns": 2**63}, {"request_id": "\ud800"}])
def test_a_row_that_cannot_be_stored_takes_no_other_with_it(
    tmp_path: Path, bad: dict[str, int | str]
) -> None:
    path = tmp_path / "usage.db"
    rows = [replace(ROW, num_output_tokens=number) for number in range(9)]
    written(path, [*rows[:4], replace(ROW, **bad), *rows[4:]])  # type: ignore[arg-type]
    (totals,) = usage_totals(path)
    assert (totals.num_sequences, totals.num_output_tokens) == (9, 36)


@pytest.mark.parametrize("name", ["usage.db", "usage[1]*.db"])
def test_rows_that_a_lock_keeps_out_until_the_end_are_inserted_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("quickstep.server.usage.ledger._BUSY_S", 0.01)
    path = tmp_path / name
    first, second = Ledger(path), Ledger(path)
    first.open()
    second.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        first.add(ROW)
        second.add(replace(ROW, key_name="bob"))
        first.close()
        second.close()
        other.execute("ROLLBACK")
    kept = [one for one in tmp_path.iterdir() if "unwritten" in one.name]
    assert len(kept) == 2
    assert {one.stat().st_mode & 0o777 for one in kept} == {0o600}
    later = Ledger(path)
    later.open()
    assert [later.totals(key, 0).num_sequences for key in ("ann", "bob")] == [1, 1]
    assert later.take_others() == []
    later.close()
    written(path, [])
    assert usage_totals(path)[0].num_sequences == 2
    assert [one for one in tmp_path.iterdir() if "unwritten" in one.name] == []


def test_unwritten_rows_that_cannot_be_read_are_reported_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torn = tmp_path / "usage.db.unwritten-1"
    torn.write_bytes(b"torn")
    written(tmp_path / "usage.db", [ROW])
    assert usage_totals(tmp_path / "usage.db")[0].num_sequences == 1
    assert "cannot be read" in caplog.text
    assert torn.exists()


@pytest.mark.parametrize("is_moved", [True, False])
def test_usage_goes_into_a_new_file_when_the_ledger_was_moved_or_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_moved: bool
) -> None:
    path, moved = tmp_path / "usage.db", tmp_path / "moved.db"
    ledger = Ledger(path, commit_every_s=0.01)
    ledger.open()
    ledger.add(ROW)
    deadline = time.monotonic() + 30
    while not _num_rows(path):
        assert time.monotonic() < deadline
    if is_moved:
        path.rename(moved)
    else:
        path.unlink()
    while "was moved or deleted" not in caplog.text:  # without a request
        assert time.monotonic() < deadline
        time.sleep(0.001)
    ledger.add(replace(ROW, key_name="bob"))
    ledger.close()
    assert [one.group for one in usage_totals(path, ["key"])] == [("bob",)]
    if is_moved:
        assert [one.group for one in usage_totals(moved, ["key"])] == [("ann",)]


def test_rows_wait_while_there_can_be_no_new_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, moved = tmp_path / "usage", tmp_path / "moved"
    folder.mkdir()
    ledger = Ledger(folder / "usage.db", commit_every_s=0.01)
    ledger.open()
    folder.rename(moved)
    ledger.add(ROW)
    deadline = time.monotonic() + 30
    while "there can be no new one" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    ledger.close()
    assert usage_totals(moved / "usage.db")[0].num_sequences == 1


def test_only_its_owner_may_read_a_ledger(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    before = os.umask(0)
    ledger = Ledger(path, commit_every_s=0.01)
    try:
        ledger.open()
        modes = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.iterdir()}
    finally:
        os.umask(before)
        ledger.close()
    assert set(modes.values()) == {0o600}, modes


def test_files_that_are_no_ledger_are_refused_in_one_sentence(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("no database, but long enough to be read as a header of one " * 10)
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE other (x)")
    newer = tmp_path / "newer.db"
    check_ledger(newer)
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for path, message in (
        (text, "not a database"),
        (foreign, "another program"),
        (newer, "version 99 of the schema"),
        (tmp_path / "no" / "folder.db", "unable to open"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_ledger(path)
    for path, message in (
        (text, "not a database"),
        (foreign, "another program"),
        (tmp_path / "none.db", "there is no usage database"),
    ):
        with pytest.raises(ConfigError, match=message):
            usage_totals(path)
