"""A beam search with the interface of a request's stream, so that writers treat both alike.

The hypotheses come at the end, all at once, best first: a delta per token. Made by `generation`.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Iterator, Sequence

from quickstep.engine.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from quickstep.engine.interface import ServedEngine, Vocabulary
from quickstep.engine.requests import check_request
from quickstep.types import Delta, FinishReason, Request


class BeamStream:
    """A `TokenStream` of `sampling.n` sequences."""

    def __init__(
        self,
        search: BeamSearch,
        request: Request,
        tokenizer: Vocabulary,
    ) -> None:
        self._search = search
        self._prompt_token_ids = request.prompt_token_ids
        self._sampling = request.sampling
        self._tokenizer = tokenizer

    @property
    def request_id(self) -> str:
        """None of the engine's: its requests are single tokens."""
        return ""

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt as the model reads it."""
        return self._prompt_token_ids

    @property
    def num_cached_tokens(self) -> int:
        """How many tokens of the prompt were cached; 0 before the search has read it."""
        return self._search.num_cached_tokens

    @property
    def seed(self) -> int:
        """The client's seed, or 0: a beam search samples nothing."""
        return self._sampling.seed or 0

    @property
    def ignored(self) -> tuple[str, ...]:
        """A search has no grammar."""
        return ()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """A delta per token of each hypothesis, best first."""
        best = await self._search.run()
        for index, hypothesis in enumerate(best[: self._sampling.n]):
            for delta in self._deltas(index, hypothesis):
                yield delta

    async def accepted(self) -> None:
        """Return once the engine has taken the prompt. Raises RequestError, EngineError."""
        await self._search.accepted()

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        await self._search.aclose()

    def _deltas(self, index: int, hypothesis: Hypothesis) -> Iterator[Delta]:
        reason, token_ids = hypothesis.reason, hypothesis.token_ids
        logprobs = hypothesis.logprobs if self._sampling.logprobs is not None else ()
        texts = self._texts(token_ids[:-1] if reason is FinishReason.EOS else token_ids)
        for place, token_id in enumerate(token_ids):
            yield Delta(
                index=index,
                text=next(texts, ""),
                token_ids=(token_id,),
                logprobs=logprobs[place : place + 1],
                prompt_logprobs=() if index or place else self._search.prompt_logprobs,
            )
        yield Delta(
            index=index,
            text=next(texts, ""),
            finish_reason=reason,
            stop_reason=reason.value if reason is FinishReason.DEADLINE else None,
            prompt_logprobs=() if index or token_ids else self._search.prompt_logprobs,
        )

    def _texts(self, token_ids: Sequence[int]) -> Iterator[str]:
        """The text that each token completes, and the rest, detokenised as the engine does after a
        prompt.
        """
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in token_ids:
            is_visible = self._is_visible(token_id)
            yield utf8.decode(self._tokenizer.token_bytes(token_id) if is_visible else b"")
        yield utf8.decode(b"", final=True)

    def _is_visible(self, token_id: int) -> bool:
        sampling = self._sampling
        skips = sampling.skip_special_tokens and self._tokenizer.is_special(token_id)
        return not skips or token_id in sampling.shown_special_token_ids


def open_beams(engine: ServedEngine, request: Request, params: BeamSearchParams) -> BeamStream:
    """Start a search that returns `sampling.n` hypotheses. Raises RequestError, EngineError."""
    vocab_size, end_ids = engine.tokenizer.vocab_size, engine.tokenizer.eos_token_ids
    check_request(request, vocab_size, engine.max_model_len, end_ids)
    search = BeamSearch(
        engine.stream,
        request,
        params,
        end_ids,
        max_model_len=engine.max_model_len,
        vocab_size=vocab_size,
    )
    search.start()
    return BeamStream(search, request, engine.tokenizer)
