"""`python -m benchmarks.real.speed FILE ...`: first tokens and steps on the same GGUF files as
llama.cpp, in turns.

llama.cpp is that of `benchmarks.peers`. Printed are the milliseconds to the first token of 512, and
of a step of 1 and of 8 sequences, without drafts and cached prefixes: medians over the repeats, in
which the engines take turns.

    --shape qwen3.5-0.8b          a file with random weights of a shape of `quickstep.bench.shapes`,
                                  made by llama.cpp's converter and quantizer
    --type q4_k_m                 of that file, as the quantizer names it; bf16 is not quantized
    --ik FOLDER                   `ik_llama_cpp` of `ik-llama-cpp-python`, unpacked: a third engine,
                                  which repacks weights while it loads (-rtr)
    --clock cpu                   the CPU time of the engines' processes, with --threads 1 where
                                  other processes run too: threads that wait for each other may spin
    --competing 20                also while another process takes 20 % of a core, in bursts of 2 ms
    --tables speed depth prefix   `depth`: the first token of a long prompt, and a step after it;
                                  `prefix`, of Quickstep only: the first token of a prompt that
                                  begins as an earlier long one, after other requests
    --tokens 8192                 of a long prompt
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Self

from benchmarks.machine import describe_machine
from benchmarks.peers.checkpoints import convert, make_checkpoint
from benchmarks.peers.environments import Environment, prepare
from benchmarks.real.llama_cpp import LlamaCpp
from quickstep.bench.shapes import SHAPES
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.text.tokenizer import Tokenizer

_ENGINE = """
import json, sys, time
from quickstep import LLM, SamplingParams
file, most_tokens, threads, caching = sys.argv[1:]
drafts = {"method": "off"}
llm = LLM(
    file,
    max_model_len=int(most_tokens),
    num_threads=int(threads),
    enable_prefix_caching=caching == "caching",
    speculative_config=drafts,
)
for line in sys.stdin:
    request = json.loads(line)
    clock = time.process_time if request["clock"] == "cpu" else time.perf_counter
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    seconds = []
    # the second and the third differ by the steps; with cached prefixes both have the first's
    for count in (1, 1, 1 + request["num_tokens"])[: 3 if request["num_tokens"] else 1]:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        began = clock()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds.append(clock() - began)
        if len(seconds) == 1:
            num_cached = outputs[0].metrics.num_cached_tokens
    print(json.dumps({
        "first_s": seconds[0],
        "steps_s": seconds[-1] - seconds[-2] if request["num_tokens"] else 0.0,
        "token_ids": list(outputs[0].outputs[0].token_ids),
        "num_cached": num_cached,
    }), flush=True)
"""
_TEXT = (
    "A server takes requests of many users, and answers each of them as if it were the only one. "
)
_NUM_STEPS = 32
_MANY = 8  # sequences at once
_PROMPT = 512
_SHORT = 16
_TURN = 32  # tokens of an answer and of what follows it
_NUM_OTHERS, _OTHER = 4, 1024  # requests between two with the same prefix, and their tokens
_MARGIN = 256  # of the context that an engine gets, for outputs

_BURST_S = 0.01
_COMPETING = """
import sys, time
period, part = float(sys.argv[1]), float(sys.argv[2])
while True:
    until = time.perf_counter() + part * period
    while time.perf_counter() < until:
        pass
    time.sleep((1.0 - part) * period)
"""


class Quickstep:
    """Quickstep on a file, in a process of its own. A context manager, with the times that
    `LlamaCpp` has.
    """

    def __init__(
        self, file: Path, num_threads: int, most_tokens: int, *, caching: bool = False
    ) -> None:
        sizes = str(most_tokens), str(num_threads)
        arguments = [str(file), *sizes, "caching" if caching else ""]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ENGINE, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def seconds(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, clock: str = "elapsed"
    ) -> tuple[float, float]:
        """`LlamaCpp.seconds`."""
        first_s, steps_s, _, _ = self.generated(prompts, num_tokens, clock)
        return first_s, steps_s

    def generated(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, clock: str
    ) -> tuple[float, float, list[int], int]:
        """And the output of the first prompt, of which so many tokens were cached."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        lists = [list(prompt) for prompt in prompts]
        request = {"prompts": lists, "num_tokens": num_tokens, "clock": clock}
        print(json.dumps(request), file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with code {self._process.wait()}")
        found = json.loads(line)
        return found["first_s"], found["steps_s"], found["token_ids"], found["num_cached"]


Engine = Quickstep | LlamaCpp


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="*", metavar="FILE")
    parser.add_argument("--shape", choices=[*SHAPES])
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ik", type=Path, metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--clock", choices=["elapsed", "cpu"], default="elapsed")
    parser.add_argument("--competing", type=float, default=0.0, metavar="PERCENT")
    tables = ["speed", "depth", "prefix"]
    parser.add_argument("--tables", nargs="+", choices=tables, default=["speed"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quickstep-peers")
    args = parser.parse_args(argv)
    environment = prepare("llama_cpp", args.cache)
    files = [find_checkpoint(LoadConfig(model=model)).path for model in args.models]
    if args.shape is not None:
        checkpoint = make_checkpoint(args.shape, args.cache, 0)
        files.append(convert(checkpoint, "llama_cpp", args.type, environment))
    clock = "" if args.clock == "elapsed" else " of CPU time"
    of = f"medians of {args.repeats} (least to most), {args.threads} threads, times{clock}"
    print(f"{describe_machine()}; {of}", flush=True)
    for file in files:
        if "speed" in args.tables:
            with ExitStack() as stack:
                engines = _engines(stack, file, environment, args, _MANY, 1024)
                _compare(file, engines, args)
        if "depth" in args.tables:
            with ExitStack() as stack:
                engines = _engines(stack, file, environment, args, 1, args.tokens + _MARGIN)
                _compare_depth(file, engines, args)
        if "prefix" in args.tables:
            sizes = args.threads, args.tokens + 2 * _MARGIN
            with Quickstep(file, *sizes, caching=True) as quickstep:
                _use_again(file, quickstep, args)
    return 0


def _engines(
    stack: ExitStack,
    file: Path,
    environment: Environment,
    args: argparse.Namespace,
    num_sequences: int,
    most_tokens: int,
) -> dict[str, Engine]:
    """All of them on a file, until the stack ends."""
    sizes = args.threads, num_sequences, most_tokens
    caching = num_sequences == 1  # where every prompt is new
    ours = Quickstep(file, args.threads, most_tokens, caching=caching)
    engines: dict[str, Engine] = {
        "Quickstep": stack.enter_context(ours),
        "llama.cpp": stack.enter_context(LlamaCpp(environment, file, *sizes)),
    }
    if args.ik is not None:
        other = LlamaCpp(environment, file, *sizes, bindings=args.ik)
        engines["ik_llama.cpp"] = stack.enter_context(other)
    return engines


def _compare(file: Path, engines: dict[str, Engine], args: argparse.Namespace) -> None:
    loads = (0.0, args.competing) if args.competing else (0.0,)
    print("| model | other load | engine | first token of 512, ms | a step of 1 | a step of 8 |")
    print("|---|--:|---|--:|--:|--:|")
    text = _tokens(file, _PROMPT + _MANY)
    short = [text[start : start + _SHORT] for start in range(_MANY)]
    runs = (([text[:_PROMPT]], 0), (short[:1], _NUM_STEPS), (short, _NUM_STEPS))
    found: dict[tuple[float, str], list[list[float]]] = {}
    for percent in loads * (1 + args.repeats):
        for name, engine in engines.items():
            with _competing(percent):
                seconds = [engine.seconds(*run, args.clock) for run in runs]
            (first, _), (_, single), (_, many) = seconds
            values = [first, single / _NUM_STEPS, many / _NUM_STEPS]
            found.setdefault((percent, name), []).append([1e3 * value for value in values])
    for (percent, name), rows in found.items():
        columns = map(_range, zip(*rows[1:], strict=True))  # the first run is for warming up
        print(f"| {file.name} | {percent:g} % | {name} | {' | '.join(columns)} |", flush=True)


def _compare_depth(file: Path, engines: dict[str, Engine], args: argparse.Namespace) -> None:
    depth = args.tokens
    print(
        f"| model | engine | first token of {depth}, s | a step there, ms | over one at {_SHORT} |"
    )
    print("|---|---|--:|--:|--:|")
    some = _some(file)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in engines}
    for _ in range(args.repeats):
        text = some(depth)
        for name, engine in engines.items():
            _, shallow = engine.seconds([text[-_SHORT:]], _NUM_STEPS, args.clock)
            first, deep = engine.seconds([text], _NUM_STEPS, args.clock)
            found[name].append((first, 1e3 * deep / _NUM_STEPS, deep / shallow))
    for name, rows in found.items():
        columns = map(_range, zip(*rows, strict=True))
        print(f"| {file.name} | {name} | {' | '.join(columns)} |", flush=True)


def _use_again(file: Path, quickstep: Quickstep, args: argparse.Namespace) -> None:
    """Cold, the next turn, and other ends, each after other requests."""
    print(
        f"| model | prompt with a prefix of {args.tokens} | first token, s | cold / it | cached |"
    )
    print("|---|---|--:|--:|--:|")
    some = _some(file)
    quickstep.seconds([some(_SHORT)], 1)
    found: dict[str, list[tuple[float, float, int]]] = {}
    for _ in range(args.repeats):
        prefix = some(args.tokens)
        cold = [*prefix, *some(_TURN)]
        first, _, answer, _ = quickstep.generated([cold], _TURN, args.clock)
        found.setdefault("cold", []).append((first, 1.0, 0))
        prompts = {
            "the next turn": [*cold, *answer, *some(_TURN)],
            "another end": [*prefix, *some(_TURN)],
            "a third end": [*prefix, *some(_TURN)],
        }
        for name, prompt in prompts.items():
            for _ in range(_NUM_OTHERS):
                quickstep.seconds([some(_OTHER)], 0)
            seconds, _, _, num_cached = quickstep.generated([prompt], 0, args.clock)
            found.setdefault(name, []).append((seconds, first / seconds, num_cached))
    for name, rows in found.items():
        times, ratios, cached = zip(*rows, strict=True)
        columns = f"{_range(times)} | {_range(ratios)} | {min(cached)} to {max(cached)}"
        print(f"| {file.name} | {name} | {columns} |", flush=True)


def _some(file: Path) -> Callable[[int], list[int]]:
    """Makes prompts of random tokens, each another."""
    choose = random.Random(0)
    known = sorted(set(_tokens(file, len(_TEXT))))
    return lambda count: choose.choices(known, k=count)


def _tokens(file: Path, count: int) -> list[int]:
    """The same text again and again."""
    tokenizer = Tokenizer.open(file)
    return tokenizer.encode(_TEXT * (1 + count // len(tokenizer.encode(_TEXT))) * 2)[:count]


@contextmanager
def _competing(percent: float) -> Iterator[None]:
    """Another process takes so much of a core."""
    if not percent:
        yield
        return
    arguments = [str(_BURST_S), str(percent / 100.0)]
    with subprocess.Popen([sys.executable, "-c", _COMPETING, *arguments]) as process:
        try:
            yield
        finally:
            process.kill()


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
