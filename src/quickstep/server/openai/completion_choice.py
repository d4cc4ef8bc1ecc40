"""A completion's choices as JSON: text, OpenAI's four lists of logprobs, token ids, the prompt.

`CompletionRendering` belongs to one request: `text_offset` counts along, and a stream's first word
of a choice carries the echoed prompt. `completions` makes it, `choices` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quickstep.engine.stream import Delta
from quickstep.server.generate.engine_interface import Vocabulary
from quickstep.server.generate.generation import Choice, Generation, InfillPrompt, TextPrompt
from quickstep.types import TokenLogprobs

__all__ = ["CompletionRendering", "prompt_logprobs_json"]


class CompletionRendering:
    """Choices as `{"text", "logprobs"}`, with what else was asked for."""

    def __init__(self, generation: Generation, tokenizer: Vocabulary) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._shown = generation.request.shown
        self._skips_special = generation.request.sampling.skip_special_tokens
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def opening(self) -> None:
        """A stream of completions begins with its first text."""

    def beside(self) -> Mapping[str, Any]:
        """Nothing: every choice carries its own."""
        return {}

    def news(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """New text, with the new tokens' logprobs; the prompt first, once it is scored."""
        if delta.finish_reason is None and not delta.token_ids and not delta.text:
            return []
        shows_tokens = self._shown.logprobs is not None or self._shown.token_ids
        is_first = choice.index not in self._begun
        with_prompt = is_first and (self._shown.echo or self._shown.token_ids)
        if not delta.text and not with_prompt and not (shows_tokens and delta.token_ids):
            return []
        self._begun.add(choice.index)
        return [self._said(choice, delta.text, delta.logprobs, delta.token_ids, is_first)]

    def ending(self) -> dict[str, Any]:
        """No text."""
        return {"text": "", "logprobs": None}

    def whole(self, choice: Choice) -> dict[str, Any]:
        """The whole text."""
        text = "".join(choice.text)
        said = self._said(choice, text, choice.logprobs, choice.token_ids, is_first=True)
        num_top = self._shown.prompt_logprobs
        if num_top is not None:
            scores = self._generation.prompt_logprobs(choice)
            said["prompt_logprobs"] = prompt_logprobs_json(scores, num_top, self._tokenizer)
        return said

    def finish_reason(self, choice: Choice) -> str | None:
        """In OpenAI's words."""
        return choice.finish_reason.openai if choice.finish_reason else None

    def _said(
        self,
        choice: Choice,
        text: str,
        logprobs: Iterable[TokenLogprobs],
        token_ids: Sequence[int],
        is_first: bool,
    ) -> dict[str, Any]:
        listed = None if self._shown.logprobs is None else _new_lists()
        if is_first and self._shown.echo:
            text = self._prompt_text(choice) + text
            self._list_prompt(choice, text, listed)
        if listed is not None:
            self._list_tokens(choice.index, logprobs, listed)
        said: dict[str, Any] = {"text": text, "logprobs": listed}
        if self._shown.token_ids:
            said["token_ids"] = list(token_ids)
            if is_first:
                said["prompt_token_ids"] = list(self._generation.prompt_token_ids(choice))
        return said

    def _prompt_text(self, choice: Choice) -> str:
        """The client's own text; of token ids, what they say."""
        request = self._generation.request
        prompt = request.prompts[choice.index // request.sampling.n]
        if isinstance(prompt, TextPrompt):
            return prompt.text
        if isinstance(prompt, InfillPrompt):
            return prompt.before
        ids = self._generation.prompt_token_ids(choice)
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)

    def _list_prompt(self, choice: Choice, text: str, listed: dict[str, list[Any]] | None) -> None:
        """The prompt's tokens, the first of which nothing scores; offsets go on behind them."""
        if listed is None:
            return
        scores = self._generation.prompt_logprobs(choice)
        token_ids = self._generation.prompt_token_ids(choice)
        offset = 0
        # a deadline may have come before the whole prompt was scored
        for token_id, score in zip(token_ids, scores, strict=False):
            token = self._tokenizer.decode([token_id], skip_special_tokens=False)
            listed["tokens"].append(self._token(token_id))
            listed["token_logprobs"].append(None if score is None else score.logprob)
            top = None if score is None else self._alternatives(score, self._shown.logprobs)
            listed["top_logprobs"].append(top)
            listed["text_offset"].append(offset)
            offset += self._length_in(text, token_id, token, offset)
        self._offsets[choice.index] = len(self._prompt_text(choice))

    def _length_in(self, text: str, token_id: int, token: str, offset: int) -> int:
        """Characters that a token has in `text`: none if it is only special, without the space
        that a text's first word loses.
        """
        if self._tokenizer.is_special(token_id) and not text.startswith(token, offset):
            return 0
        length = _num_characters(self._tokenizer.token_bytes(token_id))
        loses_space = offset == 0 and token.startswith(" ") and not text.startswith(" ")
        return length - loses_space

    def _list_tokens(
        self, index: int, logprobs: Iterable[TokenLogprobs], listed: dict[str, list[Any]]
    ) -> None:
        offset = self._offsets.get(index, 0)
        for item in logprobs:
            listed["tokens"].append(self._token(item.token_id))
            listed["token_logprobs"].append(item.logprob)
            listed["top_logprobs"].append(self._alternatives(item, len(item.top)))
            listed["text_offset"].append(offset)
            if not (self._skips_special and self._tokenizer.is_special(item.token_id)):
                offset += _num_characters(self._tokenizer.token_bytes(item.token_id))
        self._offsets[index] = offset

    def _alternatives(self, item: TokenLogprobs, num_top: int | None) -> dict[str, float]:
        """The token and the alternatives. Texts that two of them share keep the likelier."""
        alternatives = {self._token(item.token_id): item.logprob}
        for token_id, logprob in item.top[:num_top]:
            alternatives.setdefault(self._token(token_id), logprob)
        return alternatives

    def _token(self, token_id: int) -> str:
        if self._shown.tokens_as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def prompt_logprobs_json(
    scores: Sequence[TokenLogprobs | None], num_top: int, tokenizer: Vocabulary
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per token an object by token id, null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        token = tokenizer.decode([token_id], skip_special_tokens=False)
        return {"logprob": logprob, "rank": rank, "decoded_token": token}

    listed: list[dict[str, Any] | None] = []
    for score in scores:
        if score is None:
            listed.append(None)
            continue
        chosen = {str(score.token_id): entry(score.token_id, score.logprob, score.rank)}
        top = {
            str(token_id): entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(score.top[:num_top], 1)
        }
        listed.append(chosen | top)
    return listed


def _new_lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _num_characters(content: bytes) -> int:
    """Characters that begin in these bytes of UTF-8: a token may hold the rest of one only."""
    return sum(byte & 0xC0 != 0x80 for byte in content)
