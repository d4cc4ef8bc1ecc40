"""The files of recordings: private, and the first ones are kept."""

import os
import stat
from pathlib import Path
from typing import cast

import pytest

from quickstep.config import RecordingConfig
from quickstep.engine.records.recording_file import RecordingFile
from quickstep.errors import ConfigError
from quickstep.text.tokenizer import Tokenizer


def recorded(path: Path, line: bytes, is_full: bool = False) -> None:
    """One life of an engine that records a line."""
    tokenizer = cast(Tokenizer, None)  # only a recording with text needs it
    file = RecordingFile.open(RecordingConfig(str(path), is_full), tokenizer)
    file._write(line)
    file.close()


def test_the_first_recordings_survive_any_number_of_restarts(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    for life in range(14):
        recorded(path, b"life %d" % life)
    kept = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    earlier = {f"traffic.jsonl.{number}": b"life %d" % (number - 1) for number in range(1, 9)}
    assert kept == {**earlier, "traffic.jsonl.9": b"life 12", "traffic.jsonl": b"life 13"}


@pytest.mark.parametrize("is_full", [False, True])
def test_only_its_owner_may_read_a_recording(tmp_path: Path, is_full: bool) -> None:
    path = tmp_path / "traffic.jsonl"
    before = os.umask(0)
    try:
        recorded(path, b"first", is_full)
        recorded(path, b"second", is_full)
    finally:
        os.umask(before)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
    assert modes == {"traffic.jsonl": 0o600, "traffic.jsonl.1": 0o600}


def test_an_empty_file_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.touch()
    recorded(path, b"first")
    assert [one.name for one in tmp_path.iterdir()] == ["traffic.jsonl"]


def test_a_recording_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        recorded(tmp_path / "none" / "traffic.jsonl", b"first")
