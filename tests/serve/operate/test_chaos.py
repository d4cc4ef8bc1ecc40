"""Some seconds of `python -m benchmarks.chaos`: what it promises, with a few faults of each kind.

In a process of its own: as root it has mounts of its own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos.answers import read_answer
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.run import overlap_s
from benchmarks.chaos.sites import SITES

ROOT = Path(__file__).parents[3]
SECONDS = ("--seconds", "8", "--clients", "5", "--pool", "14", "--every", "0.4", "--seed", "48")
FEW = {
    "replicas": ("killed", "until it is replaced", "hour", "the ledger", "descriptors"),
    "hosts": ("host", "to an engine", "an engine is killed"),
    "models": ("model", "an engine is killed"),
}


@pytest.mark.parametrize("site", SITES)
def test_every_promise_is_kept_for_some_seconds(site: str) -> None:
    few = ("--site", site, "--only", *FEW[site])
    command = [sys.executable, "-m", "benchmarks.chaos", "--untimed", *SECONDS, *few]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every promise was kept" in done.stdout


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {site for fault in FAULTS for site in fault.sites} == set(SITES)


def test_a_time_that_two_faults_took_counts_once() -> None:
    assert overlap_s([(1.0, 3.0), (2.0, 4.0), (6.0, 9.0)], 0.0, 7.0) == 4.0
    assert overlap_s([(1.0, 3.0)], 3.5, 7.0) == 0.0


@pytest.mark.parametrize("cuts", [(0, 9), (0, 1, 2, 9), (0, 4, 9)])
def test_answers_do_not_depend_on_where_a_stream_was_cut_into_chunks(cuts: tuple[int, ...]) -> None:
    text = "abcdefghi"
    parts = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    chunks = [f'{{"id": "x", "choices": [{{"index": 0, "text": "{part}"}}]}}' for part in parts]
    chunks.append('{"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}')
    body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode()
    answer = read_answer("completions", streams=True, body=body)
    complete = read_answer(
        "completions",
        streams=False,
        body=b'{"choices": [{"index": 0, "text": "abcdefghi", "finish_reason": "length"}]}',
    )
    assert answer.is_over and answer.texts == [text]
    assert answer.content == complete.content
    assert not read_answer("completions", streams=True, body=body[:-12]).is_over
