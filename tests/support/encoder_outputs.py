"""What an encoder answers, down to the bits. Imports no torch by itself."""

from __future__ import annotations

from quickstep import LLM
from quickstep.types import Pooling

_TEXTS = ["cats", "a text that is longer than the windows of local layers are", "a [SEP] b [SEP]"]


def answers(path: str, enforce_eager: bool = False) -> list[str]:
    """Embeddings, or the classes of a model with a head, and the fingerprint, as text."""
    with LLM(path, enforce_eager=enforce_eager, device="cpu", num_threads=1) as llm:
        if llm.engine.retrieval.labels:
            found = [repr(answer.outputs.probs) for answer in llm.classify(_TEXTS, use_tqdm=False)]
        else:
            found = [
                repr(tuple(answer.outputs.embedding))
                for pooling in (Pooling.CLS, Pooling.MEAN)
                for answer in llm.embed(_TEXTS, use_tqdm=False, pooling=pooling)
            ]
        return [*found, llm.engine.fingerprint]
