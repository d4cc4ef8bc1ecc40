"""The whole engine with recorded steps, two of them in flight, interpreted, with a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from graph_double import Reexecution
from tiny_checkpoint import write_checkpoint

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine import assembly
from quickstep.engine.outputs import collect
from quickstep.ops import resolve
from quickstep.runtime.cache import kv_cache
from quickstep.runtime.executors.device import DeviceExecutor
from quickstep.runtime.steps.step_model import GraphOptions
from quickstep.types import SamplingParams

REQUESTS = {
    "a": SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True),
    "d": SamplingParams(
        max_tokens=3, top_p=0.9, frequency_penalty=1.0, logprobs=2, seed=3, ignore_eos=True
    ),
}


def answers(checkpoint: Path) -> tuple[list[object], int | None, type]:
    """Tokens and logprobs of requests that run together; the pipeline depth; the executor."""
    config = EngineConfig(
        load=LoadConfig(model=str(checkpoint), num_threads=1),
        cache=CacheConfig(block_size=4, num_blocks=24),
        scheduler=SchedulerConfig(max_num_seqs=2),
        max_model_len=32,
        seed=0,
    )
    engine = assembly.open_engine(config)

    async def answer(prompt: str) -> object:
        params = REQUESTS[prompt]
        stream = engine.generate(prompt, params)
        [output] = (await collect(stream, prompt, params, engine.tokenizer)).outputs
        return output.token_ids, output.logprobs

    async def run() -> list[object]:
        await engine.start()
        try:
            return list(await asyncio.gather(*map(answer, REQUESTS)))
        finally:
            await engine.stop()

    found = asyncio.run(run())
    return found, engine._scheduler._config.pipeline_depth, type(engine._executor)


@pytest.mark.usefixtures("products_in_order")
def test_an_engine_with_graphs_has_two_steps_in_flight_and_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny-llama", max_len=32)
    ops = resolve.resolve_ops(torch.device("cpu"), "triton")
    monkeypatch.setattr(resolve, "resolve_ops", lambda *_: ops)
    expected, depth, _ = answers(checkpoint)
    assert depth == 1

    allocate_kv = kv_cache.allocate_kv

    def with_scratch_block(
        shape: Any, num_blocks: int, block_size: int, device: Any, states: Any
    ) -> Any:
        return allocate_kv(shape, num_blocks + 1, block_size, device, states)

    monkeypatch.setattr(kv_cache, "allocate_kv", with_scratch_block)
    monkeypatch.setattr(assembly, "graph_options", lambda *_: GraphOptions(Reexecution(), 2))
    found, depth, executor = answers(checkpoint)
    assert found == expected
    assert (depth, executor) == (2, DeviceExecutor)
