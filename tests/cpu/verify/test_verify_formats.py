"""`quickstep verify --formats`: pairs of weight and KV formats, each verified, any may fail."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from quickstep.cli.flags.quantization import KV_FORMATS, WEIGHT_FORMATS, FormatPair, format_pairs
from quickstep.cli.main import main
from quickstep.config import KV_DTYPES, QUANTIZATIONS
from quickstep.ops import resolve
from quickstep.ops.table import OpTable
from quickstep.ops.weights import LinearWeight

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("formats"))


def test_all_is_every_weight_format_over_every_kv_format() -> None:
    pairs = format_pairs("all")
    assert len(pairs) == len(set(pairs)) == len(WEIGHT_FORMATS) * len(KV_FORMATS)
    assert {WEIGHT_FORMATS[pair.weights].quantization for pair in pairs} == {None, *QUANTIZATIONS}
    assert {KV_FORMATS[pair.kv] for pair in pairs} == set(KV_DTYPES)


def test_a_weight_format_by_itself_means_every_kv_format_and_duplicates_are_dropped() -> None:
    pairs = format_pairs("int8/int8,bf16,int8/int8")
    assert pairs[0] == FormatPair("int8", "int8")
    assert pairs[1:] == tuple(FormatPair("bf16", kv) for kv in KV_FORMATS)


@pytest.mark.parametrize(
    ("text", "named"), [("int3", "weights"), ("int8/int3", "KV"), ("", "weights"), ("all,", "all")]
)
def test_an_unknown_format_is_named(text: str, named: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=named):
        format_pairs(text)


def test_each_pair_is_verified_in_its_own_format(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    formats = "bf16/int8,bf16/fp8,fp16/fp32,int4/auto"
    flags = ["--requests", "4", "--threads", "1", "--formats", formats]
    assert main(["verify", str(checkpoint), *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["formats"]
    assert [(one["weights"], one["kv"]) for one in found] == [
        ("bf16", "int8"),
        ("bf16", "fp8"),
        ("fp16", "fp32"),
        ("int4", "auto"),
    ]
    assert all(one["comparisons"] >= 4 and one["mismatches"] == 0 for one in found)
    assert len({one["fingerprint"] for one in found}) == len(found)


def test_one_mismatch_fails_the_command_and_its_format_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = bits_of_halves_depend_on_rows(resolve.resolve_ops(CPU))
    monkeypatch.setattr(resolve, "resolve_ops", lambda *_: table)
    flags = ["--requests", "4", "--threads", "1", "--formats", "fp32/auto,fp16/auto"]
    assert main(["verify", str(checkpoint), *flags]) == 1
    output = capsys.readouterr().out
    assert "fp16 over auto KV: first mismatch" in output
    assert "fp32 over auto KV" not in output
    assert "2 formats" in output


def bits_of_halves_depend_on_rows(ops: OpTable) -> OpTable:
    def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        out = ops.linear(x, weight)
        return out * 1.01 if out.dtype == torch.float16 and len(x) > 1 else out

    return replace(ops, linear=linear, steps=None)


def test_formats_with_a_flag_that_it_replaces_are_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--formats", "bf16", "--dtype", "float16"]
    assert main(["verify", str(checkpoint), *flags]) == 2
    assert "--formats replaces --dtype" in capsys.readouterr().err
