"""`python -m benchmarks.ranks MODEL`: one process against several that compute every step together.

All engines are open at the same time and measured in turns, each with all threads of the machine:
one process with N threads, or N ranks with a part of them each. Ratios above 1: ranks are faster.

    --sizes 2,4          numbers of ranks
    --quantization int8  as of `quickstep serve`
    --batches 1,8        sequences that decode together; 0 is a prompt of 512 tokens
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

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


def _print(label: str, one: list[float], ranks: list[float]) -> None:
    ratios = [b / a for a, b in zip(one, ranks, strict=True)]
    print(
        f"{label:<22} {statistics.median(one):9.1f} {statistics.median(ranks):9.1f}   "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def main() -> int:
    """Print tokens per second of each number of ranks, and the ratio to one process."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--sizes", default="2")
    parser.add_argument("--quantization")
    parser.add_argument("--batches", default="1,8,32,0")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    sizes = [1, *map(int, args.sizes.split(","))]
    print(describe_machine())
    print(f"{args.model}, {args.quantization or 'as stored'}, {usable_cores()} threads in all")
    engines = {
        size: LLM(
            args.model,
            quantization=args.quantization,
            tensor_parallel_size=size,
            max_model_len=1024,
            enable_prefix_caching=False,
        )
        for size in sizes
    }
    for size in sizes[1:]:
        print(f"{size} ranks: tokens/s {'one':>15} {'ranks':>9}   ratio (least to greatest)")
        for batch in map(int, args.batches.split(",")):
            found: dict[int, list[float]] = {1: [], size: []}
            for turn in range(args.rounds + 1):
                for count, llm in ((1, engines[1]), (size, engines[size])):
                    value = _decode(llm, batch, turn) if batch else _prefill(llm, turn)
                    if turn:  # the first binds programs
                        found[count].append(value)
            label = f"  decode, batch {batch}" if batch else f"  prefill of {_PROMPT_LEN}"
            _print(label, found[1], found[size])
    for llm in engines.values():
        llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
