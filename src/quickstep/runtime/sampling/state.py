"""The sampling state of one resident sequence: its parameters and the tokens so far.

Owned by the sequence's slot. It is a function of the admission and of the tokens recorded since, so
a sequence that was preempted and admitted again continues exactly as if it had stayed. Parts with a
state of their own (grammar, DRY, bad words, reasoning budget) are rebuilt in the same way; a part
that the request does not use is None.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt

from quickstep.errors import RequestError
from quickstep.runtime.sampling.grammar import GrammarConstraint, NewMatcher, grammar_start
from quickstep.runtime.sampling.logit_changes import (
    NO_BANS,
    Bans,
    Edit,
    LogitChanges,
    apply_changes_,
    bits_of_ids,
    edits_of,
)
from quickstep.runtime.sampling.noise import chance
from quickstep.runtime.sampling.penalties import BadWords, DryPenalty, Penalties
from quickstep.runtime.sampling.reasoning import ReasonedGrammar, ThinkingBudget
from quickstep.sampling_params import ReasoningTokens, TokenForms
from quickstep.types import Admission, SamplingParams


class SamplingState:
    """Adjusts a row's logits before temperature, and counts what was emitted.

    Attributes:
        may_be_argmax: Whether the next token is the argmax of the raw logits, with no
            log-probabilities, unless end tokens are still banned.
    """

    def __init__(
        self, admission: Admission, vocab_size: int, new_matcher: NewMatcher | None = None
    ) -> None:
        """Rebuild from an admission.

        Raises:
            RequestError: A token id is not in the model, the grammar cannot be followed, or texts
                are not in token ids.
        """
        sampling = admission.sampling
        self.sampling: SamplingParams = sampling
        self._admission = admission
        self._recorded: list[int] = []  # since the admission
        self._recorded_state: SamplingState | None = None
        self.seed = admission.seed
        self.num_outputs = len(admission.token_ids) - admission.prompt_len
        self._vocab_size = vocab_size
        self._bias_ids = _ids_in(vocab_size, sampling.logit_bias, "logit_bias")
        self._biases = np.array(list(sampling.logit_bias.values()), dtype=np.float64)
        self._allowed_ids = _ids_in(vocab_size, sampling.allowed_token_ids, "allowed_token_ids")
        self._end_ids = _end_ids(admission, vocab_size)
        self._grammar = _grammar(admission, vocab_size, new_matcher)
        self._allowed_bits = (
            bits_of_ids(self._allowed_ids, vocab_size) if self._allowed_ids.size else None
        )
        self.penalties: Penalties | None = _penalties(admission)
        in_tokens = _token_forms(sampling)
        self._dry = _dry(admission, in_tokens, vocab_size)
        self._bad_words = _bad_words(admission, in_tokens, vocab_size)
        self._thinking = _thinking(admission, in_tokens, vocab_size)
        recorders = (self._grammar, self._dry, self._bad_words, self._thinking)
        self._recorders = [recorder for recorder in recorders if recorder is not None]
        self._always_adjusts = bool(
            self.penalties is not None
            or self._bias_ids.size
            or self._allowed_ids.size
            or self._recorders
        )
        # what `RecordedSampling` does not sample, whatever the position
        self._has_lists = bool(
            self._bias_ids.size
            or self._allowed_ids.size
            or self._recorders
            or sampling.xtc_probability > 0.0
        )
        # end tokens are banned below so many outputs
        self._end_ban = sampling.min_tokens if self._end_ids.size else 0
        is_greedy = sampling.temperature == 0.0 and sampling.logprobs is None
        self.may_be_argmax = is_greedy and not self._always_adjusts

    @property
    def is_expensive(self) -> bool:
        """Whether it takes long to rebuild: its parts read all tokens, or search."""
        return self._grammar is not None or self._dry is not None

    def continues_with(self, admission: Admission) -> bool:
        """Whether rebuilding from `admission` would give exactly this state."""
        first, token_ids = self._admission, admission.token_ids
        num_first = len(first.token_ids)
        return (
            len(token_ids) == num_first + len(self._recorded)
            and token_ids[:num_first] == first.token_ids
            and list(token_ids[num_first:]) == self._recorded
            and admission.prompt_len == first.prompt_len
            and admission.seed == first.seed
            and admission.eos_token_ids == first.eos_token_ids
            and admission.sampling == first.sampling
        )

    @property
    def adjusts_logits(self) -> bool:
        """Whether `adjust_` would change anything for the next token."""
        return self._always_adjusts or self.num_outputs < self._end_ban

    @property
    def failure(self) -> str:
        """Why the grammar cannot be followed any further; "" if it can."""
        return "" if self._grammar is None else self._grammar.failure

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the next token is the argmax of the raw logits, with no log-probabilities."""
        is_past_ban = self.num_outputs >= self._end_ban
        return self.may_be_argmax and is_past_ban

    def is_plain_argmax_after(self, num_outputs: int) -> bool:
        """Whether that holds for the token after this many more outputs."""
        is_past_ban = self.num_outputs + num_outputs >= self._end_ban
        return self.may_be_argmax and is_past_ban

    def has_fixed_record_after(self, num_outputs: int) -> bool:
        """Whether numbers and the counts of penalties say all about how the token after this many
        more outputs is sampled: no token is banned or has a logit of its own.
        """
        return not self._has_lists and self.num_outputs + num_outputs >= self._end_ban

    @property
    def _bans_ends(self) -> bool:
        return self.num_outputs < self._end_ban

    def adjust_(self, logits: npt.NDArray[np.float64]) -> None:
        """Apply all that precedes temperature to logits [V] in place: penalties, bias, masks."""
        apply_changes_(logits, self.changes(logits))

    def changes(self, row: npt.NDArray[np.floating] | None) -> LogitChanges:
        """What `adjust_` does to the raw logits `row` [V], without a pass over all of them.

        With None, what it does after `penalties`: a device computes those from its own logits.
        """
        allowed = self._allowed_bits
        if self._grammar is not None:
            bits = self._grammar.allowed_bits()
            allowed = bits if allowed is None else bits & allowed
        budget = self._ending_budget
        forced = None if budget is None else budget.forced_token
        if forced is not None:
            only = np.array([forced], dtype=np.int64)
            bits = bits_of_ids(only, self._vocab_size)
            return LogitChanges(only, np.zeros(1), 1, bits, (NO_BANS, NO_BANS))
        ends = NO_BANS
        if self._bans_ends:
            ends = Bans(self._end_ids, yields=self._grammar is not None)
        bad_words = NO_BANS
        if self._bad_words is not None:
            bad_words = Bans(self._bad_words.banned(), yields=True)
        return LogitChanges(*self._edits(row), allowed, (ends, bad_words))

    def _edits(
        self, row: npt.NDArray[np.floating] | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], int]:
        """The edits of logits by penalties and bias; see `edits_of`."""
        replaced: Edit | None = None
        if self.penalties is not None and row is not None:
            ids = self.penalties.token_ids
            replaced = ids, self.penalties.lowered(row[ids].astype(np.float64))
        added: list[Edit] = []
        if self._dry is not None:
            ids, amounts = self._dry.penalties()
            added.append((ids, -amounts))
        if self._bias_ids.size:
            added.append((self._bias_ids, self._biases))
        return edits_of(replaced, added)

    def forced_token(self, token_id: int) -> int:
        """The sampled token, or another one if the grammar could not end in time after it."""
        return token_id if self._grammar is None else self._grammar.forced_token(token_id)

    def next_tokens(self) -> tuple[int, ...]:
        """The tokens that the grammar or the thinking budget forces to come next, as far as they
        are known. A hint: `changes` decides.
        """
        budget = self._ending_budget
        if budget is not None and (forced := budget.next_tokens()):
            return forced
        return () if self._grammar is None else self._grammar.next_tokens()

    @property
    def _ending_budget(self) -> ThinkingBudget | None:
        """The budget, if it decides how the reasoning ends; near the limit of tokens the grammar
        does, which has no room for the budget's message.
        """
        if isinstance(self._grammar, ReasonedGrammar) and self._grammar.must_close:
            return None
        return self._thinking

    @property
    def applies_xtc(self) -> bool:
        """Whether XTC removes tokens at the next position."""
        probability = self.sampling.xtc_probability
        return probability > 0.0 and chance(self.seed, self.num_outputs) < probability

    @property
    def reads_tokens(self) -> bool:
        """Whether the host needs all tokens so far before it samples the next one: for a grammar,
        DRY, bad words or a reasoning budget. Of penalties a device counts the tokens by itself.
        """
        return bool(self._recorders)

    @property
    def is_function_of_position(self) -> bool:
        """Whether the tokens so far have no effect on the next one but by the logits."""
        return self.penalties is None and not self._recorders

    @property
    def recorded_state(self) -> SamplingState:
        """The state that tokens are recorded in: this one, or the one that it is `ahead` of."""
        return self if self._recorded_state is None else self._recorded_state

    def ahead(self, num_tokens: int) -> SamplingState:
        """The state after so many more tokens, whatever they are, of one that does not
        `reads_tokens`. For sampling only: it shares everything else with this state, so `penalties`
        do not know these tokens.
        """
        assert not self.reads_tokens
        later = copy(self)
        later.num_outputs += num_tokens
        later._recorded_state = self.recorded_state
        return later

    def outputs_since(self, num_outputs: int) -> list[int]:
        """The recorded tokens after so many outputs, of which none is before the admission."""
        num_before = self.num_outputs - len(self._recorded)
        assert num_outputs >= num_before
        return self._recorded[num_outputs - num_before :]

    def record(self, token_id: int) -> None:
        """Count an emitted token."""
        self.num_outputs += 1
        self._recorded.append(token_id)
        for recorder in self._recorders:
            recorder.record(token_id)
        if self.penalties is not None:
            self.penalties.record(token_id)


def _grammar(
    admission: Admission, vocab_size: int, new_matcher: NewMatcher | None
) -> GrammarConstraint | ReasonedGrammar | None:
    """The grammar's constraint, after the reasoning if there is any, with the outputs replayed."""
    start = grammar_start(admission, vocab_size, new_matcher)
    if start is None:
        return None
    sampling = admission.sampling
    in_tokens = sampling.in_tokens
    limit = sampling.max_tokens if in_tokens is None else in_tokens.max_tokens
    tags = None if in_tokens is None else in_tokens.reasoning
    grammar: GrammarConstraint | ReasonedGrammar
    if tags is None:
        grammar = start.constraint(limit)
    else:
        _check_closing(tags, vocab_size)
        grammar = ReasonedGrammar(start, tags, limit)
    for token_id in admission.token_ids[admission.prompt_len :]:
        grammar.record(token_id)
    return grammar


def _penalties(admission: Admission) -> Penalties | None:
    sampling, token_ids, prompt_len = admission.sampling, admission.token_ids, admission.prompt_len
    additive = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    if sampling.repetition_penalty == 1.0 and not additive:
        return None
    return Penalties(sampling, token_ids[:prompt_len], token_ids[prompt_len:])


def _ids_in(vocab_size: int, token_ids: Iterable[int], param: str) -> npt.NDArray[np.int64]:
    ids = list(token_ids)
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} names token {token_id}, the model has {vocab_size} tokens", param=param
            )
    return np.array(ids, dtype=np.int64)


def _end_ids(admission: Admission, vocab_size: int) -> npt.NDArray[np.int64]:
    """Tokens that would end the sequence. Ids outside the vocabulary cannot be sampled anyway."""
    ends = set(admission.sampling.stop_token_ids)
    if not admission.sampling.ignore_eos:
        ends |= admission.eos_token_ids
    return np.array(sorted(i for i in ends if 0 <= i < vocab_size), dtype=np.int64)


def _token_forms(sampling: SamplingParams) -> TokenForms:
    """The texts in token ids. Raises RequestError if they are missing."""
    if sampling.in_tokens is not None:
        return sampling.in_tokens
    has_breakers = sampling.dry_multiplier > 0.0 and sampling.dry_sequence_breakers
    needed = {
        "bad_words": bool(sampling.bad_words),
        "dry_sequence_breakers": bool(has_breakers),
        "thinking_budget": sampling.thinking_budget is not None,
        "reasoning_tags": sampling.grammar is not None and sampling.reasoning_tags is not None,
    }
    for param, is_needed in needed.items():
        if is_needed:
            raise RequestError(f"{param} is not in token ids; submit to an engine", param=param)
    return TokenForms()


def _dry(admission: Admission, in_tokens: TokenForms, vocab_size: int) -> DryPenalty | None:
    sampling = admission.sampling
    if sampling.dry_multiplier == 0.0:
        return None
    breakers, flags = in_tokens.dry_breakers, in_tokens.dry_breaker_flags
    return DryPenalty(sampling, breakers, admission.token_ids, vocab_size, flags)


def _bad_words(admission: Admission, in_tokens: TokenForms, vocab_size: int) -> BadWords | None:
    if not in_tokens.bad_words:
        return None
    outputs = admission.token_ids[admission.prompt_len :]
    return BadWords(in_tokens.bad_words, outputs, vocab_size)


def _thinking(
    admission: Admission, in_tokens: TokenForms, vocab_size: int
) -> ThinkingBudget | None:
    budget, tags = admission.sampling.thinking_budget, in_tokens.reasoning
    if budget is None:
        return None
    if tags is None:
        raise RequestError("thinking_budget has no tag to write", param="thinking_budget")
    _check_closing(tags, vocab_size)
    outputs = admission.token_ids[admission.prompt_len :]
    return ThinkingBudget(budget, tags, outputs)


def _check_closing(tags: ReasoningTokens, vocab_size: int) -> None:
    if max((*tags.closing_ids, *tags.message_ids)) >= vocab_size:
        raise RequestError(
            "reasoning_tags or the budget's message has text that is no token of the model",
            param="reasoning_tags",
        )
