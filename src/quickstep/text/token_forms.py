"""The texts in a request's parameters as token ids: bad words, DRY's breakers, the tags around
the reasoning.

`Engine.submit` calls `find` once per request; the sampler reads the result. A text may have several
spellings, depending on its neighbours, so every spelling that the tokenizer has counts. The results
for DRY's breakers and for tags are cached, since they search the complete vocabulary.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quickstep.errors import RequestError
from quickstep.sampling_params import ReasoningTokens, TokenForms
from quickstep.text.output_text import prompt_end
from quickstep.text.tokenizer import Tokenizer
from quickstep.types import SamplingParams

if TYPE_CHECKING:
    from quickstep.text.token_texts import Ids, TokenTexts
    from quickstep.text.tool_calls.formats import ReasoningFormat

Spelling = tuple[int, ...]

_MAX_CACHED = 64  # texts of breakers, and pairs of tags


class TokenFormFinder:
    """Finds tokens for the requests of one model.

    `vocab_size` is the width of the logits. `reasoning` gives the format of the chat template; it
    is called for requests that need it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        reasoning: Callable[[], ReasoningFormat | None],
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._read_reasoning = reasoning
        self._breakers: OrderedDict[str, Ids] = OrderedDict()
        self._tags: OrderedDict[tuple[str, str], ReasoningTokens] = OrderedDict()
        self._lock = threading.Lock()  # of both

    def knows(self, sampling: SamplingParams) -> bool:
        """Whether `find` can do without a search of the vocabulary."""
        tags = self._tags_of(sampling)
        breakers = sampling.dry_sequence_breakers if sampling.dry_multiplier else ()
        with self._lock:
            return (tags is None or tags in self._tags) and all(
                text in self._breakers for text in breakers
            )

    async def prepare(self, sampling: SamplingParams) -> None:
        """Search the vocabulary in a thread. Raises RequestError as `find`."""
        if not self.knows(sampling):
            await asyncio.to_thread(self.find, sampling, ())

    def find(self, sampling: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """The parameters, with `in_tokens` set if one of them needs it.

        Raises:
            RequestError: A text has no tokens, or there is no reasoning to count in.
        """
        needs_tokens = (
            sampling.bad_words
            or sampling.dry_multiplier > 0.0
            or sampling.thinking_budget is not None
            or sampling.grammar is not None
        )
        if not needs_tokens:
            return sampling
        max_tokens = self._max_model_len - len(prompt)
        if sampling.max_tokens is not None:
            max_tokens = min(max_tokens, sampling.max_tokens)
        found = TokenForms(
            bad_words=self._bad_words(sampling),
            dry_breakers=self._dry_breakers(sampling),
            dry_breaker_flags=self._breaker_flags(sampling),
            reasoning=self._reasoning_tokens(sampling, prompt),
            max_tokens=max_tokens,
        )
        return replace(sampling, in_tokens=found)

    def _bad_words(self, sampling: SamplingParams) -> tuple[Spelling, ...]:
        """The tokens of each bad word, as it is and after a space."""
        found: dict[Spelling, None] = {}
        for word in sampling.bad_words:
            for text in (word, " " + word.lstrip(" ")):
                ids = self._encode("bad_words", text)
                if not ids:
                    raise RequestError(
                        f"bad_words holds {word!r}, which has no tokens", param="bad_words"
                    )
                found[ids] = None
        words = tuple(found)
        single_tokens = {ids[0] for ids in words if len(ids) == 1}
        if sampling.allowed_token_ids and single_tokens.issuperset(sampling.allowed_token_ids):
            raise RequestError(
                "bad_words bans everything that allowed_token_ids allows", param="bad_words"
            )
        return words

    def _breaker_flags(self, sampling: SamplingParams) -> bytes:
        """A flag per token: whether it contains a breaker's text."""
        if sampling.dry_multiplier == 0.0 or not sampling.dry_sequence_breakers:
            return b""
        return self._texts.flags(map(self._containing, sampling.dry_sequence_breakers))

    def _dry_breakers(self, sampling: SamplingParams) -> tuple[Spelling, ...]:
        """The breakers that are several tokens, as sequences of tokens."""
        if sampling.dry_multiplier == 0.0:
            return ()
        texts = [t for text in sampling.dry_sequence_breakers for t in (text, " " + text)]
        spelled = (self._encode("dry_sequence_breakers", text) for text in texts)
        return tuple(dict.fromkeys(ids for ids in spelled if len(ids) > 1))

    def _containing(self, text: str) -> Ids:
        with self._lock:
            known = self._breakers.pop(text, None)
        if known is None:
            known = self._texts.containing(text.encode())
        with self._lock:
            self._breakers[text] = known
            while len(self._breakers) > _MAX_CACHED:
                self._breakers.popitem(last=False)
        return known

    @cached_property
    def _texts(self) -> TokenTexts:
        from quickstep.text.token_texts import TokenTexts  # imports NumPy

        return TokenTexts([self._tokenizer.token_bytes(i) for i in range(self._vocab_size)])

    def _reasoning_tokens(
        self, sampling: SamplingParams, prompt: Sequence[int]
    ) -> ReasoningTokens | None:
        if not _follows_reasoning(sampling):
            return None
        from quickstep.text.tool_calls.formats import check_reasoning_tags

        tags = check_reasoning_tags(self._tags_of(sampling), "the model")
        found = self._tag_tokens(tags)
        end = prompt_end(self._tokenizer.decode, prompt)
        is_open = sampling.inside_reasoning or end.endswith(found.opening.decode())
        is_over = not is_open and end.endswith(found.closing.decode())
        if is_over and sampling.thinking_budget is None:
            return None  # the template has disabled the reasoning: the grammar begins at once
        return replace(found, starts_open=is_open, message_ids=self._message_ids(sampling, tags[1]))

    def _message_ids(self, sampling: SamplingParams, closing: str) -> Spelling:
        """What is written when the budget is used up. Raises RequestError."""
        message = sampling.reasoning_budget_message
        if not message:
            return ()
        from quickstep.text.tool_calls.formats import check_budget_message

        check_budget_message(message, closing)
        return self._encode("reasoning_budget_message", message)

    def _tags_of(self, sampling: SamplingParams) -> tuple[str, str] | None:
        """The tags around the request's reasoning; None if it needs none."""
        if not _follows_reasoning(sampling):
            return None
        if sampling.reasoning_tags is not None:
            return sampling.reasoning_tags
        found = self._reasoning
        return None if found is None else (found.opening, found.closing)

    @cached_property
    def _reasoning(self) -> ReasoningFormat | None:
        return self._read_reasoning()

    def _tag_tokens(self, tags: tuple[str, str]) -> ReasoningTokens:
        """The tags as tokens, from the cache or a search of the vocabulary."""
        with self._lock:
            known = self._tags.get(tags)
        if known is not None:
            return known
        opening, closing = (tag.encode() for tag in tags)
        texts = self._texts
        pieces = {token_id: texts[token_id] for token_id in texts.within(opening, closing).tolist()}
        closing_ids = self._encode("reasoning_tags", tags[1])
        found = ReasoningTokens(opening, closing, closing_ids, MappingProxyType(pieces))
        with self._lock:
            self._tags[tags] = found
            while len(self._tags) > _MAX_CACHED:
                self._tags.popitem(last=False)
        return found

    def _encode(self, param: str, text: str) -> Spelling:
        try:
            ids: Iterable[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except RequestError as error:
            raise RequestError(f"{param}: {error}", param=param) from error
        return tuple(ids)


def _follows_reasoning(sampling: SamplingParams) -> bool:
    has_grammar = sampling.grammar is not None and sampling.reasoning_tags is not None
    return sampling.thinking_budget is not None or has_grammar
