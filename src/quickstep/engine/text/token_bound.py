"""How many bytes of text one token can cover at most, from the tokenizer's own description.

A text of more bytes than that times the context cannot fit, which is known without tokenising it.
Where a step of the tokenizer may drop text (a normaliser that strips, a splitter that removes
blanks, an unknown token for a whole word) there is no bound.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

__all__ = ["TokenBound", "token_bound"]

# canonical composition: the longest spelling of a character is this many times its composed one
_COMPOSING = 4
_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_NUM_BYTES = 256


class TokenBound(msgspec.Struct, frozen=True):
    """Bytes of text that a token covers at most; blanks besides, if `swallows_blanks`."""

    num_bytes: int
    swallows_blanks: bool

    def least_tokens(self, text: str) -> int:
        """Tokens that `text` has at least."""
        kept = "".join(text.split()) if self.swallows_blanks else text
        return -(-len(kept.encode("utf-8", "surrogatepass")) // self.num_bytes)


def token_bound(library: Any, byte_level_alphabet: Mapping[str, int]) -> TokenBound | None:
    """The bound of a tokenizer of the `tokenizers` library; None where there is none."""
    factor = _shrinking(_state(library.normalizer))
    splitters = list(_steps(_state(library.pre_tokenizer), "pretokenizers"))
    if factor is None or not all(map(_keeps_text, splitters)):
        return None
    vocabulary: Mapping[str, int] = library.get_vocab(with_added_tokens=True)
    is_byte_level = any(step["type"] == "ByteLevel" for step in splitters)
    alphabet = byte_level_alphabet if is_byte_level else None
    if not _spells_every_byte(library.model, vocabulary, alphabet):
        return None
    longest = max(len(piece.encode("utf-8", "surrogatepass")) for piece in vocabulary)
    added = library.get_added_tokens_decoder().values()
    return TokenBound(longest * factor, any(token.lstrip or token.rstrip for token in added))


def _state(step: Any) -> Mapping[str, Any] | None:
    """A step's JSON, which is its pickled state."""
    return None if step is None else json.loads(step.__getstate__())


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many times shorter a normaliser may make a text, None for any number of times."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "NFC"}:
                factor *= _COMPOSING
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case _:
                return None
    return factor


def _keeps_text(splitter: Mapping[str, Any]) -> bool:
    if splitter["type"] in ("Split", "Punctuation"):
        removes: bool = splitter["behavior"] == "Removed"
        return not removes
    return splitter["type"] in _KEEPING_SPLITTERS


def _steps(step: Mapping[str, Any] | None, list_name: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[list_name]:
        yield from _steps(part, list_name)


def _spells_every_byte(
    model: Any, vocabulary: Mapping[str, int], byte_level_alphabet: Mapping[str, int] | None
) -> bool:
    """Whether nothing becomes an unknown token, of which one may stand for a long text."""
    if type(model).__name__ != "BPE":
        return False
    spellings: Iterable[str] = byte_level_alphabet or ()
    if model.byte_fallback:
        spellings = (f"<0x{byte:02X}>" for byte in range(_NUM_BYTES))
    return len(set(spellings) & vocabulary.keys()) == _NUM_BYTES
