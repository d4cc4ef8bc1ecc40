"""KV blocks that are copied from and to a GPU next to its steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
import torch

from quickstep.config import CacheConfig, EngineConfig, LoadConfig
from quickstep.engine.assembly import open_engine
from quickstep.engine.engine import Engine
from quickstep.model.interface import KVLayout, KVSize, kv_groups
from quickstep.runtime.cache.device_block_bytes import DeviceBlockBytes
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.cache.opening import open_block_bytes
from quickstep.types import Request, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

PROMPT = tuple(range(20, 450))
NUM_BLOCKS = 64


def test_copies_have_what_was_launched_before_and_stay() -> None:
    """After work that takes long, which a copy would overtake if it did not wait."""
    rng, device = Random(3), torch.device("cuda")
    layout = KVLayout(kv_groups([KVSize(2, 64)] * 4), torch.bfloat16)
    kv = allocate_kv(layout, NUM_BLOCKS, 16, device)
    blocks = open_block_bytes(kv)
    assert isinstance(blocks, DeviceBlockBytes)
    large = torch.randn(4096, 4096, device=device)
    layers = [one for one in (*kv.keys, *kv.values) if isinstance(one, torch.Tensor)]
    for turn in range(20):
        ids = rng.sample(range(NUM_BLOCKS), 9)
        for _ in range(5):
            large = (large @ large).clamp_(-1, 1)
        for layer in layers:
            layer[ids] = float(turn)
        expected = layers[0][ids[0]].cpu().view(torch.uint8).numpy().tobytes()
        with blocks.reading(ids) as found:
            assert {bytes(part) for parts in found for part in parts} == {expected}
        values = [[rng.randbytes(len(expected)) for _ in layers] for _ in ids]
        for _ in range(5):
            large = (large @ large).clamp_(-1, 1)
        for layer in layers:
            layer[ids] = -1.0  # an aborted step
        with blocks.writing(ids) as places:
            for parts, value in zip(places, values, strict=True):
                for part, one in zip(parts, value, strict=True):
                    part[:] = one
        with blocks.reading(ids) as found:
            assert [[bytes(part) for part in parts] for parts in found] == values


def test_a_slot_of_a_gpu_gives_the_same_bits_after_a_restart(tmp_path: Path) -> None:
    def opened() -> Engine:
        cache = CacheConfig(num_blocks=NUM_BLOCKS, slot_save_path=str(tmp_path))
        config = EngineConfig(load=LoadConfig("demo", device="cuda"), cache=cache, seed=0)
        return open_engine(config)

    async def answer(engine: Engine) -> tuple[list[object], int | None]:
        sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=4, logprobs=2)
        deltas = [delta async for delta in engine.stream(Request("", PROMPT, sampling))]
        (ended,) = [delta.timings for delta in deltas if delta.timings is not None]
        found = [(delta.token_ids, delta.logprobs) for delta in deltas if delta.token_ids]
        return found, ended.num_cached_tokens

    async def run(engine: Engine, is_first: bool) -> tuple[list[object], int | None]:
        await engine.start()
        try:
            if not is_first:
                await engine.restore_slot("talk", "")
            found = await answer(engine)
            if is_first:
                await engine.save_slot("talk", "", "", PROMPT)
            return found
        finally:
            await engine.stop()

    expected, _ = asyncio.run(run(opened(), True))
    num_full = len(PROMPT) // 16 * 16
    assert asyncio.run(run(opened(), False)) == (expected, num_full)
