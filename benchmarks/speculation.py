"""What speculation gains and loses: the same requests with and without it, in turns.

    python -m benchmarks.speculation [--model demo] [--quantization int8] [--batches 1 4 16 64]
                                     [--rounds 3] [--tokens 128] [--with off auto demo-eagle ...]

Engines with the same weights: one with the method `off`, and one for each of `--with`, which are
methods or draft models; `off` is the control, which shows the noise. Each workload (copies of the
prompt, code, chat, random words) runs on all, in turns. The outputs have to be equal. Printed are
the tokens per second without speculation, and for each other engine the ratio to it (median and
range), the tokens per step of a sequence, and how many of the drafts were accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import random
import statistics
import textwrap
import time
from collections.abc import Sequence

import msgspec

from benchmarks.machine import describe_machine
from quickstep import LLM, SamplingParams
from quickstep.config import LoadConfig, SpeculationMethod
from quickstep.engine.outputs import RequestOutput
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.checkpoint.weights import open_checkpoint_files
from quickstep.runtime.speculation.methods import method_of_tensors

_TEMPERATURES = (0.0, 0.8)
_BASELINE = "baseline"


class Workload(msgspec.Struct, frozen=True):
    """Prompts of one kind."""

    name: str
    prompts: tuple[str, ...]


class Figures(msgspec.Struct):
    """One engine's runs of a workload."""

    rates: list[float] = msgspec.field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def add(self, rate: float, outputs: Sequence[RequestOutput]) -> None:
        """Count a run: its tokens per second, and the drafts of its sequences."""
        self.rates.append(rate)
        for output in outputs:
            self.num_tokens += sum(len(one.token_ids) for one in output.outputs)
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
    """Run the workload on all engines in turns, a batch at a time; no prompt and no seed comes
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
    parser.add_argument("--with", nargs="+", default=["off", "auto"], dest="others", metavar="NAME")
    args = parser.parse_args()
    print(describe_machine())
    print(
        f"{'workload':<10}{'batch':>6}{'T':>5}{'off tok/s':>11}  {'with':<14}{'ratio':>5}", end=""
    )
    print(f"{'range':>14}{'tokens/step':>13}{'accepted':>9}")
    options = {"quantization": args.quantization, "max_num_seqs": max(args.batches)}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLM(args.model, speculative_config=config, **options))
            for name, config in _configs(args.others).items()
        }
        for batch in args.batches:
            for temperature in _TEMPERATURES:
                for workload in workloads(batch * (args.rounds + 1)):
                    figures = measure(engines, workload, batch, temperature, args.tokens)
                    start = f"{workload.name:<10}{batch:>6}{temperature:>5.1f}"
                    _print_lines(start, figures)


def _configs(others: Sequence[str]) -> dict[str, dict[str, str]]:
    """The baseline and the other engines, by the names that are printed."""
    methods = {method.value for method in SpeculationMethod}
    configs = {_BASELINE: {"method": "off"}}
    for name in others:
        if name in methods:
            configs[name] = {"method": name}
        else:
            configs[name] = {"method": method_of(name), "model": name}
    return configs


def method_of(model: str) -> str:
    """So that nothing else drafts, as it would with `auto`."""
    path = find_checkpoint(LoadConfig(model)).path
    return method_of_tensors(open_checkpoint_files(path).tensors).value


def _print_lines(start: str, figures: dict[str, Figures]) -> None:
    off = figures.pop(_BASELINE)
    for name, on in figures.items():
        ratios = [with_ / without for with_, without in zip(on.rates, off.rates, strict=True)]
        accepted = on.num_accepted / on.num_drafts if on.num_drafts else 0.0
        tokens_per_step = on.num_tokens / (on.num_tokens - on.num_accepted)
        print(
            f"{start}{statistics.median(off.rates):>11.0f}  {name:<14}"
            f"{statistics.median(ratios):>5.2f}{min(ratios):>7.2f}-{max(ratios):<6.2f}"
            f"{tokens_per_step:>13.2f}{accepted:>9.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
