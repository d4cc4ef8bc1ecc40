"""The interface of a tokenizer library, between `tokenizer` and the vocabularies of GGUF files."""

from __future__ import annotations

from typing import Any, Protocol


class TokenizerLibrary(Protocol):
    """What `Tokenizer` uses of the `tokenizers` library, or of `SentencePieces` in its place. Each
    `encode` raises TypeError for a text without Unicode, each `decode` for ids that are none.
    """

    @property
    def decoder(self) -> Any:
        """Pieces to text; None for pieces with blanks between them."""

    @property
    def normalizer(self) -> Any:
        """What is done with a text first, or None."""

    @property
    def pre_tokenizer(self) -> Any:
        """What splits a text, or None."""

    @property
    def model(self) -> Any:
        """The kind of vocabulary."""

    def no_truncation(self) -> None:
        """Encode complete texts."""

    def no_padding(self) -> None:
        """Encode texts by themselves."""

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """The number of token ids."""

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """The ids of all pieces."""

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """Tokens that are found in texts before anything else."""

    def token_to_id(self, text: str) -> int | None:
        """The id of a piece."""

    def id_to_token(self, token_id: int) -> str | None:
        """The piece of an id."""

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> Any:
        """The encoding of a text, or of a pair; its `ids` are the tokens."""

    def encode_batch_fast(self, texts: list[Any], *, add_special_tokens: bool = True) -> Any:
        """The encodings of texts, or of pairs."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""

    def decode_batch(self, sequences: list[Any], skip_special_tokens: bool = True) -> list[str]:
        """The texts of lists of token ids."""

    def to_str(self) -> str:
        """All of it as JSON."""
