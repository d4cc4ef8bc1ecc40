"""Kernels that Triton compiles while the engine serves are in the log, with their arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# Compiled for an H100 that is not there, in a process of its own: here kernels are interpreted.
_SCRIPT = """
import logging, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor
from quickstep.ops.triton.compile_log import expect_compiles, warn_of_compiles
from quickstep.ops.triton.move_kv import _move_kv_kernel

class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

driver.set_active(Driver())
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")

def compile(slot_bytes, num_moves):
    numbers = MockTensor(torch.int64)
    _move_kv_kernel.warmup(numbers, numbers, num_moves, slot_bytes, BLOCK=2048, grid=(1,))

warn_of_compiles()
expect_compiles()
compile(64, 1)
warn_of_compiles()
compile(64, 2)
compile(64, 16)
compile(65, 1)
"""


def test_a_kernel_that_is_compiled_while_serving_is_reported_once_per_variant() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, env=environ, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    [line] = ran.stdout.splitlines()
    assert line.startswith("WARNING compiled a kernel while serving, ")
    assert line.endswith(
        "_move_kv_kernel(addresses: *i64/16, moves: *i64/16, num_moves: i32, slot_bytes: i32, "
        "BLOCK=2048, num_warps=4, num_stages=3)"
    )
