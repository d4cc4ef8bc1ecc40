"""The tokenizer and the chat templates in a GGUF file's metadata.

`tokenizer.ggml.model` is `gpt2` (byte-level BPE, whose split has the name `tokenizer.ggml.pre`),
`llama` (SentencePiece BPE, whose merges are computed from the pieces' scores), `bert` (WordPiece)
or `t5` (Unigram, as T5 and XLM-R have it). SentencePiece's takes the `tokenizers` library seconds
to build, so `sentence_pieces` tokenizes for it where it can. Called by `Tokenizer.open` and
`chat_template.find_templates`, which import it for GGUF files only. A tokenizer with an unknown
split is refused by name, because it would split text differently from its training.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
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
from quickstep.ops.native.pieces import NativePieces
from quickstep.text.gguf_splits import SPLITS
from quickstep.text.sentence_pieces import SentencePieces
from quickstep.text.tokenizer_library import TokenizerLibrary

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
# of tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "▁"
# as llama.cpp: they end an answer wherever they are control tokens
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
_NAMED = ("bos", "eos", "unknown", "padding")


class GgufTokenizer(msgspec.Struct, frozen=True):
    """The parts of a `Tokenizer`."""

    library: TokenizerLibrary
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        ConfigError: The file has none, or one of a kind that is not supported.
    """
    return _native_tokenizer(path) or build_gguf_tokenizer(path)


def _native_tokenizer(path: Path) -> GgufTokenizer | None:
    """A vocabulary of SentencePiece, tokenized by native code; None where that does not read it."""
    file = open_gguf(path)
    values, listed = _values(file.metadata), file.text_lists.get(f"{_PREFIX}tokens")
    scores, kinds = values.get("scores"), values.get("token_type")
    if values.get("model") != "llama" or listed is None:
        return None
    if not _are_numbers(scores, listed.count) or not _are_numbers(kinds, listed.count):
        return None
    texts = file.header[listed.start : listed.end]
    tokens = NativePieces.open(texts, scores, kinds, _adds_space(values))
    if tokens is None:
        return None
    before, after = _framed(values, tokens, adds_bos=True, adds_eos=False)
    normalizer, decoder = _sentence_piece_steps(values)
    library = SentencePieces(
        tokens,
        special_ids=_ids_of(kinds, _CONTROL),
        user_defined_ids=_ids_of(kinds, _USER_DEFINED),
        before=[token_id for _, token_id in before],
        after=[token_id for _, token_id in after],
        normalizer=normalizer,
        decoder=decoder,
        build=lambda: build_gguf_tokenizer(path).library,
    )
    found = (tokens.find(text) for text in _ENDS)
    ends = {i for i in found if i is not None and kinds[i] == _CONTROL}
    return GgufTokenizer(library, _named_ends(values, tokens) | ends, _named(values, tokens))


def build_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer of a GGUF file in the `tokenizers` library. Raises ConfigError."""
    file = open_gguf(path)
    lists = {key: file.texts(key) for key in file.text_lists if key.startswith(_PREFIX)}
    values = _values({**file.metadata, **lists})
    tokens, kind = values.get("tokens"), values.get("model")
    if not _are_texts(tokens):
        raise ConfigError(f"{path} holds no tokenizer (tokenizer.ggml.tokens)")
    if not isinstance(kind, str) or kind not in _BUILDERS:
        raise ConfigError(
            f"{path} holds a tokenizer of kind {kind!r:.80}; supported are {', '.join(_BUILDERS)}"
        )
    try:
        library, adds_bos = _BUILDERS[kind](path, values, tokens)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the tokenizer of {path} cannot be read: {reason}") from error
    kinds = _kinds(values, len(tokens))
    control = (_CONTROL, _UNKNOWN) if kind == "t5" else (_CONTROL,)  # as T5 and XLM-R declare it
    marked = [i for i, k in enumerate(kinds) if k != _NORMAL]  # few of many
    for special, wanted in ((True, control), (False, (_USER_DEFINED,))):
        chosen = [tokens[i] for i in marked if kinds[i] in wanted and tokens[i]]
        library.add_tokens([AddedToken(t, special=special, normalized=False) for t in chosen])
    if kind == "bert":
        _frame_word_pieces(library, values, tokens)
    else:
        _frame(library, values, tokens, adds_bos, with_pairs=kind == "t5")
    ends = {i for i in marked if kinds[i] == _CONTROL and tokens[i] in _ENDS}
    return GgufTokenizer(library, _named_ends(values, tokens) | ends, _named(values, tokens))


def gguf_templates(path: Path) -> dict[str, str]:
    """The chat templates of a GGUF file by name; the plain one is `default`."""
    found = {}
    for key, value in open_gguf(path).metadata.items():
        if key == _TEMPLATE:
            found["default"] = str(value)
        elif key.startswith(f"{_TEMPLATE}."):
            found[key.removeprefix(f"{_TEMPLATE}.")] = str(value)
    return found


def _values(metadata: Mapping[str, object]) -> dict[str, object]:
    return {
        key.removeprefix(_PREFIX): value
        for key, value in metadata.items()
        if key.startswith(_PREFIX)
    }


def _are_numbers(value: object, count: int) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (tuple, array)) and len(value) == count


def _are_texts(value: object) -> TypeGuard[tuple[str, ...]]:
    return isinstance(value, tuple) and set(map(type, value)) <= {str}


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
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
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
    scores = _scores(path, values, tokens)
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
    library.normalizer, library.decoder = _sentence_piece_steps(values)
    return library, True


def _sentence_piece_steps(values: Mapping[str, object]) -> tuple[Any, Any]:
    """Normalizer and decoder."""
    spaces = normalizers.Replace(" ", "▁")
    pieces: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if not _adds_space(values):
        return spaces, decoders.Sequence(pieces)
    pieces.append(decoders.Strip(" ", 1, 0))
    return normalizers.Sequence([normalizers.Prepend("▁"), spaces]), decoders.Sequence(pieces)


def _adds_space(values: Mapping[str, object]) -> bool:
    return bool(values.get("add_space_prefix", True))


def _word_piece(
    path: Path, values: Mapping[str, object], tokens: Sequence[str]
) -> tuple[Library, bool]:
    """Files mark the beginning of a word, vocabularies its continuation (`##`). Which case texts
    get is not in the file: that of the vocabulary.
    """
    pieces, has_case = [], False
    for token, kind in zip(tokens, _kinds(values, len(tokens)), strict=True):
        word = token.removeprefix(_SPACE)
        is_text = kind == _NORMAL and not (word.startswith("[") and word.endswith("]"))
        pieces.append(f"##{token}" if is_text and word == token else word)
        has_case |= is_text and word != word.lower()
    unknown = _token_id(values, "unknown", tokens)
    unknown_token = "[UNK]" if unknown is None else tokens[unknown]
    if unknown_token not in pieces:
        raise ConfigError(f"{path} names no unknown token (tokenizer.ggml.unknown_token_id)")
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    library = Library(models.WordPiece(vocabulary, unk_token=unknown_token))
    library.normalizer = normalizers.BertNormalizer(lowercase=not has_case)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library, True


def _unigram(
    path: Path, values: Mapping[str, object], tokens: Sequence[str]
) -> tuple[Library, bool]:
    scores = _scores(path, values, tokens)
    kinds = _kinds(values, len(tokens))
    unknown = _token_id(values, "unknown", tokens)
    if unknown is None:
        unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else 2  # as T5
    pairs = list(zip(tokens, scores, strict=True))
    library = Library(models.Unigram(pairs, unknown, byte_fallback=_BYTE in kinds))
    charsmap = values.get("precompiled_charsmap")
    if isinstance(charsmap, (tuple, array)) and charsmap:
        content = bytes(octet % 256 for octet in charsmap)
        library.normalizer = normalizers.Precompiled(content)
    scheme = "always" if values.get("add_space_prefix", True) else "never"
    if values.get("remove_extra_whitespaces", True):
        steps: list[Any] = [pre_tokenizers.WhitespaceSplit()]
        steps.append(pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme))
        library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme=scheme, split=False
        )
    library.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    return library, False


_Build = Callable[[Path, Mapping[str, object], Sequence[str]], tuple[Library, bool]]
_BUILDERS: Mapping[str, _Build] = MappingProxyType(
    {"gpt2": _byte_level, "llama": _sentence_piece, "bert": _word_piece, "t5": _unigram}
)


def _scores(path: Path, values: Mapping[str, object], tokens: Sequence[str]) -> Sequence[float]:
    scores = values.get("scores")
    if not _are_numbers(scores, len(tokens)):
        raise ConfigError(f"{path} holds no scores of its tokenizer (tokenizer.ggml.scores)")
    return scores


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece: the best piece first, then the longest halves (as
    transformers converts such vocabularies).
    """
    found: list[tuple[str, str]] = []
    distinct: list[str] = []  # pieces whose order their scores decide, as those of most do
    best_first = sorted(vocabulary, key=lambda piece: -scores[vocabulary[piece]])
    for _, same in itertools.groupby(best_first, lambda piece: scores[vocabulary[piece]]):
        pieces = list(same)
        if len(pieces) == 1:
            distinct += pieces
            continue
        found += _halves(distinct, vocabulary)
        distinct = []
        equal = _halves(pieces, vocabulary)
        found += sorted(equal, key=lambda pair: _rank_of_equals(pair, vocabulary))
    return found + _halves(distinct, vocabulary)


def _halves(pieces: Sequence[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Of each piece the pairs that make it, those with the longest first half first."""
    return [
        (left, right)
        for piece in pieces
        for at in range(len(piece) - 1, 0, -1)
        if (left := piece[:at]) in vocabulary and (right := piece[at:]) in vocabulary
    ]


def _rank_of_equals(pair: tuple[str, str], vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    left, right = pair
    return (-len(left), -len(right), vocabulary[left + right], vocabulary[left])


def _kinds(values: Mapping[str, object], count: int) -> Sequence[int]:
    kinds = values.get("token_type")
    return kinds if _are_numbers(kinds, count) else (1,) * count


def _frame(
    library: Library,
    values: Mapping[str, object],
    tokens: Sequence[str],
    adds_bos: bool,
    *,
    with_pairs: bool,
) -> None:
    """Set the post-processor, which adds beginning and end tokens as the file specifies; pairs are
    those of XLM-R, or of T5 without a beginning.
    """
    before, after = _framed(values, tokens, adds_bos, adds_eos=with_pairs)
    if not before and not after:
        return
    first, end = [text for text, _ in before], [text for text, _ in after]
    between = [*end, *end] if before else end
    library.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *end],
        pair=[*first, "$A", *between, "$B", *end] if with_pairs else None,
        special_tokens=list(dict([*before, *after]).items()),
    )


def _ids_of(kinds: Sequence[int], wanted: int) -> list[int]:
    """The tokens of a kind; a vocabulary has hundreds of thousands of others, so they are found as
    bytes.
    """
    content, pattern = array("i", kinds).tobytes(), array("i", [wanted]).tobytes()
    found, at = [], content.find(pattern)
    while at >= 0:
        token_id, rest = divmod(at, len(pattern))
        if rest == 0:
            found.append(token_id)
        at = content.find(pattern, at + 1)
    return found


def _framed(
    values: Mapping[str, object],
    tokens: Sequence[str] | NativePieces,
    adds_bos: bool,
    adds_eos: bool,
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The tokens before and after a text, each with its id; the arguments for a file that does not
    say it.
    """
    bos, eos = (_token_id(values, name, tokens) for name in ("bos", "eos"))
    with_bos = bool(values.get("add_bos_token", adds_bos)) and bos is not None
    with_eos = bool(values.get("add_eos_token", adds_eos)) and eos is not None
    before = [(tokens[bos], bos)] if with_bos and bos is not None else []
    after = [(tokens[eos], eos)] if with_eos and eos is not None else []
    return before, after


def _frame_word_pieces(
    library: Library, values: Mapping[str, object], tokens: Sequence[str]
) -> None:
    """Set the post-processor, which adds BERT's tokens; files have two names for each."""
    found = []
    for names, default in ((("cls", "bos"), "[CLS]"), (("seperator", "eos"), "[SEP]")):
        known = (_token_id(values, name, tokens) for name in names)
        token_id = next((token_id for token_id in known if token_id is not None), None)
        if token_id is None and default not in tokens:
            return
        token_id = tokens.index(default) if token_id is None else token_id
        found.append((tokens[token_id], token_id))
    (start, _), (end, _) = found
    library.post_processor = processors.TemplateProcessing(
        single=[start, "$A", end],
        pair=[start, "$A", end, "$B:1", f"{end}:1"],
        special_tokens=found,
    )


def _token_id(
    values: Mapping[str, object], name: str, tokens: Sequence[str] | NativePieces
) -> int | None:
    value = values.get(f"{name}_token_id")
    return value if isinstance(value, int) and 0 <= value < len(tokens) else None


def _named_ends(
    values: Mapping[str, object], tokens: Sequence[str] | NativePieces
) -> frozenset[int]:
    """The tokens that the file says end an answer."""
    named = (_token_id(values, name, tokens) for name in ("eos", "eot", "eom"))
    return frozenset(token_id for token_id in named if token_id is not None)


def _named(values: Mapping[str, object], tokens: Sequence[str] | NativePieces) -> dict[str, str]:
    """`bos_token` and others, which chat templates use."""
    names = {"unknown": "unk", "padding": "pad"}
    found = {}
    for name in _NAMED:
        token_id = _token_id(values, name, tokens)
        if token_id is not None:
            found[f"{names.get(name, name)}_token"] = tokens[token_id]
    return found
