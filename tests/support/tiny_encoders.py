"""Random encoders of a few thousand parameters with a WordPiece tokenizer, as checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = 64
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
    "initializer_range": 0.4,
}
_OWN: dict[str, dict[str, Any]] = {
    "Bert": {"layer_norm_eps": 1e-12},
    "XLMRoberta": {"type_vocab_size": 1, "max_position_embeddings": 82, "pad_token_id": 1},
    "ModernBert": {
        "local_attention": 8,
        "global_attn_every_n_layers": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "initializer_cutoff_factor": 2.0,
    },
}
FAMILIES = tuple(_OWN)


def write_encoder(path: Path, family: str, kind: str = "Model", **changes: Any) -> Any:
    """Fill the directory `path`; returns transformers' model."""
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **_OWN[family], **changes})
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    model.save_pretrained(path)
    write_wordpiece(path)
    return model


def write_wordpiece(path: Path) -> None:
    """A tokenizer of letters, which adds [CLS] and [SEP] as BERT's does."""
    pieces = [*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    library = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    library.add_special_tokens(list(SPECIAL))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    library.decoder = decoders.WordPiece()
    library.enable_padding(length=64)
    library.enable_truncation(max_length=64)
    library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]"}))
