"""`python -m benchmarks.loading MODEL ...`: how long a start takes, and what memory it needs.

Each start is a process of its own: without packed weights in the cache directory, the first one
that keeps them, and a later one that maps them, in turn. Printed are medians over the repeats of
the seconds until the model is loaded (imports apart) and until the first token after that, of the
milliseconds per token of one stream, and the memory that belongs to no file. The exit code is 1 if
outputs differ.

    --quantization int8 int4 --repeats 5

With `--peer llama.cpp`, for GGUF files: the seconds from the start of a process to its first token,
in turns with llama.cpp, as `benchmarks.real` sets it up. Quickstep's include tokenizing. What
follows a start is compared by `benchmarks.real.speed`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.machine import describe_machine
from benchmarks.peers.environments import Environment, prepare
from benchmarks.real.llama_cpp import LlamaCpp
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.text.tokenizer import Tokenizer

_START = """
import json, sys, threading, time
from quickstep import LLM, SamplingParams
from quickstep.engine import assembly
model, options = sys.argv[1], json.loads(sys.argv[2])
began = time.perf_counter()
llm = LLM(model, **options)
loaded = time.perf_counter()
sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
(first,) = llm.generate("The capital of France is", sampling, use_tqdm=False)
answered = time.perf_counter()
sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
llm.generate("The capital of France is", sampling, use_tqdm=False)
began_decode = time.perf_counter()
(output,) = llm.generate("The capital of France is", sampling, use_tqdm=False)
decoded = time.perf_counter()
rollup = dict(line.split(":", 1) for line in open("/proc/self/smaps_rollup") if ":" in line[:20])
for thread in threading.enumerate():
    if thread.name == "packed-weights":
        thread.join()
print(json.dumps({
    "load_s": loaded - began,
    "first_s": answered - loaded,
    "token_ms": 1e3 * (decoded - began_decode) / 64,
    "anonymous": int(rollup["Anonymous"].split()[0]) * 1024,
    "token_ids": list(output.outputs[0].token_ids),
}))
"""


_FIRST_TOKEN = """
import sys
from quickstep import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=1024)
llm.generate(sys.argv[2], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
print("done", flush=True)
"""
_PROMPT = "The capital of France is"


class Start(msgspec.Struct, frozen=True):
    """What one start took; `anonymous` are bytes."""

    load_s: float
    first_s: float
    token_ms: float
    anonymous: int
    token_ids: tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.loading")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--quantization", nargs="*", default=[], choices=["int8", "int4"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peer", choices=["llama.cpp"])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "quickstep-peers")
    args = parser.parse_args(argv)
    print(describe_machine())
    if args.peer is not None:
        environment = prepare("llama_cpp", args.cache)
        _compare_with_llama_cpp(args.models, args.repeats, environment)
        return 0
    print(f"medians of {args.repeats} starts in turn (least to most)")
    print("| model | start | loaded, s | first token, s | ms per token | memory of no file, MB |")
    print("|---|---|--:|--:|--:|--:|")
    is_equal = True
    for model in args.models:
        for quantization in (None, *args.quantization):
            is_equal &= _compare(model, quantization, args.repeats)
    return 0 if is_equal else 1


def _compare(model: str, quantization: str | None, repeats: int) -> bool:
    options = {} if quantization is None else {"quantization": quantization}
    found: dict[str, list[Start]] = {"nothing kept": [], "first": [], "later": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="quickstep-loading-") as cache:
            found["nothing kept"].append(_start(model, options, ""))
            found["first"].append(_start(model, options, cache))
            if not any(Path(cache).glob("packed/*.packed")):
                raise SystemExit(f"{model}: nothing was kept; the log says why")
            found["later"].append(_start(model, options, cache))
    name = " ".join(filter(None, (Path(model).name, quantization)))
    for kind, starts in found.items():
        seconds = [
            _range([start.load_s for start in starts]),
            _range([start.first_s for start in starts]),
            _range([start.token_ms for start in starts]),
        ]
        megabytes = median([start.anonymous for start in starts]) / 1e6
        print(f"| {name} | {kind} | {' | '.join(seconds)} | {megabytes:.0f} |", flush=True)
    outputs = {start.token_ids for starts in found.values() for start in starts}
    return len(outputs) == 1


def _compare_with_llama_cpp(models: Sequence[str], repeats: int, environment: Environment) -> None:
    print(f"medians of {repeats} starts in turn (least to most)")
    print("| model | Quickstep, s | with packed weights, s | llama.cpp, s |")
    print("|---|--:|--:|--:|")
    for model in models:
        file = find_checkpoint(LoadConfig(model=model)).path
        prompt = Tokenizer.open(file).encode(_PROMPT)
        ours = [sys.executable, "-c", _FIRST_TOKEN, str(file), _PROMPT]
        found: tuple[list[float], list[float], list[float]] = ([], [], [])
        with tempfile.TemporaryDirectory(prefix="quickstep-loading-") as cache:
            _start(str(file), {}, cache)  # which keeps the weights
            for _ in range(repeats):
                found[0].append(_first_token_s(ours, ""))
                found[1].append(_first_token_s(ours, cache))
                began = time.perf_counter()
                with LlamaCpp(environment, file, os.cpu_count() or 1) as llama_cpp:
                    llama_cpp.greedy(prompt, 1)
                    found[2].append(time.perf_counter() - began)
        print(f"| {file.name} | {' | '.join(map(_range, found))} |", flush=True)


def _first_token_s(command: Sequence[str], cache: str) -> float:
    """Of a process that prints a line after its first token."""
    environment = {**os.environ, "QUICKSTEP_CACHE_DIR": cache}
    began = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        is_done = process.stdout.readline() == b"done\n"
        seconds = time.perf_counter() - began
    if not is_done:
        raise SystemExit(f"{command[3]} did not start")
    return seconds


def _start(model: str, options: dict[str, str], cache: str) -> Start:
    environment = {**os.environ, "QUICKSTEP_CACHE_DIR": cache}
    command = [sys.executable, "-c", _START, model, json.dumps(options)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{model} did not start:\n{ran.stderr}")
    return msgspec.json.decode(ran.stdout.splitlines()[-1], type=Start)


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
