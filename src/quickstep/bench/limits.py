"""The machine's limits: memory bandwidth and arithmetic peak, measured next to a benchmark.

On a CPU with native kernels, their probes measure streaming reads of huge pages, and the dot
product that prefill uses, in registers. Otherwise torch measures the sum of a buffer, or the copy
of one on a GPU, and a square matrix product, which can be slower than what is compared with it. All
of random values: a GPU multiplies constants faster. A GPU's limits are measured before an engine
opens (`gpu_limits`): one that waits for requests captures graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quickstep.ops.native.backend import NativeProbe, load_probe
from quickstep.ops.tensors import FLOAT32, Device, DType, torch_device, torch_dtype

if TYPE_CHECKING:
    import torch

DEFAULT_PROBE_BYTES = 512 * 2**20  # far above any cache
_GPU_PROBE_BYTES = 2 * 2**30
_PASSES = 3
_LEAST_S = 0.02  # of multiplying, so that every thread wakes up and takes part
_FIRST_ROUNDS = 1000
_SQUARE = 2048
_GPU_SQUARE = 8192
_GPU_ROUNDS = 20  # between two waits for the GPU, which take tens of microseconds


class Limits(Protocol):
    """Measures both limits, best of a few passes."""

    @property
    def read_how(self) -> str:
        """How `read_bytes_per_s` is measured."""

    @property
    def multiply_how(self) -> str:
        """How `flops_per_s` is measured."""

    def read_bytes_per_s(self) -> float:
        """Bytes read from memory per second."""

    def flops_per_s(self) -> float:
        """Operations per second; a multiply-add counts as two."""


class NativeLimits:
    """Measures with the probes of the native kernels."""

    def __init__(
        self, probe: NativeProbe, dtype: DType | torch.dtype, clock: Callable[[], float]
    ) -> None:
        self._probe = probe
        self._dtype = dtype
        self._clock = clock
        self._rounds = _FIRST_ROUNDS
        size = f"{probe.num_bytes / 2**20:.0f} MiB"
        best = f"native {probe.isa}, best of {_PASSES}"
        self.read_how = f"streaming read of {size} in huge pages, {best}"
        name = str(dtype).removeprefix("torch.")
        self.multiply_how = f"{name} multiply-adds in registers, {best}"

    def read_bytes_per_s(self) -> float:
        """`Limits.read_bytes_per_s`."""
        return self._probe.num_bytes / min(self._read_s() for _ in range(_PASSES))

    def flops_per_s(self) -> float:
        """`Limits.flops_per_s`."""
        while (sample := self._multiply())[1] < _LEAST_S:
            self._rounds *= 2
        samples = [sample, *(self._multiply() for _ in range(_PASSES - 1))]
        return max(flops / seconds for flops, seconds in samples)

    def _read_s(self) -> float:
        started = self._clock()
        self._probe.read()
        return self._clock() - started

    def _multiply(self) -> tuple[int, float]:
        started = self._clock()
        num_flops = self._probe.multiply(self._dtype, self._rounds)
        return num_flops, self._clock() - started


class TorchLimits:
    """Measures with torch, on any device without native kernels; a GPU by its own clock."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        num_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._clock = clock
        is_gpu = device.type == "cuda"
        side = self._side = _GPU_SQUARE if is_gpu else _SQUARE
        self._rounds = _GPU_ROUNDS if is_gpu else 1
        self._buffer = torch.rand(num_bytes // 4, dtype=torch.float32, device=device)
        self._copy = torch.empty_like(self._buffer) if is_gpu else None
        self._square = torch.randn(side, side, dtype=torch.float32, device=device).to(dtype)
        name = str(dtype).removeprefix("torch.")
        best = f"random values, {device}, best of {_PASSES}"
        work = "copy (read and written)" if is_gpu else "sum"
        self.read_how = f"torch {work} of {num_bytes / 2**20:.0f} MiB float32, {best}"
        self.multiply_how = f"torch {name} product of {side} x {side} matrices, {best}"

    def read_bytes_per_s(self) -> float:
        """`Limits.read_bytes_per_s`."""
        copy = self._copy
        if copy is not None:
            return 2 * self._buffer.nbytes / self._best_s(lambda: copy.copy_(self._buffer))
        return self._buffer.nbytes / self._best_s(lambda: self._buffer.sum())

    def flops_per_s(self) -> float:
        """`Limits.flops_per_s`."""
        return 2.0 * self._side**3 / self._best_s(lambda: self._square @ self._square)

    def _best_s(self, work: Callable[[], object]) -> float:
        pass_s = self._gpu_pass_s if self._device.type == "cuda" else self._pass_s
        work()
        return min(pass_s(work) for _ in range(_PASSES)) / self._rounds

    def _pass_s(self, work: Callable[[], object]) -> float:
        started = self._clock()
        for _ in range(self._rounds):
            work()
        return self._clock() - started

    def _gpu_pass_s(self, work: Callable[[], object]) -> float:
        cuda: Any = self._torch.cuda
        start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        start.record()
        for _ in range(self._rounds):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class KnownLimits(msgspec.Struct, frozen=True):
    """`Limits` that were measured before."""

    read_how: str
    multiply_how: str
    bytes_per_s: float
    products_per_s: float

    def read_bytes_per_s(self) -> float:
        """`Limits.read_bytes_per_s`."""
        return self.bytes_per_s

    def flops_per_s(self) -> float:
        """`Limits.flops_per_s`."""
        return self.products_per_s


def gpu_limits(device: torch.device, dtype: str, num_bytes: int | None = None) -> KnownLimits:
    """Measure now, and give the memory back.

    Args:
        device: The GPU.
        dtype: `LoadConfig.dtype`; `auto` is bfloat16, as fast as float16.
        num_bytes: Of the buffer; None for 2 GiB, or less where less is free.
    """
    import torch

    free_bytes = torch.cuda.mem_get_info(device)[0]
    num_bytes = num_bytes or min(_GPU_PROBE_BYTES, free_bytes // 4)
    square = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    with torch.cuda.device(device):
        limits = TorchLimits(device, square, num_bytes, clock=lambda: 0.0)
        known = KnownLimits(
            limits.read_how, limits.multiply_how, limits.read_bytes_per_s(), limits.flops_per_s()
        )
        del limits
        torch.cuda.empty_cache()
    return known


def open_limits(
    device: torch.device | Device,
    dtype: DType | torch.dtype,
    num_threads: int | None,
    isa: str | None,
    num_bytes: int,
    clock: Callable[[], float],
) -> Limits:
    """Use the native probes on a CPU that has them, otherwise torch."""
    probe = load_probe(num_bytes, num_threads, isa) if device.type == "cpu" else None
    if probe is None:
        # torch has no integer product that works on every device
        square = torch_dtype(dtype)
        square = square if square.is_floating_point else torch_dtype(FLOAT32)
        return TorchLimits(torch_device(device), square, num_bytes, clock)
    return NativeLimits(probe, dtype, clock)
