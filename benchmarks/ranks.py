"""`python -m benchmarks.ranks MODEL`: one process against a model that is divided among several.

All engines are open at the same time and measured in turns, each with all threads of the machine:
one process with N threads, or N ranks or stages with a part of them each. Ratios above 1: the
divided model is faster. Of stages, the part of the time with steps in flight that they waited.

    --sizes 2,4          numbers of ranks
    --stages 2           numbers of stages of a pipeline
    --quantization int8  as of `quickstep serve`
    --batches 1,8        sequences that decode together; 0 is a prompt of 512 tokens
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

from benchmarks.machine import describe_machine
from quickstep import LLM, SamplingParams
from quickstep.engine.machine import usable_cores

_PROMPT_LEN = 512
_NEW_TOKENS = 64


def _decode(llm: LLM, batch: int, seed: int) -> float:
    """Tokens per second of requests that decode together."""
    sampling = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, seed=seed)
    prompts = [[5 + (seed + index) % 90] * 8 for index in range(batch)]
    started_s = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started_s
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / seconds


def _prefill(llm: LLM, seed: int) -> float:
    """Prompt tokens per second of one prompt that no cache has."""
    prompt = [5 + (seed * 31 + place * 7) % 90 for place in range(_PROMPT_LEN)]
    started_s = time.perf_counter()
    llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    return _PROMPT_LEN / (time.perf_counter() - started_s)


def _print(label: str, one: list[float], divided: list[float], bubble: float) -> None:
    ratios = [b / a for a, b in zip(one, divided, strict=True)]
    waited = f"  waited {bubble:.0%}" if bubble else ""
    print(
        f"{label:<22} {statistics.median(one):9.1f} {statistics.median(divided):9.1f}   "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}){waited}",
        flush=True,
    )


def _times(llm: LLM) -> tuple[float, float]:
    """Seconds that steps have taken, and in which stages waited, so far."""
    totals = llm.engine.stats().scheduler.totals
    return totals.busy_s, totals.bubble_s


def main() -> int:
    """Print tokens per second of each number of ranks, and the ratio to one process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--sizes", default="2")
    parser.add_argument("--stages", default="")
    parser.add_argument("--quantization")
    parser.add_argument("--batches", default="1,8,32,0")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    splits: list[dict[str, Any]] = [
        {name: int(size)}
        for name, sizes in (
            ("tensor_parallel_size", args.sizes),
            ("pipeline_parallel_size", args.stages),
        )
        for size in filter(None, sizes.split(","))
    ]
    print(describe_machine())
    print(f"{args.model}, {args.quantization or 'as stored'}, {usable_cores()} threads in all")
    first, *others = [
        LLM(
            args.model,
            quantization=args.quantization,
            max_model_len=1024,
            enable_prefix_caching=False,
            **split,
        )
        for split in ({}, *splits)
    ]
    for split, divided in zip(splits, others, strict=True):
        ((name, size),) = split.items()
        what = f"{size} {'ranks' if name == 'tensor_parallel_size' else 'stages'}"
        print(f"{what}: tokens/s {'one':>14} {what:>9}   ratio (least to greatest)")
        for batch in map(int, args.batches.split(",")):
            found: tuple[list[float], list[float]] = [], []
            busy_s, bubble_s = _times(divided)
            for turn in range(args.rounds + 1):
                for values, llm in zip(found, (first, divided), strict=True):
                    value = _decode(llm, batch, turn) if batch else _prefill(llm, turn)
                    if turn:  # the first binds programs
                        values.append(value)
            busy_s, bubble_s = (
                b - a for a, b in zip((busy_s, bubble_s), _times(divided), strict=True)
            )
            label = f"  decode, batch {batch}" if batch else f"  prefill of {_PROMPT_LEN}"
            _print(label, *found, bubble_s / (busy_s + bubble_s))
    for llm in (first, *others):
        llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
