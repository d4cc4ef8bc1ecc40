"""What an engine says about a KV format that costs a model much."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from quickstep import LLM
from quickstep.bench.outliers import kv_error, random_keys
from quickstep.engine import assembly
from quickstep.model.interface import ForwardBatch, KVLayout
from quickstep.ops.reference import reference_ops
from quickstep.ops.table import AttentionParams, KVCache
from quickstep.runtime.cache.kv_probe import KV_BOUND, kv_change

HEAD = 64


class OutlierKeys:
    """A token's logits are what it attends to; two channels of all keys are near `offset`."""

    vocab_size = 97
    device = torch.device("cpu")
    kv_layout = KVLayout.uniform(1, 1, HEAD, torch.float32)

    def __init__(self, offset: float) -> None:
        generator = torch.Generator().manual_seed(4)
        self.embedding = torch.randn(self.vocab_size, HEAD, generator=generator)
        self.offset = torch.zeros(HEAD)
        self.offset[[5, 40]] = offset
        self.ops = reference_ops()

    def forward(self, batch: ForwardBatch, kv: KVCache) -> Tensor:
        x = self.embedding[batch.token_ids][:, None]
        keys, values, layout = kv.keys[0], kv.values[0], batch.layout
        self.ops.write_kv(x + self.offset, x, keys, values, layout.slot_mapping)
        params = AttentionParams(scale=0.3)
        return self.ops.paged_attention(x, keys, values, layout, params, None).squeeze(1)

    def logits(self, hidden: Tensor, lora: object = None) -> Tensor:
        return 4.0 * hidden @ self.embedding.t()


def test_the_same_format_changes_nothing_and_int8_little() -> None:
    model = OutlierKeys(0.0)
    assert kv_change(model, "float32") == 0
    assert 0 < kv_change(model, "int8") < KV_BOUND / 5


def test_keys_with_large_channels_are_found() -> None:
    assert kv_change(OutlierKeys(1000.0), "int8") > KV_BOUND > kv_change(OutlierKeys(0.0), "int8")


def test_int8_loses_more_on_keys_with_large_channels_than_halves_do() -> None:
    layer, ops = random_keys(100, seed=1), reference_ops()
    exact, half, quants = (
        kv_error(layer, ops, dtype) for dtype in (torch.float32, torch.float16, torch.int8)
    )
    assert exact < 1e-5 < half < quants / 10


@pytest.mark.parametrize("bound", [0.0, KV_BOUND])
def test_an_engine_names_the_figure_above_the_bound_and_is_silent_below(
    bound: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quickstep.runtime.cache.kv_probe.KV_BOUND", bound)
    with caplog.at_level(logging.WARNING, logger=assembly.__name__):
        LLM("demo", kv_cache_dtype="int8").close()
    said = [record.getMessage() for record in caplog.records if "nats" in record.getMessage()]
    assert len(said) == (1 if bound == 0 else 0)
    assert all("--kv-cache-dtype int8 changes" in text for text in said)
