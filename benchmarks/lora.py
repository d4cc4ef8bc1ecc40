"""`python -m benchmarks.lora`: throughput with many LoRA adapters, against none and against merges.

A checkpoint of random weights, and as many random adapters as the largest point, are written once
to `--cache` and opened through `LLM(lora_dir=...)`, as a user would; `--max-loras` of them fit into
memory, the others are loaded and evicted on the way. Each measurement sends `--concurrency`
prompts at once, whose adapters are chosen by a distribution:

    uniform   each adapter equally often
    zipf      adapter k with a probability proportional to 1 / k

`none` is the same engine and prompts without adapters. `merge-and-swap` serves one adapter after
another with the base model's speed, and pays for W + scale * B A of each before; the time for
packing the merged weights is left out, so this figure is an upper bound.

The adapters change the projections of attention (`--targets all` adds the MLP, four times as many
bytes). Rounds alternate between the variants of a point, so that a slow phase of the machine
affects all of them; figures are medians, in output tokens per second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from benchmarks.machine import describe_machine
from benchmarks.peers.checkpoints import make_checkpoint, plain_tokens
from quickstep import LLM, LoRARequest, SamplingParams
from quickstep.bench.shapes import SHAPES
from quickstep.model.adapters.checkpoint import open_adapter
from quickstep.model.adapters.int8 import as_int8
from quickstep.model.adapters.lora_modules import LoRAModule, lora_modules
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.ops.tensors import BFLOAT16

__all__ = ["ATTENTION", "choose_adapters", "main", "write_adapters"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_TARGETS = {"attention": ATTENTION, "all": (*ATTENTION, "gate_proj", "up_proj", "down_proj")}
_NUM_COLD = 9  # adapters whose first token is measured


class Workload(msgspec.Struct, frozen=True):
    """The requests of a round: `concurrency` prompts of `input_len` tokens, all at once."""

    concurrency: int
    input_len: int
    output_len: int
    rounds: int


def choose_adapters(num_adapters: int, count: int, distribution: str, seed: int) -> list[int]:
    """The adapter of each of `count` requests, from 0 to `num_adapters` - 1."""
    weights = [1.0 if distribution == "uniform" else 1.0 / (k + 1) for k in range(num_adapters)]
    return random.Random(seed).choices(range(num_adapters), weights, k=count)


def write_adapters(
    base: Path, directory: Path, count: int, rank: int, targets: Sequence[str]
) -> list[Path]:
    """Random adapters of the checkpoint `base`, in bf16; those that exist are kept."""
    modules = {
        name: module
        for name, module in lora_modules(read_spec(base)).items()
        if name.rpartition(".")[2] in targets
    }
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(targets),
        "bias": "none",
    }
    paths = [directory / f"adapter-{number:04}" for number in range(count)]
    for number, path in enumerate(paths):
        if (path / "adapter_config.json").exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        save_file(_tensors(modules, rank, number), path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config))
    return paths


def _tensors(modules: dict[str, LoRAModule], rank: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in modules.items():
        start = f"base_model.model.model.{name}"
        for half, shape in (("A", (rank, module.num_inputs)), ("B", (module.num_outputs, rank))):
            values = torch.randn(shape, generator=generator) * 0.02
            tensors[f"{start}.lora_{half}.weight"] = values.to(torch.bfloat16)
    return tensors


def merge_s(base: Path, rank: int, targets: Sequence[str], repeats: int = 3) -> float:
    """Seconds for W + B A of every target, in bf16 with torch: the median."""
    modules = [
        module
        for name, module in lora_modules(read_spec(base)).items()
        if name.rpartition(".")[2] in targets
    ]
    weights = [
        torch.zeros(module.num_outputs, module.num_inputs, dtype=torch.bfloat16)
        for module in modules
    ]
    halves = [
        (
            torch.ones(module.num_outputs, rank, dtype=torch.bfloat16),
            torch.ones(rank, module.num_inputs),
        )
        for module in modules
    ]
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        for weight, (b, a) in zip(weights, halves, strict=True):
            weight.addmm_(b, a.to(torch.bfloat16))
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def load_s(base: Path, adapter: Path, rank: int, dtype: str) -> float:
    """Seconds for reading, checking and packing an adapter, next to nothing else."""
    spec, ops = read_spec(base), resolve_ops(torch.device("cpu"))
    started_s = time.perf_counter()
    modules = open_adapter(adapter, spec, rank).read(BFLOAT16).modules
    ops.pack_lora(as_int8(modules) if dtype == "int8" else modules)
    return time.perf_counter() - started_s


class Bench:
    """Runs rounds on one engine."""

    def __init__(self, llm: LLM, base: Path, names: Sequence[str], workload: Workload) -> None:
        self._llm = llm
        self._tokens = plain_tokens(base)
        self._requests = [LoRARequest(name) for name in names]
        self._workload = workload

    def open(self, num_adapters: int) -> None:
        """Have the first `num_adapters` read and checked, as a server that has run for a while."""
        prompts = [{"prompt_token_ids": self._tokens[:1]}] * num_adapters
        requests = self._requests[:num_adapters]
        self._llm.generate(prompts, SamplingParams(max_tokens=1), False, lora_request=requests)

    def cold_first_token_s(self, name: str) -> tuple[float, float]:
        """Seconds until the first token: of an adapter that was never named, and of no adapter."""
        params = SamplingParams(max_tokens=1)
        times = []
        for request in (LoRARequest(name), None):
            prompt = {"prompt_token_ids": self._tokens[: self._workload.input_len]}
            started_s = time.perf_counter()
            self._llm.generate([prompt], params, use_tqdm=False, lora_request=request)
            times.append(time.perf_counter() - started_s)
        return times[0], times[1]

    def tokens_per_s(self, chosen: Sequence[int | None], seed: int) -> float:
        """Output tokens per second of one round, a request for each entry of `chosen`."""
        rng = random.Random(seed)
        work = self._workload
        prompts = [
            {"prompt_token_ids": rng.choices(self._tokens, k=work.input_len)} for _ in chosen
        ]
        requests = [None if adapter is None else self._requests[adapter] for adapter in chosen]
        params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
        started_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        elapsed_s = time.perf_counter() - started_s
        return sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed_s

    def point(self, num_adapters: int, distribution: str) -> tuple[float, float]:
        """Medians of output tokens per second: without adapters, and with `num_adapters`."""
        work = self._workload
        none: list[float] = []
        mixed: list[float] = []
        for seed in range(work.rounds):
            chosen = choose_adapters(num_adapters, work.concurrency, distribution, seed)
            none.append(self.tokens_per_s([None] * work.concurrency, seed))
            mixed.append(self.tokens_per_s(chosen, seed))
        return statistics.median(none), statistics.median(mixed)

    def swap_tokens_per_s(self, num_adapters: int, distribution: str, swap_s: float) -> float:
        """Output tokens per second when adapters are merged one after another."""
        chosen = choose_adapters(num_adapters, self._workload.concurrency, distribution, 0)
        groups: dict[int, int] = defaultdict(int)
        for adapter in chosen:
            groups[adapter] += 1
        total_s = swap_s * len(groups)
        for seed, size in enumerate(groups.values()):
            num_tokens = size * self._workload.output_len
            total_s += num_tokens / self.tokens_per_s([None] * size, seed)
        return len(chosen) * self._workload.output_len / total_s


def print_cold_first_tokens(
    bench: Bench, base: Path, adapters: Sequence[Path], rank: int, dtype: str
) -> None:
    """First tokens of adapters that were never named, next to what loading and a step take."""
    cold_s, warm_s, loading_s = [], [], []
    for adapter in adapters:
        cold, warm = bench.cold_first_token_s(adapter.name)
        cold_s.append(cold)
        warm_s.append(warm)
        loading_s.append(load_s(base, adapter, rank, dtype))
    excess_s = [
        cold - warm - loading for cold, warm, loading in zip(cold_s, warm_s, loading_s, strict=True)
    ]
    print(
        f"first token, medians of {len(adapters)}: {1e3 * statistics.median(cold_s):.1f} ms of a "
        f"cold adapter, {1e3 * statistics.median(warm_s):.1f} ms of none; loading one: "
        f"{1e3 * statistics.median(loading_s):.1f} ms; more than both together: "
        f"{1e3 * statistics.median(excess_s):.1f} ms ({1e3 * min(excess_s):.1f} to "
        f"{1e3 * max(excess_s):.1f})"
    )


def main() -> int:
    """Print a line for each point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora")
    add = parser.add_argument
    add("--cache", type=Path, required=True, help="where the checkpoint and adapters are written")
    add("--shape", choices=[*SHAPES], default="qwen2.5-0.5b", help="(default: %(default)s)")
    add("--rank", type=int, default=16, help="(default: %(default)s)")
    add("--targets", choices=[*_TARGETS], default="attention", help="(default: %(default)s)")
    add("--points", type=int, nargs="+", default=[1, 8, 64], help="numbers of adapters")
    add("--distributions", nargs="+", choices=("zipf", "uniform"), default=["zipf", "uniform"])
    add("--max-loras", type=int, default=64, help="(default: %(default)s)")
    add("--lora-dtype", choices=("auto", "int8"), default="auto", help="(default: %(default)s)")
    add("--max-cpu-loras", type=int, help="(default: --max-loras)")
    add("--concurrency", type=int, default=64, help="(default: %(default)s)")
    add("--input-len", type=int, default=16, help="(default: %(default)s)")
    add("--output-len", type=int, default=16, help="(default: %(default)s)")
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    add("--swap", action="store_true", help="measure merge-and-swap too")
    args = parser.parse_args()
    targets = _TARGETS[args.targets]
    base = make_checkpoint(args.shape, args.cache, seed=0)
    kept = args.cache / "adapters" / f"{args.shape}-rank{args.rank}-{args.targets}"
    paths = write_adapters(base, kept, max(args.points) + _NUM_COLD, args.rank, targets)
    workload = Workload(args.concurrency, args.input_len, args.output_len, args.rounds)
    print(describe_machine())
    swap_s = merge_s(base, args.rank, targets) if args.swap else 0.0
    # without the prefix cache: the rounds of a point repeat their prompts; without drafts: they
    # guess more of one variant's text than of the other's
    with LLM(
        str(base),
        lora_dir=str(kept),
        max_loras=args.max_loras,
        max_cpu_loras=args.max_cpu_loras,
        max_lora_rank=args.rank,
        lora_dtype=args.lora_dtype,
        max_num_seqs=args.concurrency,
        max_model_len=args.input_len + args.output_len,
        enable_prefix_caching=False,
        speculative_config={"method": "off"},
    ) as llm:
        bench = Bench(llm, base, [path.name for path in paths], workload)
        bench.tokens_per_s([None] * args.concurrency, seed=0)
        print_cold_first_tokens(bench, base, paths[-_NUM_COLD:], args.rank, args.lora_dtype)
        swap = "  merge-and-swap" if args.swap else ""
        print(f"adapters  distribution  none tok/s  adapters tok/s  of none %{swap}")
        for num_adapters in sorted(args.points):
            bench.open(num_adapters)
            for distribution in args.distributions:
                none, mixed = bench.point(num_adapters, distribution)
                line = f"{num_adapters:8}  {distribution:12}  {none:10.1f}  {mixed:14.1f}"
                line += f"  {100 * mixed / none:9.1f}"
                if args.swap:
                    swapped = bench.swap_tokens_per_s(num_adapters, distribution, swap_s)
                    line += f"  {swapped:14.1f}"
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
