"""Measure an exported model: `python -m tools.demo_model.quality --run FOLDER --model FOLDER`.

Bits per byte on held-out modules, compared with xz and a 5-gram model, and the fractions of
questions and tool calls that greedy decoding answers exactly. Writes RUN/quality.json and the model
card.
"""

import argparse
import json
import lzma
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from tools.demo_model import dataset
from tools.demo_model.card import write_card
from tools.demo_model.chat import Conversation, ask, chat_renderer
from tools.demo_model.corpus import Document, load_corpus
from tools.demo_model.dialogues import Question, signature_questions, summary_questions
from tools.demo_model.export import load_exported
from tools.demo_model.facts import Fact, load_facts
from tools.demo_model.network import Llama
from tools.demo_model.ngram import NgramModel
from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, VOCAB_SIZE
from tools.demo_model.tool_dialogues import tool_conversations

SEED = 7
NUM_QUESTIONS = 300
NUM_TOOL_CALLS = 100
_WINDOW = 1024
_STRIDE = 512
_BATCH = 50


@dataclass(frozen=True, slots=True)
class Quality:
    """All measurements; fractions are in [0, 1]."""

    held_out_bytes: int
    bits_per_byte: float
    xz_bits_per_byte: float
    ngram_bits_per_byte: float
    summaries_exact: float
    signatures_exact: float
    tool_calls_exact: float
    num_questions: int = NUM_QUESTIONS
    num_tool_calls: int = NUM_TOOL_CALLS


def measure(run: Path, folder: Path) -> Quality:
    """Measure the model in `folder`, trained in `run`."""
    model, tokenizer = load_exported(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    held_out, facts = load_corpus().held_out, load_facts()
    rng = random.Random(SEED)
    text = "".join(document.text for document in held_out).encode()
    encoded = [_encode_document(tokenizer, document) for document in held_out]
    arrays = dataset.load_arrays(run)
    ngram = NgramModel(np.concatenate([arrays.library, arrays.tests]), VOCAB_SIZE)
    ngram_bits = -sum(float(ngram.log2_probabilities(tokens).sum()) for tokens in encoded)
    summaries = [rng.choice(one) for one in summary_questions(facts)]
    signatures = [rng.choice(one) for one in signature_questions(facts)]
    return Quality(
        held_out_bytes=len(text),
        bits_per_byte=sum(_bits(model, tokens) for tokens in encoded) / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=9)) / len(text),
        ngram_bits_per_byte=ngram_bits / len(text),
        summaries_exact=_fraction_exact(model, tokenizer, _question_pairs(summaries, rng)),
        signatures_exact=_fraction_exact(model, tokenizer, _question_pairs(signatures, rng)),
        tool_calls_exact=_fraction_exact(model, tokenizer, _new_tool_calls(facts)),
    )


@torch.inference_mode()
def _bits(model: Llama, tokens: np.ndarray) -> float:
    """Information of tokens after the first, each seeing at least `_STRIDE` before it if there."""
    total = 0.0
    scored_to = 1
    for start in range(0, max(1, tokens.size - _STRIDE), _STRIDE):
        window = torch.from_numpy(tokens[start : start + _WINDOW].astype(np.int64))
        skipped = scored_to - start - 1
        logits = model.logits(window[None, :-1])[0, skipped:]
        total += F.cross_entropy(logits, window[1 + skipped :], reduction="sum").item()
        scored_to = start + window.numel()
    return total / math.log(2)


def _fraction_exact(model: Llama, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> float:
    batches = [pairs[start : start + _BATCH] for start in range(0, len(pairs), _BATCH)]
    return sum(num_exact(model, tokenizer, batch) for batch in batches) / len(pairs)


@torch.inference_mode()
def num_exact(model: Llama, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> int:
    """How many (prompt, answer) pairs greedy decoding completes exactly, ending the turn.

    All decode together; a row leaves the batch when its turn ends or its text departs from the
    answer.
    """
    end = tokenizer.token_to_id(TURN_END)
    rows = [list(tokenizer.encode(prompt).ids) for prompt, _ in pairs]
    prompt_lens = [len(row) for row in rows]
    active, exact = list(range(len(rows))), 0
    while active:
        newest = _most_likely_next(model, [rows[i] for i in active])
        still_active = []
        for i, token in zip(active, newest, strict=True):
            rows[i].append(token)
            text = tokenizer.decode(rows[i][prompt_lens[i] :], skip_special_tokens=False)
            answer = pairs[i][1] + TURN_END
            if token == end:
                exact += text == answer
            elif answer.startswith(text.rstrip("\ufffd")):  # a character may be half written
                still_active.append(i)
        active = still_active
    return exact


def _most_likely_next(model: Llama, rows: Sequence[Sequence[int]]) -> list[int]:
    """The most likely next token of each row."""
    # Padding is on the right, where causal attention does not see it.
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    last = model(padded)[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])]
    token_ids: list[int] = F.linear(last, model.model.embed_tokens.weight).argmax(-1).tolist()
    return token_ids


def _question_pairs(questions: Sequence[Question], rng: random.Random) -> list[tuple[str, str]]:
    render = chat_renderer()
    sample = rng.sample(list(questions), min(NUM_QUESTIONS, len(questions)))
    return [(render(ask(question.text)), question.answer) for question in sample]


def _new_tool_calls(facts: Sequence[Fact]) -> list[tuple[str, str]]:
    """Random requests with another seed than the training set's, and the expected calls."""
    render = chat_renderer()
    pairs: list[tuple[str, str]] = []
    for one in tool_conversations(facts, 10 * NUM_TOOL_CALLS, random.Random(SEED)):
        call = next((i for i, m in enumerate(one.messages) if m.get("tool_calls")), None)
        if call is not None:
            prompt = render(Conversation(one.messages[:call], one.tools, True))
            text = render(Conversation(one.messages[: call + 1], one.tools))
            pairs.append((prompt, text.removeprefix(prompt).removesuffix(f"{TURN_END}\n")))
    return pairs[:NUM_TOOL_CALLS]


def _encode_document(tokenizer: Tokenizer, document: Document) -> np.ndarray:
    start = tokenizer.token_to_id(END_OF_TEXT)
    return np.array([start, *tokenizer.encode(document.text).ids], np.uint16)


def main() -> None:
    """Measure and write the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--note", default="", help="a sentence for the card about this run")
    arguments = parser.parse_args()
    quality = asdict(measure(arguments.run, arguments.model))
    (arguments.run / "quality.json").write_text(json.dumps(quality, indent=2) + "\n")
    write_card(arguments.run, arguments.model, quality, arguments.note)
    print(json.dumps(quality, indent=2))


if __name__ == "__main__":
    main()
