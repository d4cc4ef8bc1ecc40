"""Opening a tokenizer from a checkpoint's files: end tokens, special tokens, refusals."""

from __future__ import annotations

import json

import pytest
from scripted_engine import END, END_ID, byte_tokenizer

from quickstep.errors import ConfigError, RequestError
from quickstep.text.tokenizer import Tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    byte_tokenizer()._library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(path, **files):
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))


def test_a_missing_tokenizer_says_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.open(tmp_path)


def test_a_broken_tokenizer_and_a_broken_config_are_configuration_errors(checkpoint):
    (checkpoint / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer_config"):
        Tokenizer.open(checkpoint)
    (checkpoint / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        Tokenizer.open(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.open(checkpoint)


def test_end_tokens_come_from_every_file_that_names_them(checkpoint):
    assert Tokenizer.open(checkpoint).eos_token_ids == frozenset()
    write(checkpoint, config={"eos_token_id": 7})
    assert Tokenizer.open(checkpoint).eos_token_ids == {7}
    write(checkpoint, tokenizer_config={"eos_token": {"content": END, "special": True}})
    assert Tokenizer.open(checkpoint).eos_token_ids == {7, END_ID}
    write(checkpoint, generation_config={"eos_token_id": [1, 2]})
    assert Tokenizer.open(checkpoint).eos_token_ids == {1, 2, END_ID}


def test_special_tokens_are_named_by_their_text(checkpoint):
    config = {"eos_token": END, "bos_token": None, "chat_template": "x", "model_max_length": 5}
    write(checkpoint, tokenizer_config=config)
    assert dict(Tokenizer.open(checkpoint).special_tokens) == {"eos_token": END}


def test_stored_truncation_and_padding_do_not_apply(checkpoint):
    library = byte_tokenizer()._library
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(checkpoint / "tokenizer.json"))
    tokenizer = Tokenizer.open(checkpoint)
    assert tokenizer.encode("abcdefgh") == list(b"abcdefgh")
    assert tokenizer.encode("ab") == list(b"ab")


def test_special_tokens_in_text_are_recognised():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(f"a{END}b") == [ord("a"), END_ID, ord("b")]
    assert tokenizer.token_id(END) == END_ID
    assert tokenizer.is_special(END_ID)
    assert tokenizer.vocab_size == 257


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [None]])
def test_decoding_what_is_no_token_id_is_the_clients_error(ids):
    with pytest.raises(RequestError, match="integers"):
        byte_tokenizer().decode(ids)
