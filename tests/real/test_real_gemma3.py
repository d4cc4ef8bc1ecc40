"""Gemma 3 270M, a real public model in Q4_K_M: it loads without PyTorch, and its texts are those of
the exact model, which transformers dequantizes from the same file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.real.__main__ import text_windows
from benchmarks.real.models import QUESTIONS
from quickstep import LLM, SamplingParams
from quickstep.bench.text_accuracy import Reference, compare
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.text.tokenizer import Tokenizer

Measured = list[tuple[str, str]]

NUM_TOKENS = 24
NUM_WINDOWS = 6  # of 512 tokens: the logits of 262,144 tokens take seconds in float64
_WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from quickstep import LLM, SamplingParams
with LLM(sys.argv[1], max_model_len=1024) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    outputs = llm.generate(json.loads(sys.argv[2]), params, use_tqdm=False)
print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.fixture(scope="module")
def exact(gemma3_file: Path) -> Any:
    """transformers' model of the same file, dequantized to float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gemma3_file.parent, gguf_file=gemma3_file.name, dtype=torch.float32
    )
    return model.eval()


class _ExactHead:
    """The output projection of transformers' model, where a `Model` has `logits`."""

    def __init__(self, exact: Any) -> None:
        self._exact = exact

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[E, hidden] -> [E, V]."""
        with torch.inference_mode():
            logits: torch.Tensor = self._exact.lm_head(hidden)
        return logits


def test_documentation_is_as_likely_as_in_the_exact_model(
    gemma3_file: Path, exact: Any, measured: Measured
) -> None:
    windows = text_windows(gemma3_file)[:NUM_WINDOWS]
    with torch.inference_mode():
        hidden = tuple(exact.model(torch.tensor([w])).last_hidden_state[0] for w in windows)
    load = LoadConfig(model=str(gemma3_file), device="cpu")
    ops = resolve_ops(torch.device("cpu"))
    model = load_model(find_checkpoint(load), read_spec(gemma3_file), ops, load, None, 512)
    found = compare(Reference(_ExactHead(exact), windows, hidden), model)
    measured.append(("gemma3: perplexity", f"{found.perplexity:.4f}"))
    measured.append(("gemma3: its change from float32", f"{found.perplexity_change:+.3%}"))
    measured.append(("gemma3: mean KL in nats", f"{found.kl_mean:.5f}"))
    assert abs(found.perplexity_change) < 0.01
    assert found.kl_mean < 0.01


def test_greedy_texts_are_those_of_the_exact_model_until_it_is_nearly_tied(
    gemma3_file: Path, exact: Any, measured: Measured
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(str(gemma3_file), max_model_len=1024) as llm:
        outputs = llm.generate(list(QUESTIONS), params, use_tqdm=False)
    gaps = 0.0
    for output in outputs:
        prompt, tokens = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = exact(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps = max(gaps, float((logits.max(-1).values - chosen).max()))
    measured.append(("gemma3: largest logit that was missed by", f"{gaps:.3f}"))
    assert gaps < 0.5


def test_it_runs_without_torch_with_the_same_texts(gemma3_file: Path) -> None:
    prompts = list(QUESTIONS[:4])
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(gemma3_file), json.dumps(prompts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(str(gemma3_file), max_model_len=1024) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [list(output.outputs[0].token_ids) for output in outputs]


def test_texts_come_back_from_tokens(gemma3_file: Path) -> None:
    tokenizer = Tokenizer.open(gemma3_file)
    for text in (*QUESTIONS, "na\u00efve \u6f22\u5b57  \n\ttabs \U0001f469"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
