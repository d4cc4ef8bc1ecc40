"""Tokenizers out of GGUF metadata, against the ones that transformers makes of the same."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import gguf
import pytest
import transformers
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from quickstep.errors import ConfigError
from quickstep.text.chat_template import find_templates
from quickstep.text.gguf_splits import SPLITS
from quickstep.text.gguf_tokenizer import read_gguf_tokenizer
from quickstep.text.tokenizer import DecoderKind, Tokenizer

CORPUS = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
TEXTS = (
    "",
    "Hello world",
    " leading and  double   spaces\n\n and lines\r\n",
    "It's 12345 o'clock; they'LL say 'we've 3.14'!",
    "naïve café, e\u0301 combined, Übergröße, 漢字かな交じり, Ελληνικά, עברית",
    "def f(x):\n\treturn x**2  # code()[]{}<=>\n",
    "emoji 👩‍👩‍👧 and <|im_start|>user\nhi<|im_end|>\n",
    "1 22 333 4444 55555 ¼ ² Ⅷ",
    CORPUS[:3000],
)
CONTROL = ("<|im_start|>", "<|im_end|>")


def trained(vocab_size: int = 600) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary, learnt from the README."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(alphabet), show_progress=False
    )
    library.train_from_iterator([CORPUS], trainer)
    vocabulary = library.get_vocab()
    merges = json.loads(library.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(pair) for pair in merges]


def write(path: Path, kind: str, pre: str | None, values: dict[str, object]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(values["tokens"])
    writer.add_token_types(values["types"])
    if "merges" in values:
        writer.add_token_merges(values["merges"])
    if "scores" in values:
        writer.add_token_scores(values["scores"])
    for name in ("bos", "eos"):
        if name in values:
            getattr(writer, f"add_{name}_token_id")(values[name])
    writer.add_chat_template("{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(path: Path, pre: str | None) -> Path:
    tokens, merges = trained()
    values = {"tokens": [*tokens, *CONTROL], "types": [1] * len(tokens) + [3, 3]}
    values |= {"merges": merges, "bos": len(tokens), "eos": len(tokens) + 1}
    return write(path, "gpt2", pre, values)


def pieces() -> dict[str, object]:
    """A SentencePiece vocabulary by frequency: characters, then words and their halves."""
    counted = Counter(f"▁{word}" for word in CORPUS.split())
    found: dict[str, float] = {}
    for word, count in counted.most_common(300):
        for end in range(2, len(word) + 1):
            found.setdefault(word[:end], -20.0 + math.log(count) - end / 100)
        for start in range(1, len(word) - 1):
            found.setdefault(word[start:], -30.0 + math.log(count) - start / 100)
    characters = sorted({*CORPUS, "▁", "é"} - {"\n", " "})
    rest = sorted(found, key=lambda piece: (-found[piece], piece))
    rest = [piece for piece in rest if len(piece) > 1]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *rest, *characters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(rest) + len(characters))]
    scores = [0.0] * 259 + [found[piece] for piece in rest] + [-1000.0] * len(characters)
    return {"tokens": tokens, "types": types, "scores": scores, "bos": 1, "eos": 2}


def test_qwen2_splits_as_transformers_does(tmp_path: Path) -> None:
    tokens, merges = trained()
    vocabulary = {token: i for i, token in enumerate([*tokens, *CONTROL])}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    reference = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=pairs, eos_token=CONTROL[1], pad_token=CONTROL[1], unk_token=None
    )
    reference.add_tokens(list(CONTROL), special_tokens=True)
    found = Tokenizer.open(byte_level(tmp_path / "m.gguf", "qwen2"))
    assert found.kind is DecoderKind.BYTES
    for text in TEXTS:
        assert found.encode(text) == reference.encode(text), text
        assert found.decode(found.encode(text), False) == reference.decode(found.encode(text))


def test_llama_bpe_takes_whole_tokens_and_three_digits(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", "llama-bpe")
    found, bos = Tokenizer.open(path), len(trained()[0])
    reference = Library(read_gguf_tokenizer(path).library.model)
    split = pre_tokenizers.Split(
        Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        "isolated",
    )
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    for text in TEXTS:
        if CONTROL[0] not in text:
            assert found.encode(text) == [bos, *reference.encode(text).ids]
            assert found.encode(text, add_special_tokens=False) == reference.encode(text).ids


def test_sentence_pieces_split_as_transformers_does(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", "default", pieces())
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    found = Tokenizer.open(path)
    assert found.kind is DecoderKind.PIECES
    for text in TEXTS:
        if text and "<|" not in text:
            # as SentencePiece, and unlike transformers, also before a space
            if not text.startswith(" "):
                expected = reference.encode(text, add_special_tokens=False)
                assert found.encode(text, False) == expected
            assert found.encode(text)[0] == 1
            assert found.decode(found.encode(text)) == text
    assert found.is_byte_piece("<0x0A>")


O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def test_gpt_4o_splits_as_the_tokenizer_of_gpt_oss_does(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", "gpt-4o")
    found = Tokenizer.open(path)
    reference = Library(read_gguf_tokenizer(path).library.model)
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(O200K), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in TEXTS:
        if CONTROL[0] not in text:
            assert found.encode(text) == reference.encode(text).ids


@pytest.mark.parametrize(
    "pre", [None, "default", "gpt-2", "smollm", "tekken", "qwen2", "gpt-4o", "falcon3", "dbrx"]
)
def test_text_comes_back_from_tokens(pre: str | None, tmp_path: Path) -> None:
    found = Tokenizer.open(byte_level(tmp_path / "m.gguf", pre))
    for text in TEXTS:
        assert found.decode(found.encode(text, False), False) == text or pre == "qwen2"


def _split(pre: str, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(e), "isolated") for e in SPLITS[pre].expressions]
    return [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", SPLITS)
def test_every_split_keeps_all_of_the_text(pre: str) -> None:
    for text in TEXTS:
        assert "".join(_split(pre, text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("glm4", "It'S 1234", "It|'S| |123|4"),
        ("olmo", "It'S 1234", "It|'|S| 1234"),
        ("deepseek-v3", "a漢かb(foo 1234", "a|漢か|b|(foo| |123|4"),
        ("deepseek-coder", "ab .c\n12", "ab| .|c|\n|1|2"),
        ("qwen35", "e\u0301a 12", "e\u0301a| |1|2"),
        ("kimi-k2", "a漢字bC", "a|漢字|b|C"),
        ("tiny_aya", "x 1234567", "x| |1|234|567"),
        ("bailingmoe", "It'S 12", "It|'S| |1|2"),
        ("seed-coder", "a +\nb", "a| +|\n|b"),
        ("exaone-moe", "한국 어 12", "한국 어| |1|2"),
        ("minicpm5", "ab1234", "ab|123|4"),
        ("falcon", "a`b12345", "a|`|b|123|45"),
        ("bloom", "It's it, so", "It's| it|,| so"),
        ("youtu", "한글abC1", "한글|ab|C|1"),
        ("minimax-m2", "camelCase's 1234", "camel|Case's| |123|4"),
        ("lfm2", "It's 1234", "It|'s| |123|4"),
    ],
)
def test_splits_are_those_of_their_models(pre: str, text: str, pieces: str) -> None:
    assert _split(pre, text) == pieces.split("|")


def test_special_tokens_ends_and_template_are_read(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", "qwen2")
    found, count = Tokenizer.open(path), len(trained()[0])
    assert found.eos_token_ids == {count + 1}
    assert dict(found.special_tokens) == {"bos_token": CONTROL[0], "eos_token": CONTROL[1]}
    assert found.encode("<|im_end|>") == [count + 1]
    assert found.is_special(count)
    assert find_templates(path) == {"default": "{{ messages[0].content }}"}


@pytest.mark.parametrize(
    ("kind", "pre", "named"), [("gpt2", "mystery", "'mystery'"), ("rwkv", None, "'rwkv'")]
)
def test_an_unknown_tokenizer_is_refused_by_name(
    kind: str, pre: str | None, named: str, tmp_path: Path
) -> None:
    tokens, merges = trained()
    values = {"tokens": tokens, "types": [1] * len(tokens), "merges": merges}
    path = write(tmp_path / "m.gguf", kind, pre, values)
    with pytest.raises(ConfigError, match=named):
        Tokenizer.open(path)
