"""Tokens and special tokens from every file that transformers reads: equal to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from quickstep.text.tokenizer import Tokenizer

TEXT = "<s>a<tool>b <|im|>c</s> d<pad><img> <new>  e<|x|>"
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def token(text: str, special: bool = True, **flags: bool) -> dict[str, object]:
    return {"content": text, "special": special} | PLAIN | flags


# file -> content; tokenizer.json has 256 bytes, <s>, </s> and <pad>
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tokenizer_config": {"tokenizer_config": NAMES},
    "added_tokens_decoder": {
        "tokenizer_config": NAMES | {"added_tokens_decoder": {"259": token("<tool>")}}
    },
    "two that are out of order": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "260": token("<tool>", special=False, lstrip=True),
                "259": token("<|im|>", rstrip=True),
            }
        }
    },
    "special_tokens_map": {
        "special_tokens_map": {"bos_token": "<s>", "eos_token": token("</s>")},
    },
    "the map overrides the config": {
        "tokenizer_config": NAMES | {"eos_token": "<pad>"},
        "special_tokens_map": {"eos_token": "</s>"},
    },
    "added_tokens_decoder hides the map": {
        "tokenizer_config": {"added_tokens_decoder": {"257": token("</s>")}},
        "special_tokens_map": {"eos_token": "</s>"},
        "added_tokens": {"<new>": 259},
    },
    "added_tokens": {
        "tokenizer_config": {"additional_special_tokens": ["<tool>"]},
        "added_tokens": {"<new>": 260, "<tool>": 259},
    },
    "additional_special_tokens": {
        "tokenizer_config": NAMES | {"additional_special_tokens": ["<tool>", "<|im|>"]}
    },
    "extra_special_tokens": {
        "tokenizer_config": NAMES | {"extra_special_tokens": ["<|x|>"], "image_token": "<img>"}
    },
    "extra names": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<img>"}}},
    "a beginning token": {"tokenizer_config": NAMES | {"add_bos_token": True}},
    "no beginning token": {"tokenizer_config": NAMES | {"add_bos_token": False}},
    "both ends": {"tokenizer_config": NAMES | {"add_bos_token": True, "add_eos_token": True}},
    "an end token": {"tokenizer_config": {"eos_token": "</s>", "add_eos_token": True}},
    "a beginning token without a name": {"tokenizer_config": {"add_bos_token": True}},
    "a named token that is nowhere else": {"special_tokens_map": {"mask_token": "<new>"}},
}


@pytest.mark.parametrize("is_framed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_ids_and_names_are_those_of_transformers(
    case: str, is_framed: bool, tmp_path: Path
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    stored = [AddedToken(text, special=True, normalized=False) for text in NAMES.values()]
    library.add_special_tokens(stored)
    if is_framed:
        library.post_processor = processors.TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", 256)]
        )
    library.save(str(tmp_path / "tokenizer.json"))
    files = {"config": {"model_type": "llama", "vocab_size": 300}} | CASES[case]
    config = files.get("tokenizer_config", {})
    files["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.open(tmp_path)
    ids = theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert ours.encode(TEXT, add_special_tokens=False) == ids
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    for skip in (False, True):
        text = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == text
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    end = theirs.eos_token_id
    assert ours.eos_token_ids == (frozenset() if end is None else {end})
