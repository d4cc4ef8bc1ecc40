"""`EncoderSpec`: what an encoder has that a decoder has not, read from `config.json`.

    BERT        learned positions, segments, norms after each part, gelu
    XLM-R       the same with positions from `pad_token_id + 1` on and one segment
    ModernBERT  rotary positions, norms before each part, gated gelu, windows in most layers

A classification head's sizes are here too. The sizes that all models have stay in `ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class HeadSpec(msgspec.Struct, frozen=True):
    """A classification head over the pooled state.

    Attributes:
        labels: The names of the classes, in the order of the logits.
        is_mean: It reads the mean of all states, not the first one.
    """

    labels: tuple[str, ...]
    is_mean: bool = False


class EncoderSpec(msgspec.Struct, frozen=True):
    """An encoder.

    Attributes:
        family: `bert`, `roberta` or `modernbert`: how tensors are called.
        activation: Of the feed-forward part.
        first_position: The row of the position table for the first token.
        num_positions: Rows of the position table; 0 for rotary positions.
        num_segments: Rows of the segment table; 0 for none.
        separator_id: The token after which the second segment begins; None where all tokens are in
            the first one.
        head: None without a classification head.
    """

    family: str
    activation: str
    first_position: int = 0
    num_positions: int = 0
    num_segments: int = 0
    separator_id: int | None = None
    head: HeadSpec | None = None


# architecture -> (family, whether it has a classification head)
ENCODERS: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "BertModel": ("bert", False),
        "BertForMaskedLM": ("bert", False),
        "BertForPreTraining": ("bert", False),
        "BertForSequenceClassification": ("bert", True),
        "RobertaModel": ("roberta", False),
        "RobertaForMaskedLM": ("roberta", False),
        "RobertaForSequenceClassification": ("roberta", True),
        "XLMRobertaModel": ("roberta", False),
        "XLMRobertaForMaskedLM": ("roberta", False),
        "XLMRobertaForSequenceClassification": ("roberta", True),
        "ModernBertModel": ("modernbert", False),
        "ModernBertForMaskedLM": ("modernbert", False),
        "ModernBertForSequenceClassification": ("modernbert", True),
    }
)
