"""Token arrays for training, and random rows of them for each step.

`python -m tools.demo_model.dataset --run FOLDER` trains the tokenizer and writes tokenizer.json and
tokens.npz into FOLDER. `RowSampler` gives `train` its rows: those of a step depend on the seed and
only the step's number, so a resumed run gets the same rows as an uninterrupted one.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.demo_model.chat import chat_renderer
from tools.demo_model.corpus import Corpus, Document, load_corpus
from tools.demo_model.dialogues import fact_conversations, small_talk_conversations
from tools.demo_model.facts import Fact, load_facts
from tools.demo_model.tokenizer import END_OF_TEXT, TURN_END, TURN_START, train_tokenizer
from tools.demo_model.tool_dialogues import json_conversations, tool_conversations

SEED = 20
TEST_SHARE = 0.2  # of the text rows; the library's tests are twice its size and half as useful
_PROMPT_WEIGHT = 0.1  # loss weight of prompts; answers have 1
_NUM_TOOL_CONVERSATIONS = 1_800
_NUM_JSON_CONVERSATIONS = 1_200
_NUM_SMALL_TALK = 600

Tokens = NDArray[np.uint16]
Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """The tokenised corpus; conversation i is chat[chat_starts[i]:chat_starts[i + 1]]."""

    library: Tokens
    tests: Tokens
    chat: Tokens
    chat_weights: Weights
    chat_starts: NDArray[np.int64]


def chat_texts(facts: Sequence[Fact], seed: int = SEED) -> list[str]:
    """Every training conversation as text, in a seeded order."""
    rng = random.Random(seed)
    conversations = [
        *fact_conversations(facts, rng),
        *tool_conversations(facts, _NUM_TOOL_CONVERSATIONS, rng),
        *json_conversations(facts, _NUM_JSON_CONVERSATIONS, rng),
        *small_talk_conversations(_NUM_SMALL_TALK, rng),
    ]
    rng.shuffle(conversations)
    render = chat_renderer()
    return [render(conversation) for conversation in conversations]


def build(run: Path) -> None:
    """Write the token arrays below `run`, and the tokenizer unless there is one already."""
    corpus, facts = load_corpus(), load_facts()
    texts = chat_texts(facts)
    run.mkdir(parents=True, exist_ok=True)
    tokenizer_file = run / "tokenizer.json"
    if not tokenizer_file.exists():  # a model trained so far is bound to its tokenizer
        train_tokenizer(_tokenizer_texts(corpus, texts)).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    chat, starts = _encode_all(tokenizer, texts)
    arrays = TokenArrays(
        library=_encode_documents(tokenizer, corpus.library),
        tests=_encode_documents(tokenizer, corpus.tests),
        chat=chat,
        chat_weights=_answer_weights(tokenizer, chat),
        chat_starts=starts,
    )
    np.savez(
        run / "tokens.npz",
        library=arrays.library,
        tests=arrays.tests,
        chat=arrays.chat,
        chat_weights=arrays.chat_weights,
        chat_starts=arrays.chat_starts,
    )
    for name, tokens in (("library", arrays.library), ("tests", arrays.tests), ("chat", chat)):
        print(f"{name}: {tokens.size:,} tokens")
    print(f"facts: {len(facts):,}, conversations: {len(texts):,}")


def load_arrays(run: Path) -> TokenArrays:
    """Read what `build` wrote."""
    with np.load(run / "tokens.npz") as stored:
        return TokenArrays(**{name: stored[name] for name in stored.files})


class RowSampler:
    """Chooses the rows of a step; keeps the arrays and never changes them."""

    def __init__(self, arrays: TokenArrays, seed: int = SEED) -> None:
        self._arrays = arrays
        self._seed = seed

    def rows(
        self, step: int, num_rows: int, context: int, chat_share: float
    ) -> tuple[NDArray[np.int64], Weights]:
        """Tokens and loss weights [R, context + 1] of one step, about `chat_share` of them chat."""
        rng = np.random.default_rng((self._seed, step))
        length = context + 1
        tokens = np.empty((num_rows, length), np.int64)
        weights = np.ones((num_rows, length), np.float32)
        num_chat = int(num_rows * chat_share + rng.random())
        for row in range(num_rows):
            if row < num_chat:
                tokens[row], weights[row] = self._chat_row(rng, length)
            else:
                tokens[row] = self._text_row(rng, length)
        return tokens, weights

    def _text_row(self, rng: np.random.Generator, length: int) -> Tokens:
        from_tests = rng.random() < TEST_SHARE
        source = self._arrays.tests if from_tests else self._arrays.library
        start = rng.integers(0, source.size - length + 1)
        return source[start : start + length]

    def _chat_row(self, rng: np.random.Generator, length: int) -> tuple[Tokens, Weights]:
        """Complete conversations from the start of the row; the last one is cut at its end."""
        starts = self._arrays.chat_starts
        tokens, weights = np.empty(length, np.uint16), np.empty(length, np.float32)
        filled = 0
        while filled < length:
            one = rng.integers(0, starts.size - 1)
            taken = min(int(starts[one + 1] - starts[one]), length - filled)
            source = slice(starts[one], starts[one] + taken)
            tokens[filled : filled + taken] = self._arrays.chat[source]
            weights[filled : filled + taken] = self._arrays.chat_weights[source]
            filled += taken
        return tokens, weights


def _tokenizer_texts(corpus: Corpus, texts: Sequence[str]) -> Iterable[str]:
    yield from (document.text for document in corpus.library)
    yield from texts[:: max(1, len(texts) // 3_000)]


def _encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> Tokens:
    tokens, _ = _encode_all(tokenizer, [document.text for document in documents])
    return tokens


def _encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Tokens, NDArray[np.int64]]:
    """All texts as one array, each closed by the end-of-text token, and where each starts."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(list(texts))]
    starts = np.cumsum([0] + [len(ids) for ids in encoded], dtype=np.int64)
    return np.concatenate([np.array(ids, np.uint16) for ids in encoded]), starts


def _answer_weights(tokenizer: Tokenizer, chat: Tokens) -> Weights:
    """1 for the assistant's text and the end of its turn, `_PROMPT_WEIGHT` elsewhere."""
    opening = tokenizer.encode(f"{TURN_START}assistant\n").ids
    turn_start, turn_end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
    weights = np.full(chat.size, _PROMPT_WEIGHT, np.float32)
    turn_ends = np.flatnonzero(chat == turn_end)
    for start in np.flatnonzero(chat == turn_start):
        answer = start + len(opening)
        if list(chat[start:answer]) == opening:
            end = turn_ends[np.searchsorted(turn_ends, answer)]
            weights[answer : end + 1] = 1.0
    return weights


def main() -> None:
    """Build the data of a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of this training run")
    build(parser.parse_args().run)


if __name__ == "__main__":
    main()
