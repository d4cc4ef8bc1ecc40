"""The byte-level BPE tokenizer of the demo model: training it, and the files that describe it.

Owns the vocabulary's size, its special tokens and the split pattern. Called by `dataset` (train)
and `export` (files).
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tools.demo_model.chat import CHAT_TEMPLATE

VOCAB_SIZE = 4096
MAX_CONTEXT = 2048
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TOOL_TOKENS = ("<tool_call>", "</tool_call>")

# A word takes one leading space or sign (" return", ".join", "_name"), digits are separate, and a
# line break takes the indentation after it, so that a Python line costs one token of whitespace.
_SPLIT = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train on texts; the result has exactly VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(TOOL_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not special: a client that strips special tokens must still see the tool calls.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in TOOL_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the corpus yields {tokenizer.get_vocab_size()} tokens, {VOCAB_SIZE} are needed; "
            "train on more text"
        )
    return tokenizer


def write_tokenizer_files(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and the three JSON files that transformers reads with it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    roles = {"eos_token": TURN_END, "pad_token": END_OF_TEXT}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": added,
            "additional_special_tokens": [TURN_START],
            "bos_token": None,
            **roles,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_CONTEXT,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "special_tokens_map.json", {**roles, "additional_special_tokens": [TURN_START]}
    )
    end_ids = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": end_ids, "pad_token_id": tokenizer.token_to_id(END_OF_TEXT)},
    )


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
