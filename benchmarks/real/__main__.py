"""`python -m benchmarks.real`: Quickstep and llama.cpp on the same files, SmolLM2 and Gemma 3 270M.

Prints a table: the perplexity of 50 kB of Python documentation by both, how far Quickstep's
distributions are from llama.cpp's, and how many greedy texts of 20 prompts are the same. Both get
the same tokens. The exit code is 1 if a perplexity is more than 0.5 % above llama.cpp's.

llama.cpp is that of `benchmarks.peers`, whose environment is set up if it is missing (a build of
20 minutes); Gemma's packages must be installed (`make real` does so).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from benchmarks.machine import describe_machine
from benchmarks.peers.environments import prepare
from benchmarks.real.llama_cpp import LlamaCpp, LlamaCppWindows
from benchmarks.real.models import QUESTIONS, documentation, gemma3, smollm2
from quickstep import LLM, SamplingParams
from quickstep.bench.text_accuracy import Reference, compare
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.text.tokenizer import Tokenizer

WINDOW = 512
NUM_TOKENS = 24
MOST_ABOVE = 0.005  # of llama.cpp's perplexity


class Comparison(msgspec.Struct, frozen=True):
    """One file in both.

    Attributes:
        num_tokens: Of the text, in windows of 512.
        above: Quickstep's perplexity divided by llama.cpp's, minus 1.
        kl_mean: Of llama.cpp's distributions from Quickstep's, nats per token.
        num_same_texts: Of the greedy texts of 20 prompts.
        num_same_tokens: Of all greedy texts, those before the first difference.
    """

    num_tokens: int
    perplexity: float
    above: float
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    num_same_texts: int
    num_same_tokens: int


def compared(file: Path, llama_cpp: LlamaCpp) -> Comparison:
    """Measure one file."""
    found = _likelihoods(file, llama_cpp)
    num_same, num_tokens = _greedy_texts(file, llama_cpp)
    return msgspec.structs.replace(found, num_same_texts=num_same, num_same_tokens=num_tokens)


def _likelihoods(file: Path, llama_cpp: LlamaCpp) -> Comparison:
    windows = text_windows(file)
    head = LlamaCppWindows(llama_cpp, windows)
    reference = Reference(cast(Any, head), windows, head.hidden())
    load = LoadConfig(model=str(file), device="cpu")
    ops = resolve_ops(torch.device("cpu"))
    model = load_model(find_checkpoint(load), read_spec(file), ops, load, None, WINDOW)
    found = compare(reference, model)
    return Comparison(
        num_tokens=sum(map(len, windows)),
        perplexity=found.perplexity,
        above=found.perplexity_change,
        kl_mean=found.kl_mean,
        kl_p99=found.kl_p99,
        top1_agreement=found.top1_agreement,
        num_same_texts=0,
        num_same_tokens=0,
    )


def text_windows(file: Path) -> tuple[tuple[int, ...], ...]:
    """The documentation in windows, each with the tokens that begin a text."""
    tokenizer = Tokenizer.open(file)
    start = tokenizer.encode("")
    token_ids = tokenizer.encode(documentation(), add_special_tokens=False)
    step = WINDOW - len(start)
    places = range(0, len(token_ids) - step + 1, step)
    return tuple((*start, *token_ids[place : place + step]) for place in places)


def _greedy_texts(file: Path, llama_cpp: LlamaCpp) -> tuple[int, int]:
    """How many texts are the same, and how many tokens before the first difference."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(file), max_model_len=1024) as llm:
        if llm.engine.chat_template is None:  # a base model
            outputs = llm.generate(list(QUESTIONS), params, use_tqdm=False)
        else:
            chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
            outputs = llm.chat(chats, params, use_tqdm=False)
    num_texts = num_tokens = 0
    for output in outputs:
        ours = list(output.outputs[0].token_ids)
        theirs = llama_cpp.greedy(list(output.prompt_token_ids or ()), NUM_TOKENS)
        num_texts += ours == theirs
        pairs = zip(ours, theirs, strict=True)
        num_tokens += next((i for i, (a, b) in enumerate(pairs) if a != b), NUM_TOKENS)
    return num_texts, num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.real")
    add = parser.add_argument
    add("--cache", type=Path, default=Path.home() / ".cache" / "quickstep-peers")
    add(
        "--gemma3", type=Path, default=Path("build") / "real", help="where its file is put together"
    )
    add("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    environment = prepare("llama_cpp", args.cache)
    print(describe_machine())
    print(f"llama.cpp of {environment.llama_cpp_bindings.parent.name}")
    columns = "tokens | perplexity | above llama.cpp's | mean KL | KL p99 | same most likely token"
    print(f"| file | {columns} | same greedy texts | same tokens before a difference |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    is_near = True
    for file in filter(None, (smollm2(), gemma3(args.gemma3))):
        with LlamaCpp(environment, file, args.threads) as llama_cpp:
            found = compared(file, llama_cpp)
        is_near &= found.above <= MOST_ABOVE
        cells = [
            f"{found.num_tokens}",
            f"{found.perplexity:.4f}",
            f"{found.above:+.3%}",
            f"{found.kl_mean:.5f}",
            f"{found.kl_p99:.4f}",
            f"{found.top1_agreement:.2%}",
            f"{found.num_same_texts} of {len(QUESTIONS)}",
            f"{found.num_same_tokens} of {NUM_TOKENS * len(QUESTIONS)}",
        ]
        print(f"| {file.name} | {' | '.join(cells)} |", flush=True)
    return 0 if is_near else 1


if __name__ == "__main__":
    sys.exit(main())
