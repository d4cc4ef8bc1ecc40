"""How many tokens a text has at least is known without tokenising it, and never too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

import quickstep
from quickstep.text.tokenizer import Tokenizer

BYTES = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁": 257, "a": 258}


def byte_level(normalizer: Any = None, splitter: Any = None) -> Library:
    merges = [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ")]
    vocabulary = {**BYTES, "aa": 256, "aaaa": 257, "ĠĠ": 258}
    library = Library(models.BPE(vocabulary, merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    library.pre_tokenizer = pre_tokenizers.Sequence([*([splitter] if splitter else []), *steps])
    if normalizer is not None:
        library.normalizer = normalizer
    return library


def pieces(byte_fallback: bool = True) -> Library:
    model = models.BPE(FALLBACK, [], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback)
    library = Library(model)
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return library


def with_blank_eating_token(library: Library) -> Library:
    library.add_special_tokens([AddedToken("<|end|>", lstrip=True, rstrip=True)])
    return library


BOUNDED = {
    "byte level": byte_level(),
    "composing": byte_level(normalizers.NFC()),
    "split": byte_level(splitter=pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "pieces": pieces(),
    "blank-eating token": with_blank_eating_token(byte_level()),
}
UNBOUNDED = {
    "strips": byte_level(normalizers.Strip()),
    "shortens": byte_level(normalizers.Replace("aaaa", "b")),
    "by expression": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "drops blanks": byte_level(splitter=pre_tokenizers.Split(Regex(r"\s+"), "removed")),
    "one unknown token for many": pieces(byte_fallback=False),
    "words": Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "unigram": Library(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
}
TEXTS = st.text(
    st.sampled_from("a \né한😀") | st.characters(exclude_categories=["Cs"]), max_size=80
) | st.lists(
    st.sampled_from(["aaaa" * 8, " " * 9, "<|end|>", "e\u0301", "\u1112\u1161\u11ab", "ᾂ", "x"]),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_said(name: str, text: str) -> None:
    tokenizer = Tokenizer(BOUNDED[name])
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, False))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_is_known_to_have_many_tokens(name: str) -> None:
    assert Tokenizer(BOUNDED[name]).least_tokens("a" * 100_000) > 1000


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_reported_where_text_may_vanish(name: str) -> None:
    assert Tokenizer(UNBOUNDED[name]).least_tokens("a" * 100_000) == 0


def test_the_bundled_model_has_a_bound() -> None:
    demo = Path(quickstep.__file__).parent / "bundled" / "demo"
    tokenizer = Tokenizer.open(demo)
    text = "def add(first, second):\n    return first + second\n" * 50
    assert 0 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text, False))
