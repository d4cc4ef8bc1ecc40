"""What speculation gains and loses: the same requests with and without it, in turns.

    python -m benchmarks.speculation [--model demo] [--quantization int8] [--batches 1 4 16 64]
                                     [--rounds 3] [--tokens 128]

Two engines hold the same weights, one with the method `off` and one with the method `auto`. Each
workload (copies of the prompt, code, chat, random words) runs on both, alternating. The outputs
have to be equal. Printed are the tokens per second without speculation, the ratio with it (median
and range), and how many of the drafts were accepted.
"""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
import textwrap
import time
from collections.abc import Sequence

import msgspec

from benchmarks.machine import describe_machine
from quickstep import LLM, SamplingParams
from quickstep.engine.outputs import RequestOutput

_TEMPERATURES = (0.0, 0.8)


class Workload(msgspec.Struct, frozen=True):
    """Prompts of one kind."""

    name: str
    prompts: tuple[str, ...]


class Figures(msgspec.Struct):
    """One engine's runs of a workload."""

    rates: list[float] = msgspec.field(default_factory=list)
    num_drafts: int = 0
    num_accepted: int = 0

    def add(self, rate: float, outputs: Sequence[RequestOutput]) -> None:
        """Count a run: its tokens per second, and the drafts of its sequences."""
        self.rates.append(rate)
        for output in outputs:
            for timings in filter(None, output.metrics.sequences):
                self.num_drafts += timings.num_drafts
                self.num_accepted += timings.num_accepted


def workloads(count: int) -> list[Workload]:
    """`count` prompts of each kind, all different."""
    sources = [inspect.getsource(module) for module in (textwrap, statistics, random, argparse)]

    def code(index: int, size: int) -> str:
        source = sources[index % len(sources)]
        start = (index * 997) % max(1, len(source) - size)
        return source[start : start + size]

    rng = random.Random(0)
    words = [word for source in sources for word in source.split()]
    copies = tuple(f"{code(i, 400)}\n\n{code(i, 400)[:60]}" for i in range(count))
    return [
        Workload("copy", copies),
        Workload("code", tuple(code(i, 300) for i in range(count))),
        Workload("chat", tuple(f"Q: What does `{words[i]}` do?\nA:" for i in range(count))),
        Workload("random", tuple(" ".join(rng.sample(words, 40)) for _ in range(count))),
    ]


def measure(
    engines: dict[str, LLM], workload: Workload, batch: int, temperature: float, num_tokens: int
) -> dict[str, Figures]:
    """Run the workload on both engines in turns, a batch at a time; no prompt and no seed comes
    twice, because `suffix` finds drafts in recent outputs. The first batch is not counted.

    Raises AssertionError where the outputs differ.
    """
    figures = {name: Figures() for name in engines}
    for first in range(0, len(workload.prompts), batch):
        prompts = workload.prompts[first : first + batch]
        params = [
            SamplingParams(
                temperature=temperature, seed=first + i, max_tokens=num_tokens, ignore_eos=True
            )
            for i in range(batch)
        ]
        expected: list[list[int]] | None = None
        for name in list(engines) if (first // batch) % 2 else list(reversed(engines)):
            began = time.perf_counter()
            outputs = engines[name].generate(list(prompts), params, use_tqdm=False)
            seconds = time.perf_counter() - began
            tokens = [list(output.outputs[0].token_ids) for output in outputs]
            expected = expected or tokens
            assert tokens == expected, f"{workload.name}: {name} generated other tokens"
            if first:
                figures[name].add(sum(map(len, tokens)) / seconds, outputs)
    return figures


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    print(describe_machine())
    print(f"{'workload':<10}{'batch':>6}{'T':>5}{'off tok/s':>11}{'ratio':>7}{'range':>14}", end="")
    print(f"{'accepted':>9}")
    options = {"quantization": args.quantization, "max_num_seqs": max(args.batches)}
    with (
        LLM(args.model, speculative_config={"method": "off"}, **options) as off,
        LLM(args.model, speculative_config={"method": "auto"}, **options) as on,
    ):
        engines = {"off": off, "auto": on}
        for batch in args.batches:
            for temperature in _TEMPERATURES:
                for workload in workloads(batch * (args.rounds + 1)):
                    figures = measure(engines, workload, batch, temperature, args.tokens)
                    _print_line(workload.name, batch, temperature, figures)


def _print_line(name: str, batch: int, temperature: float, figures: dict[str, Figures]) -> None:
    off, on = figures["off"], figures["auto"]
    ratios = [with_ / without for with_, without in zip(on.rates, off.rates, strict=True)]
    accepted = on.num_accepted / on.num_drafts if on.num_drafts else 0.0
    print(
        f"{name:<10}{batch:>6}{temperature:>5.1f}{statistics.median(off.rates):>11.0f}"
        f"{statistics.median(ratios):>7.2f}{min(ratios):>7.2f}-{max(ratios):<6.2f}{accepted:>9.0%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
