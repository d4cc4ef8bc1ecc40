"""llama.cpp on the same files: `python -m benchmarks.real` prints the complete table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.peers.environments import Environment, fault_of_environment
from benchmarks.real.__main__ import MOST_ABOVE, NUM_TOKENS, compared
from benchmarks.real.llama_cpp import LlamaCpp
from benchmarks.real.models import QUESTIONS, smollm2

Measured = list[tuple[str, str]]


@pytest.fixture(scope="module")
def environment() -> Environment:
    cache = os.environ.get("QUICKSTEP_PEERS_CACHE", Path.home() / ".cache" / "quickstep-peers")
    found = Environment("llama_cpp", Path(cache) / "llama_cpp")
    fault = fault_of_environment(found)
    if fault is not None:
        pytest.skip(f"{fault}; `python -m benchmarks.real` sets it up in 20 minutes")
    return found


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_perplexity_is_llama_cpps_or_better(
    model: str, environment: Environment, measured: Measured, request: pytest.FixtureRequest
) -> None:
    file = smollm2() if model == "smollm2" else request.getfixturevalue("gemma3_file")
    with LlamaCpp(environment, file, os.cpu_count() or 1) as llama_cpp:
        found = compared(file, llama_cpp)
    texts = f"{found.num_same_texts} of {len(QUESTIONS)}"
    measured.append((f"{model}: perplexity above llama.cpp's", f"{found.above:+.3%}"))
    measured.append((f"{model}: mean KL from llama.cpp in nats", f"{found.kl_mean:.5f}"))
    measured.append((f"{model}: greedy texts that are llama.cpp's", texts))
    assert found.above <= MOST_ABOVE
    assert found.kl_mean < 0.02
    # until one is nearly tied, texts are the same: at least a third of all tokens
    assert found.num_same_tokens > NUM_TOKENS * len(QUESTIONS) / 3
