"""Text to token ids and back, over the `tokenizers` library and the checkpoint's own files.

Reads `tokenizer.json` (model, normaliser, post-processor, decoder), added and special tokens from
the files next to it, and end tokens (`special_tokens`). The post-processor
decides whether a beginning token is added. Used by the engine, the detokenizer and the server;
read-only after `open`, so any thread may call it. Never loads `transformers`.
"""

from __future__ import annotations

import enum
import hashlib
import json
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from tokenizers.tokenizers import Tokenizer as Library

from quickstep.errors import ConfigError, RequestError
from quickstep.model.checkpoint.config_fields import read_json
from quickstep.model.checkpoint.gguf_names import is_gguf
from quickstep.model.checkpoint.source import reading_checkpoint
from quickstep.text.special_tokens import (
    add_tokens,
    end_token_ids,
    read_declared_tokens,
)
from quickstep.text.tokenizer_library import TokenizerLibrary
from quickstep.text.tokenizer_process import TokenizerProcess

_HEX_DIGITS = frozenset(string.hexdigits)
# canonical composition: the longest spelling of a character is this many times its composed one
_COMPOSING = 4
_KEEPING_SPLITTERS = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
_NUM_BYTES = 256
# Shorter texts take milliseconds; a process would take longer to start.
LONG_CHARS = 64 * 1024
# The library keeps the interpreter's lock in its calls for one text, and releases it in those for
# several: next to a busy thread a short call waits half a millisecond for the lock, and in a long
# one other threads have to run.
_KEEPING_CHARS = 1024
_KEEPING_IDS = 1024


class DecoderKind(enum.Enum):
    """How tokens become text: as raw bytes of UTF-8, or as pieces of text with fallback bytes."""

    BYTES = "bytes"
    PIECES = "pieces"


class _TokenBound(msgspec.Struct, frozen=True):
    """The most bytes of text that one token covers, blanks not counted if `swallows_blanks`.

    So a text that is too long for the context is found without tokenizing it.
    """

    num_bytes: int
    swallows_blanks: bool

    def least_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text`."""
        kept = "".join(text.split()) if self.swallows_blanks else text
        return -(-len(kept.encode("utf-8", "surrogatepass")) // self.num_bytes)


class Tokenizer:
    """One checkpoint's vocabulary. `open` reads the files; no method changes it."""

    def __init__(
        self,
        library: TokenizerLibrary,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        process: TokenizerProcess | None = None,
    ) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._process = process
        self._decoder = library.decoder
        self._eos_token_ids = frozenset(eos_token_ids)
        self._special_tokens = MappingProxyType(dict(special_tokens))
        added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        # a decoder's pickled state is its JSON; the tokenizer's would contain the vocabulary
        decoder = None if library.decoder is None else json.loads(library.decoder.__getstate__())
        steps = _decoder_steps(decoder)
        self._kind = _decoder_kind(steps)
        self._byte_fallback = "ByteFallback" in steps
        self._byte_of_char = _byte_level_alphabet()
        self._bytes_of_id: dict[int, bytes] = {}

    @classmethod
    def open(cls, path: Path, process: TokenizerProcess | None = None) -> Tokenizer:
        """Read the tokenizer of the checkpoint at `path`, a directory or a GGUF file.

        Long texts are tokenised in `process`, if there is one.

        Raises:
            ConfigError: A file is missing or cannot be read.
        """
        with reading_checkpoint(path):
            return cls._open(path, process)

    @classmethod
    def _open(cls, path: Path, process: TokenizerProcess | None) -> Tokenizer:
        if is_gguf(path):
            from quickstep.text.gguf_tokenizer import read_gguf_tokenizer

            found = read_gguf_tokenizer(path)
            return cls(found.library, found.eos_token_ids, found.special_tokens, process)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{path} has no tokenizer.json; convert the tokenizer to that format "
                "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        try:
            library = Library.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} cannot be read: {error}") from error
        declared = read_declared_tokens(path)
        add_tokens(library, declared.added, _model_vocabulary(path))
        ends = end_token_ids(path, library, declared.named)
        return cls(library, ends, declared.named, process)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, added tokens included; the model's logits may be wider."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def digest(self) -> str:
        """Of all that decides which tokens a text becomes; takes 0.3 s for 150,000 tokens."""
        content = self._library.to_str()
        names = msgspec.json.encode([sorted(self._eos_token_ids), dict(self._special_tokens)])
        return hashlib.sha256(content.encode() + names).hexdigest()[:16]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the checkpoint's and the tokenizer's."""
        return self._eos_token_ids

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """`bos_token`, `eos_token`, ... and their texts, which chat templates use."""
        return self._special_tokens

    @property
    def kind(self) -> DecoderKind:
        """How the vocabulary's tokens become text."""
        return self._kind

    def least_tokens(self, text: str) -> int:
        """A lower bound on the tokens of `text`, computed from its bytes; 0 if there is none."""
        bound = self._bound
        return 0 if bound is None else bound.least_tokens(text)

    @cached_property
    def _bound(self) -> _TokenBound | None:
        """Reads the complete vocabulary, so it is only called for long texts."""
        return _token_bound(self._library, self._byte_of_char)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognized.

        Raises:
            RequestError: The text is not Unicode (JSON can spell half a surrogate pair).
        """
        [ids] = self.encode_all([text], add_special_tokens)
        return ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, joined with the tokenizer's special tokens.

        Raises:
            RequestError: One is not valid Unicode.
        """
        try:
            if len(first) + len(second) <= _KEEPING_CHARS:
                encoding = self._library.encode(first, second)
            else:
                [encoding] = self._library.encode_batch_fast([(first, second)])
        except TypeError as error:
            raise RequestError(
                "the text is not valid Unicode: it holds half a surrogate pair", param="prompt"
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text, as `encode`; long texts may take a process of their own.

        Raises:
            RequestError: A text is not Unicode.
            EngineError: That process failed.
        """
        num_chars = sum(map(len, texts))
        if self._process is not None and num_chars > LONG_CHARS:
            return self._process.encode_all(texts, add_special_tokens)
        try:
            if num_chars <= _KEEPING_CHARS:
                encodings = [
                    self._library.encode(text, add_special_tokens=add_special_tokens)
                    for text in texts
                ]
            else:
                encodings = self._library.encode_batch_fast(
                    list(texts), add_special_tokens=add_special_tokens
                )
        except TypeError as error:
            raise RequestError(
                "the text is not valid Unicode: it holds half a surrogate pair", param="prompt"
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a complete sequence; incomplete UTF-8 becomes U+FFFD.

        Raises:
            RequestError: An id is negative or no 32-bit number.
        """
        try:
            if len(ids) <= _KEEPING_IDS:
                text = self._library.decode(list(ids), skip_special_tokens=skip_special_tokens)
            else:
                [text] = self._library.decode_batch(
                    [list(ids)], skip_special_tokens=skip_special_tokens
                )
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"token ids are integers from 0 to {self.vocab_size - 1}", param="tokens"
            ) from error
        decoded: str = text
        return decoded

    def token_id(self, text: str) -> int | None:
        """The id of the token that is exactly `text`, or None."""
        token_id: int | None = self._library.token_to_id(text)
        return token_id

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0xAB>`), None if unknown."""
        piece: str | None = self._library.id_to_token(token_id)
        return piece

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""
        return token_id in self._special_ids

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""
        return self._special_ids

    def is_byte_piece(self, piece: str) -> bool:
        """Whether a piece such as `<0xAB>` is a byte in this vocabulary."""
        return self._byte_fallback and _fallback_byte(piece) is not None

    def decode_pieces(self, pieces: Sequence[str], at_start: bool) -> str:
        """The text that `pieces` add at the start of a text or inside one (see DecoderKind.PIECES).

        Decoders treat the first token of a text differently (they drop a leading space). Inside a
        text another token precedes, so one is put there and its text removed.
        """
        if at_start:
            return self._join(list(pieces))
        return self._join(["a", *pieces])[1:]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text; b"" for an id outside the vocabulary."""
        known = self._bytes_of_id.get(token_id)
        if known is None:
            known = self._bytes_of_id[token_id] = self._read_bytes(token_id)
        return known

    def _read_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        if piece is None:
            return b""
        if self._kind is DecoderKind.BYTES:
            try:
                return bytes(map(self._byte_of_char.__getitem__, piece))
            except KeyError:  # an added token, spelled as it is
                return piece.encode()
        if self._byte_fallback:
            byte = _fallback_byte(piece)
            if byte is not None:
                return bytes((byte,))
        return self.decode_pieces((piece,), at_start=False).encode()

    def _join(self, pieces: list[str]) -> str:
        if self._decoder is None:
            return " ".join(pieces)
        text: str = self._decoder.decode(pieces)
        return text


def _token_bound(library: Any, byte_level_alphabet: Mapping[str, int]) -> _TokenBound | None:
    """The bound of a tokenizer of the `tokenizers` library.

    None where a step of the tokenizer may drop text: a normalizer that strips, a splitter that
    removes blanks, an unknown token for a complete word.
    """
    factor = _shrinking(_state(library.normalizer))
    splitters = list(_sequence_steps(_state(library.pre_tokenizer), "pretokenizers"))
    if factor is None or not all(map(_keeps_text, splitters)):
        return None
    vocabulary: Mapping[str, int] = library.get_vocab(with_added_tokens=True)
    is_byte_level = any(step["type"] == "ByteLevel" for step in splitters)
    alphabet = byte_level_alphabet if is_byte_level else None
    if not _spells_every_byte(library.model, vocabulary, alphabet):
        return None
    longest = max(len(piece.encode("utf-8", "surrogatepass")) for piece in vocabulary)
    added = library.get_added_tokens_decoder().values()
    return _TokenBound(longest * factor, any(token.lstrip or token.rstrip for token in added))


def _state(step: Any) -> Mapping[str, Any] | None:
    """A step's JSON, which is its pickled state."""
    return None if step is None else json.loads(step.__getstate__())


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many times shorter a normalizer may make a text; None if there is no limit."""
    factor = 1
    for step in _sequence_steps(normalizer, "normalizers"):
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


def _sequence_steps(step: Mapping[str, Any] | None, list_name: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step[list_name]:
        yield from _sequence_steps(part, list_name)


def _spells_every_byte(
    model: Any, vocabulary: Mapping[str, int], byte_level_alphabet: Mapping[str, int] | None
) -> bool:
    """Whether no text becomes an unknown token, which may cover any number of bytes."""
    if type(model).__name__ != "BPE":
        return False
    spellings: Iterable[str] = byte_level_alphabet or ()
    if model.byte_fallback:
        spellings = (f"<0x{byte:02X}>" for byte in range(_NUM_BYTES))
    return len(set(spellings) & vocabulary.keys()) == _NUM_BYTES


def _model_vocabulary(path: Path) -> int | None:
    """The width of the model's logits, if the config has it."""
    config = read_json(path / "config.json")
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        value = section.get("vocab_size")
        if isinstance(value, int):
            return value
    return None


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[str]:
    """Names of a decoder's steps, in order."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [name for part in decoder["decoders"] for name in _decoder_steps(part)]


def _decoder_kind(steps: Sequence[str]) -> DecoderKind:
    if not set(steps) - {"ByteLevel", "Fuse"} and "ByteLevel" in steps:
        return DecoderKind.BYTES
    unsupported = set(steps) & {"ByteLevel", "BPEDecoder", "CTC"}
    if unsupported:
        raise ConfigError(
            f"tokenizer.json has the decoder {' + '.join(steps)}, which Quickstep cannot stream; "
            "supported are ByteLevel alone, and ByteFallback, Metaspace, WordPiece, Replace, "
            "Fuse and Strip"
        )
    return DecoderKind.PIECES


def _fallback_byte(piece: str) -> int | None:
    if len(piece) != 6 or not piece.startswith("<0x") or not piece.endswith(">"):
        return None
    digits = piece[3:5]
    return int(digits, 16) if set(digits) <= _HEX_DIGITS else None


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 is itself, the rest moves to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}
