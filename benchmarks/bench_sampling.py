"""Time of sampling from a vocabulary of 151,936, by kind of parameters and number of rows.

    python -m benchmarks.bench_sampling [--threads 2] [--repeats 21] [--rows 1 16] [--numpy]
    python -m benchmarks.bench_sampling --device cuda [--copied] [--rows 1 64] [--vocab-size 151936]

Times include Python: from a row of logits and the state of its sequence to a token. `peaked` logits
are distributed like those of a language model, `flat` ones like those of random weights. Caveats:
the logits are in the cache; with `--numpy` the sampler is the one in NumPy, which defines the
tokens; the smallest time is printed too, in case the machine is not quiet.

`--device cuda` samples on a GPU with the Triton kernels, and compares the tokens of the first rows
with those of the native sampler; with `--copied` the native sampler samples copies of a GPU's
logits. `--device cpu --triton` runs the kernels interpreted, to see that they work: use a small
`--vocab-size`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
from msgspec.structs import replace

from benchmarks.machine import describe_machine
from quickstep.ops.native.backend import default_num_threads, load_native
from quickstep.ops.tensors import to_torch
from quickstep.runtime.sampling.native_sampler import NativeSampler, Sampler
from quickstep.runtime.sampling.sampler import sample
from quickstep.runtime.sampling.state import SamplingState
from quickstep.sampling_params import TokenForms
from quickstep.types import Admission, SamplingParams

NUM_TOKENS = 1024  # prompt and output of a sequence, for penalties
_COMPARED = 4  # rows whose tokens are compared: NumPy takes milliseconds for one
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


def state_of(sampling: SamplingParams, seed: int, vocab_size: int) -> SamplingState:
    """The state of a sequence in the middle of its output."""
    generator = torch.Generator().manual_seed(seed)
    tokens = tuple(
        torch.randint(min(2000, vocab_size), (NUM_TOKENS,), generator=generator).tolist()
    )
    allowed = tuple(i for i in sampling.allowed_token_ids if i < vocab_size)
    sampling = replace(sampling, allowed_token_ids=allowed)
    admission = Admission(0, "bench", tokens, NUM_TOKENS // 2, sampling, seed, frozenset({0}))
    return SamplingState(admission, vocab_size)


def logits_of(shape: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    """Logits [R, V] in float32, rounded to bfloat16."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(num_rows, vocab_size, generator=generator)
    if shape == "peaked":
        rows = 2.0 * rows - 8.0 * torch.rand(num_rows, vocab_size, generator=generator).log().neg()
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


def sampler_of(options: argparse.Namespace) -> Sampler:
    """The sampler that the options name; for logits on their device."""
    if options.numpy:
        return sample
    if options.device == "cuda" or options.triton:
        from quickstep.runtime.sampling.device_sampler import DeviceSampler

        if not options.copied:
            return DeviceSampler(options.vocab_size, options.device).sample
    native = native_sampler(options)
    if options.copied:
        return lambda logits, *rest: native(to_torch(logits).to("cpu"), *rest)
    return native


def native_sampler(options: argparse.Namespace) -> Sampler:
    """The native sampler, for logits on a CPU; that of NumPy where there are no native kernels."""
    ops = load_native(options.threads)
    if ops is None or ops.steps is None:
        return sample
    return NativeSampler(ops.steps.sampler(options.vocab_size)).sample


def main() -> int:
    """Print a table. Returns 1 if tokens of a GPU are not those of the native sampler."""
    parser = argparse.ArgumentParser(
        description="Sampling by kind of parameters, microseconds per row."
    )
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--numpy", action="store_true", help="measure the sampler in NumPy")
    parser.add_argument("--triton", action="store_true", help="interpret Triton's on a CPU")
    parser.add_argument(
        "--copied", action="store_true", help="copy a GPU's logits to the native sampler"
    )
    options = parser.parse_args()
    if options.triton and options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    sample_rows = sampler_of(options)
    compared = native_sampler(options) if options.device == "cuda" or options.triton else None
    print(describe_machine())
    columns = [(shape, rows) for shape in ("peaked", "flat") for rows in options.rows]
    print(f"{'us per row':18s}" + "".join(f"{f'{s} x{r}':>20s}" for s, r in columns))
    on_host = [logits_of(shape, rows, options.vocab_size) for shape, rows in columns]
    num_different = 0
    for kind, sampling in KINDS.items():
        cells = []
        for host in on_host:
            logits = host.to(options.device)
            states = [state_of(sampling, seed, options.vocab_size) for seed in range(len(host))]
            if compared is not None:
                some = sample_rows(logits[:_COMPARED], states[:_COMPARED], None)
                num_different += some != compared(host[:_COMPARED], states[:_COMPARED], None)
            times = microseconds_per_row(sample_rows, logits, states, options.repeats)
            cells.append(f"{statistics.median(times):11.0f} ({min(times):6.0f})")
        print(f"{kind:18s}" + "".join(f"{cell:>20s}" for cell in cells), flush=True)
    if num_different:
        print(f"{num_different} cells differ from the native sampler", file=sys.stderr)
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
