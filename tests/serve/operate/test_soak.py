"""Some seconds of `make soak`, so that its expectations stay those of the server."""

from __future__ import annotations

import sys

import pytest

from benchmarks import soak


def test_a_short_soak_finds_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes", "0.15", "--clients", "8"])
    status = soak.main()
    assert status == 0, capsys.readouterr().out
