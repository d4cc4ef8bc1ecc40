"""The probes of the machine: every byte is read, operations are counted. No speed is asserted."""

from __future__ import annotations

import json
import time

import pytest
import torch

from quickstep.bench.limits import NativeLimits, open_limits
from quickstep.cli.main import main
from quickstep.errors import ConfigError, EngineError
from quickstep.ops.native.backend import NativeProbe, load_native, load_probe, native_status

LEVELS = native_status().levels
MIB = 2**20


def probe(isa: str, num_bytes: int = 4 * MIB, num_threads: int = 2) -> NativeProbe:
    loaded = load_probe(num_bytes, num_threads, isa)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("num_bytes", [1, 512 * 1024, 3 * MIB + 1])
def test_a_read_touches_every_byte(isa: str, num_bytes: int) -> None:
    one = probe(isa, num_bytes)
    assert num_bytes <= one.num_bytes < num_bytes + MIB
    assert one.isa == isa
    assert one.read() == one.read() == one.num_bytes // 4 * 0x01010101 % 2**32


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_multiplications_are_counted_and_take_time(isa: str, dtype: torch.dtype) -> None:
    one = probe(isa)
    started = time.perf_counter()
    num_flops = one.multiply(dtype, 1000)
    seconds = time.perf_counter() - started
    assert one.multiply(dtype, 3000) == 3 * num_flops
    assert num_flops > 0
    assert 0 < num_flops / seconds < float("inf")


def test_twice_the_threads_do_twice_the_work() -> None:
    one, two = (probe("", num_threads=count) for count in (1, 2))
    assert two.multiply(torch.float32, 10) == 2 * one.multiply(torch.float32, 10)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(EngineError):
        probe("").multiply(torch.float32, 0)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="QUICKSTEP_CPU_ISA"):
        load_probe(MIB, 1, "abacus")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_kernel_seconds_grow_with_kernels_and_only_with_them(num_threads: int) -> None:
    ops = load_native(num_threads)
    assert ops is not None and ops.kernel_s is not None
    packed = ops.pack_linear(torch.ones(600, 300), None)
    before = ops.kernel_s()
    started = time.perf_counter()
    for _ in range(20):
        ops.linear(torch.ones(1, 300), packed)
    elapsed = time.perf_counter() - started
    after = ops.kernel_s()
    assert 0 < after - before <= elapsed
    torch.ones(600, 300) @ torch.ones(300, 300)
    assert ops.kernel_s() == after


class Ticks:
    """A clock that advances by one second with every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_limits_on_a_cpu_are_the_probes_amounts_over_time() -> None:
    limits = open_limits(torch.device("cpu"), torch.bfloat16, 1, None, MIB, Ticks())
    assert isinstance(limits, NativeLimits)
    assert limits.read_bytes_per_s() == MIB
    # How many operations a round has depends on the ISA level: the limit is complete rounds.
    flops_per_round = probe("", num_threads=1).multiply(torch.bfloat16, 1)
    num_rounds, rest = divmod(limits.flops_per_s(), flops_per_round)
    assert (num_rounds > 1, rest) == (True, 0)


def test_limits_are_finite_on_a_real_clock() -> None:
    limits = open_limits(torch.device("cpu"), torch.float32, 2, None, MIB, time.perf_counter)
    assert 0 < limits.read_bytes_per_s() < float("inf")
    assert 0 < limits.flops_per_s() < float("inf")


def test_doctor_says_how_the_bandwidth_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    measured = memory["read_bytes_per_s"] is not None
    assert measured or memory["measured_how"].startswith("not: too little memory")
    if measured:
        assert memory["read_bytes_per_s"] > 0
        assert memory["measured_how"].startswith("streaming read of 512 MiB in huge pages, native")
