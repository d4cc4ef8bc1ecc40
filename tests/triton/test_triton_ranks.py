"""Ranks on Triton's kernels, interpreted and exchanging through gloo, give the bits of one process.

This is what ranks on GPUs compute, with NCCL in place of gloo.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from golden_cases import CASES, Case
from golden_harness import random_prompts
from paged_driver import PagedDriver
from rank_threads import run_ranks
from triton.runtime import interpreter

from adapter_files import ALL, write_adapter
from quickstep.config import LoadConfig
from quickstep.model.adapters.checkpoint import open_adapter
from quickstep.model.decoder import Decoder
from quickstep.model.sharding import Shard, shard_adapter
from quickstep.model.spec import read_spec
from quickstep.ops.table import LoRAAdapter, OpTable
from quickstep.ops.tensors import BFLOAT16
from quickstep.ops.triton import linear
from quickstep.ops.triton.backend import load_triton

pytestmark = pytest.mark.usefixtures("products_in_order", "one_kernel_at_a_time")

# One layer: its output passes through the ranks' exchange to the logits. Several ones are in
# `tests/native/test_ranks.py` and in the mixtures below, whose layers differ.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
ONE_KV_HEAD = WIDE | {"num_key_value_heads": 1}


@pytest.fixture
def one_kernel_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps where it is in a grid in one object, and ranks are threads here."""
    call, lock = interpreter.GridExecutor.__call__, threading.Lock()

    def locked(executor: Any, *args: Any, **options: Any) -> Any:
        with lock:
            return call(executor, *args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", locked)


def table() -> OpTable | None:
    return load_triton(torch.device("cpu"))


def logits_of(
    model: Decoder, _: int, adapter: LoRAAdapter | None = None
) -> list[np.ndarray[Any, Any]]:
    """Of chunks of two prompts, then of a decode step; the second one has the adapter."""
    prompts = random_prompts((6, 3), model.vocab_size)
    driver = PagedDriver(model, adapters={id(prompts[1]): adapter})
    rows = [driver.open(prompt) for prompt in prompts]
    steps = [[(rows[0], 5), (rows[1], 2)], [(rows[0], 1), (rows[1], 1)]]
    return [part.numpy() for work in steps for part in driver.step(work)]


def assert_same(path: Path, size: int, run: Any = logits_of, **options: Any) -> None:
    load = LoadConfig(str(path), **options)
    (expected,) = run_ranks(path, load, 1, run, make_ops=table)
    found, *_ = run_ranks(path, load, size, run, store=path / "store", make_ops=table)
    assert all(map(np.array_equal, expected, found))


@pytest.mark.parametrize(
    ("values", "size", "dtype"),
    [
        pytest.param(WIDE, 2, "float32", id="untied"),
        pytest.param(ONE_KV_HEAD | {"tie_word_embeddings": True}, 4, "bfloat16", id="tied"),
    ],
)
def test_ranks_of_floating_point(
    values: dict[str, object],
    size: int,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # inputs of a down projection: one slice of the complete matrix, two of one as large as a part
    monkeypatch.setattr(linear, "_SPLIT_TILES", 4)
    assert linear.slice_inputs(256, 1024) == 1024 and linear.slice_inputs(128, 1024) == 512
    Case("wide", "Llama", values).save(tmp_path)
    assert_same(tmp_path, size, dtype=dtype)


@pytest.mark.parametrize("quantization", ["int8", "int4-g64", "fp8"])
def test_ranks_of_quantized_weights(quantization: str, tmp_path: Path) -> None:
    Case("wide", "Llama", ONE_KV_HEAD).save(tmp_path)
    assert_same(tmp_path, 2, dtype="bfloat16", quantization=quantization)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "llama4"])
def test_ranks_of_a_mixture_of_experts(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    chunk = {"attention_chunk_size": 256} if name == "llama4" else {}  # kernels have no chunks
    replace(case, values=case.values | chunk).save(tmp_path)
    assert_same(tmp_path, 2, dtype="bfloat16")


def test_ranks_with_an_adapter(tmp_path: Path) -> None:
    Case("wide", "Llama", WIDE).save(tmp_path)
    spec = read_spec(tmp_path)
    write_adapter(tmp_path / "adapter", spec, (*ALL, "embed_tokens", "lm_head"), rank=5)
    modules = open_adapter(tmp_path / "adapter", spec, 8).read(BFLOAT16, {}).modules

    def with_adapter(model: Decoder, rank: int) -> list[np.ndarray[Any, Any]]:
        size = 1 if model.ops.ranks is None else 2
        part = shard_adapter(modules, spec, Shard(rank, size))
        return logits_of(model, rank, model.ops.pack_lora(part))

    assert_same(tmp_path, 2, with_adapter, dtype="bfloat16")
