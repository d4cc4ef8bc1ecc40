"""What speculation gains and loses: the same requests with and without it, in turns.

    python -m benchmarks.speculation [--model demo] [--quantization int8]
                                     [--workloads copy code chat random] [--batches 1 4 16 64]
                                     [--temperatures 0 0.8] [--seconds 240] [--tokens 128]
                                     [--with off auto demo-eagle ...]

Engines with the same weights: one with the method `off`, and one for each of `--with`, which are
methods or draft models (several at once as `demo-draft+demo-eagle`); `off` is the control, which
shows the noise. Workloads are copies of the prompt, code, chat and random words, for each batch
size and temperature. A batch size is how many sequences run at once: in a round each engine gets,
in turns, a few times as many requests of various lengths, so that a sequence that ends early makes
room for another one. Rounds follow until `--seconds` are over, with the engines in changing orders.
The outputs have to be equal. Printed are the tokens per second without speculation, and for each
other engine the ratio to it (median and range), the tokens per step of a sequence, and how many of
the drafts were accepted; at the end each engine's least median, and for each batch size and
temperature the geometric mean of all ratios with its standard error, which says whether a
difference to the control is one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import itertools
import math
import random
import statistics
import textwrap
import time
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.machine import describe_machine
from quickstep import LLM, SamplingParams
from quickstep.config import LoadConfig, SpeculationMethod
from quickstep.engine.outputs import RequestOutput
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.checkpoint.weights import open_checkpoint_files
from quickstep.runtime.speculation.methods import method_of_tensors

_KINDS = ("copy", "code", "chat", "random")
_BASELINE = "baseline"
_REQUESTS_PER_SEQUENCE = 3  # that runs at once


class Workload(msgspec.Struct, frozen=True):
    """Prompts of one kind at one temperature, `batch` of them at once."""

    name: str
    batch: int
    temperature: float


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
            self.num_tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            for timings in filter(None, output.metrics.sequences):
                self.num_drafts += timings.num_drafts
                self.num_accepted += timings.num_accepted


class Prompts:
    """Prompts of each kind, by an index that is new for every prompt."""

    def __init__(self) -> None:
        self._sources = [
            inspect.getsource(module) for module in (textwrap, statistics, random, argparse)
        ]
        self._words = [word for source in self._sources for word in source.split()]

    def of(self, kind: str, index: int) -> str:
        """A prompt; prompts of the same kind and index are equal."""
        if kind == "copy":
            return f"{self._code(index, 400)}\n\n{self._code(index, 400)[:60]}"
        if kind == "code":
            return self._code(index, 300)
        if kind == "chat":
            return f"Q: What does `{self._words[index % len(self._words)]}` do?\nA:"
        assert kind == "random"
        return " ".join(random.Random(index).sample(self._words, 40))

    def _code(self, index: int, size: int) -> str:
        source = self._sources[index % len(self._sources)]
        start = (index * 997) % max(1, len(source) - size)
        return source[start : start + size]


def run_round(
    engines: dict[str, LLM], workload: Workload, prompts: Prompts, number: int, num_tokens: int
) -> dict[str, tuple[float, list[RequestOutput]]]:
    """Run round `number` of the workload on all engines: tokens per second, and the outputs, which
    have 0.5 to 1.5 times `num_tokens` tokens. No prompt and no seed comes twice, because `suffix`
    finds drafts in recent outputs.

    Raises AssertionError where the outputs differ.
    """
    num_requests = _REQUESTS_PER_SEQUENCE * workload.batch
    indices = range(number * num_requests, (number + 1) * num_requests)
    texts = [prompts.of(workload.name, index) for index in indices]
    params = [
        SamplingParams(
            temperature=workload.temperature,
            seed=index,
            max_tokens=random.Random(index).randint(num_tokens // 2, num_tokens * 3 // 2),
            ignore_eos=True,
        )
        for index in indices
    ]
    results = {}
    expected: list[list[int]] | None = None
    for name in _order(list(engines), number):
        began = time.perf_counter()
        outputs = engines[name].generate(list(texts), params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        expected = expected or tokens
        assert tokens == expected, f"{workload.name}: {name} generated other tokens"
        results[name] = sum(map(len, tokens)) / seconds, outputs
    return results


def _order(names: Sequence[str], number: int) -> list[str]:
    """In which order the engines of round `number` run: all rotations of the names, then of the
    names backwards, so that each one is in each place equally often.
    """
    start = number % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number // len(names) % 2 else order


@contextlib.contextmanager
def _without_full_collections() -> Iterator[None]:
    """The garbage collector does not look at the objects that exist now, as in `quickstep serve`.
    Else some runs would pass through all imported modules and all engines for 50 to 130 ms.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(
    engines: dict[str, LLM], workloads: Sequence[Workload], num_tokens: int, seconds: float
) -> dict[Workload, dict[str, Figures]]:
    """Rounds of all workloads, two at least and until `seconds` are over, each counted
    but for the first.
    """
    prompts = Prompts()
    figures = {workload: {name: Figures() for name in engines} for workload in workloads}
    until = time.perf_counter() + seconds
    for number in itertools.count():
        for workload in workloads:
            if number > 1 and time.perf_counter() > until:
                return figures
            results = run_round(engines, workload, prompts, number, num_tokens)
            for name, (rate, outputs) in results.items() if number else ():
                figures[workload][name].add(rate, outputs)
    raise AssertionError("rounds end with the time")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization")
    parser.add_argument("--workloads", nargs="+", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--with", nargs="+", default=["off", "auto"], dest="others", metavar="NAME")
    args = parser.parse_args()
    print(describe_machine())
    measured: dict[Workload, dict[str, Figures]] = {}
    for batch in args.batches:
        workloads = [
            Workload(kind, batch, temperature)
            for temperature in args.temperatures
            for kind in args.workloads
        ]
        options = {"quantization": args.quantization, "max_num_seqs": batch}
        with contextlib.ExitStack() as stack:
            engines = {
                name: stack.enter_context(LLM(args.model, speculative_config=config, **options))
                for name, config in _configs(args.others).items()
            }
            stack.enter_context(_without_full_collections())
            seconds = args.seconds / len(args.batches)
            measured |= measure(engines, workloads, args.tokens, seconds)
    _print_table(measured)


def _configs(others: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """The baseline and the other engines, by the names that are printed."""
    methods = {method.value for method in SpeculationMethod}
    configs = {_BASELINE: [{"method": "off"}]}
    for name in others:
        if name in methods:
            configs[name] = [{"method": name}]
        else:
            models = name.split("+")
            configs[name] = [{"method": method_of(model), "model": model} for model in models]
    return configs


def method_of(model: str) -> str:
    """So that nothing else drafts, as it would with `auto`."""
    path = find_checkpoint(LoadConfig(model)).path
    return method_of_tensors(open_checkpoint_files(path).tensors).value


def _print_table(measured: dict[Workload, dict[str, Figures]]) -> None:
    print(
        f"{'workload':<10}{'batch':>6}{'T':>5}{'off tok/s':>11}  {'with':<14}{'rounds':>6}", end=""
    )
    print(f"{'ratio':>6}{'range':>14}{'tokens/step':>13}{'accepted':>9}")
    worst: dict[str, tuple[float, str]] = {}
    ratios_of: dict[tuple[str, int, float], list[float]] = {}
    for workload, figures in measured.items():
        off = figures[_BASELINE]
        where = f"{workload.name:<10}{workload.batch:>6}{workload.temperature:>5.1f}"
        for name, on in figures.items():
            if name == _BASELINE:
                continue
            ratios = [with_ / without for with_, without in zip(on.rates, off.rates, strict=True)]
            ratio = statistics.median(ratios)
            of_batch = ratios_of.setdefault((name, workload.batch, workload.temperature), [])
            of_batch.extend(ratios)
            worst[name] = min(worst.get(name, (ratio, where)), (ratio, where))
            accepted = on.num_accepted / on.num_drafts if on.num_drafts else 0.0
            tokens_per_step = on.num_tokens / (on.num_tokens - on.num_accepted)
            print(
                f"{where}{statistics.median(off.rates):>11.0f}  {name:<14}{len(ratios):>6}"
                f"{ratio:>6.2f}{min(ratios):>7.2f}-{max(ratios):<6.2f}"
                f"{tokens_per_step:>13.2f}{accepted:>9.0%}"
            )
    for name, (ratio, where) in worst.items():
        print(f"least median of {name}: {ratio:.3f} ({' '.join(where.split())})")
        for (other, batch, temperature), ratios in ratios_of.items():
            if other == name:
                mean, error = _mean_and_error(ratios)
                print(f"  batch {batch}, T {temperature}: mean {mean:.3f} +- {error:.3f}")


def _mean_and_error(ratios: Sequence[float]) -> tuple[float, float]:
    """The geometric mean and its standard error; infinite for a single ratio."""
    mean = statistics.geometric_mean(ratios)
    if len(ratios) < 2:
        return mean, math.inf
    deviation = statistics.stdev([math.log(ratio) for ratio in ratios])
    return mean, mean * deviation / math.sqrt(len(ratios))


if __name__ == "__main__":
    main()
