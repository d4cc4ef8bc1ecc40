"""Time of sampling from a vocabulary of 151,936, by kind of parameters and number of rows.

    python -m benchmarks.bench_sampling [--threads 2] [--repeats 21] [--rows 1 16] [--numpy]

Times include Python: from a row of logits and the state of its sequence to a token. `peaked` logits
are distributed like those of a language model, `flat` ones like those of random weights. Caveats:
the logits are in the cache; with `--numpy` the sampler is the one in NumPy, which defines the
tokens; the smallest time is printed too, in case the machine is not quiet.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from benchmarks.machine import describe_machine
from quickstep.ops.native.backend import default_num_threads, load_native
from quickstep.runtime.sampling.native_sampler import NativeSampler, Sampler
from quickstep.runtime.sampling.sampler import sample
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import TokenForms
from quickstep.types import Admission, SamplingParams

VOCAB_SIZE = 151_936
NUM_TOKENS = 1024  # prompt and output of a sequence, for penalties
_FORMS = TokenForms(bad_words=((11,), (12, 13)), dry_breakers=((5,),))
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "top-k, top-p": SamplingParams(top_k=50, top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "typical-p 0.9": SamplingParams(typical_p=0.9),
    "XTC": SamplingParams(xtc_probability=1.0, xtc_threshold=0.1),
    "repetition": SamplingParams(repetition_penalty=1.1),
    "frequency, top-p": SamplingParams(frequency_penalty=0.5, top_p=0.95),
    "DRY": SamplingParams(dry_multiplier=0.8, in_tokens=_FORMS),
    "bias": SamplingParams(logit_bias={5: 2.0, 9: -3.0}),
    "mask": SamplingParams(allowed_token_ids=tuple(range(0, 100_000, 7))),
    "bad words": SamplingParams(bad_words=("x",), in_tokens=_FORMS),
    "logprobs 20": SamplingParams(logprobs=20),
    "greedy, penalties": SamplingParams(temperature=0.0, repetition_penalty=1.1),
}


def state_of(sampling: SamplingParams, seed: int) -> SamplingState:
    """The state of a sequence in the middle of its output."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(2000, (NUM_TOKENS,), generator=generator).tolist())
    admission = Admission(0, "bench", tokens, NUM_TOKENS // 2, sampling, seed, frozenset({0}))
    return SamplingState(admission, VOCAB_SIZE)


def logits_of(shape: str, num_rows: int) -> torch.Tensor:
    """Logits [R, V] in float32, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(num_rows, VOCAB_SIZE, generator=generator)
    if shape == "peaked":
        rows = 2.0 * rows - 8.0 * torch.rand(num_rows, VOCAB_SIZE, generator=generator).log().neg()
        rows[:, :40] += 14.0
    return rows.bfloat16().float()


def microseconds_per_row(
    sample_rows: Sampler, logits: torch.Tensor, states: list[SamplingState], repeats: int
) -> list[float]:
    """The time of each repeat, after one for warm-up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        sample_rows(logits, states, None)
        times.append((time.perf_counter() - start) / len(states) * 1e6)
    return times[1:]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description="Sampling by kind of parameters, microseconds per row."
    )
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--numpy", action="store_true", help="measure the sampler in NumPy")
    options = parser.parse_args()
    ops = load_native(options.threads)
    assert ops is not None and ops.steps is not None
    native = NativeSampler(ops.steps.sampler(VOCAB_SIZE))
    sample_rows: Sampler = sample if options.numpy else native.sample
    print(describe_machine())
    columns = [(shape, rows) for shape in ("peaked", "flat") for rows in options.rows]
    print(f"{'us per row':18s}" + "".join(f"{f'{s} x{r}':>20s}" for s, r in columns))
    inputs = [logits_of(shape, rows) for shape, rows in columns]
    for kind, sampling in KINDS.items():
        cells = []
        for logits in inputs:
            states = [state_of(sampling, seed) for seed in range(logits.shape[0])]
            times = microseconds_per_row(sample_rows, logits, states, options.repeats)
            cells.append(f"{statistics.median(times):11.0f} ({min(times):6.0f})")
        print(f"{kind:18s}" + "".join(f"{cell:>20s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
