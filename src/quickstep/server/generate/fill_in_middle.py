"""`suffix`: text behind the gap that the model is to fill, for models that were trained to.

Which they are is told by their vocabulary: tokens that announce the text before the gap, the text
behind it, and the gap itself, in this order (prefix, suffix, middle).
"""

from __future__ import annotations

from quickstep.errors import RequestError
from quickstep.server.generate.engine_interface import Vocabulary

__all__ = ["infill_markers"]

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    (
        "<\uff5cfim▁begin\uff5c>",
        "<\uff5cfim▁hole\uff5c>",
        "<\uff5cfim▁end\uff5c>",
    ),  # DeepSeek-Coder
)


def infill_markers(tokenizer: Vocabulary) -> tuple[int, int, int]:
    """The three tokens. Raises RequestError for a model that has none."""
    for family in _FAMILIES:
        before, behind, middle = map(tokenizer.token_id, family)
        if before is not None and behind is not None and middle is not None:
            return before, behind, middle
    raise RequestError(
        "suffix is not supported: the model does not fill in the middle", param="suffix"
    )
