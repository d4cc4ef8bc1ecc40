"""Token ids of a target and of its draft model, where the two tokenizers are not the same.

A token is translated to the one with the same string. Called when a draft model is opened, and for
every step of one whose vocabulary differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quickstep.errors import ConfigError
from quickstep.ops.tensors import FLOAT32, AnyTensor, HostTensor, to_numpy

_LEAST_COVERED = 0.5


class DraftVocabulary:
    """Translates between V token ids of the target and those of a draft model.

    `draft_ids` [V] has the draft model's id of each token of the target, -1 where it has none. Such
    a token is never a draft; as an input it is replaced by `fallback_id`.
    """

    def __init__(self, draft_ids: npt.NDArray[np.int64], fallback_id: int) -> None:
        self._is_missing = draft_ids < 0
        self._draft_ids = np.where(self._is_missing, fallback_id, draft_ids)

    def of_draft(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Inputs of the draft model for tokens of the target."""
        return tuple(self._draft_ids[list(token_ids)].tolist())

    def logits_of_target(self, logits: AnyTensor) -> HostTensor:
        """The draft model's logits in the order of the target's ids, [E, V] fp32; -inf where the
        draft model lacks a token. The noise of sampling is then that of the target's ids.
        """
        mapped = np.take(to_numpy(logits), self._draft_ids, axis=1)
        mapped[:, self._is_missing] = -np.inf
        return HostTensor(mapped, FLOAT32)


def map_vocabulary(
    target: Sequence[str | None], draft: Sequence[str | None], fallback_id: int = 0
) -> DraftVocabulary | None:
    """The translation between two vocabularies, given the string of each of their V token ids (None
    for an id without one); None where the target's ids mean the same to the draft model.

    Raises:
        ConfigError: The draft model has less than half of the target's tokens.
    """
    num_common = min(len(target), len(draft))
    differs = any(a is not None and a != b for a, b in zip(target, draft, strict=False))
    if not differs and all(text is None for text in target[num_common:]):
        return None
    ids = {text: token_id for token_id, text in enumerate(draft) if text is not None}
    draft_ids = np.array(
        [-1 if text is None else ids.get(text, -1) for text in target], dtype=np.int64
    )
    num_tokens = sum(text is not None for text in target)
    num_found = int((draft_ids >= 0).sum())
    if num_found < _LEAST_COVERED * num_tokens:
        raise ConfigError(
            f"the draft model has {num_found} of the model's {num_tokens} tokens; "
            "use a draft model with the same tokenizer"
        )
    return DraftVocabulary(draft_ids, fallback_id)
