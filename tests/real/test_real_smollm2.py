"""What users do with a real model: exact weights, texts, chat, tools, schemas, stops, drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.real.models import QUESTIONS
from quickstep import LLM, SamplingParams
from quickstep.bench.text_accuracy import Reference, compare, cut_windows
from quickstep.cli.main import main
from quickstep.config import LoadConfig
from quickstep.model.checkpoint.source import find_checkpoint
from quickstep.model.loader import load_model
from quickstep.model.spec import read_spec
from quickstep.ops.resolve import resolve_ops
from quickstep.sampling_params import StructuredOutputsParams
from quickstep.text.tokenizer import Tokenizer

Measured = list[tuple[str, str]]

NUM_TOKENS = 24


def _chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


def _greedy(num_tokens: int = NUM_TOKENS, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, **changes)


class _ExactHead:
    """The output projection of transformers' model, where a `Model` has `logits`."""

    def __init__(self, exact: Any) -> None:
        self._exact = exact

    def logits(self, hidden: Tensor) -> Tensor:
        """[E, hidden] -> [E, V]."""
        with torch.inference_mode():
            logits: Tensor = self._exact.lm_head(hidden)
        return logits


def test_documentation_is_as_likely_as_in_the_exact_model(
    file: Path, exact: Any, documentation: str, measured: Measured
) -> None:
    token_ids = Tokenizer.open(file).encode(documentation)
    windows = cut_windows(token_ids, len(token_ids) // 512 * 512, 512)
    with torch.inference_mode():
        hidden = tuple(exact.model(torch.tensor([w])).last_hidden_state[0] for w in windows)
    reference = Reference(_ExactHead(exact), windows, hidden)
    spec, checkpoint = read_spec(file), find_checkpoint(LoadConfig(model="smollm2"))
    ops = resolve_ops(torch.device("cpu"))
    for dtype in ("bfloat16", "float32"):
        load = LoadConfig(model="smollm2", dtype=dtype, device="cpu")
        found = compare(reference, load_model(checkpoint, spec, ops, load, None, 512))
        measured.append((f"tokens of documentation, {dtype}", str(len(windows) * 512)))
        measured.append((f"perplexity, {dtype}", f"{found.perplexity:.4f}"))
        measured.append((f"its change from float32, {dtype}", f"{found.perplexity_change:+.3%}"))
        measured.append((f"mean KL in nats, {dtype}", f"{found.kl_mean:.5f}"))
        measured.append((f"same most likely token, {dtype}", f"{found.top1_agreement:.2%}"))
        # Activations are rounded to 8 bits for each product, the exact model's are not.
        assert abs(found.perplexity_change) < 0.01
        assert found.kl_mean < 0.01


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_texts_are_those_of_the_exact_model_but_for_near_ties(
    dtype: str, exact: Any, measured: Measured
) -> None:
    """How far the exact logit of each chosen token is below the highest. In float32 only the
    rounding of activations to 8 bits is left; bfloat16 rounds all of them once more, and now and
    then chooses another one of several likely tokens.
    """
    with LLM("smollm2", dtype=dtype, max_model_len=1024) as llm:
        answers = llm.chat(_chats(), _greedy())
    gaps = []
    for answer in answers:
        prompt, tokens = list(answer.prompt_token_ids or ()), list(answer.outputs[0].token_ids)
        with torch.inference_mode():
            logits = exact(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        gaps.append(logits.max(-1).values - chosen)
    same, all_gaps = sum(not gap.any() for gap in gaps), torch.cat(gaps)
    share, largest = float((all_gaps == 0).double().mean()), float(all_gaps.max())
    measured.append((f"texts whose tokens are all the exact model's, {dtype}", f"{same} of 20"))
    measured.append((f"tokens that are, {dtype}", f"{share:.2%}"))
    measured.append((f"logits that were missed by, {dtype}", f"{float(all_gaps.mean()):.4f}"))
    measured.append((f"the largest, {dtype}", f"{largest:.3f}"))
    assert share > 0.95
    assert float(all_gaps.mean()) < 0.02
    if dtype == "float32":
        assert largest < 0.5


def test_an_answer_in_a_batch_is_the_answer_of_batch_size_1(llm: LLM) -> None:
    chats = _chats()[:6]
    together = [output.outputs[0].token_ids for output in llm.chat(chats, _greedy())]
    assert together == [llm.chat([chat], _greedy())[0].outputs[0].token_ids for chat in chats]


def test_it_answers_and_ends_its_answer(llm: LLM) -> None:
    question = QUESTIONS.index("Name three primary colors.")  # no near tie at any level of kernels
    (answer,) = llm.chat([_chats()[question]], _greedy())
    assert answer.outputs[0].text == "The primary colors are:\n\nRed (R)\nBlue (B)\nYellow (Y)"
    assert answer.outputs[0].finish_reason == "stop"


def test_the_chat_template_is_transformers(llm: LLM, file: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    chat = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye\n  \u00e9\u4e2d\U0001f600"},
    ]
    expected = theirs.apply_chat_template(
        chat, chat_template=_template(file), add_generation_prompt=True, tokenize=False
    )
    (answer,) = llm.chat([chat], _greedy(1))
    assert list(answer.prompt_token_ids or ()) == theirs.encode(expected, add_special_tokens=False)


def _template(file: Path) -> str:
    from quickstep.model.checkpoint.gguf_file import open_gguf

    return str(open_gguf(file).metadata["tokenizer.chat_template"])


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "large": {"type": "boolean"},
    },
    "required": ["city", "country", "large"],
    "additionalProperties": False,
}


def test_answers_under_a_schema_are_json_of_it(llm: LLM) -> None:
    chats = [
        [{"role": "user", "content": f"Describe the city {city} in JSON."}]
        for city in ("Paris", "Tokyo", "Cairo")
    ]
    for answer in llm.chat(
        chats, _greedy(120, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    ):
        found = json.loads(answer.outputs[0].text)
        assert list(found) == ["city", "country", "large"]
        assert isinstance(found["large"], bool)


@pytest.mark.parametrize("length", [12, 40])
def test_a_long_stop_ends_the_text_before_it(llm: LLM, length: int) -> None:
    chat = [[{"role": "user", "content": "Tell me a short story about a dragon."}]]
    (free,) = llm.chat(chat, _greedy(120))
    text = free.outputs[0].text
    start = len(text) // 2
    stop = text[start : start + length]
    (stopped,) = llm.chat(chat, _greedy(120, stop=[stop]))
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].stop_reason == stop


def test_suffix_drafts_change_no_token_of_real_text(documentation: str, measured: Measured) -> None:
    prompts = [documentation[start : start + 1500] for start in range(0, 12_000, 3000)]
    repeat = "Repeat this text:\n\n{}\n\nAgain, the same text:\n\n"
    prompts += [repeat.format(text[:600]) for text in prompts]
    params = _greedy(64)
    with LLM("smollm2", max_model_len=2048) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    drafts = {"method": "suffix", "num_speculative_tokens": 8}
    with LLM("smollm2", max_model_len=2048, speculative_config=drafts) as drafting:
        answers = drafting.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in answers] == expected
    for name, part in (("documentation", answers[:4]), ("repeated text", answers[4:])):
        timings = [timing for answer in part for timing in answer.metrics.sequences if timing]
        checked = sum(timing.num_drafts for timing in timings)
        accepted = sum(timing.num_accepted for timing in timings)
        measured.append((f"suffix drafts accepted, {name}", f"{accepted} of {checked}"))


def test_verify_finds_no_difference(measured: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "smollm2", "--requests", "12", "--adapters", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    measured.append(("comparisons of verify", str(report.get("comparisons", report))[:60]))
