"""The engine from request to token: decode per batch size, prefill, and a mixed batch.

Depth 1 and depth 2 of the pipeline alternate in one run, so their ratio means something on a
machine whose speed drifts. Figures are of the whole engine (scheduling, sampling, detokenising).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from benchmarks.machine import spread
from quickstep import LLM, SamplingParams

__all__ = ["run"]

BATCH_SIZES = (1, 8, 32)
NUM_DECODE_TOKENS = 64
PREFILL_LEN = 512
NUM_MIXED = 48


def _prompts(rng: random.Random, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """Random token ids: no two prompts share a block."""
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _decode_ms(llm: LLM, batch_size: int, rng: random.Random) -> float:
    """Milliseconds a step, the batch decoding together, from the step log."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODE_TOKENS, ignore_eos=True)
    prompts = _prompts(rng, llm.engine.model.vocab_size, [16] * batch_size)
    first = llm.engine.step_log.totals.num_steps
    llm.generate(prompts, params, use_tqdm=False)
    steps = llm.engine.step_log.steps[first - llm.engine.step_log.totals.num_steps :]
    full = [one.seconds for one in steps if one.num_decode_rows == batch_size]
    return 1e3 * statistics.median(full)


def _prefill_tokens_per_s(llm: LLM, rng: random.Random) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    [prompt] = _prompts(rng, llm.engine.model.vocab_size, [PREFILL_LEN])
    started = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return PREFILL_LEN / (time.perf_counter() - started)


def _mixed_tokens_per_s(llm: LLM, rng: random.Random) -> float:
    """Output tokens a second: lognormal lengths, all requests at once."""
    lengths = [min(512, max(8, int(rng.lognormvariate(4.5, 0.8)))) for _ in range(NUM_MIXED)]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=rng.randrange(16, 96), ignore_eos=True)
        for i in range(NUM_MIXED)
    ]
    prompts = _prompts(rng, llm.engine.model.vocab_size, lengths)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    num_tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    return num_tokens / (time.perf_counter() - started)


def _measure(llm: LLM, seed: int) -> dict[str, float]:
    """One round of every figure."""
    rng = random.Random(seed)
    figures = {f"decode, batch {n}, ms/step": _decode_ms(llm, n, rng) for n in BATCH_SIZES}
    figures[f"prefill of {PREFILL_LEN}, tokens/s"] = _prefill_tokens_per_s(llm, rng)
    figures[f"{NUM_MIXED} mixed requests, output tokens/s"] = _mixed_tokens_per_s(llm, rng)
    return figures


def run(model: str, device: str, repeats: int) -> None:
    """Print the table for one model."""
    engines = [
        LLM(model, device=device, pipeline_depth=depth, max_model_len=1024) for depth in (1, 2)
    ]
    # The first round warms up.
    rounds = [[_measure(llm, repeat) for llm in engines] for repeat in range(repeats + 1)][1:]
    print(f"{'model ' + model:44} {'depth 1':>28} {'depth 2':>28}")
    for name in rounds[0][0]:
        columns = [spread([one[index][name] for one in rounds]) for index in (0, 1)]
        print(f"{name:44} {columns[0]:>28} {columns[1]:>28}")
    for llm in engines:
        llm.close()
