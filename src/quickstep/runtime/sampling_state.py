"""What the sampler knows of one resident sequence: its parameters and the tokens it has seen.

Owned by the sequence's slot. It is a function of the admission and of the tokens recorded since,
so a sequence that was preempted and admitted again continues exactly as if it had stayed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quickstep.errors import RequestError
from quickstep.types import Admission, SamplingParams

__all__ = ["SamplingState"]


class SamplingState:
    """Adjusts a row's logits before temperature, and counts what was emitted."""

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        """Rebuild from an admission. Raises RequestError when a token id is not in the model."""
        sampling = admission.sampling
        self.sampling: SamplingParams = sampling
        self.seed = admission.seed
        self.num_outputs = len(admission.token_ids) - admission.prompt_len
        self._repetition = sampling.repetition_penalty != 1.0
        self._additive = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._bias_ids = _ids_in(vocab_size, sampling.logit_bias, "logit_bias")
        self._biases = np.array(list(sampling.logit_bias.values()), dtype=np.float64)
        self._allowed_ids = _ids_in(vocab_size, sampling.allowed_token_ids, "allowed_token_ids")
        self._end_ids = _end_ids(admission, vocab_size)
        self._is_seen = np.zeros(vocab_size if self._repetition else 0, dtype=np.bool_)
        self._output_counts = np.zeros(vocab_size if self._additive else 0, dtype=np.int64)
        if self._repetition:
            self._is_seen[list(admission.token_ids)] = True
        if self._additive:
            outputs = np.array(admission.token_ids[admission.prompt_len :], dtype=np.int64)
            np.add.at(self._output_counts, outputs, 1)

    @property
    def adjusts_logits(self) -> bool:
        """Whether `adjust_` would change anything for the next token."""
        return bool(
            self._repetition
            or self._additive
            or self._bias_ids.size
            or self._allowed_ids.size
            or self._bans_ends
        )

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the next token is the argmax of the raw logits and nothing else is asked."""
        sampling = self.sampling
        return sampling.temperature == 0.0 and sampling.logprobs is None and not self.adjusts_logits

    @property
    def _bans_ends(self) -> bool:
        return self.num_outputs < self.sampling.min_tokens and self._end_ids.size > 0

    def adjust_(self, logits: npt.NDArray[np.float64]) -> None:
        """Penalties and bias, then the allowed mask and the ban of ends before `min_tokens`."""
        sampling = self.sampling
        if self._repetition:
            seen = np.flatnonzero(self._is_seen)
            scores = logits[seen]
            penalty = sampling.repetition_penalty
            with np.errstate(over="ignore"):  # a huge penalty sends a score to -inf: it is banned
                logits[seen] = np.where(scores < 0, scores * penalty, scores / penalty)
        if self._additive:
            used = np.flatnonzero(self._output_counts)
            counts = self._output_counts[used]
            logits[used] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if self._bias_ids.size:
            logits[self._bias_ids] += self._biases
        if self._allowed_ids.size:
            allowed = logits[self._allowed_ids]
            logits.fill(-np.inf)
            logits[self._allowed_ids] = allowed
        if self._bans_ends:
            logits[self._end_ids] = -np.inf

    def record(self, token_id: int) -> None:
        """Count an emitted token."""
        self.num_outputs += 1
        if self._repetition:
            self._is_seen[token_id] = True
        if self._additive:
            self._output_counts[token_id] += 1


def _ids_in(vocab_size: int, token_ids: Iterable[int], param: str) -> npt.NDArray[np.int64]:
    ids = list(token_ids)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} names token {token_id}, the model has {vocab_size} tokens", param=param
            )
    return np.array(ids, dtype=np.int64)


def _end_ids(admission: Admission, vocab_size: int) -> npt.NDArray[np.int64]:
    """Tokens that would end the sequence. Ids outside the vocabulary cannot be drawn anyway."""
    ends = set(admission.sampling.stop_token_ids)
    if not admission.sampling.ignore_eos:
        ends |= admission.eos_token_ids
    return np.array(sorted(i for i in ends if 0 <= i < vocab_size), dtype=np.int64)
