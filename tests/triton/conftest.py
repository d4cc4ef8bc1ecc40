"""The interpreted table of ops, and a model of one small layer on it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from recorded_steps import SMALL

from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.ops.table import OpTable
from quickstep.ops.triton.backend import load_triton

CPU = torch.device("cpu")


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


@pytest.fixture(scope="session", autouse=True)
def kernels_can_be_interpreted() -> None:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    is_old = _version(triton.__version__) < (3, 7)
    if is_interpreted and is_old and _version(np.__version__) >= (2, 4):
        pytest.fail("with NumPy 2.4 and newer, kernels are interpreted by Triton 3.7 and newer")


@pytest.fixture(scope="session")
def ops() -> OpTable:
    table = load_triton(CPU)
    assert table is not None
    return table


@pytest.fixture(scope="session")
def model(ops: OpTable) -> Decoder:
    return random_model(SMALL, ops, RandomValues(torch.float32, CPU, 1, None), 64, None)
