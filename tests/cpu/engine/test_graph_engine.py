"""The whole engine with recorded steps, two of them in flight, interpreted, with a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from graph_double import Reexecution
from late_copies import use_late_copies
from msgspec.structs import replace
from tiny_checkpoint import write_checkpoint

from quickstep.config import CacheConfig, EngineConfig, LoadConfig, SchedulerConfig
from quickstep.engine import assembly
from quickstep.engine.outputs import collect
from quickstep.ops import resolve
from quickstep.runtime.cache import kv_cache
from quickstep.runtime.executors.device import DeviceExecutor
from quickstep.runtime.steps.step_model import GraphOptions
from quickstep.types import Request, SamplingParams

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


def use_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines that are opened record their steps, as on a GPU."""
    allocate_kv = kv_cache.allocate_kv

    def with_scratch_block(
        shape: Any, num_blocks: int, block_size: int, device: Any, states: Any
    ) -> Any:
        return allocate_kv(shape, num_blocks + 1, block_size, device, states)

    monkeypatch.setattr(kv_cache, "allocate_kv", with_scratch_block)
    monkeypatch.setattr(assembly, "graph_options", lambda *_: GraphOptions(Reexecution(), 2))


@pytest.mark.usefixtures("products_in_order")
def test_an_engine_with_graphs_has_two_steps_in_flight_and_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny-llama", max_len=32)
    ops = resolve.resolve_ops(torch.device("cpu"), "triton")
    monkeypatch.setattr(resolve, "resolve_ops", lambda *_: ops)
    expected, depth, _ = answers(checkpoint)
    assert depth == 1

    use_graphs(monkeypatch)
    found, depth, executor = answers(checkpoint)
    assert found == expected
    assert (depth, executor) == (2, DeviceExecutor)


@pytest.mark.usefixtures("products_in_order")
def test_blocks_are_moved_while_two_steps_are_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved and restored, as slots, next to the steps of another request."""
    checkpoint = write_checkpoint(tmp_path / "tiny-llama", max_len=32)
    ops = resolve.resolve_ops(torch.device("cpu"), "triton")
    monkeypatch.setattr(resolve, "resolve_ops", lambda *_: ops)
    use_graphs(monkeypatch)
    use_late_copies(monkeypatch)
    engine = assembly.open_engine(
        EngineConfig(
            load=LoadConfig(model=str(checkpoint), num_threads=1),
            cache=CacheConfig(block_size=4, num_blocks=24, slot_save_path=str(tmp_path / "slots")),
            scheduler=SchedulerConfig(max_num_seqs=2),
            max_model_len=32,
            seed=0,
        )
    )
    prompt = tuple(range(3, 13))
    sampling = SamplingParams(max_tokens=3, temperature=0.9, seed=3, logprobs=2, ignore_eos=True)

    async def answer(token_ids: tuple[int, ...], max_tokens: int = 3) -> tuple[list[Any], Any]:
        params = replace(sampling, max_tokens=max_tokens)
        deltas = [delta async for delta in engine.stream(Request("", token_ids, params))]
        (ended,) = [delta.timings for delta in deltas if delta.timings is not None]
        tokens = [(delta.token_ids, delta.logprobs) for delta in deltas if delta.token_ids]
        return tokens, ended.num_cached_tokens

    async def run() -> None:
        await engine.start()
        try:
            expected, num_cached = await answer(prompt)
            assert num_cached == 0
            other = asyncio.create_task(answer((2, 2, 2, 2, 2), 8))
            prefix = await engine.save_slot("talk", "", "", prompt)
            await other
            assert prefix.token_ids == prompt[:8]
            await engine.reset_prefix_cache()
            other = asyncio.create_task(answer((2, 2, 2, 2, 2), 8))
            await engine.restore_slot("talk", "")
            assert await answer(prompt) == (expected, 8)
            await other
        finally:
            await engine.stop()

    asyncio.run(run())
    assert type(engine._executor) is DeviceExecutor
