"""Encoders and their tokenizers from GGUF, as llama.cpp's converter writes them, against the
checkpoints of transformers that the files were made of.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import gguf_files as files
import numpy as np
import pytest
import torch
import transformers
from encoder_outputs import answers
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from tiny_encoders import LETTERS, SPECIAL, VOCAB, write_encoder
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from quickstep import LLM
from quickstep.errors import ConfigError
from quickstep.model.spec import read_spec
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import Pooling

CORPUS = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
TEXTS = (
    "Hello world, it's 12345 o'clock!",
    " leading and  double   spaces\n\n and lines\r\n",
    "na\u00efve caf\u00e9, e\u0301 combined, \u6f22\u5b57\u304b\u306a, \u0395\u03bb\u03bb",
    "def f(x):\n\treturn x**2  # code()[]{}<=>\n",
    "a [SEP] b </s> c \U0001f469 \ufb01ne \u2160 \u3000wide",
    "unaffable Unaffable UNAFFABLE quantization",
    *CORPUS.split("\n"),
)
_SECTION = {
    "num_hidden_layers": ".block_count",
    "hidden_size": ".embedding_length",
    "intermediate_size": ".feed_forward_length",
    "num_attention_heads": ".attention.head_count",
    "layer_norm_eps": ".attention.layer_norm_epsilon",
}


def marked(piece: str, kind: int) -> str:
    """As the converter writes WordPiece: it marks beginnings, not continuations."""
    if kind == 3:
        return piece
    return piece.removeprefix("##") if piece.startswith("##") else f"\u2581{piece}"


def word_pieces(pieces: Sequence[str]) -> dict[str, object]:
    kinds = [3 if piece in SPECIAL else 1 for piece in pieces]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.tokens": list(map(marked, pieces, kinds)),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": pieces.index("[UNK]"),
        "tokenizer.ggml.seperator_token_id": pieces.index("[SEP]"),
        "tokenizer.ggml.padding_token_id": pieces.index("[PAD]"),
        "tokenizer.ggml.cls_token_id": pieces.index("[CLS]"),
        "tokenizer.ggml.mask_token_id": pieces.index("[MASK]"),
    }


def trained_word_pieces(*, lowercase: bool) -> list[str]:
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [*SPECIAL, "[unused1]"]
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    library.train_from_iterator([CORPUS], trainer)
    vocabulary = library.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_are_those_of_bert(lowercase: bool, tmp_path: Path) -> None:
    pieces = trained_word_pieces(lowercase=lowercase)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    reference = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=lowercase)
    path = files.write_gguf(tmp_path / "m.gguf", "bert", word_pieces(pieces), [])
    found = Tokenizer.open(path)
    for text in TEXTS:
        assert found.encode(text) == reference.encode(text), text
    assert found.encode_pair("one", "two") == reference.encode("one", "two")
    pair = reference.backend_tokenizer.encode("one", "two")
    assert found._library.encode("one", "two").type_ids == pair.type_ids


def charsmap(changes: Mapping[str, str]) -> bytes:
    """SentencePiece's form of replaced texts: a double-array trie, then the replacements."""
    texts, units, nodes = b"", [0] * 256, {b"": 0}
    for old, new in sorted((old.encode(), new.encode()) for old, new in changes.items()):
        for end in range(1, len(old) + 1):
            prefix = old[:end]
            if prefix not in nodes:
                parent = nodes[prefix[:-1]]
                block = _children(units, parent)
                units[block + prefix[-1]] |= prefix[-1]
                nodes[prefix] = block + prefix[-1]
        node = nodes[old]
        block = _children(units, node)
        units[node] |= 1 << 8
        units[block] = 1 << 31 | len(texts)
        texts += new + b"\0"
    content = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(content)) + content + texts


def _children(units: list[int], node: int) -> int:
    """The first of 256 places for a node's children, which it names by exclusive or."""
    if units[node] >> 10 == 0:
        block = len(units)
        units += [0] * 256
        units[node] |= (node ^ block) << 10
    return node ^ units[node] >> 10


CHANGES = {
    **{"\ufb01": "fi", "\u2160": "I", "\u3000": " ", "\t": " ", "\n": " ", "\r": " "},
    **{"e\u0301": "\u00e9", "\uff21": "A"},
}


def trained_pieces() -> list[tuple[str, float]]:
    library = Library(models.Unigram())
    library.normalizer = normalizers.Precompiled(charsmap(CHANGES))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS.split("\n"), trainer)
    return [(piece, score) for piece, score in json.loads(library.to_str())["model"]["vocab"]]


def unigram(pieces: Sequence[tuple[str, float]], **changes: object) -> dict[str, object]:
    kinds = {"<s>": 3, "<pad>": 3, "</s>": 3, "<unk>": 2, "<mask>": 3}
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score in pieces],
        "tokenizer.ggml.token_type": [kinds.get(piece, 1) for piece, _ in pieces],
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": list(charsmap(CHANGES)),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_a_charsmap_replaces_what_it_names() -> None:
    normalizer = normalizers.Precompiled(charsmap(CHANGES))
    assert normalizer.normalize_str("\ufb01ne\u3000\u2160\tn \uff21") == "fine I n A"


def test_unigram_pieces_are_those_of_xlm_r(tmp_path: Path) -> None:
    pieces = [*trained_pieces(), ("<mask>", 0.0)]
    reference = transformers.XLMRobertaTokenizer(
        vocab=pieces, _spm_precompiled_charsmap=charsmap(CHANGES)
    )
    path = files.write_gguf(tmp_path / "m.gguf", "bert", unigram(pieces), [])
    found = Tokenizer.open(path)
    for text in TEXTS:
        if "</s>" not in text:
            assert found.encode(text) == reference.encode(text), text
            assert found.decode(found.encode(text)) == reference.decode(
                reference.encode(text), skip_special_tokens=True
            )
    assert found.encode_pair("one", "two") == reference.encode("one", "two")


def test_unigram_pieces_are_those_of_t5(tmp_path: Path) -> None:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [*special, *trained_pieces()[4:]]
    ids = {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0}
    values = unigram(pieces, add_bos_token=False, **ids)
    for key in ("precompiled_charsmap", "bos_token_id"):
        del values[f"tokenizer.ggml.{key}"]
    reference = transformers.T5Tokenizer(vocab=pieces, extra_ids=0, eos_token="</s>")
    found = Tokenizer.open(files.write_gguf(tmp_path / "m.gguf", "t5", values, []))
    for text in TEXTS:
        if "</s>" not in text:
            expected = reference.backend_tokenizer.encode(text, add_special_tokens=False).ids
            assert found.encode(text) == [*expected, 1], text
    assert found.encode_pair("one", "two") == [*found.encode("one"), *found.encode("two")]


def write_twin(
    checkpoint: Path,
    path: Path,
    section: Mapping[str, object],
    tokenizer: Mapping[str, object],
    kind: Kind = Kind.F32,
) -> Path:
    """An encoder of transformers as the converter writes it, matrices in one type."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    metadata = {ours: config[key] for key, ours in _SECTION.items()}
    metadata |= {".context_length": 80, ".attention.causal": False}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    written = []
    for name, values in load_file(checkpoint / "model.safetensors").items():
        plain = name.removeprefix("roberta.")
        own = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if own is None:
            assert "pooler" in name, name
            continue
        if "position_embeddings" in name and config["model_type"] == "xlm-roberta":
            values = values[config["pad_token_id"] + 1 :]
        is_matrix = ".weight" in name and values.ndim == 2 and "embeddings" not in name
        stored = gguf.quants.quantize(values, kind) if is_matrix else values
        written.append((own, np.ascontiguousarray(stored), kind if is_matrix else Kind.F32))
    all_values = metadata | dict(section) | dict(tokenizer)
    return files.write_gguf(path, "bert", all_values, written)


LETTER_PIECES = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
SENTENCES = ["cats", "a text that is longer than others are", "Dogs and cats", "x"]
_POOLS = {1: lambda state: state.mean(0), 2: lambda state: state[0], 3: lambda state: state[-1]}
_NAMES = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST}


@pytest.mark.parametrize("pooling", _POOLS)
@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_states_are_those_of_the_checkpoint(family: str, pooling: int, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, family)
    path = tmp_path / "m.gguf"
    pieces = word_pieces([*LETTER_PIECES, *(f"[PAD{n}]" for n in range(VOCAB - 57))])
    write_twin(tmp_path, path, {".pooling_type": pooling}, pieces)
    with LLM(str(path), num_threads=1) as llm:
        assert llm.engine.retrieval.pooling is _NAMES[pooling]
        assert llm.engine.max_model_len == 80
        encode = llm.get_tokenizer().encode
        for text, output in zip(SENTENCES, llm.embed(SENTENCES, use_tqdm=False), strict=True):
            with torch.no_grad():
                [state] = reference(torch.tensor([encode(text)])).last_hidden_state
            expected = torch.nn.functional.normalize(_POOLS[pooling](state), dim=0)
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_0])
def test_quantized_matrices_are_what_they_mean(kind: Kind, tmp_path: Path) -> None:
    reference = write_encoder(tmp_path, "Bert", intermediate_size=64)
    path = tmp_path / "m.gguf"
    pieces = word_pieces([*LETTER_PIECES, *(f"[PAD{n}]" for n in range(VOCAB - 57))])
    write_twin(tmp_path, path, {".pooling_type": 1}, pieces, kind)
    with torch.no_grad():
        for name, values in reference.named_parameters():
            if values.ndim == 2 and "embeddings" not in name:
                stored = gguf.quants.quantize(values.numpy(), kind)
                values.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    with LLM(str(path), num_threads=1, dtype="float32") as llm:
        encode = llm.get_tokenizer().encode
        for text, output in zip(SENTENCES, llm.embed(SENTENCES, use_tqdm=False), strict=True):
            with torch.no_grad():
                [state] = reference(torch.tensor([encode(text)])).last_hidden_state
            expected = torch.nn.functional.normalize(state.mean(0), dim=0)
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_rerankers_scores_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    kind = "ForSequenceClassification"
    reference = write_encoder(tmp_path, "XLMRoberta", kind, num_labels=1, vocab_size=504)
    path = tmp_path / "m.gguf"
    write_twin(tmp_path, path, {".pooling_type": 4}, unigram(trained_pieces()))
    with LLM(str(path), num_threads=1) as llm:
        encode_pair = llm.get_tokenizer().encode_pair
        outputs = llm.score("pets", SENTENCES, use_tqdm=False)
        for document, output in zip(SENTENCES, outputs, strict=True):
            ids = list(output.prompt_token_ids)
            assert ids == encode_pair("pets", document)
            with torch.no_grad():
                [[logit]] = reference(torch.tensor([ids])).logits
            assert output.outputs.score == pytest.approx(torch.sigmoid(logit).item(), abs=1e-5)


@pytest.mark.parametrize(
    ("architecture", "section", "named"),
    [
        ("nomic-bert", {}, "architecture 'nomic-bert'"),
        ("bert", {".attention.causal": True}, "'attention.causal'"),
        ("bert", {".pooling_type": 4}, "classification head"),
        ("bert", {".expert_count": 8}, "'expert_count'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    architecture: str, section: dict[str, object], named: str, tmp_path: Path
) -> None:
    tables = [
        (f"{name}.weight", np.zeros((8, 32), np.float32), Kind.F32)
        for name in ("token_embd", "position_embd", "token_types")
    ]
    sizes = {".block_count": 1, ".embedding_length": 32, ".feed_forward_length": 48}
    sizes |= {".attention.head_count": 4, ".attention.layer_norm_epsilon": 1e-12}
    path = files.write_gguf(tmp_path / "m.gguf", architecture, sizes | section, tables)
    with pytest.raises(ConfigError, match=named):
        read_spec(path)


_SCRIPT = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refusing())
import json
from encoder_outputs import answers

print(json.dumps([answers(path) for path in sys.argv[1:]]))
"""


def test_encoders_that_cannot_import_torch_answer_to_the_bit_as_with_its_tensors(
    tmp_path: Path,
) -> None:
    heads = {"Bert": "Model", "XLMRoberta": "Model", "ModernBert": "ForSequenceClassification"}
    for family, kind in heads.items():
        (tmp_path / family).mkdir()
        write_encoder(tmp_path / family, family, kind, intermediate_size=64)
    pieces = word_pieces([*LETTER_PIECES, *(f"[PAD{n}]" for n in range(VOCAB - 57))])
    blocks = tmp_path / "m.gguf"
    write_twin(tmp_path / "Bert", blocks, {".pooling_type": 1}, pieces, Kind.Q8_0)
    paths = [*(str(tmp_path / family) for family in heads), str(blocks)]
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *paths],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    for path, found in zip(paths, json.loads(done.stdout), strict=True):
        assert found == answers(path, enforce_eager=True), path
