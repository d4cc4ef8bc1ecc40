"""SentencePiece vocabularies of GGUF files: the native tokenizer is the `tokenizers` library's."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.gguf_files import write_gguf

from quickstep.errors import ConfigError, RequestError
from quickstep.model.checkpoint.gguf_file import open_gguf
from quickstep.ops.native.pieces import NativePieces, read_texts
from quickstep.text.gguf_tokenizer import _ids_of, build_gguf_tokenizer, read_gguf_tokenizer
from quickstep.text.sentence_pieces import SentencePieces
from quickstep.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTERS = "ab▁"
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# "<0" and "x41>" make the piece of a byte, which is a text like any other
FRAGMENTS = ("<", "0", "x", "4", "1", ">", "<0", "x41>")


def write_pieces(
    path: Path,
    pieces: list[tuple[str, float, int]],
    *,
    adds_space: bool = True,
    adds_eos: bool = False,
) -> Path:
    """A file with `pieces` (text, score, kind) after three tokens and all bytes."""
    rows = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    rows += [(text, 0.0, BYTE) for text in BYTES]
    rows += pieces
    texts, scores, kinds = zip(*rows, strict=True)
    values: dict[str, object] = {
        "model": "llama",
        "tokens": texts,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_eos_token": adds_eos,
        "add_space_prefix": adds_space,
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    return write_gguf(path, "llama", metadata, [])


@st.composite
def vocabularies(draw: st.DrawFn) -> list[tuple[str, float, int]]:
    """Few letters and few scores, so that many pieces overlap, and many are equally good."""
    words = st.text(LETTERS, min_size=1, max_size=5) | st.text("é漢a", min_size=1, max_size=2)
    texts = draw(st.lists(words, min_size=12, max_size=60, unique=True))
    texts += draw(st.sampled_from([(), FRAGMENTS]))
    scores = st.sampled_from([-0.0, 0.0, 1e-3, -1e30])
    kinds = st.sampled_from([NORMAL] * 8 + [CONTROL, USER_DEFINED])
    return [(text, draw(scores), draw(kinds)) for text in texts]


# "bcd" or "ab", of the same score and with left halves of the same length
LONGER_RIGHT_HALF = [(text, 0.0, NORMAL) for text in ("a", "b", "c", "d", "ab", "bcd")]
TEXTS = st.text(LETTERS, max_size=40) | st.text(LETTERS + " é漢<0x41>\n\0s/", max_size=30)


@given(
    pieces=vocabularies(),
    texts=st.lists(
        st.text(LETTERS, max_size=40) | st.text(LETTERS + " é漢<0x41>\n\0s/", max_size=30),
        min_size=1,
        max_size=8,
    ),
    adds_space=st.booleans(),
    adds_eos=st.booleans(),
)
@example(
    pieces=[*LONGER_RIGHT_HALF, ("cd", 1.0, NORMAL)],
    texts=["abcd"],
    adds_space=False,
    adds_eos=False,
)
@settings(max_examples=80)
def test_texts_become_the_tokens_of_the_library(
    pieces: list[tuple[str, float, int]],
    texts: list[str],
    adds_space: bool,
    adds_eos: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("pieces") / "m.gguf"
    write_pieces(path, pieces, adds_space=adds_space, adds_eos=adds_eos)
    found, built = read_gguf_tokenizer(path), build_gguf_tokenizer(path)
    assert isinstance(found.library, SentencePieces)
    assert found.eos_token_ids == built.eos_token_ids
    assert found.special_tokens == built.special_tokens
    ours, expected = Tokenizer(found.library), Tokenizer(built.library)
    assert ours.special_ids == expected.special_ids
    assert ours.encode_all(texts) == expected.encode_all(texts)
    for text in texts:
        ids = expected.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids
        for skips in (True, False):
            assert ours.decode(ids, skips) == expected.decode(ids, skips)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """One vocabulary, read by native code and by the library."""
    pieces = [(text, -float(i), NORMAL) for i, text in enumerate(["▁a", "a", "b", "ab", "▁"])]
    pieces += [("<end_of_turn>", 0.0, CONTROL), ("\n\n", 0.0, USER_DEFINED)]
    path = write_pieces(tmp_path_factory.mktemp("pieces") / "m.gguf", pieces)
    found, built = read_gguf_tokenizer(path), build_gguf_tokenizer(path)
    return (
        Tokenizer(found.library, found.eos_token_ids, found.special_tokens),
        Tokenizer(built.library, built.eos_token_ids, built.special_tokens),
    )


def test_what_is_asked_of_a_vocabulary_is_what_the_library_answers(
    two: tuple[Tokenizer, Tokenizer],
) -> None:
    ours, expected = two
    assert ours.vocab_size == expected.vocab_size
    assert ours.eos_token_ids == expected.eos_token_ids
    assert ours.kind is expected.kind
    assert ours.digest() == expected.digest()
    for text in ("<end_of_turn>", "▁a", "no piece", "", "<0x0A>"):
        assert ours.token_id(text) == expected.token_id(text)
    for token_id in range(ours.vocab_size + 2):
        assert ours.piece(token_id) == expected.piece(token_id)
        assert ours.token_bytes(token_id) == expected.token_bytes(token_id)
    long_text = "a b\n\n" * 20_000
    assert ours.least_tokens(long_text) == expected.least_tokens(long_text) > 0
    assert ours.encode(long_text) == expected.encode(long_text)


def test_texts_and_ids_that_are_none_are_refused(two: tuple[Tokenizer, Tokenizer]) -> None:
    for tokenizer in two:
        with pytest.raises(RequestError, match="surrogate"):
            tokenizer.encode("\ud800")
        for token_id in (-1, 1 << 32):
            with pytest.raises(RequestError, match="integers"):
                tokenizer.decode([token_id])
        assert tokenizer.decode([1 << 31]) == ""


def test_no_tokens_are_no_vocabulary() -> None:
    assert NativePieces.open(b"", (), (), True) is None


def many_pieces() -> list[tuple[str, float, int]]:
    """So many that lists of numbers are read as arrays."""
    found = [(f"▁{number:b}", -float(number), NORMAL) for number in range(1000)]
    others = [
        ("<mask>", 0.0, CONTROL),
        ("<end_of_turn>", 0.0, CONTROL),
        ("\n\n", 0.0, USER_DEFINED),
    ]
    return [*found[:600], *others, *found[600:], ("<last>", -1.0, CONTROL)]


def test_a_long_vocabulary_is_read_as_a_short_one(tmp_path: Path) -> None:
    path = write_pieces(tmp_path / "m.gguf", many_pieces())
    metadata = open_gguf(path).metadata
    assert isinstance(metadata["tokenizer.ggml.scores"], array)
    kinds = metadata["tokenizer.ggml.token_type"]
    assert isinstance(kinds, array)
    for kind in (UNKNOWN, CONTROL, USER_DEFINED, 5):
        assert _ids_of(kinds, kind) == [i for i, found in enumerate(kinds) if found == kind]
    found, built = read_gguf_tokenizer(path), build_gguf_tokenizer(path)
    assert isinstance(found.library, SentencePieces)
    assert (found.eos_token_ids, found.special_tokens) == (
        built.eos_token_ids,
        built.special_tokens,
    )
    ours, expected = Tokenizer(found.library), Tokenizer(built.library)
    assert ours.special_ids == expected.special_ids
    text = "0 101 <mask>\n\n1111<last> 2"
    assert ours.encode(text) == expected.encode(text)


@given(st.lists(st.sampled_from([1, 3, 4, 0x0100, 0x0301, 0x030000, -1]), max_size=9))
def test_tokens_of_a_kind_are_found_in_bytes(kinds: list[int]) -> None:
    for kind in (1, 3, 0x0301):
        expected = [i for i, found in enumerate(kinds) if found == kind]
        assert _ids_of(tuple(kinds), kind) == _ids_of(array("i", kinds), kind) == expected


@pytest.mark.parametrize("cut", [1, 700])
def test_a_file_that_ends_within_a_list_of_numbers_is_refused(tmp_path: Path, cut: int) -> None:
    path = write_pieces(tmp_path / "m.gguf", many_pieces())
    content = path.read_bytes()
    end = content.index(b"bos_token_id") - len("tokenizer.ggml.") - 8
    path.write_bytes(content[: end - cut])
    with pytest.raises(ConfigError, match=r"m\.gguf is truncated or corrupt"):
        open_gguf(path)


@pytest.mark.parametrize("others", [[], many_pieces()], ids=["short", "many"])
@pytest.mark.parametrize(
    "piece",
    [
        ("<s>", 0.0, NORMAL),
        ("", 0.0, NORMAL),
        ("x", float("inf"), NORMAL),
        ("x", float("nan"), NORMAL),
        ("x" * 4_097, 0.0, 1),
    ],
    ids=["twice", "empty", "infinite score", "no score", "long"],
)
def test_other_vocabularies_are_the_librarys(
    piece: tuple[str, float, int], others: list[tuple[str, float, int]], tmp_path: Path
) -> None:
    path = write_pieces(tmp_path / "m.gguf", [("▁a", -1.0, NORMAL), *others, piece])
    assert not isinstance(read_gguf_tokenizer(path).library, SentencePieces)
    assert Tokenizer.open(path).encode(" a")


LISTED = st.lists(st.one_of(st.binary(max_size=9), st.text(max_size=5).map(str.encode)))


@given(LISTED, st.integers(0, 12), st.booleans())
def test_lists_of_texts_are_read_as_texts_read_one_by_one(
    texts: list[bytes], num_less: int, is_long: bool
) -> None:
    content = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    if is_long:
        assert read_texts(content, len(texts) + 1) is None
        texts.append(b"text")
        content += (5 + num_less).to_bytes(8, "little") + b"text"
        assert read_texts(content, len(texts)) is None
    elif not texts or any(b"\0" in text for text in texts):
        assert read_texts(content, len(texts)) is None
    else:
        expected = tuple(text.decode("utf-8", "replace") for text in texts)
        assert read_texts(content, len(texts)) == expected
