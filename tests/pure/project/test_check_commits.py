"""The check of commit messages."""

from __future__ import annotations

from pathlib import Path

import check_commits
import pytest

GOOD = "Add a thing\n\nIt was missing. Checked: by hand.\n"
BAD = {
    "no body": "Add a thing\n",
    "not empty": "Add a thing\nat once\n",
    "73 characters": "x" * 73 + "\n\nWhy.\n",
}


def test_a_good_message_passes(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(GOOD + "# a comment of git\n")
    assert check_commits.main([str(message)]) == 0


@pytest.mark.parametrize("why", BAD)
def test_a_fault_is_named(why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = tmp_path / "message"
    message.write_text(BAD[why])
    assert check_commits.main([str(message)]) == 1
    assert why in capsys.readouterr().out
