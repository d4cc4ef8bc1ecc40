"""The interpreted table of ops, and a model of one small layer on it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from recorded_steps import SMALL

from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.ops.table import OpTable
from quickstep.ops.triton.backend import load_triton

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def ops() -> OpTable:
    table = load_triton(CPU)
    assert table is not None
    return table


@pytest.fixture(scope="session")
def model(ops: OpTable) -> Decoder:
    return random_model(SMALL, ops, RandomValues(torch.float32, CPU, 1, None), 64, None)
