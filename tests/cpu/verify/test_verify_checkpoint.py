"""`quickstep verify` on a real decoder: sound ops pass, plain torch products are caught."""

import itertools
import json

import pytest
import torch
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from quickstep.cli.main import main
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops import resolve
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.weights import LinearWeight
from quickstep.text.output_text import OutputText
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import FinishReason
from quickstep.verify import checker
from quickstep.verify.checker import verify
from quickstep.verify.report import VerifyOptions, VerifyReport

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def plain_linear(table):
    """The ops with torch's own matrix product, whose bits depend on the number of rows."""
    return replace(
        table,
        name="plain",
        pack_linear=lambda weight, bias: LinearWeight(weight, bias, *weight.shape, weight.nbytes),
        linear=lambda x, weight: torch.nn.functional.linear(x, weight.data, weight.bias),
        load_linear=None,
    )


def load(path, ops, dtype="float32"):
    config = LoadConfig(model=str(path), dtype=dtype)
    found = find_checkpoint(config)
    return load_model(found, read_spec(found.path), ops, config)


@pytest.mark.parametrize(("kernels", "num_requests"), [("native", 24), ("reference", 8)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decoder_gives_the_same_bits_in_any_batch_and_thread_count(
    checkpoint, dtype, kernels, num_requests
):
    options = VerifyOptions(num_requests=num_requests, seed=2, threads=(1, 2))
    loaded = []

    def on(threads):
        loaded.append(threads)
        return load(checkpoint, resolve_ops(CPU, kernels, threads), dtype)

    report = verify(on, options)
    assert loaded == [1, 2]
    assert report.first_mismatch is None
    assert report.mismatches == 0
    assert report.comparisons > 2 * num_requests


def test_a_product_whose_bits_depend_on_the_number_of_rows_is_caught(checkpoint):
    model = load(checkpoint, plain_linear(resolve_ops(CPU)))
    report = verify(lambda _: model, VerifyOptions(num_requests=20, seed=2, threads=(1,)))
    assert report.mismatches > 0
    assert report.first_mismatch.expected_logprobs != report.first_mismatch.got_logprobs


def test_the_command_reports_as_json_and_exits_0(checkpoint, capsys):
    flags = ["--requests", "8", "--seed", "3", "--threads", "1", "--json"]
    assert main(["verify", str(checkpoint), *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mismatches"] == 0
    assert report["comparisons"] >= 8
    assert (report["num_requests"], report["seed"], report["threads"]) == (8, 3, [1])


def test_the_command_prints_a_line_after_every_batch_and_ends_when_its_time_is_over(
    checkpoint, capsys
):
    flags = ["--requests", "40", "--threads", "1", "--json-lines", "--seconds", "0.001"]
    assert main(["verify", str(checkpoint), *flags]) == 0
    batch, report = map(json.loads, capsys.readouterr().out.splitlines())
    assert batch["comparisons"] == report["comparisons"] < 40
    assert report["mismatches"] == batch["mismatches"] == 0


@pytest.mark.parametrize("formats", [(), ("--formats", "bf16/auto,int8/auto")])
def test_an_interrupted_verification_prints_what_it_has_compared(
    checkpoint, capsys, monkeypatch, formats
):
    def interrupted(*arguments, load_divided):
        *_, after_group = arguments
        report = VerifyReport(VerifyOptions(num_requests=8, threads=(1,)))
        assert after_group("batched", report)
        raise KeyboardInterrupt

    monkeypatch.setattr(checker, "verify", interrupted)
    assert main(["verify", str(checkpoint), "--threads", "1", *formats]) == 130
    printed = capsys.readouterr()
    assert "0 comparisons, 0 mismatches" in printed.out
    assert "interrupted: this is what was compared until then" in printed.err


def test_stop_strings_are_compared_where_there_is_a_tokenizer(checkpoint, monkeypatch):
    model = load(checkpoint, resolve_ops(CPU))
    options = VerifyOptions(num_requests=120, seed=4, threads=(1,))

    def stopped():
        tokenizer = Tokenizer.open(checkpoint)
        return verify(lambda _: model, options, frozenset(), tokenizer=tokenizer)

    report = stopped()
    assert report.mismatches == 0
    assert sum(counts.runs.stop_strings for counts in report.scenarios.values()) > 5

    whole = OutputText.advance
    num_seen = itertools.count()

    def late(text, output):
        """Now and then the stop is not seen."""
        delta = whole(text, output)
        is_stop = delta.finish_reason is FinishReason.STOP_STRING
        is_missed = is_stop and next(num_seen) % 8 == 7
        return replace(delta, finish_reason=output.finish_reason) if is_missed else delta

    monkeypatch.setattr(OutputText, "advance", late)
    assert stopped().mismatches > 0


def test_the_command_exits_1_on_a_mismatch_and_shows_the_first(checkpoint, capsys, monkeypatch):
    table = plain_linear(resolve_ops(CPU))
    monkeypatch.setattr(resolve, "resolve_ops", lambda *_: table)
    flags = ["--requests", "8", "--threads", "1", "--dtype", "float32"]
    assert main(["verify", str(checkpoint), *flags]) == 1
    output = capsys.readouterr().out
    assert "first mismatch: r" in output
    assert " 0 mismatches" not in output


@pytest.mark.parametrize(
    "arguments",
    [
        ["/no/such/model"],
        ["--requests", "0"],
        ["--threads", "0"],
        ["--threads", "1,x"],
        ["--dtype", "int3"],
        ["--block-size", "12"],
        ["--request", "5"],
    ],
)
def test_bad_input_exits_2_with_one_sentence(arguments, checkpoint, capsys):
    model = [] if arguments[0].startswith("/") else [str(checkpoint)]
    assert main(["verify", *model, *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.strip().splitlines()) == 1
