"""The tokenizer and the chat templates in a GGUF file's metadata.

`tokenizer.ggml.model` is `gpt2` (byte-level BPE, whose split has the name `tokenizer.ggml.pre`) or
`llama` (SentencePiece BPE, whose merges are computed from the pieces' scores). Called by
`Tokenizer.open` and `chat_template.find_templates`, which import it for GGUF files only. A
tokenizer with an unknown split is refused by name, because it would split text differently from
its training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Library

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.gguf_file import open_gguf
from quickstep.text.gguf_splits import SPLITS

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
# as llama.cpp: they end an answer wherever they are control tokens
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
_NAMED = ("bos", "eos", "unknown", "padding")


class GgufTokenizer(msgspec.Struct, frozen=True):
    """The parts of a `Tokenizer`."""

    library: Any
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ConfigError: The file has none, or one of a kind that is not supported.
    """
    metadata = open_gguf(path, with_texts=True).metadata
    values = {
        key.removeprefix(_PREFIX): value
        for key, value in metadata.items()
        if key.startswith(_PREFIX)
    }
    tokens, kind = values.get("tokens"), values.get("model")
    if not _are_texts(tokens):
        raise ConfigError(f"{path} holds no tokenizer (tokenizer.ggml.tokens)")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"{path} holds a tokenizer of kind {kind!r}; supported are gpt2, llama")
    try:
        build = _byte_level if kind == "gpt2" else _sentence_piece
        library, adds_bos = build(path, values, tokens)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the tokenizer of {path} cannot be read: {reason}") from error
    kinds = _kinds(values, len(tokens))
    for wanted in (_CONTROL, _USER_DEFINED):
        special = wanted == _CONTROL
        chosen = [t for t, k in zip(tokens, kinds, strict=True) if k == wanted and t]
        library.add_tokens([AddedToken(t, special=special, normalized=False) for t in chosen])
    _frame(library, values, tokens, adds_bos)
    return GgufTokenizer(library, _ends(values, tokens, kinds), _special_tokens(values, tokens))


def gguf_templates(path: Path) -> dict[str, str]:
    """The chat templates of a GGUF file by name; the plain one is `default`."""
    found = {}
    for key, value in open_gguf(path).metadata.items():
        if key == _TEMPLATE:
            found["default"] = str(value)
        elif key.startswith(f"{_TEMPLATE}."):
            found[key.removeprefix(f"{_TEMPLATE}.")] = str(value)
    return found


def _are_texts(value: object) -> TypeGuard[tuple[str, ...]]:
    return isinstance(value, tuple) and all(isinstance(text, str) for text in value)


def _byte_level(
    path: Path, values: Mapping[str, object], tokens: Sequence[str]
) -> tuple[Library, bool]:
    name = str(values.get("pre", "default"))
    split = SPLITS.get(name)
    if split is None:
        raise ConfigError(
            f"{path} splits text as {name!r} (tokenizer.ggml.pre); supported are "
            f"{', '.join(SPLITS)}"
        )
    merges = values.get("merges")
    if not _are_texts(merges):
        raise ConfigError(f"{path} holds no merges of its tokenizer (tokenizer.ggml.merges)")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = Library(models.BPE(vocabulary, pairs, ignore_merges=split.ignore_merges))
    if split.composed:
        library.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(part), "isolated") for part in split.expressions]
    bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_step])
    library.decoder = decoders.ByteLevel()
    return library, split.adds_bos


def _sentence_piece(
    path: Path, values: Mapping[str, object], tokens: Sequence[str]
) -> tuple[Library, bool]:
    scores = values.get("scores")
    if not isinstance(scores, tuple) or len(scores) != len(tokens):
        raise ConfigError(f"{path} holds no scores of its tokenizer (tokenizer.ggml.scores)")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = _token_id(values, "unknown", tokens) or 0
    library = Library(
        models.BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    pieces: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.get("add_space_prefix", True):
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        pieces.append(decoders.Strip(" ", 1, 0))
    else:
        library.normalizer = spaces
    library.decoder = decoders.Sequence(pieces)
    return library, True


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece: the best piece first, then the longest halves (as
    transformers converts such vocabularies).
    """
    found = []
    for piece, token_id in vocabulary.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocabulary and right in vocabulary:
                lengths = (-len(left), -len(right))
                rank = (-scores[token_id], *lengths, token_id, vocabulary[left])
                found.append((rank, left, right))
    found.sort()
    return [(left, right) for _, left, right in found]


def _kinds(values: Mapping[str, object], count: int) -> Sequence[int]:
    kinds = values.get("token_type")
    return kinds if isinstance(kinds, tuple) and len(kinds) == count else (1,) * count


def _frame(
    library: Library, values: Mapping[str, object], tokens: Sequence[str], adds_bos: bool
) -> None:
    """Set the post-processor, which adds beginning and end tokens as the file specifies."""
    bos, eos = (_token_id(values, name, tokens) for name in ("bos", "eos"))
    with_bos = bool(values.get("add_bos_token", adds_bos)) and bos is not None
    with_eos = bool(values.get("add_eos_token", False)) and eos is not None
    if not with_bos and not with_eos:
        return
    before = [(tokens[bos], bos)] if with_bos and bos is not None else []
    after = [(tokens[eos], eos)] if with_eos and eos is not None else []
    library.post_processor = processors.TemplateProcessing(
        single=[*(text for text, _ in before), "$A", *(text for text, _ in after)],
        special_tokens=list(dict([*before, *after]).items()),
    )


def _token_id(values: Mapping[str, object], name: str, tokens: Sequence[str]) -> int | None:
    value = values.get(f"{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _ends(
    values: Mapping[str, object], tokens: Sequence[str], kinds: Sequence[int]
) -> frozenset[int]:
    named = (_token_id(values, name, tokens) for name in ("eos", "eot", "eom"))
    ids = {token_id for token_id in named if token_id is not None}
    control = (i for i, kind in enumerate(kinds) if kind == _CONTROL)
    return frozenset(ids | {i for i in control if tokens[i] in _ENDS})


def _special_tokens(values: Mapping[str, object], tokens: Sequence[str]) -> dict[str, str]:
    names = {"unknown": "unk", "padding": "pad"}
    found = {}
    for name in _NAMED:
        token_id = _token_id(values, name, tokens)
        if token_id is not None:
            found[f"{names.get(name, name)}_token"] = tokens[token_id]
    return found
