"""The detokenizer against whole decodes, for byte-level, byte-fallback and plain vocabularies."""

from __future__ import annotations

import string

import pytest
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from quickstep.errors import ConfigError
from quickstep.text.output_text import Detokenizer
from quickstep.text.tokenizer import Tokenizer, _byte_level_alphabet

SPECIAL = "<|end|>"
CORPUS = ["the cat sat on the mat", "naïve café — 日本語 😀😀", "def f(x):\n    return x\n"] * 3


def byte_level() -> Library:
    alphabet = sorted(_byte_level_alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    library = Library(models.BPE(vocab=vocab, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(SPECIAL, special=True)])
    library.add_tokens([AddedToken("<tool call>", special=False), AddedToken("日", special=False)])
    return library


def byte_fallback(strip: bool = True) -> Library:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["<unk>", "▁", *string.ascii_letters, "▁t", "▁th", "▁▁", "é", "th", "日"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "t"), ("▁t", "h"), ("▁", "▁"), ("t", "h")]
    library = Library(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return library


def metaspace() -> Library:
    pieces = ["<unk>", "▁", "▁the", "▁cat", "s", "a", "▁▁", "日", "é"]
    library = Library(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    library.decoder = decoders.Metaspace()
    library.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return library


def plain() -> Library:
    pieces = ["<unk>", "the", "cat", "sat", "é", "."]
    return Library(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))


def word_piece() -> Library:
    pieces = ["[UNK]", "the", "cat", "##s", ".", "##é"]
    library = Library(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    return library


VOCABULARIES = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback without strip": lambda: byte_fallback(strip=False),
    "metaspace": metaspace,
    "plain": plain,
    "word piece": word_piece,
}
TOKENIZERS = {name: Tokenizer(build()) for name, build in VOCABULARIES.items()}


def streamed(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool, at_start: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip, at_text_start=at_start)
    deltas, position, turn = [], 0, 0
    while position < len(ids):
        size = sizes[turn % len(sizes)]
        deltas.append(detokenizer.feed(ids[position : position + size]))
        position, turn = position + size, turn + 1
    return [*deltas, detokenizer.finish()]


sizes_of_steps = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@pytest.mark.parametrize("name", VOCABULARIES)
@examples(60)
@given(data=st.data(), sizes=sizes_of_steps, skip=st.booleans())
def test_deltas_joined_equal_the_whole_decode_of_random_tokens(name, data, sizes, skip):
    tokenizer = TOKENIZERS[name]
    # two ids past the end: logits are often wider than the vocabulary
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=24))
    assert "".join(streamed(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@examples(60)
@given(raw=st.one_of(st.binary(max_size=16), st.text(max_size=8).map(str.encode)), cut=st.data())
def test_every_split_of_random_bytes_gives_the_whole_decode(name, raw, cut):
    tokenizer = TOKENIZERS[name]
    ids = [byte_token(tokenizer, byte) for byte in raw]
    sizes = cut.draw(sizes_of_steps)
    assert "".join(streamed(tokenizer, ids, sizes, True)) == tokenizer.decode(ids)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    spelled = {value: char for char, value in _byte_level_alphabet().items()}
    token_id = tokenizer.token_id(f"<0x{byte:02X}>")
    return tokenizer.token_id(spelled[byte]) if token_id is None else token_id


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@examples(50)
@given(text=st.text(alphabet="aé日😀 ", min_size=1, max_size=8))
def test_no_delta_of_valid_text_holds_half_a_code_point(name, text):
    tokenizer = TOKENIZERS[name]
    ids = [byte_token(tokenizer, byte) for byte in text.encode()]
    deltas = streamed(tokenizer, ids, [1], True, at_start=False)
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text


@examples(50)
@given(text=st.text(alphabet="the cat日😀é ", max_size=20))
@example(text=" the the")
def test_byte_level_text_survives_the_round_trip(text):
    tokenizer = TOKENIZERS["byte level"]
    assert "".join(streamed(tokenizer, tokenizer.encode(text), [1], True)) == text


def test_byte_level_text_is_shown_as_soon_as_its_code_point_is_whole():
    tokenizer = TOKENIZERS["byte level"]
    ids = [byte_token(tokenizer, byte) for byte in "é!".encode()]
    assert streamed(tokenizer, ids, [1], True) == ["", "é", "!", ""]


def test_half_a_code_point_at_the_end_becomes_the_replacement_character():
    tokenizer = TOKENIZERS["byte level"]
    ids = [byte_token(tokenizer, byte) for byte in "a日".encode()[:-1]]
    assert streamed(tokenizer, ids, [1], True) == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize("name", ["byte level", "byte fallback", "metaspace"])
@examples(50)
@given(data=st.data())
def test_a_continuation_is_what_the_prompt_lacks(name, data):
    """Prompt text + deltas = whole text: the first word keeps its space, no prompt text leaks."""
    tokenizer = TOKENIZERS[name]
    words = [i for i in range(tokenizer.vocab_size) if whole_text(tokenizer, i)]
    ids = data.draw(st.lists(st.sampled_from(words), min_size=2, max_size=10))
    split = data.draw(st.integers(1, len(ids) - 1))
    at_start = all(tokenizer.is_special(i) for i in ids[:split])
    deltas = streamed(tokenizer, ids[split:], [1], True, at_start)
    assert tokenizer.decode(ids[:split]) + "".join(deltas) == tokenizer.decode(ids)


def whole_text(tokenizer: Tokenizer, token_id: int) -> bool:
    piece = tokenizer.piece(token_id) or ""
    if tokenizer.is_byte_piece(piece):
        return False
    try:
        return bool(tokenizer.token_bytes(token_id).decode())
    except UnicodeDecodeError:
        return False


def test_output_after_a_prompt_with_half_a_code_point_starts_clean():
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = Detokenizer(tokenizer)
    tail = [byte_token(tokenizer, byte) for byte in "日".encode()[2:]]
    assert detokenizer.feed(tail) == "\ufffd"
    assert detokenizer.feed(tokenizer.encode("ok")) == "ok"


def test_special_tokens_show_only_when_requested():
    tokenizer = TOKENIZERS["byte level"]
    ids = [*tokenizer.encode("a"), tokenizer.token_id(SPECIAL), *tokenizer.encode("b")]
    assert "".join(streamed(tokenizer, ids, [1], skip=True)) == "ab"
    assert "".join(streamed(tokenizer, ids, [1], skip=False)) == f"a{SPECIAL}b"


@pytest.mark.parametrize("library", [byte_level(), byte_fallback(), metaspace()])
def test_markup_that_a_parser_reads_stays_while_other_special_tokens_go(library):
    library.add_special_tokens([AddedToken("[CALL]", special=True)])
    tokenizer = Tokenizer(library)
    ids = [tokenizer.token_id(token) for token in ("s", SPECIAL, "[CALL]", "s")]
    shown = Detokenizer(tokenizer, skip_special_tokens=True, kept_special=ids[2:3])
    assert (shown.feed(ids) + shown.finish()).replace(" ", "") == "s[CALL]s"


def test_a_special_token_between_the_bytes_of_a_code_point_does_not_break_it():
    for name in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS[name]
        ids = [byte_token(tokenizer, byte) for byte in "é".encode()]
        ids.insert(1, tokenizer.token_id(SPECIAL))
        assert "".join(streamed(tokenizer, ids, [1], skip=True)) == "é"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_token_bytes_are_what_a_token_adds_inside_a_text(name):
    tokenizer = TOKENIZERS[name]
    anchor = next(i for i in range(tokenizer.vocab_size) if whole_text(tokenizer, i))
    for token_id in range(tokenizer.vocab_size):
        whole = tokenizer.decode([anchor, token_id], skip_special_tokens=False)
        added = whole[len(tokenizer.decode([anchor])) :]
        assert tokenizer.token_bytes(token_id).decode(errors="replace") == added
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_token_bytes_of_single_bytes_are_those_bytes():
    for name in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS[name]
        for byte in range(256):
            assert tokenizer.token_bytes(byte_token(tokenizer, byte)) == bytes([byte])


def test_an_unknown_decoder_is_refused_by_name():
    library = plain()
    library.decoder = decoders.CTC()
    with pytest.raises(ConfigError, match="CTC"):
        Tokenizer(library)
