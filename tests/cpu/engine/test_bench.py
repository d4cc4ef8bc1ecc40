"""`quickstep bench`: what it prints, on a shape and on a checkpoint. No speed is asserted."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from tiny_checkpoint import write_checkpoint

from quickstep.bench import traffic
from quickstep.bench.limits import TorchLimits
from quickstep.bench.measured_engine import (
    RequestTimes,
    TimedModel,
    TokenArrival,
    artificial_tokenizer,
    with_kernel_clock,
)
from quickstep.bench.shapes import SHAPES
from quickstep.bench.step import decode_times
from quickstep.bench.traffic import ThroughputOptions, random_lengths
from quickstep.cli.main import main
from quickstep.errors import EngineError
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.spec import parse_spec
from quickstep.ops.reference import reference_ops

CPU = torch.device("cpu")
STEP = ["bench", "step", "--repeats", "2", "--steps", "4", "--probe-bytes", "4M"]
SMALL = ["--context", "40", "--prefill", "48"]


def printed(capsys, *arguments):
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def report(capsys, *arguments):
    return json.loads(printed(capsys, *arguments, "--json"))


@pytest.mark.parametrize("flags", [[], ["--batch", "3", "--pipeline-depth", "2"]])
def test_a_step_on_a_shape_has_times_and_fractions_of_limits(capsys, flags):
    found = report(capsys, *STEP, *SMALL, "--shape", "tiny2", *flags)
    for name in ("decode_ms", "prefill_ms", "read_gb_per_s", "peak_tflops"):
        assert found[name] > 0
    for name in found["spread"]:
        low, high = found["spread"][name]
        assert low <= found[name] <= high
    # A model in the cache may beat the memory, never by much here: a step is overhead.
    assert 0 < found["decode_bandwidth_share"] < 1.5
    assert 0 < found["prefill_peak_share"] < 1.5
    # A kernel that runs across a token's arrival counts where it ends, so no lower bound is sure.
    assert found["overhead_us"] < 1e3 * found["decode_ms"]
    assert found["model"] == "tiny2"
    assert found["dtype"] == "bfloat16"
    assert found["threads"] == torch.get_num_threads()
    assert {"cpu", "torch", "python", "quickstep", "load_average"} <= set(found["machine"])
    assert set(found["measured_how"]) == {"read", "peak", "overhead"}


def test_a_step_at_a_depth_has_its_ratio_to_the_other_one(capsys):
    found = report(capsys, *STEP, *SMALL, "--shape", "tiny2", "--depth", "96")
    assert found["depth"] == 96
    low, high = found["spread"]["depth_ratio"]
    assert 0 < low <= found["depth_ratio"] <= high
    assert low <= found["spread"]["depth_decode_ms"][1] / found["spread"]["decode_ms"][0]


@pytest.mark.parametrize(
    ("weights", "dtype", "quantization"),
    [("int8", "bfloat16", "int8"), ("int4", "bfloat16", "int4"), ("fp32", "float32", None)],
)
def test_a_step_names_the_weights_it_ran_on(capsys, weights, dtype, quantization):
    found = report(capsys, *STEP, *SMALL, "--shape", "tiny2", "--weights", weights)
    assert (found["dtype"], found["quantization"]) == (dtype, quantization)
    counted = "int8" if quantization else dtype
    assert counted in found["measured_how"]["peak"]
    assert 0 < found["decode_bandwidth_share"] < 1.5
    assert 0 < found["prefill_peak_share"] < 1.5


def test_a_batch_whose_first_prompts_take_longer_than_its_decoding_is_measured(capsys):
    flags = ["--batch", "6", "--context", "40", "--prefill", "16"]
    found = report(capsys, *STEP, *flags, "--shape", "tiny2", "--max-num-batched-tokens", "16")
    assert found["decode_ms"] > 0


def test_a_step_on_a_checkpoint_and_as_a_table(capsys, tmp_path):
    path = str(write_checkpoint(tmp_path / "tiny"))
    text = printed(capsys, *STEP, *SMALL, path, "--dtype", "float32", "--threads", "1")
    for shown in ("decode_ms", "prefill_peak_share", "overhead_us", "threads: 1", "model: tiny"):
        assert shown in text


def test_latency_has_first_token_and_gap(capsys):
    flags = ["--shape", "tiny2", "--repeats", "2", "--input-len", "20", "--output-len", "5"]
    found = report(capsys, "bench", "latency", *flags)
    assert 0 < found["ttft_ms"] < found["end_to_end_ms"]
    assert found["tpot_ms"] > 0
    assert (found["input_len"], found["output_len"]) == (20, 5)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("latency", ["--input-len", "20", "--output-len", "5"]),
        ("throughput", ["--num-prompts", "1", "--max-len", "24"]),
    ],
)
def test_an_interrupted_measurement_prints_its_complete_repeats(capsys, monkeypatch, kind, flags):
    num_runs = 0
    run_request = traffic.run_request

    async def interrupted(*arguments):
        nonlocal num_runs
        num_runs += 1
        if num_runs == 4:  # one to warm up, two repeats
            signal.raise_signal(signal.SIGINT)
        return await run_request(*arguments)

    monkeypatch.setattr(traffic, "run_request", interrupted)
    command = ["bench", kind, "--shape", "tiny2", "--repeats", "5", *flags]
    assert main([*command, "--json"]) == 130
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["spread"]) > 2
    assert "interrupted: these are 2 of 5 repeats" in printed.err
    num_runs = 3
    assert main(command) == 130  # nothing was complete
    assert capsys.readouterr().out == ""


def test_latency_of_one_token_has_no_gap(capsys):
    flags = ["--shape", "tiny2", "--repeats", "1", "--input-len", "5", "--output-len", "1"]
    assert "tpot_ms" not in report(capsys, "bench", "latency", *flags)


def test_throughput_counts_the_requested_tokens(capsys):
    flags = ["--shape", "tiny2", "--repeats", "1", "--num-prompts", "6", "--max-len", "24"]
    found = report(capsys, "bench", "throughput", *flags)
    lengths = random_lengths(ThroughputOptions(num_requests=6, max_len=24))
    assert found["output_tokens"] == sum(length.num_outputs for length in lengths)
    rate = found["output_tokens"] / found["wall_s"]
    assert found["output_tokens_per_s"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["step", "--shape", "qwen"], "qwen2.5-0.5b"),
        (["step", "demo", "--shape", "tiny2"], "both a MODEL and --shape"),
        (["step", "--shape", "tiny2", "--batch", "0"], "below 1"),
        (["step", "--shape", "tiny2", "--steps", "1"], "--steps is 1"),
        (["step", "--shape", "tiny2", "--depth", "64", "--profile"], "--depth"),
        (["latency", "--shape", "tiny2", "--batsch", "3"], "no flag --batsch"),
        (["latency", "--shape", "tiny2", "--input-len", "5000"], "5000"),
        (["speed"], "invalid choice: 'speed'"),
        ([], "KIND"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(capsys, flags, message):
    assert main(["bench", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_lengths_of_requests_are_a_function_of_the_seed():
    one = random_lengths(ThroughputOptions(seed=1))
    assert one == random_lengths(ThroughputOptions(seed=1))
    assert one != random_lengths(ThroughputOptions(seed=2))
    assert len({length.num_inputs for length in one}) > 20


def tiny(seed=0, dtype=torch.float32):
    spec = parse_spec(SHAPES["tiny2"])
    return random_model(spec, reference_ops(), RandomValues(dtype, CPU, seed), 256)


def test_random_weights_are_a_function_of_the_seed():
    one, same, other = tiny(0), tiny(0), tiny(1)
    assert one.fingerprint == same.fingerprint != other.fingerprint
    token_ids = torch.arange(one.vocab_size)
    rows = [
        model.ops.embedding(token_ids, model.weights.embed_tokens, torch.float32)
        for model in (one, same, other)
    ]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


def test_every_shape_is_a_model_that_can_be_read():
    for name, shape in SHAPES.items():
        spec = parse_spec(shape)
        assert spec.native, name
        assert spec.tied is shape["tie_word_embeddings"], name


def test_an_artificial_vocabulary_reads_every_token_as_its_number():
    tokenizer = artificial_tokenizer(300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([0, 255, 299]) == " 0 ff 12b"
    assert tokenizer.eos_token_ids == frozenset()


def times(*arrivals):
    return RequestTimes(0.0, tuple(TokenArrival(*arrival) for arrival in arrivals))


def test_a_step_is_the_gap_in_which_all_decode_and_overhead_is_what_kernels_leave():
    early = times((1.0, 0.0, 1), (9.0, 5.0, 1), (11.0, 6.0, 1), (13.0, 7.0, 1), (14.5, 8.0, 1))
    late = times((8.5, 4.9, 1), (10.5, 6.0, 1), (13.5, 7.0, 1), (30.0, 20.0, 1))
    assert decode_times([early, late]) == (2.0, 1.0)


def test_two_tokens_at_once_are_two_steps():
    assert decode_times([times((1.0, 0.0, 1), (5.0, 2.0, 2))]) == (2.0, 1.0)


def test_requests_that_never_decode_together_are_an_error():
    with pytest.raises(EngineError, match="never decoded together"):
        decode_times([times((1.0, 0.0, 1), (2.0, 0.0, 1)), times((3.0, 0.0, 1), (4.0, 0.0, 1))])


class Ticks:
    """A clock that advances by one second with every reading."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_torchs_limits_are_amounts_over_time():
    limits = TorchLimits(CPU, torch.float32, 4096, Ticks())
    assert limits.read_bytes_per_s() == 4096
    assert limits.flops_per_s() == 2.0 * 2048**3


def test_a_model_without_counting_kernels_counts_its_calls():
    model, busy_s, how = with_kernel_clock(tiny(), Ticks())
    assert isinstance(model, TimedModel)
    assert how == "model.forward and model.logits"
    model.logits(torch.zeros(1, 64))
    assert busy_s() == 1.0
