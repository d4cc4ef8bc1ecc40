"""What drafts gain on models of real sizes: random weights, drafts of a given acceptance.

    python -m benchmarks.speculation_shapes [--target qwen2.5-0.5b] [--quantization int4]
                                            [--draft qwen2.5-0.5b] [--acceptance 0.8]
                                            [--batches 1 8] [--rounds 3] [--tokens 128]

Nothing predicts the text of random weights. So a first run without speculation generates it, and in
the second one the drafts are its tokens, each wrong with the probability 1 - acceptance. A draft
model (`--draft`, random weights, too) computes as many tokens as are drafted, and its own are not
used; without it, drafts cost nothing, as those of a lookup in the text. Every request runs without,
with and again without speculation on one engine; the tokens have to be equal. How many drafts a row
gets is decided by the engine, as always.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from unittest.mock import patch

from msgspec.structs import replace

from benchmarks.machine import describe_machine
from quickstep.bench.measured_engine import open_shape, random_prompt
from quickstep.bench.shapes import SHAPES
from quickstep.config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from quickstep.engine import speculation
from quickstep.engine.engine import Engine
from quickstep.model.checkpoint.random_weights import RandomValues, random_model
from quickstep.model.decoder import Decoder
from quickstep.model.interface import Model
from quickstep.model.sizing import MemoryPlan
from quickstep.model.spec import parse_spec
from quickstep.ops.tensors import torch_device, torch_dtype
from quickstep.runtime.cache.kv_cache import allocate_kv
from quickstep.runtime.speculation.draft_model import DraftModelProposer
from quickstep.runtime.speculation.proposer import DraftTask, Proposer
from quickstep.runtime.speculation.static import StaticProposer
from quickstep.types import Admission, Request, SamplingParams

_BLOCK_SIZE = 16
_PROMPT_LEN = 64

# What was generated without speculation, by prompt.
Continuations = dict[tuple[int, ...], tuple[int, ...]]


class SyntheticDrafts:
    """Known drafts, at the price of a draft model."""

    name = "draft"
    needs_hidden = False

    def __init__(self, known: StaticProposer, model: Proposer | None) -> None:
        self._known = known
        self._model = model
        self._all: tuple[Proposer, ...] = (known,) if model is None else (known, model)

    def admit(self, slot: int, admission: Admission) -> None:
        """`Proposer.admit`."""
        for model in self._all:
            model.admit(slot, admission)

    def observe(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """`Proposer.observe`."""
        for model in self._all:
            model.observe(slot, token_ids)

    def propose(self, tasks: Sequence[DraftTask]) -> list[tuple[int, ...]]:
        """`Proposer.propose`."""
        if self._model is not None:
            self._model.propose(tasks)
        return self._known.propose(tasks)

    def release(self, slot: int) -> None:
        """`Proposer.release`."""
        for model in self._all:
            model.release(slot)


def open_engine(args: argparse.Namespace, continuations: Continuations) -> Engine:
    """An engine of the target's shape, with synthetic drafts."""

    def known(admission: Admission) -> Sequence[int]:
        return continuations.get(tuple(admission.token_ids[: admission.prompt_len]), ())

    def opened(
        config: EngineConfig, model: Model, plan: MemoryPlan, path: object
    ) -> SyntheticDrafts:
        draft = None if args.draft is None else _draft_model(args, model, plan)
        return SyntheticDrafts(StaticProposer(known, args.acceptance), draft)

    length = _PROMPT_LEN + args.tokens + 16
    config = EngineConfig(
        load=LoadConfig("random", quantization=args.quantization, device="cpu"),
        cache=CacheConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=max(args.batches) * (-(-length // _BLOCK_SIZE) + 1),
            prefix_caching=False,
        ),
        scheduler=SchedulerConfig(max_num_seqs=max(args.batches)),
        speculation=SpeculationConfig(num_speculative_tokens=args.num_speculative_tokens),
        max_model_len=length,
    )
    with patch.object(speculation, "open_proposer", opened):
        return open_shape(config, args.target, SHAPES[args.target], seed=0).engine


def _draft_model(args: argparse.Namespace, target: Model, plan: MemoryPlan) -> DraftModelProposer:
    """A draft model with random weights and the target's vocabulary."""
    assert isinstance(target, Decoder)
    spec = replace(parse_spec(SHAPES[args.draft]), vocab_size=target.vocab_size)
    device, dtype = torch_device(target.device), torch_dtype(target.kv_layout.dtype)
    values = RandomValues(dtype, device, 1, args.draft_quantization)
    model = random_model(spec, target.ops, values, plan.max_model_len)
    kv = allocate_kv(model.kv_layout, plan.num_blocks, _BLOCK_SIZE, model.device)
    return DraftModelProposer(
        model, kv, _BLOCK_SIZE, target.vocab_size, None, plan.max_num_batched_tokens
    )


async def generate(
    engine: Engine, prompts: Sequence[tuple[int, ...]], num_tokens: int, with_drafts: bool
) -> tuple[float, list[tuple[int, ...]], int]:
    """Tokens per second, the tokens of each prompt, and how many drafts were accepted."""
    before = engine.stats().scheduler.totals.num_accepted
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    async def one(prompt: tuple[int, ...]) -> tuple[int, ...]:
        stream = engine.stream(Request("", prompt, sampling, speculation=with_drafts))
        return tuple([token async for delta in stream for token in delta.token_ids])

    began = time.perf_counter()
    tokens = list(await asyncio.gather(*map(one, prompts)))
    seconds = time.perf_counter() - began
    num_accepted = engine.stats().scheduler.totals.num_accepted - before
    return sum(map(len, tokens)) / seconds, tokens, num_accepted


async def measure(
    engine: Engine, args: argparse.Namespace, continuations: Continuations, batch: int
) -> Mapping[str, list[float]]:
    """Figures of each round but the first."""
    rng = random.Random(batch)
    figures: dict[str, list[float]] = {"off": [], "ratio": [], "tokens per step": [], "control": []}
    for number in range(args.rounds + 1):
        vocab_size = engine.model.vocab_size
        prompts = [tuple(random_prompt(rng, vocab_size, _PROMPT_LEN)) for _ in range(batch)]
        off, expected, _ = await generate(engine, prompts, args.tokens, with_drafts=False)
        continuations.update(zip(prompts, expected, strict=True))
        on, tokens, num_accepted = await generate(engine, prompts, args.tokens, with_drafts=True)
        again, _, _ = await generate(engine, prompts, args.tokens, with_drafts=False)
        assert tokens == expected, "drafts changed the tokens"
        if number:
            num_tokens = batch * args.tokens
            figures["off"].append((off + again) / 2)
            figures["ratio"].append(2 * on / (off + again))
            figures["tokens per step"].append(num_tokens / (num_tokens - num_accepted))
            figures["control"].append(again / off)
    return figures


async def run(args: argparse.Namespace) -> None:
    """Measure and print a line for each batch size."""
    continuations: Continuations = {}
    engine = open_engine(args, continuations)
    await engine.start()
    try:
        for batch in args.batches:
            figures = await measure(engine, args, continuations, batch)
            ratios, control = figures["ratio"], figures["control"]
            print(
                f"{batch:>6}{statistics.median(figures['off']):>11.1f}"
                f"{statistics.median(ratios):>8.2f}  {min(ratios):.2f}-{max(ratios):.2f}"
                f"{statistics.median(figures['tokens per step']):>13.2f}"
                f"     {min(control):.2f}-{max(control):.2f}",
                flush=True,
            )
    finally:
        await engine.stop()


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="qwen2.5-0.5b", choices=list(SHAPES))
    parser.add_argument("--quantization")
    parser.add_argument("--draft", choices=list(SHAPES))
    parser.add_argument("--draft-quantization")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    print(describe_machine())
    draft = "no draft model"
    if args.draft is not None:
        draft = f"draft model {args.draft} {args.draft_quantization or ''}".rstrip()
    target = f"{args.target} {args.quantization or ''}".rstrip()
    print(f"{target}, {draft}, acceptance {args.acceptance:g}")
    print(f"{'batch':>6}{'off tok/s':>11}{'ratio':>8}  {'range':<9}{'tokens/step':>13}     off/off")
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
