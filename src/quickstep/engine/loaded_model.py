"""A loaded model's name, limits, tokenizer and template.

Made by `open_engine`, read by the engine and its callers; the executor owns the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from quickstep.engine.retrieval.card import Retrieval

if TYPE_CHECKING:
    from quickstep.model.sizing import MemoryPlan
    from quickstep.text.chat_template import ChatTemplate
    from quickstep.text.grammar.grammars import GrammarCompiler
    from quickstep.text.tokenizer import Tokenizer


class LoadedModel(msgspec.Struct, frozen=True, dict=True):
    """A model ready to serve.

    Attributes:
        name: The name in requests and responses.
        fingerprint: Weights, dtype and kernel set.
        max_model_len: The longest sequence in tokens that fits into memory.
        vocab_size: Width of the logits; token ids in requests are below it.
        open_template: Opens the chat template, which not every process needs; None where the model
            has none.
        default_sampling: The checkpoint's own sampling values, by SamplingParams' names.
        load_s: Seconds from opening to ready.
        memory_plan: The use of the memory; None if it was not planned.
        path: The checkpoint's directory or GGUF file; None if there is none.
        grammars: Compiles the grammars of requests; None refuses them.
        retrieval: How it embeds texts and scores pairs, as its card says.
    """

    name: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    open_template: Callable[[], ChatTemplate | None] | None = None
    default_sampling: Mapping[str, float] = MappingProxyType({})
    load_s: float = 0.0
    memory_plan: MemoryPlan | None = None
    path: Path | None = None
    grammars: GrammarCompiler | None = None
    retrieval: Retrieval = Retrieval()

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """Opened when it is first read. Raises ConfigError if it cannot be."""
        return None if self.open_template is None else self.open_template()
