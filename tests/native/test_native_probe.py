"""The probes of the machine: every byte is read, operations are counted. No speed is asserted."""

from __future__ import annotations

import time

import pytest
import torch

from quickstep.errors import ConfigError, EngineError
from quickstep.ops.native import load_native, load_probe, native_status
from quickstep.ops.native_probe import NativeProbe

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
