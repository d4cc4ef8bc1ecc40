"""The tokens that a checkpoint's files add to `tokenizer.json`, and the names of special tokens.

Called by `Tokenizer.open`. The files and their order are those of transformers 5
(`PreTrainedTokenizerBase._from_pretrained`): `tokenizer_config.json` first; if it has no
`added_tokens_decoder`, `special_tokens_map.json` overrides its names and `added_tokens.json` adds
tokens. A token gets the id that the library gives it: that of the vocabulary if it is in there,
else the next free one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers.tokenizers import AddedToken

from quickstep.errors import ConfigError
from quickstep.model.checkpoint.config_fields import read_json

_CONFIG = "tokenizer_config.json"
# Lists of special tokens without a name.
_LISTS = ("extra_special_tokens", "additional_special_tokens")
# The names that transformers knows; others that end in `_token` follow them.
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class DeclaredTokens(msgspec.Struct, frozen=True):
    """Special tokens by name (`bos_token`, ...), and all tokens to add, in order."""

    named: Mapping[str, str]
    added: tuple[Any, ...]


def read_declared_tokens(path: Path) -> DeclaredTokens:
    """Read the files in the checkpoint directory `path`. Raises ConfigError."""
    config = read_json(path / _CONFIG)
    indexed = config.get("added_tokens_decoder")
    if indexed is None:
        config |= read_json(path / "special_tokens_map.json")
    written = dict(_named(config))
    named = {name: _content(value) for name, value in written.items()}
    special = {*named.values(), *map(_content, _listed(config))}
    if indexed is None:
        stored = read_json(path / "added_tokens.json").items()
        indexed = {index: {"content": text, "special": text in special} for text, index in stored}
    if not isinstance(indexed, Mapping):
        raise ConfigError(f"{path / _CONFIG} has 'added_tokens_decoder' that is no object")
    tokens = [_token(value, special) for _, value in sorted(_by_index(path, indexed))]
    known = {token.content for token in tokens}
    for value in [*written.values(), *_listed(config)]:
        token = _token(value, special)
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    return DeclaredTokens(named, tuple(tokens))


def add_tokens(library: Any, tokens: Iterable[Any], vocab_size: int | None) -> None:
    """Add those that a tokenizer of the library lacks; ids below `vocab_size`, if it is known: the
    model has no embedding for others.
    """
    present = {token.content for token in library.get_added_tokens_decoder().values()}
    next_id = library.get_vocab_size(with_added_tokens=True)
    missing = []
    for token in tokens:
        if token.content in present or not token.content:
            continue
        if library.token_to_id(token.content) is None:
            if vocab_size is not None and next_id >= vocab_size:
                continue
            next_id += 1
        missing.append(token)
    if missing:
        library.add_tokens(missing)


def end_token_ids(path: Path, library: Any, named: Mapping[str, str]) -> frozenset[int]:
    """The generation config's end tokens (else the config's), and the tokenizer's own.

    Raises:
        ConfigError: What is named as an end token is no token id.
    """
    ids: set[int] = set()
    config = read_json(path / "config.json")
    inner = config.get("text_config")
    generation = path / "generation_config.json"
    sections = [read_json(generation), config, inner if isinstance(inner, Mapping) else {}]
    for section in sections:
        value = section.get("eos_token_id")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int for token_id in values):
            file = generation if section is sections[0] else path / "config.json"
            raise ConfigError(f"{file} sets 'eos_token_id' to {value!r}, it must be token ids")
        ids.update(values)
        break
    eos_token = named.get("eos_token")
    if eos_token is not None:
        token_id = library.token_to_id(eos_token)
        if token_id is not None:
            ids.add(token_id)
    return frozenset(ids)


def _named(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Names and tokens as they are written, in the order in which they are added."""
    for name in sorted(config, key=_place):
        if name.endswith("_token") and isinstance(config[name], (str, Mapping)):
            yield name, config[name]
    values = config.get("extra_special_tokens")
    if isinstance(values, Mapping):
        yield from values.items()


def _place(name: str) -> int:
    return _NAMES.index(name) if name in _NAMES else len(_NAMES)


def _listed(config: Mapping[str, object]) -> list[object]:
    for name in _LISTS:
        values = config.get(name)
        if isinstance(values, list) and values:
            return values
    return []


def _by_index(path: Path, tokens: Mapping[Any, object]) -> Iterator[tuple[int, object]]:
    for index, value in tokens.items():
        try:
            yield int(index), value
        except (TypeError, ValueError):
            raise ConfigError(
                f"{path} names a token {value!r} with the id {index!r}, which is no number"
            ) from None


def _content(value: object) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise ConfigError(f"{_CONFIG} and the files next to it name {value!r}, which is no token")
    return text


def _token(value: object, special: set[str]) -> Any:
    """An added token; one that is written as a plain text is special."""
    text = _content(value)
    given: Mapping[str, Any] = value if isinstance(value, Mapping) else {"special": True}
    is_special = bool(given.get("special", False)) or text in special
    flags = {name: bool(given[name]) for name in _FLAGS if name in given}
    return AddedToken(text, special=is_special, **({"normalized": not is_special} | flags))
